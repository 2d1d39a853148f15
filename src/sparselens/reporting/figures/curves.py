"""Figure 2 from rows: explained effect over edges kept, one panel per task. No torch, no models."""

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...circuits.rows import ComparisonRows, CurveRow, OpenRow, Reading, TaskRow, wording
from ..readings import count, fewer, ordered, question, scope_of, times
from .style import BLUE, GREY, INK, ORANGE, Axes, pyplot, save

COLOURS = {"control": "#7d8798", "dense": BLUE, "sparse": ORANGE}  # drawn in this order
SIZES = {1: 3.3, 2: 5.0}  # inches; from three panels on a page's width
NOTE, SMALL, LABEL = 6.5, 7.0, 7.5  # points at final size


def draw_figure2(comparison: ComparisonRows, folder: Path, part: str, suffix: str, threshold: float) -> list[Path]:
    """figure2 of the headline reading, figure2-NAME of every other one with a curve.

    Of a single task, figure2 has a second panel: the share of attribution.
    """
    tasks = comparison["tasks"]
    paths: list[Path] = []
    readings = with_curves(comparison)
    for reading in readings:
        panels = [(task, reading) for task, row in tasks.items() if _models(row, reading)]
        if reading == readings[0] and len(tasks) == 1 and "share" in readings[1:]:
            panels.append((panels[0][0], "share"))
        paths.append(folder / f"figure2{'' if reading == readings[0] else wording(reading).file}{part}.{suffix}")
        draw_curves(comparison, panels, paths[-1], threshold)
    return paths


def with_curves(comparison: ComparisonRows) -> list[str]:
    """Readings with a curve in some model, the headline first."""
    models = [model for row in comparison["tasks"].values() for model in row["models"].values()]
    return ordered(name for model in models for name, found in model["readings"].items() if "curve" in found)


def _models(row: TaskRow, reading: str) -> dict[str, Reading]:
    found = {role: model["readings"].get(reading) for role, model in row["models"].items()}
    return {role: model for role, model in found.items() if model and "curve" in model}


