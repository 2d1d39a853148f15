"""Pictures from rows. Nothing here knows about models or torch: what a figure needs lies in the Run as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from typing_extensions import NotRequired

from .style import BLUE, GREY, INK, LIGHT, ORANGE, Axes, pyplot, save


class Flow(TypedDict):  # of one model, in figure1.json
    input: str | list[str]  # a character or a word per position
    output: str | list[str]
    edges: int  # how many are open
    attention: list[list[list[list[float]]]]  # [layer][head][query][key]
    title: NotRequired[str]


def draw_flow(flow: Mapping[str, Flow], path: str | Path) -> None:
    """Figure 1: which position reads which, layer by layer, before and after; one line per attention edge.

    flow: {"base": ..., "sparse": ...}
    """
    from matplotlib.patches import FancyArrowPatch

    names = [word for rows in flow.values() for word in (*rows["input"], *rows["output"])]
    positions = max(len(rows["input"]) for rows in flow.values())
    style = _label_style(names, 6.6 * 0.795 / (positions + _left(positions)))
    bend = 0.42 * 7.4 / (7.4 + 4 * style.room)  # as far to the side, however tall it is
    with pyplot() as plt:
        figure, axes = plt.subplots(2, 1, figsize=(6.6, 7.4 + 4 * style.room))
        figure.subplots_adjust(left=0.19, right=0.985, top=0.985, bottom=0.015, hspace=0.06)
        for axis, (title, name) in zip(axes, [("Base Model", "base"), ("Sparse Model", "sparse")], strict=True):
            _draw_flow_panel(
                axis, flow[name].get("title", title), flow[name], BLUE if name == "base" else ORANGE, style
            )
        figure.add_artist(
            FancyArrowPatch(
                (0.175, 0.75), (0.175, 0.25), transform=figure.transFigure, connectionstyle=f"arc3,rad={bend:.3f}",
                arrowstyle="-|>", mutation_scale=20, linewidth=1.8, color=INK,
            )
        )  # fmt: skip
        beside: Any = {"rotation": 90, "va": "center", "ha": "center", "fontsize": 12, "color": INK}
        figure.text(0.022, 0.5, "Sparsity-Regularised Finetuning", **beside)
        save(figure, path, dpi=160)


def _left(positions: int) -> float:
    """Room for the layers' names on the left, in positions."""
    return max(1.75, 0.16 * positions)


class _Labels(NamedTuple):
    """How words are written: their size in points, whether they are turned, and the inches they then need more."""

    size: float
    turned: bool
    room: float
    most: int  # characters


def _label_style(words: list[str], step: float) -> _Labels:
    """Beside each other while they fit (step: inches from one to the next); else turned, the longest abbreviated."""
    longest = max(map(len, words), default=1)
    width = 0.61 / 72  # of a monospaced letter of one point, inches
    if 13 * width * (longest + 0.4) <= step or longest == 1:
        return _Labels(min(13.0, 0.95 * step / width), False, 0.0, longest)
    size, most = min(10.0, 0.85 * step * 72), min(longest, 12)
    return _Labels(size, True, max(0.0, size * width * most - 0.14), most)


def _draw_flow_panel(axis: Axes, title: str, rows: Flow, colour: str, labels: _Labels) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    attention = np.array(rows["attention"])
    n_layers, positions = len(attention), len(rows["input"])
    segments = [[(key, layer), (query, layer + 1)] for layer, _, query, key in np.argwhere(attention > 0)]
    weights = attention[attention > 0]
    colours = [(*to_rgb(colour), min(1.0, 0.04 + 0.9 * weight)) for weight in weights]
    inches = axis.get_window_extent().height / axis.figure.dpi
    near = max(1.0, (n_layers + 2.65) / 8.65)  # margins in layers, which become lower where there are many
    more = labels.room * (n_layers + 2.65 * near) / (inches - 2 * labels.room)  # room for turned words, in layers
    rise = inches / (n_layers + 2.65 * near + 2 * more)  # of a layer, in inches
    thin = min(1.0, rise / 0.4)
    left = _left(positions)
    frame = (-left, -0.9 * near - more), positions - 0.4 + left, n_layers + 2.35 * near + 2 * more
    axis.add_patch(FancyBboxPatch(*frame, boxstyle="round,pad=0.05", fill=False, ec=GREY, lw=1))
    for position in range(positions):  # the residual stream: every position passes itself on
        axis.plot([position, position], [0, n_layers], color=LIGHT, lw=0.8, ls=(0, (1, 2)), zorder=0)
    style: Any = {"colors": colours, "linewidths": thin * (0.5 + 1.5 * weights), "capstyle": "round"}
    axis.add_collection(LineCollection(segments, **style, zorder=1))
    for row in range(n_layers + 1):
        axis.scatter(
            range(positions),
            [row] * positions,
            s=min(20.0, (0.45 * rise * 72) ** 2),
            color="white",
            edgecolor=INK,
            linewidth=0.8,
            zorder=2,
        )
        if row and (row - 1) % max(1, round(0.17 / rise + 0.3)) == 0:
            axis.text(-0.42, row, f"Layer {row - 1}", ha="right", va="center", fontsize=9, color=INK)
    style = {"ha": "center", "fontsize": labels.size, "family": "monospace", "parse_math": False}
    below, above, away = ("top", "bottom", 0.25 * near) if labels.turned else ("center", "center", 0.48 * near)
    style |= {"rotation": 90 if labels.turned else 0}
    for position, (word, answer) in enumerate(zip(rows["input"], rows["output"], strict=True)):
        word, answer = (text if len(text) <= labels.most else text[: labels.most - 1] + "…" for text in (word, answer))
        axis.text(position, -away, word, color=INK, va=below, **style)
        axis.text(position, n_layers + away, answer, color=GREY if word == answer else INK, va=above, **style)
    heading = n_layers + 1.12 * near + more
    axis.text(0.15 - left, heading, title, fontsize=12, fontweight="bold", va="center", color=INK)
    edges = f"{rows['edges']:,} attention edges"
    axis.text(positions - 0.55, heading, edges, fontsize=9, va="center", ha="right", color=INK)
    axis.set_xlim(-left - 0.15, positions - 0.2)
    axis.set_ylim(-1.05 * near - more, n_layers + 1.6 * near + more)
    axis.axis("off")
