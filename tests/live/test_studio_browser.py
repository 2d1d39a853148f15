"""The studio in a real browser, on a tiny pair: type, close a gate, silence a head, undo, ask, keep, go offline."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import report_pages
import torch
from pairs import chosen
from report_pages import needs_browser
from studio_run import PROMPT, make_studio_run, served

from sparselens.models.loading import load

browser = report_pages.browser
pytestmark = needs_browser
SHOTS = os.environ.get("SPARSELENS_SHOTS")  # a folder for pictures to look at
WIDTHS = (390, 768, 1280, 1920)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_studio_run(tmp_path_factory.mktemp("studio") / "run", parts=("training", "attention", "circuits"))


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def studio(run):
    with served(run) as one:
        one.ready()
        yield one


class Tab:
    """A tab of the studio; what should not happen is written down."""

    def __init__(self, browser, address, **options):
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", "reduced_motion": "reduce"}
            | options
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.errors, self.requests = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)

    def answered(self, text=None):
        """Wait for answers to what was typed, edges and all."""
        self.page.locator("#answers [data-answers]").first.wait_for()
        if text is not None:
            self.until(f"location.hash.includes({text!r})")
        self.page.locator("[data-close]").first.wait_for()
        self.page.wait_for_timeout(150)
        return self

    def until(self, condition, seconds=15):
        """The page's policy forbids Playwright's own wait_for_function."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"{condition}: {self.page.locator('#studio-status').text_content()}"
            time.sleep(0.05)

    def shown(self):
        """The probability that stands after the arrow."""
        return float(self.page.locator("#p-after").get_attribute("data-p"))


@pytest.fixture
def open_tab(browser):
    opened = []

    def make(address, **options):
        opened.append(Tab(browser, address, **options))
        return opened[-1]

    yield make
    for tab in opened:
        tab.context.close()


def state_of(page):
    """What the address says."""
    from urllib.parse import parse_qs

    found = parse_qs(page.evaluate("location.hash").partition("?")[2])
    return {name: json.loads(v[0]) if name not in ("text", "role") else v[0] for name, v in found.items()}


def own(run, folder, text, closed=(), silenced=()):
    """The model's own probabilities of the next token, edges and heads taken out of it by a plain hook."""
    from test_models import without

    from sparselens.live.models import Changes

    model, tokenizer = load(run / folder)
    ids = [0, *tokenizer(text)["input_ids"]]
    if not closed and not silenced:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    return without(model.float(), ids, Changes(tuple(map(tuple, closed)), tuple(map(tuple, silenced))), -1).exp()


def test_typing_asks_all_three_models(studio, run, open_tab):
    tab = open_tab(studio.address).answered()
    page = tab.page
    assert page.locator("#prompt").input_value() == PROMPT
    page.locator("#prompt").fill("w9 w8 w7")
    tab.until("location.hash.includes('w9')")
    tab.until("document.querySelectorAll('#studio .tokens button').length === 4")
    tab.answered()
    for role, folder in (("dense", "base/model"), ("control", "control/model"), ("sparse", "model")):
        bars = page.locator(f"[data-answers={role}] .bars button")
        p = own(run, folder, "w9 w8 w7")
        assert float(bars.first.get_attribute("data-p")) == pytest.approx(float(p.max()), abs=1e-5)
        assert bars.count() == 8
    assert tab.errors == []
    assert all(url.startswith((studio.address, "blob:", "data:")) for url in tab.requests)


def test_closing_a_gate_shows_what_the_model_itself_says(studio, run, open_tab):
    tab = open_tab(studio.address).answered()
    page = tab.page
    line = page.locator(".edge-field .touch").last  # drawn last: the one that matters most
    edge = [int(i) for i in line.get_attribute("data-edge").split(".")]
    line.dispatch_event("click")
    page.locator("#p-after").wait_for()
    state = state_of(page)
    assert state["closed"] == [edge]
    model = own(run, "model", PROMPT, closed=[edge])
    before = own(run, "model", PROMPT)
    answer = state["answer"]["id"]
    assert tab.shown() == pytest.approx(float(model[answer]), rel=2e-3)
    assert abs(float(before[answer]) - tab.shown()) > 1e-6
    text = page.locator("#outcome").text_content()
    assert "measured" in text and "predicted" in text
    assert f"L{edge[0]}.H{edge[1]}" in page.locator("#changes").text_content()
    with page.expect_download() as saved:
        page.locator("#studio [data-download=JSON]").first.click()
    told = json.loads(Path(saved.value.path()).read_bytes())
    assert told["closed"] == [edge] and told["measured"]["p_after"] == pytest.approx(tab.shown())
    assert told["edges"][0][:4] == edge
    # And a head.
    silence = page.locator("#studio [data-silence]").first
    head = [int(i) for i in silence.get_attribute("data-silence").split(".")]
    silence.click()
    tab.until("document.querySelectorAll('#changes li').length === 2")
    page.wait_for_timeout(300)
    both = own(run, "model", PROMPT, closed=[edge], silenced=[head])
    assert tab.shown() == pytest.approx(float(both[answer]), rel=2e-3)
    # Undo takes back the head, reset the rest.
    page.locator("#undo").click()
    tab.until("document.querySelectorAll('#changes li').length === 1")
    page.wait_for_timeout(300)
    assert tab.shown() == pytest.approx(float(model[answer]), rel=2e-3)
    page.locator("#reset").click()
    page.locator("#p-after").wait_for(state="detached")
    assert page.locator("#changes li").count() == 0
    page.locator("#undo").click()
    page.locator("#p-after").wait_for()
    assert tab.shown() == pytest.approx(float(model[answer]), rel=2e-3)
    assert tab.errors == []


