"""Figures 2 and 3 of a comparison; here figure 3 as a graph of components, circuits side by side. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ...circuits.rows import ComparisonRows, Reading, TaskRow, wording
from ..readings import count, ordered
from .curves import COLOURS, draw_figure2, role_name
from .style import INK, LIGHT, SUFFIXES, Axes, pyplot, save
from .token_circuits import draw_token_circuits, on_tokens


def draw_all(
    rows: Mapping[str, Any], folder: str | Path, threshold: float = 0.9, suffixes: Sequence[str] = SUFFIXES,
    part: str = "",
) -> list[Path]:  # fmt: skip
    """figure2 and, for the first task, figure3 (all tasks beyond it numbered by name), in these formats.

    rows: what `compare` returns or its results.json holds, rows.ComparisonRows. part: which of several comparisons.
    """
    comparison, folder = cast(ComparisonRows, rows), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix in suffixes:
        paths += draw_figure2(comparison, folder, part, suffix, threshold)
        for i, (task, row) in enumerate(comparison["tasks"].items()):
            # A task's name may come from a file that others have written.
            name = "".join(c if c.isalnum() or c in "-_" else "_" for c in task)[:80]
            for reading, file in _pictures(row):
                paths.append(folder / f"figure3{file}{part}{f'-{name}' if i else ''}.{suffix}")
                if reading == "components":
                    draw_circuits(comparison, task, paths[-1])
                else:
                    draw_token_circuits(comparison, task, reading, paths[-1])
    return paths


def _pictures(row: TaskRow) -> list[tuple[str, str]]:
    """(reading, end of the file's name): the first reading whose circuits can be drawn, and the component graph."""
    found = ordered(
        name
        for model in row["models"].values()
        for name, reading in model["readings"].items()
        if on_tokens(reading) or name == "components"
    )
    chosen = [name for i, name in enumerate(found) if i == 0 or name == "components"]
    return [(name, "" if i == 0 else wording(name).file) for i, name in enumerate(chosen)]


def draw_circuits(comparison: ComparisonRows, task: str, path: str | Path) -> None:
    """Figure 3: the circuits that explain 90 %, side by side; a row of heads and an MLP per layer, the input below."""
    models = comparison["tasks"][task]["models"]
    roles = [role for role in ("dense", "sparse") if role in models and "components" in models[role]["readings"]]
    shapes = [(int(models[role]["n_layers"]), int(models[role]["n_heads"])) for role in roles]
    width = max(n_heads for _, n_heads in shapes) + 2
    height = max(n_layers for n_layers, _ in shapes) + 3
    scale = min(0.36, 6.4 / (width * len(roles)) if width * len(roles) > 17 else 0.36)
    with pyplot() as plt:
        size = (0.5 + scale * width * len(roles) + 0.3, 0.5 + min(max(scale, 0.2) * height, 8.0))  # fits on a page
        figure, axes = plt.subplots(1, len(roles), figsize=(max(size[0], 3.2 * len(roles)), size[1]), squeeze=False)
        figure.subplots_adjust(left=0.07, right=0.99, top=0.93, bottom=0.02, wspace=0.06)
        for axis, role, shape in zip(axes[0], roles, shapes, strict=True):
            _draw_circuit(axis, models[role]["readings"]["components"], shape, COLOURS[role])
            axis.set_title(role_name(comparison, role), fontsize=10, weight="bold", color=COLOURS[role], pad=4)
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.0}
        figure.text(0.022, 0.5, "Layers", rotation=90, va="center", ha="center", fontsize=9, color=INK)
        axes[0][0].annotate("", (0.045, 0.7), (0.045, 0.3), xycoords="figure fraction", arrowprops=arrow)
        save(figure, path)


def _place(node: str, shape: tuple[int, int]) -> tuple[float, float]:
    """Where a node stands: heads in columns 0 ..., the MLP to their right and a little higher: it comes after."""
    n_layers, n_heads = shape
    if node == "input":
        return (n_heads - 1) / 2, -1.3
    if node == "logits":
        return (n_heads - 1) / 2, n_layers + 0.5
    layer, _, head = node.partition("<")[0][1:].partition(".h")
    return (float(head), float(layer)) if node[0] == "a" else (n_heads + 0.2, float(layer) + 0.35)


