"""Figures for print: nothing overlaps, nothing is cut off, every reading and every size can be drawn."""

import itertools
import json
import re

import numpy as np
import pytest
from reading_rows import ALL, comparison
from report_runs import make_run, write_circuits

from sparselens.circuits.circuit import Circuit
from sparselens.models.component_graph import Components
from sparselens.reporting.figures import attribution, circuits, curves, flow, token_circuits
from sparselens.reporting.figures.attribution import draw_trace
from sparselens.reporting.figures.circuits import draw_all, draw_circuits
from sparselens.reporting.figures.flow import draw_flow
from sparselens.reporting.figures.token_circuits import draw_token_circuits, enough
from sparselens.reporting.sections.attribution import trace_files


@pytest.fixture
def drawn(monkeypatch):
    """{file name: figure} of what would be saved."""
    found = {}
    for module in (curves, token_circuits, circuits, flow, attribution):
        monkeypatch.setattr(module, "save", lambda figure, path, dpi=0: found.setdefault(path.name, figure))
    yield found
    import matplotlib.pyplot as plt

    plt.close("all")


def text_boxes(figure):
    """What is written and where, in pixels; {} for none."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    off = {id(text) for axis in figure.axes if not axis.axison for text in axis.findobj(Text) if text not in axis.texts}
    shown = [text for text in texts if id(text) not in off]
    return [(text, text.get_window_extent()) for text in shown]


def curve_points(axis, **which):
    return np.concatenate([*curves._points(axis)])


def check_figure_2(figure):
    boxes = text_boxes(figure)
    page = figure.bbox
    for text, box in boxes:
        name = text.get_text()
        assert box.x0 >= -1 and box.x1 <= page.x1 + 1 and box.y0 >= -1 and box.y1 <= page.y1 + 1, f"{name!r} is cut off"
        assert text.get_fontsize() >= 6.5 or "mathdefault" in name, f"{name!r} is too small for print"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one.get_text()!r} lies on {other.get_text()!r}"
    for axis in filter(lambda axis: axis.axison, figure.axes):
        points = curve_points(axis)
        dashed = axis.transData.transform((1, 0.9))[1]
        for label in axis.texts:
            box = label.get_window_extent()
            inside = (points > (box.x0, box.y0)).all(1) & (points < (box.x1, box.y1)).all(1)
            assert not inside.any(), f"a curve runs through {label.get_text()!r}"
            assert box.y0 > dashed, f"{label.get_text()!r} stands on the dashed line"


@pytest.mark.parametrize("n_tasks", [1, 2, 4])
def test_nothing_in_figure_2_overlaps(n_tasks, drawn, tmp_path):
    rows = comparison(n_tasks)
    curves.draw_figure2(rows, tmp_path, "", "png", 0.9)
    files = ["", "-task", "-share", "-corrupted", "-mean", "-heads", "-heads-corrupted"]
    assert list(drawn) == [f"figure2{file}.png" for file in files], "a learnt mask has no curve"
    for figure in drawn.values():
        check_figure_2(figure)
    widths = {1: 5.0, 2: 5.0, 4: 6.9}  # of one task the share of attribution stands beside it
    assert drawn["figure2.png"].get_size_inches()[0] == widths[n_tasks]
    labels = [text.get_text() for axis in drawn["figure2.png"].axes for text in axis.texts]
    assert {"17.3x", "all of it: 55.7x", "SmolLM2-135M, n = 100"} <= set(labels)
    note = drawn["figure2.png"].get_supxlabel()
    assert "All other attention edges are removed." in note and "one prompt at a time" in note.replace("\n", " ")


@pytest.mark.parametrize("style", [
    {"shape": (4, 4), "tokens": list("36+28=?????"), "model": "addition"}, {"scale": 4.0}, {"scale": 0.02},
    {"roles": ("sparse",)}, {"roles": ("dense", "sparse"), "n_prompts": 12345, "model": "a-very-long-name/" * 4},
])  # fmt: skip
def test_figure_2_of_one_panel_fits_a_column(drawn, tmp_path, style):
    rows = comparison(1, ("removed", "heads"), **style)
    del rows["names"]
    curves.draw_figure2(rows, tmp_path, "", "png", 0.9)
    for figure in drawn.values():
        assert figure.get_size_inches()[0] == 3.3
        check_figure_2(figure)


def test_more_in_the_sparse_model_is_said_so(drawn, tmp_path):
    curves.draw_figure2(comparison(1, ("corrupted",)), tmp_path, "", "png", 0.9)
    (figure,) = drawn.values()
    assert [t.get_text() for t in figure.axes[0].texts if "x" in t.get_text()] == ["1.7x more"]


@pytest.mark.parametrize("roles", [("dense", "sparse", "control"), ("dense",)])
def test_the_legend_says_whose_random_edges(roles, drawn, tmp_path):
    curves.draw_figure2(comparison(1, ("removed",), roles=roles), tmp_path, "", "png", 0.9)
    (figure,) = drawn.values()
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said[-1] == ("random, sparse" if "sparse" in roles else "random, dense")
    check_figure_2(figure)


def test_below_heads_stands_a_table(drawn, tmp_path):
    rows = comparison(2, ("removed", "heads"))
    curves.draw_figure2(rows, tmp_path, "", "png", 0.9)
    said = [text.get_text() for axis in drawn["figure2-heads.png"].axes[2:] for text in axis.texts]
    at = rows["tasks"]["greater-than"]["models"]["sparse"]["readings"]["heads"]["edges_at"]
    assert [f"{n:.0f}" for n in at.values()] == said[said.index("sparse") + 1 :][:4] and said.count("needs") == 2
    assert set(said[said.index("needs") + 6 :][:4]) <= {"fewer", "more"}


def test_every_subset_of_readings_can_be_drawn(tmp_path):
    """figure2 and figure3 are of the first reading that is there; the component graph keeps its own figure 3."""
    for readings, more in (
        (("components",), []),
        (("removed",), []),
        (("heads",), ["no figure3"]),
        (("learnt",), None),
    ):
        folder = tmp_path / readings[0]
        write_circuits(folder, np.random.default_rng(0), 3, 4, 30, readings=readings)
        names = [
            path.name for path in draw_all(json.loads((folder / "results.json").read_text()), folder, 0.9, ["svg"])
        ]
        expected = ["figure2.svg", "figure3.svg"] if not more else ["figure2.svg"]
        assert names == (["figure3.svg"] if more is None else expected), readings
    write_circuits(tmp_path, np.random.default_rng(0), 3, 4, 30, readings=("components", "removed"))
    paths = draw_all(json.loads((tmp_path / "results.json").read_text()), tmp_path, suffixes=["svg"])
    names = ["figure2.svg", "figure2-components.svg", "figure3.svg", "figure3-components.svg"]
    assert [path.name for path in paths] == names
    assert "Number of Edges Kept" in paths[0].read_text() and " of 252 edges" in paths[2].read_text()
    again = draw_all(json.loads((tmp_path / "results.json").read_text()), tmp_path / "again", suffixes=["svg"])
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def circuit_of(rows, n_edges):
    """Every model's example needs this many edges."""
    for model in rows["tasks"]["greater-than"]["models"].values():
        model["readings"]["removed"]["example_at"]["0.9"] = n_edges
    return rows


