"""The report in a real browser: it loads clean, every control works, its numbers are the Run's, nothing leaves it.

Needs Debian's Chromium (`apt-get install chromium`; or $SPARSELENS_CHROMIUM) and playwright; skipped without them.
"""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import report_pages
from report_pages import SECTIONS, needs_browser
from report_runs import HOSTILE, LONE, make_run
from safetensors.numpy import load_file

from sparselens.reporting import payload, write_page
from sparselens.serving.serve import make_server

browser, run = report_pages.browser, report_pages.run
page_file, open_page = report_pages.page_file, report_pages.open_page
pytestmark = needs_browser


# ---- it loads, it is closed to the world ----


def test_loads_clean_and_offline(open_page, page_file):
    watched = open_page(page_file)
    for section in SECTIONS:
        assert watched.page.locator(f"#{section} h1, #{section} h2").count() == 1
    assert watched.page.title() == "tiny-model – sparselens report"
    assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    watched.clean()


def test_policy_stops_what_does_not_belong(open_page, page_file):
    page = open_page(page_file).page
    blocked = page.evaluate(
        """async () => {
            const reports = [];
            addEventListener("securitypolicyviolation", (event) => reports.push(event.effectiveDirective));
            const script = document.createElement("script");
            try {
                script.textContent = "window.broken = true";
                document.body.append(script);
            } catch { reports.push("types"); }
            await fetch("https://example.org/").catch(() => {});
            const image = new Image();
            image.src = "https://example.org/x.png";
            try { document.body.innerHTML += "x"; } catch { reports.push("types"); }
            await new Promise((done) => setTimeout(done, 100));
            return { reports, broken: window.broken ?? false };
        }"""
    )
    assert blocked["broken"] is False
    assert {"connect-src", "img-src", "types"} <= set(blocked["reports"])


def test_hostile_text_shows_as_it_is(open_page, tmp_path):
    tokens = [HOSTILE, LONE, " x", "<b>bold</b>", "&amp;", "\u2028", "\n"]
    run = make_run(tmp_path / "run", model=HOSTILE, tokens=tokens)
    watched = open_page(write_page(payload([run]), tmp_path / "page.html"))
    page = watched.page
    assert page.locator("#summary-title").text_content().startswith(HOSTILE)
    shown = page.evaluate(
        "[...document.querySelectorAll('#attention .tokens button > span')].map((e) => "
        "[...Array(e.textContent.length).keys()].map((i) => e.textContent.charCodeAt(i)))"
    )
    units = [list(np.frombuffer(t.encode("utf-16-le", "surrogatepass"), "<u2")) for t in tokens[:-1]]
    assert shown == [*units, [ord("⏎")]]
    assert page.locator("img").count() == 0 and page.locator("main b").filter(has_text="bold").count() == 0
    page.locator("[data-look]").first.click()
    assert HOSTILE in page.locator(".look-detail").first.text_content()
    watched.clean()


def test_sections_without_rows_say_how_to_fill_them(open_page, tmp_path):
    run = make_run(tmp_path / "run", parts=())
    watched = open_page(write_page(payload([run]), tmp_path / "page.html"))
    for section, command in (
        ("training", "sparsify"),
        ("attention", "report"),
        ("circuits", "compare"),
        ("attribution", "trace"),
    ):
        assert f"sparselens {command}" in watched.page.locator(f"#{section} code.command").text_content()
    watched.clean()


# ---- every control ----


def test_every_control(open_page, page_file):
    watched = open_page(page_file)
    page = watched.page
    saved = []
    page.on("download", lambda download: saved.append(download.suggested_filename))
    page.locator("details.how summary").evaluate_all("(all) => all.forEach((one) => one.click())")
    for select in page.locator("select").all():
        for value in select.locator("option").evaluate_all("(all) => all.map((one) => one.value)"):
            select.select_option(value)
    for radio in page.locator("main input[type=radio]").all():
        radio.check(force=True)
    for slider in page.locator("input[type=range]").all():
        for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
            slider.press(key)
    for canvas in page.locator("canvas").all():
        box = canvas.bounding_box()
        if box:
            canvas.hover(position={"x": box["width"] * 0.4, "y": box["height"] * 0.3}, force=True)
            canvas.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.2}, force=True)
    for focusable in page.locator("[role=application]").all():
        for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown", "+", "-", "Enter", "Escape", "0"):
            focusable.press(key)
    # Buttons are drawn anew while they are used, so they are found one by one.
    n_buttons = page.locator("button:visible").count()
    for i in range(n_buttons):
        button = page.locator("button:visible").nth(i)
        if button.count():
            button.click(force=True)
    for link in page.locator("nav a").all():
        link.click()
    page.wait_for_timeout(200)
    assert {Path(name).suffix for name in saved} == {".svg", ".png", ".json", ".csv"}
    watched.clean()


