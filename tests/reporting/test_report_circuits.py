"""Circuits on the page, in a real browser: one reading at a time, its numbers the Run's, the headline first."""

import csv
import io
import json
from pathlib import Path

import pytest
import report_pages
from PIL import Image
from report_pages import needs_browser
from report_runs import make_run

from sparselens.reporting import payload, write_page

browser, run = report_pages.browser, report_pages.run
page_file, open_page = report_pages.page_file, report_pages.open_page
pytestmark = needs_browser
PROMPT = ("removed", "share", "corrupted")  # drawn on tokens, one prompt at a time


def read(page, reading):
    """Turns the switch."""
    page.locator(f"#circuits input[value='{reading}']").check(force=True)


def models_of(run):
    return json.loads((run / "circuits" / "results.json").read_text())["tasks"]["ioi"]["models"]


def walked(model, reading):
    """What the slider goes through: the example's own circuits, where circuits are of one prompt."""
    found = model["readings"][reading]
    return found.get("example_curve", found["curve"]), found.get("example_at", found["edges_at"])


def test_the_slider_is_first_on_removed_and_the_switch_changes_everything(open_page, page_file, run):
    watched = open_page(page_file)
    page = watched.page
    switch = page.locator("#circuits fieldset", has_text="Reading").locator("input")
    names = switch.evaluate_all("(all) => all.map((one) => one.value)")
    assert names == ["removed", "share", "corrupted", "heads", "heads-corrupted", "components"]
    assert switch.first.is_checked()
    seen = set()
    for name in names:
        read(page, name)
        assert page.locator("#circuits .panels figure").count() == 1, "one reading at a time"
        kinds = {"components": "graph"} | dict.fromkeys(PROMPT, "tokens")
        drawn = {kind: page.locator(f"[data-slider={kind}]").count() for kind in ("graph", "tokens")}
        assert drawn == {kind: int(kind == kinds.get(name)) for kind in drawn}
        words = page.locator("#circuits .question").text_content()
        scope = "on half of the prompts" if name == "components" else "one prompt at a time"
        assert scope in words and "16 prompts" in words
        note = page.locator("#circuits .panels .note").first.text_content()
        seen.add((words, note, page.locator("#circuits .panels svg").inner_html()))
    assert len(seen) == len(names)
    # With the keyboard too: the switch is a group of radio buttons.
    switch.first.focus()
    read(page, "removed")
    page.keyboard.press("ArrowRight")
    assert switch.nth(1).is_checked() and "share" in page.locator("#circuits .question").text_content()
    assert "hold" in page.locator("[data-tokens=sparse] .graph-numbers").text_content()
    watched.clean()


def test_all_of_it_stands_above_the_curves(open_page, page_file, run):
    page = open_page(page_file).page
    row = json.loads((run / "circuits" / "results.json").read_text())["tasks"]["ioi"]["open_edges"]
    words = page.locator("#circuits .all-of-it")
    numbers = [row["dense"], row["sparse"]]
    assert [int(text) for text in words.locator("b").all_text_contents()[:2]] == [round(x) for x in numbers]
    assert words.text_content().endswith("no search involved.") and "55.7x fewer (50.2 to 61.3" in words.text_content()
    assert words.bounding_box()["y"] < page.locator("#circuits .panels").bounding_box()["y"]


def test_tables_of_readings_and_heads(open_page, page_file, run):
    page, models = open_page(page_file).page, models_of(run)
    table = page.locator("#readings tbody tr")
    names = table.locator("th b").all_text_contents()
    assert names[0] == "All of it" and names[1:] == [
        "removed", "share", "corrupted", "learnt", "heads", "heads, corrupted", "components"
    ]  # fmt: skip
    for threshold, label in (("0.9", "90"), ("0.8", "80")):
        page.locator("#circuits .segments label", has_text=label).locator("input").check(force=True)
        for name, cells in zip(names[1:], table.all()[1:], strict=True):
            t = "0.9" if name == "learnt" else threshold
            shown = [float(cell.replace(",", "")) for cell in cells.locator("td").all_text_contents()[:3]]
            at = [models[role]["readings"][name.replace(", ", "-")]["edges_at"][t] for role in models]
            assert shown == [pytest.approx(value, abs=0.5, rel=0.1) for value in at]
            assert ("(at 90" in cells.text_content()) == (t != threshold)
    heads = page.locator("#heads-needed table")
    assert heads.count() == 2
    first = heads.first.locator("tbody tr").first.locator("td").all_text_contents()
    assert [float(x) for x in first] == pytest.approx(list(models["dense"]["readings"]["heads"]["edges_at"].values()))


