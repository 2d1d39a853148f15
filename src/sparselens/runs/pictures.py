"""Small SVG pictures with which objects show themselves in a notebook. By hand: no library, no script."""

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import cycle
from pathlib import Path

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 34  # margins: room for what the axes say
COLOURS = ("#1f6f8b", "#c8553d", "#6a994e", "#8d6a9f", "#b08900", "#555555", "#2a9d8f")
Line = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


def page(title: str, *pictures: str) -> str:
    """What a notebook shows: the line the object prints, and its pictures."""
    return f"<div style='font:13px sans-serif'><div>{escape(title)}</div>{''.join(pictures)}</div>"


def lines(curves: Sequence[Line], x: str, y: str, log: bool = False) -> str:
    """Line charts over one axis; log: of the horizontal one (points at 0 are left out)."""
    drawn = [(name, *_drawn(xs, ys, log)) for name, xs, ys in curves]
    every_x, every_y = [v for _, xs, _ in drawn for v in xs], [v for _, _, ys in drawn for v in ys]
    if not every_x:
        return ""
    x_low, x_high, y_low, y_high = min(every_x), max(every_x), min(0.0, *every_y), max(every_y)
    parts: list[str] = []
    for (name, xs, ys), colour in zip(drawn, cycle(COLOURS), strict=False):
        across = [_between(a, x_low, x_high, LEFT, WIDTH - RIGHT) for a in xs]
        up = [_between(b, y_low, y_high, HEIGHT - BOTTOM, TOP) for b in ys]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True))
        parts.append(f"<polyline fill='none' stroke='{colour}' stroke-width='1.6' points='{points}'/>")
        row = TOP + 12 + 14 * (len(parts) // 2)
        parts.append(_text(LEFT + 8, row, name, "start", colour))
    ends: list[float] = [10**v if log else v for v in (x_low, x_high)]
    return _svg([*parts, *_axes(ends, (y_low, y_high), x, y)])


def heat(rows: Sequence[Sequence[float]], x: str, y: str) -> str:
    """A map of numbers from 0 (white) to the largest (dark); row 0 at the bottom, as layers are."""
    height, width = len(rows), max((len(row) for row in rows), default=0)
    most = max((value for row in rows for value in row), default=0.0) or 1.0
    if not width:
        return ""
    w, h = (WIDTH - LEFT - RIGHT) / width, (HEIGHT - TOP - BOTTOM) / height
    parts = [
        f"<rect x='{LEFT + w * j:.1f}' y='{HEIGHT - BOTTOM - h * (i + 1):.1f}' width='{w:.1f}' height='{h:.1f}' "
        f"fill='#1f6f8b' fill-opacity='{max(0.0, value) / most:.3f}' stroke='#ddd'/>"
        for i, row in enumerate(rows)
        for j, value in enumerate(row)
    ]
    return _svg([*parts, *_axes((0, width - 1), (0, height - 1), x, y)])


def web(
    dots: Iterable[tuple[float, float, float, str]], edges: Iterable[tuple[int, int, float]], words: Sequence[str]
) -> str:
    """Dots (x, y, size from 0 to 1, name) and weighted edges between them over the words of a prompt; y upwards."""
    dots, wide = list(dots), max(len(words) - 1, 1)
    top = max((y for _, y, _, _ in dots), default=1.0)
    low = min((y for _, y, _, _ in dots), default=0.0)
    at = [
        (_between(x, 0, wide, LEFT, WIDTH - 40), _between(y, low, top, HEIGHT - BOTTOM, TOP + 6)) for x, y, _, _ in dots
    ]
    parts = []
    for source, target, weight in edges:
        (x1, y1), (x2, y2) = at[source], at[target]
        colour = COLOURS[0] if weight >= 0 else COLOURS[1]
        parts.append(
            f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
            f"stroke-opacity='{min(1.0, abs(weight)):.2f}'/>"
        )
    for (x, y), (_, _, size, name) in zip(at, dots, strict=True):
        shape = f"cx='{x:.1f}' cy='{y:.1f}' r='{2 + 4 * size:.1f}'"
        parts.append(f"<circle {shape} fill='#333'><title>{escape(name)}</title></circle>")
    shown = range(0, len(words), max(1, len(words) // 12))
    for i in shown:
        parts.append(_text(_between(i, 0, wide, LEFT, WIDTH - 40), HEIGHT - 16, words[i].strip()[:9] or "␣", "middle"))
    return _svg(parts)


def of_run(folder: Path, losses: Sequence[tuple[float, float]]) -> str:
    """The figure a Run has, else the loss as it went, [(step, loss)]."""
    drawn = [folder / f"figure{number}.png" for number in (1, 2, 4)]
    found = next((path for path in drawn if path.is_file()), None)
    if found is not None:
        return image(found)
    return lines([("", [step for step, _ in losses], [loss for _, loss in losses])], "step", "loss trained on")


def image(path: Path) -> str:
    """A PNG as it is, inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<img style='max-width:640px' alt='{escape(path.stem, quote=True)}' src='data:image/png;base64,{data}'/>"


def _drawn(xs: Sequence[float], ys: Sequence[float], log: bool) -> tuple[list[float], list[float]]:
    pairs = [(float(a), float(b)) for a, b in zip(xs, ys, strict=True) if math.isfinite(b) and (a > 0 or not log)]
    return [math.log10(a) if log else a for a, _ in pairs], [b for _, b in pairs]


def _between(value: float, low: float, high: float, first: float, last: float) -> float:
    """Where a value from low to high lies between two pixels."""
    share = (value - low) / (high - low) if high > low else 0.5
    return first + share * (last - first)


def _axes(xs: Sequence[float], ys: Sequence[float], x: str, y: str) -> list[str]:
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    frame = f"<path d='M{left},{TOP} V{bottom} H{right}' fill='none' stroke='#999'/>"
    ends = [
        _text(left, bottom + 13, f"{xs[0]:,.4g}", "start"), _text(right, bottom + 13, f"{xs[1]:,.4g}", "end"),
        _text(left - 4, bottom, f"{ys[0]:,.3g}", "end"), _text(left - 4, TOP + 9, f"{ys[1]:,.3g}", "end"),
    ]  # fmt: skip
    middle = (TOP + bottom) / 2
    title = f"<text transform='rotate(-90 12 {middle})' x='12' y='{middle}' text-anchor='middle'>{escape(y)}</text>"
    return [frame, *ends, _text((left + right) / 2, HEIGHT - 6, x, "middle"), title]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(text)}</text>"


def _svg(parts: Sequence[str]) -> str:
    frame = f"xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'"
    return f"<svg {frame} style='font:10px sans-serif;background:#fff'>{''.join(parts)}</svg>"