@pytest.mark.parametrize("n_edges", [30, 3000])
@pytest.mark.parametrize("tokens", [None, [f" word{i}ish" for i in range(40)], list("36+28=?????")])
def test_figure_3_on_tokens(n_edges, tokens, drawn, tmp_path):
    rows = circuit_of(comparison(1, ("removed",), tokens=tokens, shape=(30, 9)), n_edges)
    for model in rows["tasks"]["greater-than"]["models"].values():
        found = model["readings"]["removed"]
        found["circuit"] = (found["circuit"] * 9)[:3000]  # the sparse model's own are fewer
    draw_token_circuits(rows, "greater-than", "removed", tmp_path / "figure3.png")
    (figure,) = drawn.values()
    boxes = text_boxes(figure)
    assert all(box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1 and box.y1 <= figure.bbox.y1 + 1
               for _, box in boxes)  # fmt: skip
    for axis in figure.axes:  # tokens and layers beside each other do not touch
        names = [text.get_window_extent() for text in axis.texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))
        notes = [text.get_text() for text in axis.texts]
        assert any(note.startswith(f"{n_edges:,} of ") and " heads" in note for note in notes)
        (lines,) = [found for found in axis.collections if hasattr(found, "get_segments")]
        opacity, width = lines.get_colors()[:, 3], np.array(lines.get_linewidths())
        assert (opacity[-1], width[-1]) == (opacity.max(), width.max()), "the strongest lie on top"
        assert len(opacity) <= n_edges and (n_edges == 3000) == (np.median(opacity) < 0.4)
        ends = [(a[1], b[1]) for a, b in lines.get_segments()]
        assert all(round(end - start) == 1 for start, end in ends), "one layer further up: the input is below"