def draw_curves(comparison: ComparisonRows, panels: list[tuple[str, str]], path: Path, threshold: float = 0.9) -> None:
    """Log x, bands, the dashed line at the threshold, the multiplier on it. panels: (task, reading) each."""
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    tables = any(wording(reading).edges == "heads" for _, reading in panels)
    width = SIZES.get(columns, 6.9)
    with pyplot() as plt:
        size = (width, 0.75 + lines * (2.0 + (0.75 if tables else 0.0)))
        figure = plt.figure(figsize=size, layout="constrained", dpi=300)
        figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0.03, hspace=0.02)
        grid = figure.subplots(
            lines * (2 if tables else 1), columns, squeeze=False,
            height_ratios=[3.0, 1.25] * lines if tables else None,
        )  # fmt: skip
        for axis in grid.flat:
            axis.set_axis_off()
        drawn = []
        for i, (task, reading) in enumerate(panels):
            row, at = comparison["tasks"][task], (i // columns) * (2 if tables else 1)
            axis = grid[at][i % columns]
            axis.set_axis_on()
            _panel(axis, row, reading, threshold)
            _titles(axis, comparison, panels, i)
            drawn.append((axis, row, reading))
            if tables:
                _heads_table(grid[at + 1][i % columns], row, reading)
        _legend(figure, comparison, [axis for axis, *_ in drawn], columns)
        figure.supxlabel(_note(comparison, panels, width), x=0.01, ha="left", fontsize=NOTE, color=INK)
        figure.draw_without_rendering()  # now everything but the labels has its place
        for axis, row, reading in drawn:
            _label(axis, row, reading, threshold)
        save(figure, path, dpi=300)


def _panel(axis: Axes, row: TaskRow, reading: str, threshold: float) -> None:
    models = _models(row, reading)
    axis.axhline(threshold, color=INK, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
    shown = models.get("sparse") or next(iter(models.values()))
    if "random" in shown:
        _curve(axis, shown["random"], GREY, "random", linestyle=(0, (1, 1.6)), linewidth=0.9)
    for role, colour in COLOURS.items():
        if role in models:
            _curve(axis, models[role]["curve"], colour, role, linewidth=0.9 if role == "control" else 1.5)
    curves = [model["curve"] for model in models.values()]
    reached = [f for curve in curves for f in (*curve["effect"], *curve["high"]) if np.isfinite(f)]
    lowest = min(reached, default=0.0)
    top = min(max([1.0, *reached]), 1.5) + (0.3 if _open(row, reading) else 0.14)
    axis.set(xscale="log", ylim=(max(min(-0.04, lowest - 0.05), -0.6), top))
    axis.set_xlim(_left(curves, threshold), max(model["n_edges"] for model in models.values()) * 1.2)
    axis.xaxis.set_major_locator(_decades(axis.get_xlim()))
    axis.xaxis.set_minor_locator(_decades((1, 1)))
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    axis.tick_params(labelsize=SMALL, color=GREY, length=2.5, pad=2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set(color=GREY, linewidth=0.8)


def _decades(limits: tuple[float, float]) -> Any:
    from matplotlib.ticker import FixedLocator

    low, high = np.ceil(np.log10(limits[0])), np.floor(np.log10(limits[1]))
    step = max(1, int(np.ceil((high - low) / 5)))
    return FixedLocator([10.0**power for power in np.arange(low, high + 1, step)] if limits != (1, 1) else [])


def _left(curves: Iterable[CurveRow], threshold: float) -> float:
    """Where the x axis begins: a power of ten before anything happens, with room for a label before the threshold."""
    starts = []
    for curve in curves:
        points = [(n, f) for n, f in zip(curve["edges"], curve["effect"], strict=True) if n > 0]
        starts += [n for n, f in points if abs(f) >= 0.03][:1] + [n / 10 for n, f in points if f >= threshold][:1]
    return float(10.0 ** np.floor(np.log10(max(min(starts, default=1.0), 1.0))))


def _curve(axis: Axes, curve: CurveRow, colour: str, label: str, **style: Any) -> None:
    rows = zip(curve["edges"], curve["effect"], curve["low"], curve["high"], strict=True)
    points = [row for row in rows if row[0] > 0]
    if not points:
        return
    x, effect, low, high = zip(*points, strict=True)
    if label in ("dense", "sparse"):
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(x, effect, color=colour, label=label, **style)


def _titles(axis: Axes, comparison: ComparisonRows, panels: list[tuple[str, str]], at: int) -> None:
    task, reading = panels[at]
    row, several = comparison["tasks"][task], len({reading for _, reading in panels}) > 1
    models = _models(row, reading)
    title = task_name(task) + (f": {wording(reading).short or reading}" if several else "")
    prompts = max(model["n_prompts"] for model in models.values())
    model = model_name(comparison, row)
    below = ", ".join(filter(None, [model, f"n = {prompts:,}"]))
    axis.set_title(title, fontsize=LABEL + 0.5, color=INK, fontweight="bold", pad=12)
    style: Any = {"ha": "center", "va": "bottom", "fontsize": NOTE, "color": INK, "xycoords": "axes fraction"}
    axis.annotate(below, (0.5, 1.0), (0, 2.5), textcoords="offset points", **style)
    axis.set_xlabel(textwrap.fill(wording(reading).axis, 22), fontsize=SMALL, labelpad=2, color=INK)
    if at % 4 == 0 or several:
        name = "Share of Attribution" if reading == "share" else "Explained Effect"
        axis.set_ylabel(name, fontsize=LABEL, labelpad=2, color=INK)


def task_name(task: str) -> str:
    """greater-than -> Greater Than; a long one is clipped."""
    title = {"ioi": "IOI", "ioi-long": "IOI Long"}.get(task, task.replace("-", " ").title())
    return title if len(title) <= 20 else title[:19] + "…"


def model_name(comparison: ComparisonRows, row: TaskRow) -> str:
    """What the dense model is called: the last part of its name or path; empty where nobody said."""
    found = comparison.get("names", {}).get("dense", "dense")
    if found == "dense":
        found = next((str(model.get("model", "")) for model in row["models"].values()), "")
    name = found.rstrip("/").rpartition("/")[2]
    return "" if name in ("dense", "sparse", "model", "base") else name if len(name) <= 20 else name[:19] + "…"


def role_name(comparison: ComparisonRows, role: str) -> str:
    """A model in a legend."""
    found = comparison.get("names", {}).get(role, role)
    return role.capitalize() if found == role or "/" in found or role == "dense" else found[:24]


def _legend(figure: Any, comparison: ComparisonRows, axes: list[Axes], columns: int) -> None:
    """One for all panels, above them: nothing can lie behind it."""
    lines = {line.get_label(): line for axis in axes for line in axis.get_lines() if line.get_label()[0] != "_"}
    roles = [role for role in ("dense", "control", "sparse", "random") if role in lines]
    # Random edges are those of one model: others' would need more, or fewer.
    whose = "sparse" if "sparse" in roles else roles[0]
    names = [f"random, {whose}" if role == "random" else role_name(comparison, role) for role in roles]
    style: Any = {"frameon": False, "fontsize": SMALL, "handlelength": 1.5, "columnspacing": 1.1, "borderpad": 0.1}
    n = len(roles) if columns > 1 or sum(map(len, names)) < 32 else 2
    figure.legend([lines[role] for role in roles], names, loc="outside upper center", ncols=n, **style)


def _note(comparison: ComparisonRows, panels: list[tuple[str, str]], width: float) -> str:
    """What is counted, what the rest does meanwhile, and on which prompts it was ranked and measured."""
    said = []
    readings = list(dict.fromkeys(reading for _, reading in panels))
    for reading in readings:
        models = [m for row in comparison["tasks"].values() for m in _models(row, reading).values()]
        name = f"{wording(reading).short or reading}: ".capitalize() if len(readings) > 1 else ""
        said.append(name + question(reading, scope_of(models)))
    said.append("Bands: 95 % intervals over the n prompts.")
    if any(_open(comparison["tasks"][task], reading) for task, reading in panels):
        said.append("All of it: every edge that leads to the answer, no search.")
    return textwrap.fill(" ".join(said), int(width * 19.5))


def _open(row: TaskRow, reading: str) -> OpenRow | None:
    """All edges that lead to the answer belong beside circuits of those edges, the others removed."""
    return row["open_edges"] if reading == "removed" and "open_edges" in row else None


def _label(axis: Axes, row: TaskRow, reading: str, threshold: float) -> None:
    """The multiplier above the dashed line, where no curve, band or other label is."""
    taken: list[Any] = []
    found = _open(row, reading)
    if found:
        level = axis.get_ylim()[1] - 0.15
        ends = [(found["sparse"], ORANGE), (found["dense"], BLUE)]
        axis.plot([x for x, _ in ends], [level] * 2, color=GREY, linewidth=0.8, label="_all")
        for x, colour in ends:
            axis.plot([x], [level], "|", color=colour, markersize=5, markeredgewidth=1.4, label="_all")
        text = f"all of it: {times(found['multiplier'])}"
        places = [((found["sparse"] * found["dense"]) ** 0.5, "center"), (found["dense"], "right")]
        taken.append(_write(axis, text, [(x, level, 2.5, ha) for x, ha in places], taken, NOTE))
    m = row.get("multipliers", {}).get(reading, {}).get("dense", {}).get(str(threshold))
    if m is None or not m["multiplier"] > 0:
        return
    left, right = sorted(max(1, n) for n in (m["sparse_edges"], m["dense_edges"]))
    style: Any = {"color": INK, "linewidth": 1.4, "marker": "|", "markersize": 5, "label": "_span"}
    axis.plot([left, right], [threshold] * 2, **style)
    start = axis.get_xlim()[0]
    places = [
        (left, "right"),
        (0.6 * left, "right"),
        ((left * start) ** 0.5, "center"),
        (start, "left"),
        ((left * right) ** 0.5, "center"),
    ]
    spots = [(x, threshold, 2.5, ha) for x, ha in places]
    spots += [(x, axis.get_ylim()[1] - 0.13, 0.0, ha) for x, ha in reversed(places)]
    text = fewer(m, interval=False).removesuffix(" fewer")
    _write(axis, text, spots, taken, LABEL + 1, fontweight="bold")


def _write(axis: Axes, text: str, spots: list[tuple[float, float, float, str]], taken: list[Any], size: float,
           **style: Any) -> Any:  # fmt: skip
    """Write at the first free spot (x, y, points above it, side); returns the box it takes."""
    renderer, lines = axis.figure.canvas.get_renderer(), np.concatenate([*_points(axis)])
    outside = axis.get_window_extent(renderer)
    for x, y, lift, ha in spots:
        shift = {"right": -3, "left": 2}.get(ha, 0)
        written = axis.annotate(
            text, (x, y), (shift, lift), textcoords="offset points", ha=ha, va="bottom", fontsize=size, color=INK,
            annotation_clip=False, **style,
        )  # fmt: skip
        written.set_in_layout(False)
        box = written.get_window_extent(renderer)
        inside = (lines > (box.x0 - 2, box.y0)).all(1) & (lines < (box.x1 + 2, box.y1 + 2)).all(1)
        free = not inside.any() and not any(box.overlaps(other) for other in taken)
        if free and box.x0 >= outside.x0 - 1 and box.x1 <= outside.x1 + 4 and box.y1 <= outside.y1 + 3:
            break
        if (x, y, lift, ha) != spots[-1]:
            written.remove()
    return box


def _points(axis: Axes) -> Iterator[np.ndarray]:
    """What a label must not cover, as points close to each other, in pixels: lines and the edges of bands."""
    yield np.zeros((0, 2))
    bands = [path.vertices for band in axis.collections for path in band.get_paths()]
    lines = [np.column_stack(line.get_data()) for line in axis.get_lines() if line.get_label() in (*COLOURS, "random")]
    for vertices in bands + lines:
        ends = axis.transData.transform(np.maximum(vertices.astype(float), (1e-3, -9.0)))
        steps = np.linspace(0, 1, 24)[:, None, None]
        yield (ends[:-1] + steps * (ends[1:] - ends[:-1])).reshape(-1, 2)


def _heads_table(axis: Axes, row: TaskRow, reading: str) -> None:
    """Below a panel: heads needed for every share of the effect, and how many times fewer."""
    models = _models(row, reading)
    thresholds = [t for t in next(iter(models.values()))["edges_at"] if t != "mean"]
    lines = [["", *(f"{float(t):.0%}" for t in thresholds)]]
    for role in ("dense", "control", "sparse"):
        if role in models:
            lines.append([role, *(count(models[role]["edges_at"].get(t)) for t in thresholds)])
    found = row.get("multipliers", {}).get(reading, {}).get("dense", {})
    if found:
        needs = [fewer(found[t], interval=False).split(" ") if t in found else ["–", ""] for t in thresholds]
        lines.append(["needs", *(value for value, *_ in needs)])
        lines.append(["", *(word[-1] for word in needs)])
    for i, cells in enumerate(lines):
        y = 1 - (i + 0.5) / len(lines)
        for j, text in enumerate(cells):
            x = 0.0 if j == 0 else 0.27 + 0.73 * (j - 0.5) / max(len(thresholds), 1)
            style: Any = {"ha": "left" if j == 0 else "center", "va": "center", "fontsize": NOTE}
            axis.text(x, y, text, color=COLOURS.get(cells[0], INK), transform=axis.transAxes, **style)
