"""Features on the page: labels where features are named, cards, a search, and the verdict on cuts."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import report_pages
from report_pages import needs_browser
from report_runs import HOSTILE, a_card, make_run

from sparselens.faces.store import FORMAT, write_index, write_layer
from sparselens.reporting import payload
from sparselens.reporting.sections.summary import verdicts

browser, run = report_pages.browser, report_pages.run
page_file, open_page = report_pages.page_file, report_pages.open_page


def write_faces(folder: Path, n_layers: int = 2, n_features: int = 70) -> None:
    folder.mkdir(parents=True)
    for layer in range(n_layers):
        write_layer(folder, layer, [a_card(layer, f) for f in range(n_features)], 2048)
    labels = [[a_card(layer, f)["label"] for f in range(n_features)] for layer in range(n_layers)]
    write_index(folder, labels, [["small"] * n_features] * n_layers)
    about = {
        "format": FORMAT,
        "n_layers": n_layers,
        "n_features": n_features,
        "tokens": 10**6,
        "fired": 140,
        "model": "m",
    }
    (folder / "faces.json").write_text(json.dumps(about))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_cards_of_traces_and_of_transcoders(tmp_path):
    made = make_run(tmp_path / "run")
    write_faces(made / "transcoders" / "sparse" / "faces")
    rows = payload([made])["runs"][0]["features"]
    assert set(rows["cards"]) == {trace["name"] for trace in payload([made])["runs"][0]["attribution"]}
    (listed,) = rows["sets"]
    assert listed["name"] == "sparse" and listed["about"]["tokens"] == 10**6
    assert len(listed["cards"]) == 140 and all(len(card["top"]) <= 3 for card in listed["cards"].values())
    assert listed["cards"]["0/3"]["nearest"][0][3] == a_card(0, 1)["label"]


def test_a_run_without_faces_says_how_to_make_them(tmp_path):
    made = make_run(tmp_path / "run", parts=("training",))
    shown = payload([made])["runs"][0]
    assert not shown["features"] and "sparselens features" in shown["commands"]["features"]


def test_damaged_cards_are_named(tmp_path):
    made = make_run(tmp_path / "run")
    path = next(made.rglob("cards.json"))
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match=r"cards\.json is damaged"):
        payload([made])


def trace(**changes):
    cut = {"n": 226, "pearson_path": 0.97, "spearman_path": 0.9, "sign_agreement": 0.98, "n_signs": 40}
    return {"role": "sparse", "completeness_error": 2e-6, "cut": cut | changes}


@pytest.mark.parametrize(
    "changes, state",
    [
        ({}, "met"), ({"pearson_path": 0.85}, "missed"), ({"spearman_path": 0.7}, "missed"),
        ({"sign_agreement": 0.9}, "missed"), ({"sign_agreement": None}, "met"), ({"n": 0}, "open"),
        ({"pearson_path": None, "spearman_path": None, "sign_agreement": None}, "open"),
    ],
)  # fmt: skip
def test_the_tick_is_for_cuts_that_come_true(changes, state):
    (verdict,) = verdicts({}, {"fvu": 0.1}, {}, None, [trace(**changes)])
    assert verdict["state"] == state and verdict["label"].startswith("Cutting it does what the picture says")
    assert "rows add up to 2.0e-06" in verdict["detail"], "small print"


def test_books_that_do_not_balance_are_still_red():
    found = verdicts({}, {"fvu": 0.1}, {}, None, [trace() | {"completeness_error": 0.1}])
    assert [(v["state"], v["label"].split(" (")[0]) for v in found] == [
        ("missed", "Attribution adds up"), ("met", "Cutting it does what the picture says"),
    ]  # fmt: skip


# ---- in the browser --------------------------------------------------------------------------------------------------


@pytest.mark.browser
class TestInTheBrowser:
    pytestmark = needs_browser

    def test_search_and_card(self, open_page, page_file):
        shown = open_page(page_file)
        page = shown.page
        box = page.locator("#features input[type=search]")
        every = page.locator(".feature-row").count()
        box.fill("word7")
        assert 0 < page.locator(".feature-row").count() < every
        box.fill("small")  # a word it promotes
        assert page.locator(".feature-row").count() == every
        box.fill("1/3")
        page.locator(".feature-row").first.click()
        card = page.locator("dialog.feature-card")
        assert card.locator("h3").text_content() == a_card(1, 3)["label"]
        assert "feature 3 of layer 1" in card.text_content() and "small" in card.text_content()
        assert card.locator("mark").first.text_content() == " box" and HOSTILE in card.text_content()
        card.locator("button.says", has_text="word1").first.click()  # a neighbour's card
        assert "feature 1 of layer 0" in page.locator("dialog.feature-card").text_content()
        page.keyboard.press("Escape")
        page.locator("dialog.feature-card").wait_for(state="detached")
        box.fill("zebra")
        assert "No feature here has “zebra”" in page.locator("#features .note").first.text_content()
        shown.clean()

    def test_order_by_activation(self, open_page, page_file):
        page = open_page(page_file).page
        page.locator("#features select").select_option("share")
        assert "word11" in page.locator(".feature-row").first.text_content()
        page.locator("#features select").select_option("largest")
        layers = page.locator(".feature-row").evaluate_all(
            "rows => rows.map((row) => +row.dataset.feature.split('/')[0])"
        )
        assert layers == sorted(layers, reverse=True)

    def test_named_features_carry_their_labels(self, open_page, page_file):
        shown = open_page(page_file)
        page = shown.page
        named = page.locator("#attribution table button.face").first
        assert named.text_content().startswith("the word “word5”")
        named.click()
        assert "feature 5 of layer 0" in page.locator("dialog.feature-card").text_content()
        page.locator("dialog.feature-card .close").click()
        shown.clean()

    def test_cuts_are_shown_with_their_verdict(self, open_page, page_file):
        page = open_page(page_file).page
        heads = page.locator("#attribution figure .card-head", has_text="Cutting it does")
        signs = {heads.nth(i).locator(".note").text_content()[0] for i in range(heads.count())}
        assert signs == {"✓", "✕"}, "the dense trace's cuts did not come true, the sparse one's did"
        states = page.locator("#summary .verdicts li", has_text="Cutting it does").evaluate_all(
            "all => all.map((li) => li.className)"
        )
        assert sorted(states) == ["met", "missed"]

    def test_shares_beyond_the_whole_are_explained(self, open_page, run, tmp_path):
        from sparselens.reporting import write_page

        path = next(run.glob("trace/sparse/trace.json"))
        before = path.read_text()
        value = json.loads(before)
        value["edges"][0]["single_hop"] = 1.4 * value["edges"][0]["weight"]
        path.write_text(json.dumps(value))
        try:
            page = open_page(write_page(payload([run]), tmp_path / "page.html")).page
        finally:
            path.write_text(before)
        explained = page.locator(".edge-detail", has_text="Shares above 100 % or below 0 %")
        assert explained.count() == 1, "where they stand, and only there"

    def test_boxes_stand_above_their_tokens(self, open_page, page_file):
        """As the saved picture has them: a box's middle is the middle of its tokens."""
        page = open_page(page_file).page
        with page.expect_download() as saved:
            page.locator("#attribution .downloads button", has_text="SVG").first.click()
        texts = ElementTree.parse(saved.value.path()).getroot().iter("{http://www.w3.org/2000/svg}text")
        places = [(text.text, float(text.get("x"))) for text in texts]
        at = {}
        for name, x in places:
            at.setdefault(name, []).append(x)
        assert at["large"][0] == pytest.approx(at["4"][-1], abs=1.0)
