"""Do predictions of a cut come true? Edges cut one by one, tangent and path against what really happened, MLPs held.

Three numbers that add up:

1. tangent   minus the edge's weight: patterns, norm denominators and MLPs as in the uncut model
2. path      the gradient averaged between the edge in and the edge out, norms moving: tangent + what norms do
3. measured  the model run again: path + what attention patterns (and gates) do

What is cut:
- an edge between positions, where it arrives: what heads bring of the source to the target's positions is taken out
  there. The source itself stays, and with it what others read of it. `heads_cut` does the same for some heads alone
- an edge within a position has no such place: the source is removed. Of clusters these are reported apart (`within`):
  removing a whole position's token changes where all heads of that position look
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .clusters import Cluster, ClusterEdge
from .graph import FEATURE, LOGIT, Graph
from .interventions import WAYS as WAYS_OF, Change, agreement, intervene
from .linear_model import exact
from .rows import CutFigures, CutRow, CutRows, EdgeRow, HeadsCutRow

CLUSTER_EDGES = 40  # the largest ones
LARGE = 0.1  # of the largest effect: above it a sign counts
WAYS = ("tangent", "path", "measured")


def cuts(
    graph: Graph, clusters: Sequence[Cluster], edges: Sequence[ClusterEdge], rows: Sequence[EdgeRow], n: int,
    seed: int = 0,
) -> CutRows:  # fmt: skip
    """The figures of the largest cluster edges and of n random edges of features."""
    between: list[CutRow] = []
    within: list[CutRow] = []
    for edge, row in zip(edges, rows, strict=True):
        ends: dict[str, str] = {"source": row["source"], "target": row["target"]}
        if set(clusters[edge.source].positions) & set(clusters[edge.target].positions):
            change = {
                "tangent": row["predicted_direct"],
                "path": row["predicted_path"],
                "measured": row["measured_direct"],
            }
            within.append({**ends, **change})  # type: ignore[typeddict-item]
        elif len(between) < CLUSTER_EDGES and len(edge.targets):
            between.append({**ends, **cut_edge(graph, clusters[edge.source].nodes, edge)})  # type: ignore[typeddict-item]
    features = cut_features(graph, n, seed)
    kinds = cut_figures(between), cut_figures(features)
    # Effects of a cluster dwarf those of a feature: whether a sign counts is asked among edges of its own kind.
    counted = sum(kind["n_signs"] for kind in kinds)
    right = sum((kind["sign_agreement"] or 0) * kind["n_signs"] for kind in kinds)
    both = cut_figures([*between, *features])
    both |= {"n_signs": counted, "sign_agreement": right / counted if counted else None}
    return {
        **both, "clusters": kinds[0], "features": kinds[1], "within": cut_figures(within[:CLUSTER_EDGES]),
        "cluster_rows": between, "feature_rows": features,
    }  # fmt: skip


def cut_edge(graph: Graph, sources: Sequence[int], edge: ClusterEdge) -> dict[str, float]:
    """A cluster edge between different positions, cut where it arrives."""
    path, measured = _without(graph, sources, sorted(set(edge.targets.tolist())))
    return {"tangent": -edge.weight, "path": path, "measured": measured}


def _without(graph: Graph, sources: Sequence[int], targets: Sequence[int]) -> tuple[float, float]:
    """Change of the targets without what heads bring of the sources: along the cut, and measured."""
    arriving = arrivals(graph, sources, targets)
    return _less(graph, arriving, targets, hold_patterns=True), _less(graph, arriving, targets)


def _less(graph: Graph, less: Mapping[int, Tensor], targets: Sequence[int], hold_patterns: bool = False) -> float:
    """Change of the targets' sum without this part of what heads mix."""
    found = intervene(graph, less=less, hold_mlps=True, hold_patterns=hold_patterns, watch=targets)
    return float((found.after - found.before).double().sum())