def test_the_address_restores_everything(studio, open_tab):
    tab = open_tab(studio.address).answered()
    page = tab.page
    page.locator("#prompt").fill("w5 w9 w5 w11")
    tab.until("location.hash.includes('w11')")
    tab.until("document.querySelectorAll('#studio .tokens button').length === 5")
    tab.answered()
    page.locator("[data-answers=dense] .bars button").nth(2).click()
    tab.until("location.hash.includes('role=dense')")
    tab.answered()
    page.locator(".edge-field .touch").last.dispatch_event("click")
    page.locator("#p-after").wait_for()
    shown, state = tab.shown(), state_of(page)
    again = open_tab(page.url).answered()
    again.page.locator("#p-after").wait_for()
    assert again.shown() == pytest.approx(shown, rel=1e-6) and state_of(again.page) == state
    assert again.page.locator("#prompt").input_value() == "w5 w9 w5 w11"
    for damaged in (
        "#studio?closed=%5B%5B9,9,9,9%5D%5D",
        "#studio?role=x&answer=7&more=x",
        "#studio?text=%00&closed=3",
    ):
        third = open_tab(studio.address + damaged)
        third.page.locator("#answers [data-answers], .limit").first.wait_for()
        assert [e for e in third.errors if "400" not in e] == []


def test_features_and_why(studio, open_tab):
    tab = open_tab(studio.address).answered()
    page = tab.page
    page.locator("#show-features").click()
    choice = page.locator("[data-feature]").first
    choice.select_option("0")
    page.locator("#p-after").wait_for()
    assert "feature" in page.locator("#changes li").text_content()
    page.locator("#reset").click()
    page.locator("[data-why]").first.click()
    page.locator("#why h3").wait_for()
    assert "Attention logit" in page.locator("#why").text_content()
    assert tab.errors == []


def test_generating_lights_up_the_last_tokens_edges(studio, open_tab):
    tab = open_tab(studio.address).answered()
    page = tab.page
    n = page.locator("#studio .tokens button").count()
    page.locator("#generate").click()
    tab.until(f"document.querySelectorAll('#studio .tokens button').length === {n + 1}")
    tab.answered()
    page.locator("#generate-ten").click()
    tab.until(f"document.querySelectorAll('#studio .tokens button').length === {n + 11}")
    assert tab.errors == []


def test_discover_trace_keep_and_read_offline(studio, run, open_tab, browser):
    tab = open_tab(studio.address).answered()
    page = tab.page
    pair = chosen([load(run / "model")[0]]).pairs[0]
    for name in ("clean", "corrupted", "answer", "wrong"):
        page.locator(f"#ask-{name}").fill(getattr(pair, name))
    page.locator("#discover").click()
    page.locator("[data-job][data-state=done], [data-job][data-state=failed]").first.wait_for()
    assert page.locator("[data-state=done]").count() == 1, page.locator("#jobs").text_content()
    page.locator("#kept li").first.wait_for()
    assert "attention edges alone keep" in page.locator("#kept").text_content()

    page.locator(".edge-field .touch").last.dispatch_event("click")
    page.locator("#p-after").wait_for()
    shown = page.locator("#p-after").text_content()
    page.locator("#keep").click()
    tab.until("document.querySelectorAll('#kept li.card').length === 2")

    page.locator("#trace").click()
    page.locator("[data-job='3'][data-state=done], [data-job='3'][data-state=failed]").wait_for(timeout=60_000)
    assert page.locator("[data-job='3']").get_attribute("data-state") == "done", page.locator("#jobs").text_content()
    page.locator("#export").click()
    tab.until("document.querySelector('#studio-status').textContent.includes('Written')")
    assert tab.errors == []
    studio.stop()  # nothing is left but the file

    offline = browser.new_context(offline=True).new_page()
    offline.goto((run / "report.html").as_uri())
    offline.locator("#studio li.card").first.wait_for()
    kept = offline.locator("#studio").text_content()
    assert "attention edges alone keep" in kept and shown in kept
    (address,) = offline.locator("#studio li.card a").last.evaluate_all("all => all.map((one) => one.hash)")
    assert offline.locator(address).count() == 1, "what was kept has an address"
    assert offline.locator("#attribution").text_content().count("w9") > 0, "the trace is in the report"
    offline.context.close()