@pytest.mark.parametrize("readings", [("components",), ("removed",), ("learnt",), ("heads", "learnt")])
def test_runs_with_few_readings(open_page, tmp_path, readings):
    run = make_run(tmp_path / "run", readings=readings, parts=("circuits",))
    watched = open_page(write_page(payload([run]), tmp_path / "page.html"))
    page = watched.page
    switch = page.locator("#circuits fieldset", has_text="Reading")
    assert switch.count() == 0, "nothing to choose between"
    assert page.locator("#circuits .panels figure").count() == (0 if readings == ("learnt",) else 1)
    assert page.locator("#circuits input[type=range]").count() == (readings[0] in ("components", "removed"))
    assert page.locator("#readings tbody tr").count() == len(readings) + (readings != ("components",))
    watched.clean()


def test_keyboard_alone(open_page, page_file):
    """Tab reaches the slider, arrows drive it and the graph; what a node says follows."""
    page = open_page(page_file).page
    read(page, "components")
    page.locator("[data-slider=graph]").focus()
    before = page.locator("[data-graph=dense] .graph-numbers").text_content()
    page.keyboard.press("End")
    assert page.locator("[data-graph=dense] .graph-numbers").text_content() != before
    graph = page.locator("[data-graph=sparse] canvas")
    for _ in range(40):
        page.keyboard.press("Tab")
        if graph.evaluate("(node) => node === document.activeElement"):
            break
    else:
        pytest.fail("Tab never reached the graph")
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-graph=sparse] .readout b").text_content() == "input"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("[data-graph=sparse] .readout b").text_content() != "input"


@pytest.mark.parametrize("reading, kind", [("removed", "tokens"), ("share", "tokens"), ("components", "graph")])
def test_slider_numbers_equal_the_runs_json(open_page, page_file, run, reading, kind):
    page, models = open_page(page_file).page, models_of(run)
    read(page, reading)
    page.locator("[data-toggle=control]").click()
    stops = sorted({n for model in models.values() for n in walked(model, reading)[0]["edges"] if n > 0})
    slider = page.locator(f"[data-slider={kind}]")
    assert int(slider.get_attribute("max")) == len(stops) - 1
    for i, stop in enumerate(stops):
        slider.fill(str(i))
        for role, model in models.items():
            curve, _ = walked(model, reading)
            at = max((j for j, n in enumerate(curve["edges"]) if 0 < n <= stop), default=None)
            shown = page.locator(f"[data-{kind}={role}] .graph-numbers b")
            edges, effect = shown.nth(0).get_attribute("data-edges"), shown.nth(1).get_attribute("data-effect")
            assert int(edges) == (0 if at is None else curve["edges"][at])
            assert float(effect) == (0 if at is None else curve["effect"][at])


@pytest.mark.parametrize("reading, kind", [("removed", "tokens"), ("components", "graph")])
def test_threshold_shows_what_each_model_needs(open_page, page_file, run, reading, kind):
    page, models = open_page(page_file).page, models_of(run)
    read(page, reading)
    for threshold, label in (("0.8", "80"), ("0.98", "98")):
        page.locator("#circuits .segments label", has_text=label).locator("input").check(force=True)
        for role in ("dense", "sparse"):
            shown = page.locator(f"[data-{kind}={role}] .graph-numbers b").first.get_attribute("data-edges")
            assert int(shown) == walked(models[role], reading)[1][threshold]