def cut_features(graph: Graph, n: int, seed: int = 0) -> list[CutRow]:
    """n random edges from features to features and logits, one by one: those pruning kept first, then any others."""
    source, target, weight = graph.edges(kept=False)
    usable = ((graph.kind[source] == FEATURE) & (weight != 0)).nonzero()[:, 0]
    usable = usable[torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))]
    usable = usable[(~graph.edge_kept[usable]).long().argsort(stable=True)][:n]
    found: list[CutRow] = []
    for i in usable.tolist():
        one, other = int(source[i]), int(target[i])
        if int(graph.position[one]) == int(graph.position[other]):
            removed: Change = {"scale": {one: 0.0}}
            ways = (WAYS_OF[way](graph, **removed, watch=[other]) for way in ("predicted_path", "measured_direct"))
            path, measured = (outcome.change[other] for outcome in ways)
        else:
            path, measured = _without(graph, [one], [other])
        found.append({"source": graph.label(one), "target": graph.label(other), "tangent": -float(weight[i]),
                      "path": path, "measured": measured})  # fmt: skip
    return found


def cut_figures(rows: Sequence[CutRow]) -> CutFigures:
    """How well tangent and path predict what was measured."""
    tangent, path = (agreement(rows, way, "measured") for way in WAYS[:2])
    a, b, m = (torch.tensor([row[way] for row in rows], dtype=torch.float64) for way in WAYS)  # type: ignore[literal-required]
    large = m.abs() > LARGE * m.abs().max() if len(m) else torch.zeros(0, dtype=torch.bool)
    total = float(m.abs().sum())
    return {
        "n": len(rows), "pearson_tangent": tangent["pearson"], "spearman_tangent": tangent["spearman"],
        "pearson_path": path["pearson"], "spearman_path": path["spearman"],
        "sign_agreement": float((b.sign() == m.sign())[large].double().mean()) if bool(large.any()) else None,
        "n_signs": int(large.sum()), "norms": float((b - a).abs().sum()) / total if total else None,
        "patterns": float((m - b).abs().sum()) / total if total else None,
    }  # fmt: skip


def heads_cut(
    graph: Graph, sources: Sequence[int], targets: Sequence[int], heads: Sequence[tuple[int, int]]
) -> HeadsCutRow:
    """What the targets lose without what these heads bring them of the source, and without what any head brings."""
    arriving, d_head = arrivals(graph, sources, targets), graph.replacement().frozen.dims.d_head
    some: dict[int, Tensor] = {}
    for layer, z in arriving.items():
        mask = torch.zeros_like(z)
        for head in (head for one, head in heads if one == layer):
            mask[:, head * d_head : (head + 1) * d_head] = 1
        some[layer] = z * mask
    listed, every = (_less(graph, less, targets) for less in (some, arriving))
    return {
        "n_heads": len(heads),
        "listed": listed,
        "every": every,
        "share": listed / every if abs(every) > 1e-9 else None,
    }


@exact
def arrivals(graph: Graph, sources: Sequence[int], targets: Sequence[int]) -> dict[int, Tensor]:
    """Per layer what heads bring of the sources to the targets' positions from elsewhere, [T, n_heads * d_head].

    The sources' signal in the frozen model, along all paths but those through features.
    """
    replacement = graph.replacement()
    frozen, device = replacement.frozen, replacement.error.device
    ids, ends = (torch.tensor(list(some), dtype=torch.int64, device=device) for some in (sources, targets))
    ids, positions = ids[graph.kind[ids.cpu()].to(device) != LOGIT], replacement.places(ends).unique()
    written = frozen.final.new_zeros(replacement.n_layers + 1, *frozen.final.shape)
    if len(ids):
        written.index_add_(1, replacement.places(ids), replacement.writes(ids).transpose(0, 1))
    x, found = written[0], {}
    for layer in range(replacement.n_layers):
        values = frozen.to_values(layer, x[None])
        elsewhere = values.clone()
        elsewhere[:, positions] = 0
        brought = torch.zeros_like(values[0])
        brought[positions] = frozen.mix(layer, elsewhere)[0, positions]
        found[layer] = brought
        x = x + frozen.from_mix(layer, frozen.mix(layer, values))[0] + frozen.write(layer + 1, written[layer + 1])
    return found