def _line(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """A straight line, or a bow where nodes in the same column would hide it."""
    (x, y), (other, above) = start, end
    if x != other or above - y < 1.2:
        return [start, end]
    bulge = 0.22 * (above - y) ** 0.7
    return [(x + 4 * bulge * t * (1 - t), y + (above - y) * t) for t in (i / 14 for i in range(15))]


def _draw_circuit(axis: Axes, found: Reading, shape: tuple[int, int], colour: str) -> None:
    n_layers, n_heads = shape
    strength = _strengths(found)
    active = {node for line in strength for node in line}
    _draw_lines(axis, strength, shape, colour)
    _draw_nodes(axis, active, shape)
    _name_nodes(axis, shape)
    axis.text((n_heads - 1) / 2, -2.3, _note(found, active, shape), va="top", ha="center", fontsize=8, color=INK)
    axis.set_xlim(-1.7, n_heads + 0.9 + 0.25 * n_layers**0.7)
    axis.set_ylim(-3.4, n_layers + 1.4)
    axis.axis("off")


def _strengths(found: Reading) -> dict[tuple[str, str], float]:
    """(from, to) -> how strong: a head's q, k and v edges are one line."""
    strength: dict[tuple[str, str], float] = {}
    for edge, score in found["circuit"]:
        source, target = str(edge).split("->")
        line = (source, target.partition("<")[0])
        strength[line] = strength.get(line, 0.0) + abs(float(score))
    return strength


def _draw_lines(axis: Axes, strength: dict[tuple[str, str], float], shape: tuple[int, int], colour: str) -> None:
    """Thousands of lines must be thin and pale to leave a picture."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    # One edge in fifty is drawn full: a single one (the first MLP's, often) must not make all others invisible.
    top = sorted(strength.values(), reverse=True)[len(strength) // 50] if strength else 1.0
    faint = min(1.0, (60 / max(len(strength), 1)) ** 0.5)
    segments, colours, widths = [], [], []
    for (source, target), value in sorted(strength.items(), key=lambda item: item[1]):
        segments.append(_line(_place(source, shape), _place(target, shape)))
        share = min(1.0, value / top) ** 0.5 if top else 0.0
        colours.append((*to_rgb(colour), max(0.05, min(1.0, (0.25 + 0.75 * share) * max(faint, share)))))
        widths.append((0.3 + 1.3 * share) * max(faint, 0.35))
    axis.add_collection(LineCollection(segments, colors=colours, linewidths=widths, zorder=1, capstyle="round"))


def _draw_nodes(axis: Axes, active: set[str], shape: tuple[int, int]) -> None:
    """Heads round, the rest square; pale where no edge of the circuit ends."""
    n_layers, n_heads = shape
    size = min(70.0, 900.0 / max(n_heads, n_layers))
    nodes = [f"a{layer}.h{head}" for layer in range(n_layers) for head in range(n_heads)]
    nodes += [f"m{layer}" for layer in range(n_layers)] + ["input", "logits"]
    for is_active, face, rim, order in ((False, LIGHT, LIGHT, 2), (True, "white", INK, 3)):
        for marker, kind in (("o", "a"), ("s", "mil")):
            chosen = [_place(node, shape) for node in nodes if (node in active) == is_active and node[0] in kind]
            if chosen:
                x, y = zip(*chosen, strict=True)
                axis.scatter(x, y, size, marker=marker, facecolor=face, edgecolor=rim, linewidth=0.8, zorder=order)


def _name_nodes(axis: Axes, shape: tuple[int, int]) -> None:
    from matplotlib.patheffects import withStroke

    n_layers, n_heads = shape
    halo = [withStroke(linewidth=2.2, foreground="white")]  # lines pass behind the names
    labels: Any = {"ha": "center", "fontsize": 7, "color": INK, "path_effects": halo, "zorder": 4}
    for node, dy, side in (("input", -0.38, "top"), ("logits", 0.38, "bottom")):
        across, up = _place(node, shape)
        axis.text(across, up + dy, node, va=side, **labels)
    axis.text(n_heads + 0.2, -0.15, "MLP", va="top", **labels)
    every = max(1, round(n_layers / 24))  # as many as can be read
    for layer in range(0, n_layers, every):
        axis.text(-0.75, layer, f"L{layer}", **labels | {"ha": "right", "va": "center", "fontsize": 6})
    for head in range(0, n_heads, max(1, round(n_heads / 16))):
        axis.text(head, -0.42, f"H{head}", **labels | {"va": "top", "fontsize": 6})


def _note(found: Reading, active: set[str], shape: tuple[int, int]) -> str:
    n_layers, n_heads = shape
    n_edges, listed = found["edges_at"]["0.9"], len(found["circuit"])
    heads = f"{sum(node[0] == 'a' for node in active)} of {n_layers * n_heads} heads"
    if n_edges > listed:  # a long circuit is listed in part (`discover`), and so it is drawn
        return f"{count(n_edges)} edges, the strongest {listed:,}\ndrawn: {heads}"
    return f"{count(n_edges)} edges, {heads}"