def test_figure_3_draws_the_examples_own_circuit(tmp_path):
    """Heads that connect the same two tokens in a layer are one line; what is listed in part says so."""
    rows = comparison(1, ("removed",), shape=(4, 4), tokens=["a", "$b$", "\ud800", "\n"])
    models = rows["tasks"]["greater-than"]["models"]
    for role, needed in (("sparse", 3), ("dense", 9)):
        found = models[role]["readings"]["removed"]
        found |= {
            "circuit": [[0, 0, 1, 0, 2.0, 0.5], [0, 1, 1, 0, -1.0, 0.5], [3, 2, 3, 1, 0.5, 0.1], [1, 0, 2, 2, 0.1, 1]]
        }
        found["example_at"]["0.9"] = needed
        assert enough(found) == needed
    draw_token_circuits(rows, "greater-than", "removed", tmp_path / "figure3.svg")
    svg = (tmp_path / "figure3.svg").read_text()
    assert "3 of 160 edges, 3 of 16 heads" in svg and "the strongest 4 drawn: 4 of 16 heads" in svg
    assert "$b$" in svg and "Layers" in svg and "All other attention edges are removed." in svg


@pytest.mark.parametrize("n_edges", [30, 3000])
def test_figure_3_of_components(n_edges, tmp_path):
    c, rng = Components(12, 12), np.random.default_rng(0)
    mask = c.random_circuit(n_edges, rng)
    circuit = Circuit(c, np.where(mask, rng.normal(size=mask.shape), 0.0), mask)
    found = {"n_edges": c.n_edges, "edges_at": {"0.9": n_edges}, "circuit": circuit.edges}
    rows = {"n_layers": 12, "n_heads": 12, "readings": {"components": found}}
    draw_circuits({"tasks": {"ioi": {"models": {"dense": rows, "sparse": rows}}}}, "ioi", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_figure_3_of_a_long_circuit(tmp_path):
    """What is listed in part says so, and one edge that outshines all others does not hide them."""
    c, rng = Components(12, 12), np.random.default_rng(0)
    mask = c.random_circuit(2000, rng)
    circuit = Circuit(c, np.where(mask, rng.uniform(0.5, 1, size=mask.shape), 0.0), mask)
    edges = [[edge, score] for edge, score in circuit.edges]
    edges[0][1] = 1000.0
    found = {"n_edges": c.n_edges, "edges_at": {"0.9": 9000}, "circuit": edges}
    rows = {"n_layers": 12, "n_heads": 12, "readings": {"components": found}}
    draw_circuits({"tasks": {"ioi": {"models": {"dense": rows}}}}, "ioi", tmp_path / "figure.svg")
    svg = (tmp_path / "figure.svg").read_text()
    assert "9,000 edges, the strongest 2,000" in svg
    opacity = [float(x) for x in re.findall(r"stroke-opacity: ([0-9.]+)", svg)]
    assert len(opacity) > 1000 and sum(x > 0.5 for x in opacity) > len(opacity) / 2


def test_rows_of_the_tests_follow_the_contract():
    from sparselens.circuits.rows import WORDING, Leading, MultiplierRow, OpenRow, Reading, Results, TaskRow

    for row in comparison(1)["tasks"].values():
        assert row.keys() <= TaskRow.__annotations__.keys()
        assert OpenRow.__required_keys__ <= row["open_edges"].keys() <= OpenRow.__annotations__.keys()
        for model in row["models"].values():
            assert Results.__required_keys__ <= model.keys() <= Results.__annotations__.keys()
            assert model["leading"].keys() == Leading.__annotations__.keys()
            assert set(model["readings"]) == set(ALL) and {name.removesuffix("-task") for name in ALL} <= set(WORDING)
            for found in model["readings"].values():
                assert Reading.__required_keys__ <= found.keys() <= Reading.__annotations__.keys()
        for found in (m for b in row["multipliers"].values() for t in b.values() for m in t.values()):
            assert MultiplierRow.__required_keys__ <= found.keys() <= MultiplierRow.__annotations__.keys()


# ---- for words ----

WORDS = [
    "<|endoftext|>", "When", "Mary", "and", "John", "went", "to", "the", "store", ",", "John", "gave", "an",
    "extraordinarily$expensive$", "drink", "to",
]  # fmt: skip


def flow_rows(words, layers=6, heads=6):
    n = len(words)
    attention = np.tril(np.random.default_rng(0).random((layers, heads, n, n))) ** 8
    rows = {"input": words, "output": [*words[:-1], "Mary"], "edges": int((attention > 0).sum())}
    return {"base": rows | {"attention": attention}, "sparse": rows | {"attention": attention * (attention > 0.8)}}


@pytest.mark.parametrize("layers", [4, 12, 30])
@pytest.mark.parametrize("words", [WORDS, list("36+28=?????"), [*WORDS, *WORDS], ["a" * 40, "$x$", "b"]], ids=len)
def test_figure_1_for_words(words, layers, drawn, tmp_path):
    draw_flow(flow_rows(words, layers), tmp_path / "figure1.png")
    (figure,) = drawn.values()
    boxes = [(text.get_text(), box) for text, box in text_boxes(figure) if text.get_text().strip()]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), f"{one!r} and {other!r} collide"
    assert all(
        box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for _, box in boxes
    )
    lines = [found for axis in figure.axes for found in axis.collections if hasattr(found, "get_segments")]
    assert len({tuple(found.get_colors()[0][:3]) for found in lines}) == 2, "a colour for each model"
    for axis in figure.axes:
        (frame,) = (patch.get_window_extent() for patch in axis.patches)
        for text in axis.texts:
            box = text.get_window_extent()
            assert frame.y0 <= box.y0 and box.y1 <= frame.y1 + 1, f"{text.get_text()!r} lies on the frame"