def test_keyboard_reads_heat_maps_and_features(open_page, page_file, run):
    page = open_page(page_file).page
    density = json.loads((run / "evaluation.json").read_text())[-1]["density_per_head"]
    card = page.locator("figure", has_text="Where the open edges are")
    card.locator(".plot").focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
    words = card.locator(".readout").text_content()
    assert words.startswith("L1.H1: ")
    assert float(words.split()[-2]) == pytest.approx(100 * density[1][1], rel=0.01)
    trace = page.locator("[data-trace=sparse]")
    trace.locator("canvas.focusable").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    chosen = trace.locator("tr[aria-current] button")
    assert chosen.get_attribute("data-edge") == "1"
    trace.locator(".segments label", has_text="Features").locator("input").check(force=True)
    trace.locator("canvas.focusable").first.focus()
    page.keyboard.press("ArrowRight")
    assert trace.locator(".trace .readout b").text_content()


# ---- the numbers are the Run's ----


def test_attention_reading(open_page, page_file, run):
    """Weight and margin of a pair, read off the page, are those of the tensors."""
    from safetensors.numpy import load_file

    page = open_page(page_file).page
    tensors = load_file(run / "attention" / "prompt-0.safetensors")
    page.locator("#attention [data-model=sparse] canvas.focusable").focus()
    page.keyboard.press("ArrowUp")
    layer, head = map(int, page.locator("#head-detail h3").text_content()[1:].split(".H"))
    page.locator("#head-detail tbody button").first.click()
    facts = page.locator("#pair-facts dd").all_text_contents()
    query, key = (int(part.rsplit("(", 1)[1].rstrip(") ")) for part in facts[0].split("→"))
    assert float(facts[1]) == pytest.approx(float(tensors["dense.weights"][layer, head, query, key]), rel=0.01)
    assert float(facts[2]) == pytest.approx(
        float(tensors["sparse.weights"][layer, head, query, key]), rel=0.01, abs=1e-4
    )
    margin = float(tensors["sparse.margin"][layer, head, query, key])
    assert float(facts[3].split(":")[0].replace("−", "-")) == pytest.approx(margin, rel=0.01)
    assert facts[3].endswith("open" if margin > 0 else "closed")


def test_training_readout_and_zoom(open_page, page_file, run):
    page = open_page(page_file).page
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    chart = page.locator("[data-chart=Density] .plot")
    chart.focus()
    page.keyboard.press("ArrowRight")
    words = page.locator("#training-readout").text_content()
    step = int(words.split()[1])
    shown = float(words.split("density in training ")[1].split()[0])
    assert shown == pytest.approx(100 * lines[step - 1]["density"], rel=0.01)
    page.keyboard.press("+")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 80, steps=3)
    page.mouse.up()
    page.mouse.move(5, 5)
    first, last = (int(word) for word in page.locator("#training-readout").text_content().rstrip(".").split()[1::2])
    assert 0 < last - first < 60
    page.locator("#zoom-reset").click()
    assert page.locator("#training-readout").text_content() == "Steps 1 to 200."


def test_attribution_edge_names_its_heads(open_page, page_file):
    page = open_page(page_file).page
    for role, n_heads in (("dense", 5), ("sparse", 2)):
        box = page.locator(f"[data-trace={role}]")
        box.locator("[data-edge='1']").click()
        assert box.locator(".edge-detail h3").text_content() == "opposite → small"
        assert f"({n_heads} of 12 heads)" in box.locator(".edge-detail").text_content()
        assert box.locator(".head-maps canvas").count() == n_heads


