"""Pictures from rows. Nothing here knows about models or torch: what a figure needs lies in the Run as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import BLUE, GREY, INK, LIGHT, pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_flow(flow: dict[str, Any], path: str | Path) -> None:
    """Figure 1: which position reads which, layer by layer, before and after; one line per attention edge.

    flow: {"base": ..., "sparse": ...}, each with `input`, `output` (strings), `edges` (how many are open)
    and `attention` [layer][head][query][key].
    """
    from matplotlib.patches import FancyArrowPatch

    with pyplot() as plt:
        figure, axes = plt.subplots(2, 1, figsize=(6.6, 7.4))
        figure.subplots_adjust(left=0.19, right=0.985, top=0.985, bottom=0.015, hspace=0.06)
        for axis, (title, name) in zip(axes, [("Base Model", "base"), ("Sparse Model", "sparse")], strict=True):
            _draw_flow_panel(axis, flow[name].get("title", title), flow[name])
        figure.add_artist(
            FancyArrowPatch(
                (0.175, 0.75), (0.175, 0.25), transform=figure.transFigure, connectionstyle="arc3,rad=0.42",
                arrowstyle="-|>", mutation_scale=20, linewidth=1.8, color=INK,
            )
        )  # fmt: skip
        figure.text(
            0.022, 0.5, "Sparsity-Regularised Finetuning", rotation=90, va="center", ha="center", fontsize=12, color=INK
        )
        save(figure, path, dpi=160)


def _draw_flow_panel(axis: "Axes", title: str, rows: dict[str, Any]) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    attention = rows["attention"]
    n_layers, positions = len(attention), len(rows["input"])
    blue, segments, colours, widths = to_rgb(BLUE), [], [], []
    for layer, heads in enumerate(attention):
        for head in heads:
            for query, weights in enumerate(head):
                for key, weight in enumerate(weights):
                    if weight > 0:
                        segments.append([(key, layer), (query, layer + 1)])
                        colours.append((*blue, min(1.0, 0.04 + 0.9 * weight)))
                        widths.append(0.5 + 1.5 * weight)
    axis.add_patch(
        FancyBboxPatch(
            (-1.75, -0.9), positions + 1.35, n_layers + 2.35, boxstyle="round,pad=0.05", fill=False, ec=GREY, lw=1
        )
    )
    for position in range(positions):  # the residual stream: every position passes itself on
        axis.plot([position, position], [0, n_layers], color=LIGHT, lw=0.8, ls=(0, (1, 2)), zorder=0)
    axis.add_collection(LineCollection(segments, colors=colours, linewidths=widths, capstyle="round", zorder=1))
    for row in range(n_layers + 1):
        axis.scatter(range(positions), [row] * positions, s=20, color="white", edgecolor=INK, linewidth=0.8, zorder=2)
        if row:
            axis.text(-0.42, row, f"Layer {row - 1}", ha="right", va="center", fontsize=9, color=INK)
    for position in range(positions):
        unchanged = rows["input"][position] == rows["output"][position]
        style: Any = {"ha": "center", "va": "center", "fontsize": 13, "family": "monospace"}
        axis.text(position, -0.48, rows["input"][position], color=INK, **style)
        axis.text(position, n_layers + 0.48, rows["output"][position], color=GREY if unchanged else INK, **style)
    axis.text(-1.6, n_layers + 1.12, title, fontsize=12, fontweight="bold", va="center", color=INK)
    axis.text(
        positions - 0.55,
        n_layers + 1.12,
        f"{rows['edges']:,} attention edges",
        fontsize=9,
        va="center",
        ha="right",
        color=INK,
    )
    axis.set_xlim(-1.9, positions - 0.2)
    axis.set_ylim(-1.05, n_layers + 1.6)
    axis.axis("off")
