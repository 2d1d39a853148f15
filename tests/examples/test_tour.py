"""The notebook of examples/tour.py, run from its first cell to its last with shorter training."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("marimo", reason="the tour is a marimo notebook: pip install marimo")

TOUR = Path(__file__).parents[2] / "examples" / "tour.py"


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("tour", TOUR)
    tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tour)
    settings = {
        "Path": Path, "folder": tmp_path_factory.mktemp("tour"), "control": False,
        "dense_steps": 600, "sparse_steps": 80, "feature_steps": 40,
    }  # fmt: skip
    _, found = tour.app.run(defs=settings)
    return found


def test_gates_close_and_the_model_still_adds(toured):
    base, sparse = toured["rows"]
    assert toured["open_at_first"] > 2 * 1056 * sparse["density"], "trained gates close more than untrained ones"
    assert base["exact"] > 0.3 and sparse["exact"] > 0.02, "chance would be one sum in about two hundred"


def test_the_circuit_is_smaller_than_the_model_and_explains_it(toured):
    results = toured["circuit"].results["readings"]["components"]
    assert 0 < results["edges_at"]["0.9"] < results["n_edges"] == 479
    assert toured["comparison"]["tasks"]["addition"]["multipliers"]["components"]["dense"]["0.9"]["n_prompts"] == 16


def test_the_graph_adds_up(toured):
    traced = toured["traced"]
    assert traced["completeness_error"] < 1e-3
    assert all(edge["predicted_direct"] == pytest.approx(-edge["weight"], rel=1e-3) for edge in traced["edges"][:5])


def test_the_page_shows_the_run(toured):
    page = toured["page"].read_text()
    assert "36+28=?????" in page and page.startswith("<!doctype html>") and len(page) < 5e6
