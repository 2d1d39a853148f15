"""A browser, a synthetic Run, and pages of it with everything that should not happen written down: fixtures."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from report_runs import make_run

from sparselens.reporting import payload, write_page

CHROMIUM = os.environ.get("SPARSELENS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
SECTIONS = ("summary", "training", "attention", "circuits", "attribution", "features")
needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed (pip install '.[dev]')"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium, or set $SPARSELENS_CHROMIUM"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page_file(run):
    return write_page(payload([run]), run / "report.html")


class Watched:
    """A page from disk with everything that should not happen written down."""

    def __init__(self, browser, path, **options):
        options = {
            "viewport": {"width": 1280, "height": 900},
            "color_scheme": "light",
            "reduced_motion": "reduce",
        } | options
        self.context = browser.new_context(offline=True, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.goto(Path(path).as_uri())
        # The page draws when it knows its size; attention is unpacked first.
        self.page.locator("#provenance dl").first.wait_for()
        self.page.wait_for_timeout(250)

    def clean(self):
        """No error, no warning, and no request but for the file itself (and the files it makes for download)."""
        assert self.errors == [], self.errors
        assert [url for url in self.requests[1:] if not url.startswith("blob:")] == []


@pytest.fixture
def open_page(browser):
    opened = []

    def make(path, **options):
        opened.append(Watched(browser, path, **options))
        return opened[-1]

    yield make
    for watched in opened:
        watched.context.close()