def test_two_runs_in_one_page(open_page, run, tmp_path):
    other = make_run(tmp_path / "other", model="second-model", seed=1, parts=("training",))
    watched = open_page(write_page(payload([run, other]), tmp_path / "two.html"))
    assert watched.page.locator("#summary-table table").count() == 2
    watched.page.locator("#tools label", has_text="other").locator("input").check(force=True)
    assert watched.page.locator("#summary-title").text_content().startswith("second-model")
    assert "sparselens compare" in watched.page.locator("#circuits").text_content()
    watched.clean()


# ---- while a run goes on ----


def test_served_page_follows_the_run(browser, tmp_path):
    run = make_run(tmp_path / "run", parts=("training",))
    server = make_server([run])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = browser.new_context()
    try:
        page = context.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        page.locator("#training-readout", has_text="Steps 1 to 200.").wait_for()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 240, "loss": 0.1, "density": 0.02, "lambda": 1.0}) + "\n")
        page.locator("#training-readout", has_text="Steps 1 to 240.").wait_for(timeout=15_000)
        assert errors == []
        answer = context.request.get(f"http://127.0.0.1:{server.server_address[1]}/", headers={"Host": "evil.example"})
        assert answer.status == 403
    finally:
        context.close()
        server.shutdown()
        server.server_close()


# ---- it tells its story ----


