"""A traced prompt in words, for a terminal. No torch."""

from .rows import CutFigures, ModelRows

EDGES_TOLD = CLUSTERS_TOLD = 12


def tell(rows: ModelRows) -> str:
    """A summary in words, for a terminal."""
    target, main = rows["target"][0], rows["main"]
    p = "" if target["probability"] is None else f", probability {target['probability']:.3f}"
    lines = [
        f"{rows['model']}: {target['label']!r} at position {target['position']}{p}; {rows['n_nodes']} nodes and "
        f"{rows['n_edges']} edges kept, completeness error {rows['completeness_error']:.1e}",
        f"  scores: replacement {rows['scores']['replacement']:.3f}, completeness {rows['scores']['completeness']:.3f}",
    ]
    ranked = sorted(rows["clusters"], key=lambda c: (c["kind"] == "output", c["influence"]), reverse=True)
    told = [c for c in rows["clusters"] if c in ranked[:CLUSTERS_TOLD]]
    for cluster in told:
        low, high = cluster["layers"]
        span = f"layer {low}" if low == high else f"layers {low}-{high}"
        at = ", ".join(map(str, cluster["positions"][:8])) + (", ..." if len(cluster["positions"]) > 8 else "")
        line = f"  {cluster['name'][:24]:24} at {at:16} {span:12} {cluster['n_features']:4} features"
        lines.append(f"{line}  {cluster.get('label') or ''}".rstrip())
    if len(told) < len(ranked):
        lines.append(f"  and {len(ranked) - len(told)} clusters of less influence")
    lines.append(f"  {'edge':40} {'weight':>9} {'heads for 80 %':>15} {'when removed: predicted':>24} {'measured':>9}")
    for edge in rows["edges"][:EDGES_TOLD]:
        name = f"{edge['source'][:18]} -> {edge['target'][:18]}"
        changes = f"{edge['predicted_direct']:24.3f} {edge['measured_direct']:9.3f}"
        lines.append(f"  {name:40} {edge['weight']:9.3f} {edge['n_heads_for_80']:15} {changes}")
    for name, found in (("MLPs held", rows["agreement_direct"]), ("all effects", rows["agreement"])):
        shown = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
        lines.append(f"  predicted against measured, {name}: {shown}")
    cut = rows["cut"]
    kinds = (("edges between clusters", cut["clusters"]), ("edges of features", cut["features"]))
    lines += [f"  cut one by one, {name}: {_of_cut(found)}" for name, found in kinds if found["n"]]
    heads = ", ".join(f"L{h['layer']}.H{h['head']}" for h in main["heads_for_80"][:12])
    more = main["n_heads_for_80"] - 12
    lines.append(
        f"  {main['source']} -> {main['target']}: 80 % carried by {main['n_heads_for_80']} of "
        f"{rows['n_layers'] * rows['n_heads']} heads: {heads}{f' and {more} more' if more > 0 else ''}"
    )
    closed = main["closed"]
    lines.append(
        f"  their {closed['n_links']} link{'s' * (closed['n_links'] != 1)} closed, MLPs held: "
        f"{closed['measured_direct']:+.3f} "
        f"(predicted {closed['predicted_direct']:+.3f}); MLPs reacting: {closed['measured']:+.3f} "
        f"(predicted {closed['predicted']:+.3f})"
    )
    if (share := main["heads_cut"]["share"]) is not None:
        lines.append(f"  cutting these heads does {share:.0%} of what cutting the edge at all heads does (measured)")
    return "\n".join(lines)


def _of_cut(found: CutFigures) -> str:
    figures = [found["pearson_path"], found["pearson_tangent"], found["sign_agreement"]]
    path, tangent, signs = ("–" if figure is None else f"{figure:.2f}" for figure in figures)
    return f"along the cut Pearson {path} (weights alone {tangent}), share of right signs {signs}, n = {found['n']}"
