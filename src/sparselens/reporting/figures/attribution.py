"""Figure 4 from rows: the heads that carry an edge, map by map, and the prompt's clusters below. No torch, no models.

Everything is placed in inches on one page:

1. Above: the attention maps of all heads needed for 80 % of the main edge, keys across, queries upward; the cell from
   source to target is red. With two models the denser one is on the left, its maps smaller, because there are more.
2. Below: the prompt with its positions, a box with layers for every cluster that matters, what pushes the answer, and
   the answer itself; arrows by strength, the main edge in red with the number of heads that carry it in each model.
"""

import math
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

from ...attribution.rows import ClusterRow, EdgeRow, MainRow, MapRow, ModelRows, TraceRows
from .style import BLUE, GREY, INK, LIGHT, ORANGE, SUFFIXES, pyplot, save

Point = tuple[float, float]

RED = "#c8102e"
WIDTH, MARGIN, GAP = 10.6, 0.22, 0.35  # inches
HEADING, COMPASS = 0.68, 0.28  # room for a panel's titles and lower edge; for the arrows K and Q beside its maps
MOST_BOXES = 7  # clusters drawn beside the answer
MOST_CHARACTERS = 200  # of the prompt; what lies between the positions of drawn clusters is left out beyond that
VISIBLE = {"\n": "↵", "\r": "↵", "\t": "⇥"}
SLOT = 0.62  # inches per position, where the prompt is short enough