def trace_rows(words, says=1):
    """Rows of a trace, by hand: clusters on words, some that push the answer, the answer."""
    n, heads = len(words), [(2, 1), (4, 3), (5, 0)]
    boxes = [
        {"name": f"{words[i]} @{i}", "kind": "word", "positions": [i], "layers": [0, i % 3]} for i in range(0, n, 2)
    ]
    answers = [{"name": f"say {i}", "kind": "say", "positions": [n - 1], "layers": [3, 5]} for i in range(says)]
    output = {"name": "Mary (output)", "kind": "output", "positions": [n - 1], "layers": [6, 6]}
    ends = [*answers, output]
    pairs = [(a, b) for i, b in enumerate(ends) for a in [*boxes, *answers[:i]]]
    edges = [
        {"source": a["name"], "target": b["name"], "flow": 1 / (1 + i), "weight": (-1.0) ** i}
        for i, (a, b) in enumerate(pairs)
    ]
    cells = [[q, k, 0.5] for q in range(n) for k in range(q + 1) if (q * k) % 3 == 0]
    main = {"source": boxes[1]["name"], "target": ends[0]["name"], "keys": boxes[1]["positions"], "queries": [n - 1],
            "n_heads_for_80": 3, "attention": [{"layer": a, "head": h, "cells": cells} for a, h in heads]}  # fmt: skip
    return {"model": "words", "tokens": words, "clusters": [*boxes, *ends], "edges": edges, "main": main, "n_layers": 6,
            "n_heads": 6, "gated": True, "target": [{"position": n - 1}]}  # fmt: skip