def test_it_opens_with_picture_sentences_and_one_number(open_page, page_file, run):
    page = open_page(page_file).page
    assert page.locator("#summary .story li").count() == 3
    row = json.loads((run / "circuits/results.json").read_text())["tasks"]["ioi"]["multipliers"]["removed"]["dense"][
        "0.9"
    ]
    number = page.locator("#one-number")
    assert number.locator("b").text_content() == f"{row['multiplier']:.1f}x"
    assert f"n = {row['n_prompts']} prompts" in number.text_content() and "interval" in number.text_content()
    pictures = page.locator("#summary figure")
    assert [pictures.nth(i).locator("h3").text_content() for i in range(2)] == ["Before: dense", "After: sparse"]
    boxes = [pictures.nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["x"] < boxes[1]["x"] and boxes[0]["y"] == boxes[1]["y"]


def test_verdicts_are_sentences_that_open(open_page, page_file):
    page = open_page(page_file).page
    sentences = page.locator(".verdicts .sentence").all_text_contents()
    assert len(sentences) >= 8 and all(text.endswith(".") and len(text) < 130 for text in sentences)
    first = page.locator(".verdicts details").first
    assert not first.locator(".detail").is_visible()
    first.locator("summary").click()
    assert first.locator(".detail").is_visible()


def test_words_of_the_trade_are_explained_by_pointer_and_keyboard(open_page, page_file):
    page = open_page(page_file).page
    word = page.locator(".story .term-word").first
    word.focus()
    tip = word.evaluate("one => getComputedStyle(one, '::after').content")
    assert len(tip) > 40 and word.get_attribute("aria-label").endswith(".")


def test_how_to_read_this_is_open_the_first_time(open_page, page_file):
    watched = open_page(page_file)
    assert watched.page.locator("details.how[open]").count() >= 3
    watched.page.reload()
    watched.page.locator("#provenance dl").first.wait_for()
    assert watched.page.locator("details.how[open]").count() == 0


def test_every_view_has_an_address(open_page, page_file):
    watched = open_page(page_file)
    page = watched.page
    page.locator("#circuits input[value=components]").check(force=True)
    page.locator("[data-slider=graph]").press("End")
    page.locator("[data-slider=graph]").press("ArrowLeft")
    view = page.evaluate("location.hash")
    assert view.startswith("#circuits?task=ioi&reading=components") and "&n=" in view
    numbers = page.locator("#circuits .graph-numbers").all_text_contents()
    again = open_page(page_file)
    again.page.goto(f"{page_file.as_uri()}{view}")
    again.page.reload()
    again.page.locator("#provenance dl").first.wait_for()
    assert again.page.locator("#circuits .graph-numbers").all_text_contents() == numbers
    assert again.page.locator("#circuits input[value=components]").is_checked()
    again.page.wait_for_timeout(700)
    top = again.page.locator("#circuits").evaluate("one => one.getBoundingClientRect().top")
    assert -50 < top < 400, "the page stands where the address says"
    for address, selector, text in (
        ("#attention?prompt=0&head=L2.H3&show=margins", "#head-detail h3", "L2.H3"),
        ("#attention?prompt=99&head=L77.H0", "#head-detail h3", "L"),
        ("#circuits?task=nothing&n=x&reading=y", "#circuits .graph-numbers >> nth=0", "explain"),
    ):
        again.page.goto(f"{page_file.as_uri()}{address}")
        again.page.reload()
        again.page.locator(selector).first.wait_for()
        assert again.page.locator(selector).first.text_content().find(text) >= 0
    again.page.locator("#attention [data-model=sparse] canvas.focusable").last.focus()
    again.page.keyboard.press("ArrowUp")
    assert "attention?prompt=0&head=L" in again.page.evaluate("location.hash")
    assert watched.errors == [] and again.errors == []


@pytest.fixture(scope="module")
def wordy_file(tmp_path_factory):
    """Twelve layers, sixty long words, traces: what does not fit easily."""
    tokens = [f" extraordinarily{i}" if i % 5 == 0 else f" word{i}" for i in range(60)]
    run = make_run(tmp_path_factory.mktemp("wordy") / "run", n_layers=12, n_heads=12, tokens=tokens)
    return write_page(payload([run]), run / "report.html")


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_it_fits_every_width(open_page, page_file, wordy_file, width):
    for file in (page_file, wordy_file):
        watched = open_page(file, viewport={"width": width, "height": 900})
        page = watched.page
        page.locator("[data-look]").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lines = page.locator("#attribution .facts dd, #attribution .look-detail td").evaluate_all(
            """all => all.filter((one) => /^[\\d.,−% ]+$/.test(one.textContent)).map((one) => {
                const range = document.createRange();
                range.selectNodeContents(one);
                return new Set([...range.getClientRects()].map((box) => box.top)).size;
            })"""
        )
        assert len(lines) > 5 and max(lines) <= 2, "numbers stand on one line, pairs of them on two at most"
        watched.clean()


def test_every_picture_can_be_saved(open_page, page_file, run):
    """As SVG and PNG, and its numbers; attention maps with every open pair."""
    page = open_page(page_file).page
    page.locator("#attention [data-model=sparse] canvas").first.wait_for()
    page.locator(".edge-detail .head-maps").first.wait_for()
    without = page.evaluate(
        """() => [...document.querySelectorAll("main .plot")]
          .map((plot) => plot.closest(".edge-detail, .card"))
          .filter((card) => {
            const kinds = [...card.querySelectorAll("[data-download]")].map((one) => one.dataset.download);
            const numbers = kinds.includes("JSON") || kinds.includes("CSV");
            return !numbers || !kinds.includes("SVG") || !kinds.includes("PNG");
          })
          .map((card) => card.textContent.slice(0, 80))"""
    )
    assert without == []
    card = page.locator("#attention [data-model=sparse]")

    def saved(kind, place):
        with page.expect_download() as found:
            place.locator(f"[data-download={kind}]").first.click()
        return Path(found.value.path()).read_bytes()

    told = json.loads(saved("JSON", card))
    weights = load_file(run / "attention" / "prompt-0.safetensors")["sparse.weights"].astype(np.float32)
    assert len(told["pairs"]) == int((weights > 0).sum()) and told["model"] == "sparse"
    for layer, head, query, key, weight, margin in told["pairs"]:
        assert weight == pytest.approx(float(weights[layer, head, query, key]), abs=2e-5) and margin > 0
    svg = saved("SVG", card).decode()
    assert svg.count("<image") == weights.shape[0] * weights.shape[1] and "L0" in svg and "H0" in svg
    assert saved("PNG", page.locator("#head-detail"))[:4] == b"\x89PNG"
    assert saved("SVG", page.locator(".edge-detail").first).decode().count("<image") >= 1


@pytest.mark.parametrize("name", ["circuits", "attribution", "features"])
def test_an_address_is_where_the_page_opens(browser, page_file, name):
    """Also after all pictures above have been drawn; and whoever scrolls is let go."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{Path(page_file).as_uri()}#{name}")
    page.wait_for_timeout(1500)
    top = f"document.getElementById({name!r}).getBoundingClientRect().top"
    assert abs(page.evaluate(top)) < 120 or page.evaluate("scrollY + innerHeight >= document.body.scrollHeight - 2")
    page.mouse.move(600, 450)
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(400)
    assert page.evaluate(top) > 300
    page.context.close()
