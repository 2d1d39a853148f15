"""Figure 3 from rows, for attention edges: the circuit of one prompt on its tokens, dense and sparse side by side."""

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from ...circuits.rows import ComparisonRows, Reading, Results, wording
from ..readings import THRESHOLD
from .curves import COLOURS, role_name, task_name
from .style import INK, LIGHT, Axes, pyplot, save

WIDTH, MARGIN, NOTE = 6.9, 0.42, 6.5  # a page's width and the margin for "Layers", inches; points


def on_tokens(found: Reading | None) -> bool:
    """Whether its circuits can be drawn on tokens: single attention edges, and the tokens of a prompt."""
    return (
        found is not None
        and {"layer", "head", "query", "key"} <= set(found.get("columns", ()))
        and bool(found.get("tokens"))
    )


def enough(found: Reading, threshold: str = THRESHOLD) -> int:
    """How many edges of `circuit` reach the threshold: on the example itself where it was measured there."""
    return round(found.get("example_at", {}).get(threshold) or found["edges_at"].get(threshold) or 0)


def draw_token_circuits(comparison: ComparisonRows, task: str, reading: str, path: str | Path) -> None:
    """Tokens across, the input below. Heads that connect the same two tokens in a layer are one line."""
    models = comparison["tasks"][task]["models"]
    drawable = {role for role, model in models.items() if on_tokens(model["readings"].get(reading))}
    roles = [role for role in ("dense", "control", "sparse") if role in drawable]
    roles = [roles[0], *roles[-1:]] if len(roles) > 1 else roles  # the control stands in where there is no dense one
    found = [models[role]["readings"][reading] for role in roles]
    width = WIDTH if len(roles) > 1 else 3.6
    step = (width - MARGIN) / len(roles) * 0.94 / max(max(len(reading["tokens"]) for reading in found), 2)
    turned, size = _label_style([token for reading in found for token in reading["tokens"]], step)
    layers = max(models[role]["n_layers"] for role in roles)
    tall = min(max(layers * 0.17, min(layers * 0.45, 2.2)), 5.4)
    longest = max(len(_clip(token)) for reading in found for token in reading["tokens"])
    head, below = 0.24, 0.1 + 0.0095 * size * longest if turned else 0.16
    foot = 0.5 + below
    with pyplot() as plt:
        height = tall + head + foot
        figure, axes = plt.subplots(1, len(roles), figsize=(width, height), squeeze=False, dpi=300)
        side: Any = {"left": MARGIN / width, "right": 0.995, "wspace": 0.06}
        figure.subplots_adjust(**side, top=1 - head / height, bottom=foot / height)
        for axis, role, circuit in zip(axes[0], roles, found, strict=True):
            _draw(axis, circuit, models[role], COLOURS[role], below)
            _name_tokens(axis, circuit["tokens"], turned, size)
            _name_layers(axis, models[role]["n_layers"], tall)
            title: Any = {"fontsize": 8.5, "fontweight": "bold", "color": COLOURS[role], "ha": "center", "va": "top"}
            axis.annotate(
                role_name(comparison, role), (0.5, 1), (0, head * 72 - 4), xycoords="axes fraction",
                textcoords="offset points", **title,
            )  # fmt: skip
        middle = (foot + tall / 2) / height
        figure.text(0.07 / width, middle, "Layers", rotation=90, va="center", ha="left", fontsize=7.5, color=INK)
        arrow: Any = {"arrowstyle": "-|>", "color": INK, "lw": 0.8, "mutation_scale": 8}
        down = tall / height * 0.16
        axes[0][0].annotate(
            "", (0.13 / width, middle + 2.4 * down), (0.13 / width, middle + 1.2 * down),
            xycoords="figure fraction", arrowprops=arrow,
        )  # fmt: skip
        whose = "One prompt" if found[0].get("scope") == "prompt" else "One circuit for all prompts, on one of them,"
        note = f"{whose} of {task_name(task)}; edges for 90 % of the effect. {wording(reading).others}"
        lines = textwrap.fill(note, int(width * 19.5))
        figure.text(0.07 / width, 0.05 / height, lines, ha="left", va="bottom", fontsize=NOTE, color=INK)
        save(figure, path, dpi=300)


