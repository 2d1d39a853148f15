"""The report in a real browser: fast with big Runs, open to everybody, and it looks as it looked.

New reference pictures: SPARSELENS_UPDATE_SCREENSHOTS=1 pytest tests/reporting/test_report_looks.py -k screenshot
"""

import base64
import functools
import io
import os
import statistics
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import report_pages
from PIL import Image, ImageFilter
from report_pages import SECTIONS, needs_browser
from report_runs import make_run

from sparselens.reporting import payload, write_page

browser, run = report_pages.browser, report_pages.run
page_file, open_page = report_pages.page_file, report_pages.open_page
pytestmark = needs_browser
SCREENSHOTS = Path(__file__).parent / "screenshots"


# ---- fast ----

TIMED = """async ([selector, act, times]) => {
    const target = document.querySelector(selector);
    const run = new Function("target", "i", act);
    const found = [];
    for (let i = 0; i < times; i++) {
        const began = performance.now();
        run(target, i);
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        for (const canvas of document.querySelectorAll("canvas.focusable")) {  // wait until it is really drawn
            if (canvas.width) canvas.getContext("2d").getImageData(0, 0, 1, 1);
        }
        found.push(performance.now() - began);
    }
    return found;
}"""
POINT = """
    const box = target.getBoundingClientRect();
    const event = (kind, x, y) => target.dispatchEvent(new kind(kind === MouseEvent ? "click" : "pointermove",
        { bubbles: true, clientX: box.left + x * box.width, clientY: box.top + y * box.height }));
"""
GRAPH = "[data-graph=dense] canvas"
READ = "target.querySelector(`input[value=${{i % 2 ? '{1}' : '{0}'}}]`).click()"  # to and fro, ends at the second
ACTIONS = {
    "token": (
        "#attention .tokens",
        "target.children[5 + i].firstChild.dispatchEvent(new PointerEvent('pointerenter'))",
    ),
    "head": ("#attention [data-model=sparse] canvas.focusable", f"{POINT} event(MouseEvent, 0.1 + 0.08 * i, 0.5)"),
    "pair": ("#head-detail canvas", f"{POINT} event(PointerEvent, 0.2, 0.1 + 0.02 * i)"),
    "margins": ("#attention", "target.querySelector(`input[value=${i % 2 ? 'weights' : 'margins'}]`).click()"),
    "removed": ("#circuits", READ.format("components", "removed")),
    "token slider": ("[data-slider=tokens]", "target.value = 2 + 3 * i; target.dispatchEvent(new Event('input'))"),
    "token edge": ("[data-tokens=dense] canvas", f"{POINT} event(PointerEvent, 0.1 + 0.09 * i, 0.5)"),
    "components": ("#circuits", READ.format("removed", "components")),
    "slider": ("[data-slider=graph]", "target.value = 2 + 3 * i; target.dispatchEvent(new Event('input'))"),
    "node": (GRAPH, f"{POINT} event(PointerEvent, 0.1 + 0.09 * i, 0.4)"),
    "isolate": (GRAPH, f"{POINT} event(MouseEvent, 0.1 + 0.09 * i, 0.4)"),
    "cursor": ("[data-chart=Density] .plot", f"{POINT} event(PointerEvent, 0.2 + 0.05 * i, 0.5)"),
}


def test_big_runs_stay_fluid(open_page, tmp_path):
    """12 x 12 heads x 64 tokens and 3,000 edges per graph: every interaction is on the screen within 100 ms."""
    tokens = [f" w{i}" for i in range(64)]
    run = make_run(tmp_path / "run", n_layers=12, n_heads=12, tokens=tokens, n_edges=3000)
    watched = open_page(write_page(payload([run]), tmp_path / "page.html"), bypass_csp=True)  # new Function in TIMED
    taken = dict.fromkeys(ACTIONS, 1e9)
    for _ in range(3):  # other work on the machine may spoil a round, not three
        for name, action in ACTIONS.items():
            taken[name] = min(taken[name], statistics.median(watched.page.evaluate(TIMED, [*action, 8])))
        if max(taken.values()) < 100:
            break
    assert [error for error in watched.errors if "willReadFrequently" not in error] == []  # that is TIMED's own reading
    print({name: round(value) for name, value in taken.items()})
    assert max(taken.values()) < 100, {name: round(value) for name, value in taken.items()}


