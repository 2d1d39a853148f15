"""Pictures from rows. Nothing here knows about models or torch: what a figure needs lies in the Run as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

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

    with pyplot() as plt:
        figure, axes = plt.subplots(2, 1, figsize=(6.6, 7.4))
        figure.subplots_adjust(left=0.19, right=0.985, top=0.985, bottom=0.015, hspace=0.06)
        for axis, (title, name) in zip(axes, [("Base Model", "base"), ("Sparse Model", "sparse")], strict=True):
            _draw_flow_panel(axis, flow[name].get("title", title), flow[name], BLUE if name == "base" else ORANGE)
        figure.add_artist(
            FancyArrowPatch(
                (0.175, 0.75), (0.175, 0.25), transform=figure.transFigure, connectionstyle="arc3,rad=0.42",
                arrowstyle="-|>", mutation_scale=20, linewidth=1.8, color=INK,
            )
        )  # fmt: skip
        style: Any = {"rotation": 90, "va": "center", "ha": "center", "fontsize": 12, "color": INK}
        figure.text(0.022, 0.5, "Sparsity-Regularised Finetuning", **style)
        save(figure, path, dpi=160)


def _draw_flow_panel(axis: Axes, title: str, rows: Flow, colour: str) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    attention = np.array(rows["attention"])
    n_layers, positions = len(attention), len(rows["input"])
    segments = [[(key, layer), (query, layer + 1)] for layer, _, query, key in np.argwhere(attention > 0)]
    weights = attention[attention > 0]
    colours = [(*to_rgb(colour), min(1.0, 0.04 + 0.9 * weight)) for weight in weights]
    frame = (-1.75, -0.9), positions + 1.35, n_layers + 2.35
    axis.add_patch(FancyBboxPatch(*frame, boxstyle="round,pad=0.05", fill=False, ec=GREY, lw=1))
    for position in range(positions):  # the residual stream: every position passes itself on
        axis.plot([position, position], [0, n_layers], color=LIGHT, lw=0.8, ls=(0, (1, 2)), zorder=0)
    style: Any = {"colors": colours, "linewidths": 0.5 + 1.5 * weights, "capstyle": "round"}
    axis.add_collection(LineCollection(segments, **style, zorder=1))
    for row in range(n_layers + 1):
        axis.scatter(range(positions), [row] * positions, s=20, color="white", edgecolor=INK, linewidth=0.8, zorder=2)
        if row:
            axis.text(-0.42, row, f"Layer {row - 1}", ha="right", va="center", fontsize=9, color=INK)
    style = {"ha": "center", "va": "center", "fontsize": 13, "family": "monospace"}
    for position, (word, answer) in enumerate(zip(rows["input"], rows["output"], strict=True)):
        axis.text(position, -0.48, word, color=INK, **style)
        axis.text(position, n_layers + 0.48, answer, color=GREY if word == answer else INK, **style)
    axis.text(-1.6, n_layers + 1.12, title, fontsize=12, fontweight="bold", va="center", color=INK)
    edges = f"{rows['edges']:,} attention edges"
    axis.text(positions - 0.55, n_layers + 1.12, edges, fontsize=9, va="center", ha="right", color=INK)
    axis.set_xlim(-1.9, positions - 0.2)
    axis.set_ylim(-1.05, n_layers + 1.6)
    axis.axis("off")