def _draw(axis: Axes, found: Reading, model: Results, colour: str, below: float) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    n_layers, n_tokens = model["n_layers"], len(found["tokens"])
    at = {name: i for i, name in enumerate(found["columns"])}
    needed = enough(found)
    edges = found["circuit"][:needed]
    strength: dict[tuple[int, int, int], float] = defaultdict(float)
    for edge in edges:
        layer, query, key = (int(edge[at[name]]) for name in ("layer", "query", "key"))
        strength[layer, query, key] += abs(float(edge[at["score"]]))
    # One line in fifty is drawn full: a single one must not make all others invisible.
    top = sorted(strength.values(), reverse=True)[len(strength) // 50] if strength else 1.0
    faint = min(1.0, (200 / max(len(strength), 1)) ** 0.6)
    segments, colours, widths = [], [], []
    for (layer, query, key), value in sorted(strength.items(), key=lambda item: item[1]):
        share = min(1.0, value / top) ** 0.5 if top else 0.0
        segments.append([(key, layer), (query, layer + 1)])
        colours.append((*to_rgb(colour), max(0.07, min(1.0, (0.3 + 0.7 * share) * max(faint, share**2)))))
        widths.append((0.35 + 1.35 * share) * max(faint, 0.45))
    for token in range(n_tokens):  # the residual stream: every position passes itself on
        axis.plot([token] * 2, [0, n_layers], color=LIGHT, linewidth=0.5, zorder=0)
    axis.add_collection(LineCollection(segments, colors=colours, linewidths=widths, zorder=1, capstyle="round"))
    active = {node for layer, query, key in strength for node in ((key, layer), (query, layer + 1))}
    box = axis.get_window_extent()
    room = min(box.width / max(n_tokens, 2), box.height / (n_layers + 1)) * 72 / axis.figure.dpi  # points per node
    size = min(20.0, (0.3 * room) ** 2)
    idle = [(x, y) for x in range(n_tokens) for y in range(n_layers + 1) if (x, y) not in active]
    for nodes, face, rim, scale, order in ((idle, LIGHT, "none", 0.4, 2), (sorted(active), "white", INK, 1.0, 3)):
        if nodes:
            x, y = zip(*nodes, strict=True)
            style: Any = {"facecolor": face, "edgecolor": rim, "linewidth": min(0.7, room / 22), "zorder": order}
            axis.scatter(x, y, size * scale, **style)
    heads = len({(edge[at["layer"]], edge[at["head"]]) for edge in edges})
    total = f"{heads:,} of {n_layers * model['n_heads']:,} heads"
    note = f"{needed:,} of {found['n_edges']:,} edges, {total}"
    if needed > len(edges):
        note = f"{needed:,} of {found['n_edges']:,} edges\nthe strongest {len(edges):,} drawn: {total}"
    style = {"ha": "center", "va": "top", "fontsize": 7, "color": INK, "xycoords": "axes fraction"}
    axis.annotate(note, (0.5, 0), (0, -3 - 72 * below), textcoords="offset points", **style)
    axis.set_xlim(-0.7, n_tokens - 0.3)
    axis.set_ylim(-0.5, n_layers + 0.5)
    axis.axis("off")


def _label_style(tokens: list[str], step: float) -> tuple[bool, float]:
    """(whether tokens stand upright beside each other or are turned, points)."""
    longest = max((len(_clip(token)) for token in tokens), default=1)
    if longest * 0.062 + 0.03 <= step:
        return False, NOTE + 0.5
    return True, min(NOTE, step * 72 * 0.92)


def _clip(token: str, most: int = 10) -> str:
    # A dollar sign would begin a formula, half a character cannot be drawn.
    text = token.strip().replace("\n", "⏎").encode("utf-8", "replace").decode() or ("⏎" if "\n" in token else "␣")
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def _name_tokens(axis: Axes, tokens: list[str], turned: bool, size: float) -> None:
    style: Any = {"fontsize": size, "color": INK, "va": "top", "ha": "center", "rotation": 90 if turned else 0}
    for i, token in enumerate(tokens):
        axis.annotate(_clip(token), (i, 0), (0, -4.5), textcoords="offset points", annotation_clip=False, **style)


def _name_layers(axis: Axes, n_layers: int, tall: float) -> None:
    every = max(1, round(0.12 / (tall / n_layers)))
    for layer in range(0, n_layers, every):
        style: Any = {"ha": "right", "va": "center", "fontsize": 6, "color": INK}
        axis.annotate(f"L{layer}", (-0.5, layer + 0.5), (-1, 0), textcoords="offset points", **style)
