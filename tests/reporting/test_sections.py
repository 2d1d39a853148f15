"""A section of the report is one Python and one JavaScript file, found or registered; nothing else changes."""

import importlib

import pytest
import report_pages
from report_pages import SECTIONS, needs_browser

from sparselens.reporting import Section, build_page, payload, register, sections, write_page

browser, run, open_page = report_pages.browser, report_pages.run, report_pages.open_page
PYTHON = """
from pathlib import Path
from sparselens.reporting import Section

def weather(shown):
    edges = shown["circuits"]["tasks"][0]["readings"][0]["models"]["sparse"]["n_edges"]
    return {"sky": f"{edges} clouds & <b>no</b> rain"}

SECTION = Section(
    "weather", "Wetter & Wärme", weather, lambda run: f"look --up {run.path}", place=35,
    script=Path(__file__).with_suffix(".js"),
)
"""
SCRIPT = """
import { element, heading } from "./dom.js";
import { section } from "./sections.js";

section("weather", (place, run) => {
  const title = heading("weather", "Weather", "What the sky did.");
  place.replaceChildren(...title, element("p", { id: "sky" }, run.weather.sky));
});
"""


@pytest.fixture
def weather(tmp_path, monkeypatch):
    """A stranger's section, in a folder of theirs."""
    (tmp_path / "my_weather.py").write_text(PYTHON)
    (tmp_path / "my_weather.js").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sections, "_registered", {})
    monkeypatch.delitem(importlib.sys.modules, "my_weather", raising=False)
    return importlib.import_module("my_weather").SECTION


def test_a_strangers_section_has_rows_a_place_and_a_command(run, weather):
    register(weather)
    value = payload([run])["runs"][0]
    assert value["weather"]["sky"].endswith("clouds & <b>no</b> rain") and value["commands"]["weather"].startswith(
        "look"
    )
    page = build_page(payload([run]))
    assert '<a href="#weather">Wetter &amp; W&#228;rme</a>' in page and page.isascii()
    order = [page.index(f'<section id="{name}"') for name in ("attention", "weather", "circuits")]
    assert order == sorted(order)


def test_sections_are_found_in_the_order_of_the_page():
    assert tuple(sections.sections()) == (*SECTIONS, "studio")


@pytest.mark.parametrize(
    "name, why", [("training", "already"), ("a b", "small letters"), ("'><script>", "small letters")]
)
def test_bad_names_are_refused(weather, name, why):
    with pytest.raises(ValueError, match=why):
        register(Section(name, "Weather", weather.rows, weather.command, script=weather.script))


def test_a_script_that_is_not_there_is_refused_at_once(weather, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        register(Section("weather", "Weather", weather.rows, weather.command, script=tmp_path / "nowhere.js"))


def test_two_scripts_with_one_name_are_refused(run, weather):
    weather.script.write_text(SCRIPT + "function palette() {}\n")
    register(weather)
    with pytest.raises(ValueError, match=r"weather\.js: there is a palette in palette\.js"):
        build_page(payload([run]))


class TestInTheBrowser:
    pytestmark = needs_browser

    def test_a_strangers_section_is_on_the_page(self, open_page, run, weather, tmp_path):
        register(weather)
        shown = open_page(write_page(payload([run]), tmp_path / "page.html"))
        assert shown.page.locator("#weather #sky").text_content().endswith("clouds & <b>no</b> rain")
        shown.page.locator(".bar nav a", has_text="Wetter & Wärme").click()
        assert shown.page.locator("main > section").evaluate_all("all => all.map((one) => one.id)") == [
            "summary", "training", "attention", "weather", "circuits", "attribution", "features", "studio"
        ]  # fmt: skip
        shown.clean()