def draw_trace_all(trace: TraceRows, folder: str | Path) -> list[Path]:
    """figure4 as PNG, SVG and PDF."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / f"figure4.{suffix}" for suffix in SUFFIXES]
    draw_trace(trace, *paths)
    return paths


def draw_trace(trace: TraceRows, *paths: str | Path) -> None:
    """Figure 4 of trace.json: one model, or two where it has `against`. Suffixes of paths say which formats."""
    second = trace.get("against")
    # The denser model on the left; of two alike, the one compared against.
    models: list[ModelRows] = sorted([second, trace], key=lambda m: bool(m.get("gated"))) if second else [trace]
    heights = _heights(models)
    with pyplot() as plt:
        figure = plt.figure(figsize=(WIDTH, sum(heights)))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.axis("off")
        _Page(axis, models, *heights).draw()
        axis.set(xlim=(0, WIDTH), ylim=(0, sum(heights)))
        save(figure, *paths)


def _heights(models: list[ModelRows]) -> tuple[float, float]:
    """(of the maps, of the diagram) in inches."""
    counts = [len(m["main"]["attention"]) for m in models]
    most = max(counts)
    allowed = (2.1 if most <= 3 else 2.6 if most <= 16 else 3.4 if most <= 48 else 4.2) - HEADING
    used = 1.0
    for count, width in zip(counts, _widths(len(models)), strict=True):
        if count:
            columns, side, label = _grid(count, width - COMPASS, allowed)
            used = max(used, math.ceil(count / columns) * (side + label))
    return min(used, allowed) + HEADING, 3.0


def _widths(panels: int) -> list[float]:
    whole = WIDTH - 2 * MARGIN
    return [whole] if panels == 1 else [0.52 * (whole - GAP), 0.48 * (whole - GAP)]


def visible(token: str) -> str:
    """Text that can be printed: line ends (and nothing but spaces) shown, what the font lacks as a box."""
    text = token.strip(" ") or "␣" * len(token)
    return "".join(VISIBLE.get(c, c) if _has_glyph(VISIBLE.get(c, c)) else "□" for c in text) or "∅"


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans Mono"))
    # Control characters and lone surrogates have no business in an SVG, whatever the font says.
    unprintable = unicodedata.category(character) in ("Cc", "Cs", "Cn", "Co")
    return not unprintable and bool(font.get_char_index(ord(character)))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class _Page:
    """One page. Coordinates in inches, from the lower left."""

    def __init__(self, axis: Any, models: list[ModelRows], maps_height: float, diagram_height: float):
        self.axis, self.models = axis, models
        self.floor, self.top = diagram_height, maps_height + diagram_height
        self.shown = models[-1]  # whose clusters are drawn

    def text(self, x: float, y: float, text: str, size: float = 8, **style: Any) -> None:
        """Plain text: a $ in a prompt is no formula."""
        options = {"ha": "center", "va": "center", "color": INK, "parse_math": False} | style
        self.axis.text(x, y, text, fontsize=size, **options)

    def draw(self) -> None:
        x = MARGIN
        for model, width in zip(self.models, _widths(len(self.models)), strict=True):
            if x > MARGIN:
                self.axis.plot([x - GAP / 2] * 2, [self.floor + 0.12, self.top - 0.15], color=LIGHT, lw=1)
            self.panel(model, x, width)
            x += width + GAP
        self.axis.plot([MARGIN, WIDTH - MARGIN], [self.floor] * 2, color=LIGHT, lw=1)
        self.diagram()

    # ---- attention maps ----

    def panel(self, model: ModelRows, x: float, width: float) -> None:
        main = model["main"]
        note = f"80 % carried by {main['n_heads_for_80']} of {model['n_layers'] * model['n_heads']} heads"
        self.text(x, self.top - 0.2, _cut(visible(model.get("model") or "model"), 40), 10, ha="left", weight="bold")
        self.text(x, self.top - 0.42, note, 8, ha="left")
        self.text(x + width, self.top - 0.2, _cells(main, model["tokens"]), 7.5, ha="right", color=RED)
        maps = main["attention"]
        room = (width - COMPASS, self.top - self.floor - HEADING)
        if not maps:
            self.text(x + width / 2, self.floor + room[1] / 2, "no head: along the residual stream", 8, color=GREY)
            return
        columns, side, label = _grid(len(maps), *room)
        left, start, apart = x + COMPASS, self.top - 0.56, _apart(len(maps))
        for i, one in enumerate(sorted(maps, key=lambda m: (-m["layer"], -m["head"]))):
            a = left + (i % columns) * (side + apart)
            b = start - (i // columns + 1) * (side + label)
            self.map(one, main, model["tokens"], (a, b, side, apart), ORANGE if model.get("gated") else BLUE)
            name, size = f"L{one['layer']}.H{one['head']}", max(3.2, min(8.0, side * 11))
            self.text(a + side / 2, b + side + label / 2 - 0.01, name, size)
        self.compass(left, start - side - label)

    def compass(self, x: float, y: float) -> None:
        """Keys across, queries upward."""
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 0.7, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
        for dx, dy, name in ((0.16, 0, "K"), (0, 0.16, "Q")):
            self.axis.annotate("", (x - 0.24 + dx, y + dy), (x - 0.24, y), arrowprops=arrow)
            self.text(x - 0.24 + dx * 0.55 + 0.06 * (dy > 0), y - 0.07 * (dx > 0) + dy * 1.3, name, 6.5)

    def map(self, one: MapRow, main: MainRow, tokens: list[str], place: tuple[float, ...], colour: str) -> None:
        """place: x, y, the side, and the room to its right."""
        import numpy as np
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Rectangle

        n, (x, y, side, apart) = len(tokens), place
        picture, ink = np.ones((n, n, 3)), np.array(to_rgb(colour))
        for query, key, weight in one["cells"]:
            # The square root shows weak looks too; the eye compares areas of ink, not numbers.
            picture[query, key] = 1 - (1 - ink) * min(1.0, weight) ** 0.5
        extent = (x, x + side, y, y + side)
        self.axis.imshow(picture, origin="lower", extent=extent, interpolation="nearest", aspect="auto", zorder=2)
        # No frame above and on the right: the words beside the diagonal need the room.
        self.axis.plot([x, x, x + side], [y + side, y, y], color=GREY, lw=0.5, zorder=3, solid_joinstyle="miter")
        weights = {(q, k): w for q, k, w in one["cells"]}
        cell = side / n
        size = max(cell, min(0.045, side / 5))  # in a long prompt a cell is a speck: mark it larger than it is
        for query, key in ((query, key) for query in main["queries"] for key in main["keys"] if key <= query):
            corner = (x + (key + 0.5) * cell - size / 2, y + (query + 0.5) * cell - size / 2)
            fill: Any = RED if weights.get((query, key), 0.0) > 0 else "none"
            self.axis.add_patch(Rectangle(corner, size, size, lw=0.6, zorder=4, fc=fill, ec=RED))
        self.map_tokens(main, tokens, x, y, side, apart)

    def map_tokens(self, main: MainRow, tokens: list[str], x: float, y: float, side: float, apart: float) -> None:
        """Beside the diagonal, where a causal map is empty: a word names its row and its column."""
        cell = side / len(tokens)
        size = min(6.0, 0.9 * cell * 72)
        if size < 3.2:  # nobody could read them
            return
        for i, token in enumerate(tokens):
            fits = int(((len(tokens) - i - 1) * cell + apart - 0.1) * 72 / (0.62 * size))
            if fits < min(3, len(visible(token))):
                continue
            red = i in main["keys"] or i in main["queries"]
            style: Any = {"ha": "left", "zorder": 3, "color": RED if red else INK, "family": "monospace"}
            self.text(x + (i + 1) * cell + 0.02, y + (i + 0.5) * cell, _cut(visible(token), fits), size, **style)

    # ---- the prompt and its clusters ----

    def diagram(self) -> None:
        drawn, answers = _drawn(self.shown)
        centres, size = self.prompt([*drawn, *answers])
        self.boxes = _spread(drawn, centres)
        row, high = 1.12, 2.12
        for cluster, (x, width) in zip(drawn, self.boxes, strict=True):
            self.box(cluster, x, row, width)
            red = cluster["name"] == self.shown["main"]["source"]
            style: dict[str, Any] = {"color": RED if red else GREY, "lw": 0.9 if red else 0.6, "zorder": 1}
            for position in (p for p in cluster["positions"] if p in centres):
                self.axis.plot([centres[position], x], [0.62 + size / 72, row - 0.21], **style)
        places = {c["name"]: (x, row) for c, (x, _) in zip(drawn, self.boxes, strict=True)}
        right = WIDTH - MARGIN - 0.08
        x = min(right, max(centres.get(self.shown["target"][0]["position"], right), WIDTH / 2) + 1.6)
        for cluster in reversed(answers):
            width = _box_width(cluster)
            places[cluster["name"]] = (x - width / 2, high)
            self.box(cluster, *places[cluster["name"]], width)
            x -= width + 0.75
        self.arrows(places, high)
        self.caption()

    def prompt(self, clusters: list[ClusterRow]) -> tuple[dict[int, float], float]:
        """Write the prompt; returns the centre of every position that is shown, and the size of its letters."""
        tokens, main = self.shown["tokens"], self.shown["main"]
        words = _sentence(tokens, {p for c in clusters for p in c["positions"]})
        letter = min(0.11, (WIDTH - 2 * MARGIN) / sum(len(word) + 1 for _, word in words))
        size = letter * 72 / 0.61
        widths = [(len(word) + 1) * letter for _, word in words]
        wider = [max(width, SLOT) for width in widths]
        widths = wider if sum(wider) <= 0.75 * WIDTH else widths
        x = max(MARGIN, (WIDTH - sum(widths)) / 2)
        centres: dict[int, float] = {}
        answer = self.shown["target"][0]["position"]
        for (position, word), width in zip(words, widths, strict=True):
            red = position in main["keys"] or position == answer
            style: dict[str, Any] = {"color": RED if red else INK, "weight": "bold" if red else "normal"}
            self.text(x + width / 2, 0.55, word, size, family="monospace", **style)
            if position is not None:
                centres[position] = x + width / 2
                digits = min(6.5, 0.9 * width * 72 / (0.64 * len(str(position))))  # as large as the place allows
                self.text(x + width / 2, 0.36, str(position), digits, color=RED if red else GREY)
            x += width
        return centres, size

    def box(self, cluster: ClusterRow, x: float, y: float, width: float) -> None:
        from matplotlib.patches import FancyBboxPatch

        output = cluster["kind"] == "output"
        red = cluster["name"] in (self.shown["main"]["source"], self.shown["main"]["target"])
        self.axis.add_patch(
            FancyBboxPatch(
                (x - width / 2 + 0.04, y - 0.17), width - 0.08, 0.34, boxstyle="round,pad=0.03,rounding_size=0.07",
                fc=LIGHT if output else "white", ec=RED if red else INK, lw=1.1 if red or output else 0.8, zorder=5,
            )
        )  # fmt: skip
        low, high = cluster["layers"]
        self.text(x, y + 0.075, _box_name(cluster), 8.5, zorder=6, weight="bold" if output else "normal")
        where = "answer" if output else f"layer {low}" if low == high else f"layers {low}-{high}"
        self.text(x, y - 0.09, where, 6.5, zorder=6)

    def arrows(self, places: dict[str, Point], high: float) -> None:
        from matplotlib.patches import FancyArrowPatch

        main = self.shown["main"]
        edges = [e for e in self.shown["edges"] if e["source"] in places and e["target"] in places]
        edges = [e for e in edges if places[e["target"]][1] == high]  # what feeds the answer
        top = max((e["flow"] for e in edges), default=1.0) or 1.0
        for edge in sorted(edges, key=lambda e: e["flow"]):
            strength = (edge["flow"] / top) ** 0.5
            is_main = (edge["source"], edge["target"]) == (main["source"], main["target"])
            if strength < 0.1 and not is_main:
                continue
            start, end, bend = self.way(edge, places)
            colour = RED if is_main else BLUE if edge["weight"] >= 0 else ORANGE
            self.axis.add_patch(
                FancyArrowPatch(
                    start, end, arrowstyle="-|>", mutation_scale=6 + 5 * strength, lw=0.5 + 2.2 * strength,
                    color=colour, alpha=1.0 if is_main else 0.35 + 0.5 * strength, zorder=4 if is_main else 3,
                    connectionstyle=f"arc3,rad={bend:.4f}", shrinkA=0, shrinkB=0,
                )
            )  # fmt: skip

    def way(self, edge: EdgeRow, places: dict[str, Point]) -> tuple[Point, Point, float]:
        """(start, end, bend) of an arrow that runs behind no box."""
        (x, y), (to, above) = places[edge["source"]], places[edge["target"]]
        if y != above:  # bent so little that it stays below the row
            return (x, y + 0.2), (to, above - 0.2), -(0.06 if to <= x else min(0.06, 0.2 * (above - y) / (to - x)))
        if any(x < other < to for other, at in places.values() if at == above):  # over the boxes between its ends
            return (x, y + 0.2), (to, above + 0.2), -min(0.3, 1.0 / (to - x))
        from_side, to_side = (0.5 * _box_width(self.named(edge[end])) for end in ("source", "target"))
        return (x + from_side, y), (to - to_side, above), 0.0

    def named(self, name: str) -> ClusterRow:
        return next(c for c in self.shown["clusters"] if c["name"] == name)

    def caption(self) -> None:
        main = self.shown["main"]
        names = [_box_name(self.named(main[end])) for end in ("source", "target")]
        lines = [f"{names[0]} → {names[1]}", "carried at 80 % by"]
        for model in reversed(self.models):
            count, name = model["main"]["n_heads_for_80"], _cut(visible(model.get("model") or "model"), 34)
            lines.append(f"{count} head{'' if count == 1 else 's'}" + (f" ({name})" if len(self.models) > 1 else ""))
        for i, line in enumerate(lines):
            size, colour = (7.5, INK) if i == 1 else (8.5, RED)
            self.text(MARGIN, self.floor - 0.22 - 0.17 * i, line, size, ha="left", color=colour)
        legend = "arrows: how much of the answer flows there; blue raises, orange lowers, red: the edge above"
        self.text(MARGIN, 0.1, legend, 6, ha="left", color=GREY)


# ---- what to show, and where -----------------------------------------------------------------------------------------


def _cells(main: MainRow, tokens: list[str]) -> str:
    """Which cell is red, in words."""
    ends = []
    for name, positions in (("key", main["keys"]), ("query", main["queries"])):
        word = f" “{_cut(visible(tokens[positions[0]]), 10)}”" if len(positions) == 1 else ""
        listed = ", ".join(map(str, positions[:4])) + ("…" if len(positions) > 4 else "")
        ends.append(f"{name} {listed}{word}")
    return "red: " + " → ".join(ends)


def _grid(n: int, width: float, height: float) -> tuple[int, float, float]:
    """(columns, side of a map, height of its label) that make n maps as large as they can be."""
    best = (1, 0.0, 0.0)
    for columns in range(1, n + 1):
        rows = math.ceil(n / columns)
        for label in (0.16, 0.1):
            side = min(width / columns - _apart(n), height / rows - label, 1.5)
            if side > best[1] and (label == 0.16) == (side > 0.6):
                best = (columns, side, label)
    return best


def _apart(n: int) -> float:
    """From one map to the next: a few leave room for the last words."""
    return 0.45 if n <= 6 else 0.07


def _drawn(model: ModelRows) -> tuple[list[ClusterRow], list[ClusterRow]]:
    """(clusters in boxes beside the prompt, in its order; what pushes the answer, and the answer)."""
    clusters, edges, main = model["clusters"], model["edges"], model["main"]
    output = next(c for c in clusters if c["kind"] == "output")
    answers = [c for c in clusters if c["kind"] == "say"] + [output]
    if main["target"] not in {c["name"] for c in answers}:
        answers.insert(0, next(c for c in clusters if c["name"] == main["target"]))
    names = {c["name"] for c in answers}
    flow: dict[str, float] = {main["source"]: math.inf}
    for edge in edges:
        if edge["target"] in names:
            flow[edge["source"]] = flow.get(edge["source"], 0) + edge["flow"]
    others = [c for c in clusters if c["name"] in flow.keys() - names]
    others.sort(key=lambda c: -flow[c["name"]])
    return sorted(others[:MOST_BOXES], key=lambda c: sum(c["positions"]) / len(c["positions"])), answers


def _box_name(cluster: ClusterRow) -> str:
    return _cut(visible(cluster["name"].removesuffix(" (output)" if cluster["kind"] == "output" else "")), 18)


def _box_width(cluster: ClusterRow) -> float:
    low, high = cluster["layers"]
    return max(0.085 * len(_box_name(cluster)) + 0.3, 0.75 if low == high else 0.85)


def _spread(clusters: list[ClusterRow], centres: dict[int, float]) -> list[tuple[float, float]]:
    """(x, width) of boxes near their words, none on top of another, all on the page."""
    widths = [_box_width(c) for c in clusters]
    known = [[centres[p] for p in cluster["positions"] if p in centres] or [WIDTH / 2] for cluster in clusters]
    at = [sum(places) / len(places) for places in known]
    order = sorted(range(len(at)), key=lambda i: at[i])
    low = MARGIN
    for i in order:  # push right
        at[i] = max(at[i], low + widths[i] / 2)
        low = at[i] + widths[i] / 2 + 0.06
    high = WIDTH - MARGIN
    for i in reversed(order):  # and back onto the page
        at[i] = min(at[i], high - widths[i] / 2)
        high = at[i] - widths[i] / 2 - 0.06
    return list(zip(at, widths, strict=True))


def _sentence(tokens: list[str], needed: set[int]) -> list[tuple[int | None, str]]:
    """(position, word) of what fits on a line: all of it, or the needed positions with their neighbours and dots."""
    words = [_cut(visible(token), 14) for token in tokens]
    if sum(len(word) + 1 for word in words) <= MOST_CHARACTERS:
        return list(enumerate(words))
    for reach in range(8, -1, -1):
        near = {p + d for p in needed for d in range(-reach, reach + 1)} & set(range(len(tokens)))
        found: list[tuple[int | None, str]] = []
        for position in sorted(near):
            last = found[-1][0] if found else -1
            if last is not None and position > last + 1:
                found.append((None, "…"))
            found.append((position, words[position]))
        if reach == 0 or sum(len(word) + 1 for _, word in found) <= MOST_CHARACTERS:
            return found
    raise AssertionError("reach 0 always returns")