# ---- for everybody ----


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="axe-playwright-python is not installed")
@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 1280), ("dark", 390)])
def test_no_serious_accessibility_finding(open_page, page_file, scheme, width):
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    watched = open_page(page_file, color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    watched.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    watched.page.evaluate(axe)
    found = watched.page.evaluate("axe.run(document, { resultTypes: ['violations', 'passes'] })")
    assert len(found["passes"]) > 20, "it looked"
    bad = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert not bad, [(v["id"], v["help"], [node["html"][:120] for node in v["nodes"][:3]]) for v in bad]
    assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"


def test_theme_button_and_print(open_page, page_file):
    page = open_page(page_file, color_scheme="dark").page

    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = background()
    page.locator("#theme").click()
    assert page.locator("#theme").text_content() == "Theme: light" and background() != dark
    page.locator("#theme").click()
    assert background() == dark
    page.emulate_media(media="print")
    assert background() == "rgb(255, 255, 255)"
    assert page.locator(".card").first.evaluate("(e) => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".bar").is_hidden() and page.locator("#circuits [data-tokens=sparse]").is_visible()
    page.set_viewport_size({"width": 700, "height": 900})  # about a sheet of A4
    wide = page.locator(".scroll").evaluate_all("(all) => all.filter((e) => e.scrollWidth > e.clientWidth + 1).length")
    assert wide == 0, "paper does not scroll: no table is cut off"
    assert page.pdf()[:4] == b"%PDF"


SCALE, TOLERANCE = 8, 0.3


def small(picture: Image.Image) -> Image.Image:
    """What is left when fonts and antialiasing do not matter: grey, an eighth of the size, soft."""
    size = (picture.width // SCALE, picture.height // SCALE)
    return picture.convert("L").resize(size, Image.Resampling.BOX).filter(ImageFilter.GaussianBlur(1.2))


def difference(picture: Image.Image, reference: Image.Image) -> float:
    """How much of what the reference shows is different: 0 the same, about 1 nothing in common."""
    a, b = (np.asarray(image.resize(reference.size), float) for image in (picture, reference))
    return float(np.abs(a - b).mean() / np.abs(b - np.median(b)).mean())


@functools.cache
def same_font_everywhere() -> str:
    """A style that sets the page in the font matplotlib brings along: lines break at the same words on all machines."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = [
        f"@font-face {{ font-family: Same; font-weight: {weight}; "
        f"src: url(data:font/ttf;base64,{base64.b64encode((fonts / name).read_bytes()).decode()}); }}"
        for name, weight in (("DejaVuSans.ttf", "100 500"), ("DejaVuSans-Bold.ttf", "600 900"))
    ]
    return "\n".join([*faces, "* { font-family: Same !important; }", ".bar { position: static !important; }"])


# On a phone the summary is text alone: one pixel more per word and its lines break elsewhere.
VIEWS = [*((section, "light", 1280) for section in SECTIONS), *((section, "dark", 390) for section in SECTIONS[1:])]


@pytest.mark.parametrize("section, scheme, width", VIEWS)
def test_screenshot(open_page, page_file, section, scheme, width):
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "bypass_csp": True}
    page = open_page(page_file, **options).page
    page.add_style_tag(content=same_font_everywhere())
    load = "Promise.all(['16px Same', 'bold 16px Same'].map((font) => document.fonts.load(font))).then(() => {})"
    page.evaluate(load)
    page.wait_for_timeout(200)

    def shot():
        return small(Image.open(io.BytesIO(page.locator(f"#{section}").screenshot())))

    path = SCREENSHOTS / f"{section}-{scheme}-{width}.png"
    taken = shot()
    if os.environ.get("SPARSELENS_UPDATE_SCREENSHOTS"):
        SCREENSHOTS.mkdir(exist_ok=True)
        taken.save(path, optimize=True)
    reference = Image.open(path)
    assert abs(taken.height / reference.height - 1) < 0.12
    assert difference(taken, reference) < TOLERANCE
    # The comparison must be able to fail: without its pictures and numbers the section is another one.
    what = f"#{section} :is(canvas, svg, td, tbody th, .detail)"
    page.evaluate(f"document.querySelectorAll('{what}').forEach((e) => {{ e.style.visibility = 'hidden'; }})")
    assert difference(shot(), reference) > TOLERANCE