def test_downloads_hold_the_circuit_shown(open_page, page_file, run):
    page = open_page(page_file).page
    read(page, "components")
    card = page.locator("[data-graph=sparse]")
    size = int(card.locator("b").first.get_attribute("data-edges"))

    def saved(kind):
        with page.expect_download() as found:
            card.locator(f"[data-download={kind}]").click()
        return Path(found.value.path()).read_bytes()

    circuit = json.loads(saved("JSON"))
    assert circuit["edges"] == len(circuit["circuit"]) == size, "what is drawn is the circuit that was measured"
    rows = list(csv.reader(io.StringIO(saved("CSV").decode())))
    assert rows[0] == ["edge", "score"] and [row[0] for row in rows[1:]] == [name for name, _ in circuit["circuit"]]
    scores = json.loads((run / "circuits" / "circuit-ioi-sparse.json").read_text())["edges"]
    assert all(abs(scores[name]["score"] - score) <= 1e-5 * abs(score) for name, score in circuit["circuit"])
    assert b"<svg" in saved("SVG")[:100]
    assert Image.open(io.BytesIO(saved("PNG"))).width > 600


def test_attention_edges_by_token(open_page, page_file, run):
    """The slider draws the best so many edges of one prompt; scores and weights are the Run's."""
    page = open_page(page_file).page
    found = {role: model["readings"]["removed"] for role, model in models_of(run).items()}
    slider, pictures = page.locator("[data-slider=tokens]"), set()
    stops = sorted({n for row in found.values() for n in row["example_curve"]["edges"]})
    for i in (0, 3, len(stops) // 2):
        slider.fill(str(i))
        for role in ("dense", "sparse"):
            pictures.add(page.locator(f"[data-tokens={role}] canvas").evaluate("(canvas) => canvas.toDataURL()"))
    assert len(pictures) == 6, "every circuit is another picture"
    slider.fill(str(len(stops) - 1))
    alive = found["sparse"]["n_alive"]
    assert f"Only the {alive} drawn carry anything." in page.locator("[data-tokens=sparse]").text_content()
    slider.fill("3")
    card, row = page.locator("[data-tokens=sparse]"), found["sparse"]
    with page.expect_download() as saved:
        card.locator("[data-download=JSON]").click()
    circuit = json.loads(Path(saved.value.path()).read_bytes())
    expected = row["circuit"][: circuit["edges"]]
    assert circuit["edges"] == 4 == len(circuit["circuit"]) and circuit["reading"] == "removed"
    for edge, (*place, score, weight) in zip(circuit["circuit"], expected, strict=True):
        edge = dict(zip(circuit["columns"], edge, strict=True))
        assert [edge[name] for name in ("layer", "head", "query", "key")] == place
        assert (edge["score"], edge["weight"]) == pytest.approx((score, weight), rel=1e-3)
        assert edge["query_token"] == row["tokens"][place[2]] and edge["key_token"] == row["tokens"][place[3]]
    card.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    (layer, head, query, key, *_), words = expected[0], card.locator(".readout").text_content()
    reads, read_ = (row["tokens"][at].strip() for at in (query, key))
    assert words.startswith(f"{reads} ({query}) reads {read_} ({key}) through L{layer}.H{head}")


def test_pointing_at_an_attention_edge(open_page, page_file):
    """Somewhere on the drawn lines the pointer finds an edge, and says which heads it goes through."""
    page = open_page(page_file).page
    canvas = page.locator("[data-tokens=dense] canvas")
    canvas.scroll_into_view_if_needed()
    box, told = canvas.bounding_box(), set()
    for i in range(20):
        canvas.hover(position={"x": 40 + (box["width"] - 60) * i / 20, "y": box["height"] * 0.5}, force=True)
        told.add(page.locator("[data-tokens=dense] .readout").text_content())
    assert len([words for words in told if "through L1.H" in words]) > 1