def test_cancel_stops_a_job(studio, open_tab, monkeypatch):
    step = studio.studio.worker.step
    monkeypatch.setattr(studio.studio.worker, "step", lambda done, of: (time.sleep(0.4), step(done, of)))
    tab = open_tab(studio.address).answered()
    tab.page.locator("#trace").click()
    tab.page.locator("[data-cancel]").first.click()
    tab.page.locator("[data-job][data-state=cancelled]").wait_for()
    assert tab.page.locator("#prompt").is_enabled()


def test_one_model_alone(run, open_tab):
    with served(str(run / "base" / "model")) as one:
        one.ready()
        tab = open_tab(one.address).answered()
        assert tab.page.locator("[data-answers]").count() == 1
        tab.page.locator(".edge-field .touch").last.dispatch_event("click")
        tab.page.locator("#p-after").wait_for()
        assert tab.errors == []


def test_a_run_in_the_making_shows_its_progress_then_itself(run, open_tab):
    import threading

    go = threading.Event()

    def prepare(say):
        say("step 3 of 9")
        go.wait(30)
        return run

    with served(None, prepare) as one:
        tab = open_tab(one.address)
        tab.page.get_by_text("step 3 of 9").wait_for()
        go.set()
        tab.answered()
        tab.page.locator("#summary h1").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_fits_and_is_open_to_everybody(studio, open_tab, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    tab = open_tab(
        studio.address, viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True,
        reduced_motion="reduce",
    ).answered()  # fmt: skip
    tab.page.locator(".edge-field .touch").last.dispatch_event("click")
    tab.page.locator("#p-after").wait_for()
    tab.page.locator("#keep").click()
    tab.page.locator("#kept li").first.wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if SHOTS:
        tab.page.screenshot(path=f"{SHOTS}/studio-{width}-{scheme}.png", full_page=True)
    if width in (390, 1280):
        found = Axe().run(tab.page).response["violations"]
        serious = [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found
                   if v["impact"] in ("serious", "critical")]  # fmt: skip
        assert not serious, serious


def test_a_hostile_prompt_stays_text(studio, open_tab):
    tab = open_tab(studio.address).answered()
    hostile = "</script><img src=x onerror=alert(1)>"
    tab.page.locator("#prompt").fill(hostile)
    tab.until("location.hash.includes('onerror')")
    tab.answered()
    tab.page.locator(".edge-field .touch").last.dispatch_event("click")
    tab.page.locator("#p-after").wait_for()
    tab.page.locator("#keep").click()
    tab.page.locator("#kept li").first.wait_for()
    tab.page.reload()
    tab.answered()
    assert tab.page.locator("img").count() == 0 and hostile in tab.page.locator("#kept").text_content()
    assert tab.errors == []


def test_its_policy_lets_nothing_in(studio, open_tab):
    """Without bypassing it: no script but its own, no request but to itself."""
    page = open_tab(studio.address).answered().page
    blocked = page.evaluate(
        """async () => {
            const reports = [];
            addEventListener("securitypolicyviolation", (event) => reports.push(event.effectiveDirective));
            await fetch("https://example.org/").catch(() => {});
            await fetch("http://127.0.0.1:9/").catch(() => {});
            try { document.body.innerHTML += "x"; } catch { reports.push("types"); }
            await new Promise((done) => setTimeout(done, 100));
            return reports;
        }"""
    )
    assert blocked.count("connect-src") == 2 and "types" in blocked


def test_the_oracle_itself(run):
    """An edge that is closed anyway changes nothing when it is taken out."""
    model, tokenizer = load(run / "model")
    ids = torch.tensor([[0, *tokenizer(PROMPT)["input_ids"]]])
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True).attentions)[:, 0]
    shut = next(tuple(at) for at in (weights == 0).nonzero().tolist() if at[3] <= at[2])
    assert torch.allclose(own(run, "model", PROMPT, closed=[shut]), own(run, "model", PROMPT), atol=1e-6)