@pytest.mark.parametrize("says", [1, 3])
def test_figure_4_for_words(says, drawn, tmp_path):
    """Words on its maps, boxes above their words in the same order, no arrow behind a box."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    rows = trace_rows(WORDS, says)
    draw_trace(
        rows | {"against": trace_rows(WORDS, says) | {"gated": False, "model": "dense"}}, tmp_path / "figure4.png"
    )
    (figure,) = drawn.values()
    (axis,) = figure.axes
    on_maps = [text for text in axis.texts if text.get_text() == "Mary" and text.get_fontsize() < 6.5]
    assert len(on_maps) == 6, "one on each of three maps of two models"
    boxes = [patch for patch in axis.patches if isinstance(patch, FancyBboxPatch)]
    low = sorted(box.get_x() for box in boxes if box.get_y() < 1.5)
    assert len(low) >= 5 and len({round(box.get_x(), 3) for box in boxes if box.get_y() > 1.5}) == says + 1
    frames = [box.get_window_extent() for box in boxes]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(frames, 2))
    arrows = [patch for patch in axis.patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) > 5
    for arrow in arrows:
        points = np.concatenate(arrow.get_path().to_polygons(closed_only=False))
        points = np.concatenate([points[:-1] + s * (points[1:] - points[:-1]) for s in np.linspace(0, 1, 20)])
        for frame in (box.get_path().transformed(box.get_patch_transform()).get_extents() for box in boxes):
            inside = (points > (frame.x0 + 0.02, frame.y0 + 0.02)).all(1)
            inside &= (points < (frame.x1 - 0.02, frame.y1 - 0.02)).all(1)
            assert not inside.any(), "an arrow runs behind a box"


def test_figure_3_above_500_edges_keeps_its_numbers(drawn, tmp_path):
    rows = circuit_of(comparison(1, ("removed",), tokens=WORDS, shape=(12, 12)), 900)
    draw_token_circuits(rows, "greater-than", "removed", tmp_path / "figure3.png")
    (figure,) = drawn.values()
    for axis in figure.axes:
        assert {f"L{layer}" for layer in range(12)} <= {text.get_text() for text in axis.texts}
    assert figure.axes[0].get_window_extent().x0 < figure.axes[1].get_window_extent().x0
    first, second = (axis.collections[0].get_colors()[0][:3] for axis in figure.axes)
    assert tuple(first) != tuple(second)


def test_figures_says_what_it_left_out(tmp_path, capsys):
    from sparselens.cli import main

    run = make_run(tmp_path / "run", parts=("attention",))
    main(["figures", str(run), "--format", "png"])
    said = capsys.readouterr()
    assert said.out.strip().endswith("figure1.png")
    for name, command in (("figure2", "compare"), ("figure3", "compare"), ("figure4", "trace")):
        (line,) = [line for line in said.err.splitlines() if line.startswith(f"left out {name}")]
        assert f"`sparselens {command} " in line


def test_all_four_figures_of_a_prompt_of_words(tmp_path):
    from sparselens.serving.publish import figures

    run = make_run(tmp_path / "run", n_layers=6, n_heads=6, tokens=WORDS)
    (path,) = trace_files(run)[:1]
    path.write_text(json.dumps(json.loads(path.read_text()) | trace_rows(WORDS)))
    left_out = []
    made = {path.name for path in figures(run, "png", tmp_path / "drawn", say=left_out.append)}
    assert {"figure1.png", "figure2.png", "figure3.png", "figure4.png"} <= made and left_out == []
