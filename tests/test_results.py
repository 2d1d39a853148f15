"""What is published in results/ can be traced: every file says how, from what and on what it was made."""

import json
from pathlib import Path
from typing import Any

import pytest

FILES = sorted((Path(__file__).parents[1] / "results").glob("*.json"))
PAIRS = ["smollm2-135m", "stories15m", "gemma3-270m", "gpt2-shaped"]
FIGURES = [
    "density", "worst_layer_density", "density_per_layer", "density_per_head", "edges_per_query", "tokens", "minutes",
    "tokens_per_second", "peak_gib",
]  # fmt: skip


def values(found: Any, name: str) -> list[Any]:
    """Everything of that name, however deep."""
    if isinstance(found, dict):
        own = [found[name]] if name in found else []
        return own + [value for part in found.values() for value in values(part, name)]
    return [value for part in found for value in values(part, name)] if isinstance(found, list) else []


@pytest.mark.parametrize("name", ["command", "commit", "versions", "seeds", "hardware"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path, name: str):
    assert any(value is not None for value in values(json.loads(path.read_text()), name))


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_reported_in_full(name: str):
    found = json.loads(Path(FILES[0].parent, f"{name}.json").read_text())
    assert not [figure for figure in FIGURES if found.get(figure) is None]
    for kind in ("base", "control", "sparse"):
        assert len(found[f"{kind}_loss"]) >= 2, "held-out text of the training mix, and text the run never saw"
    assert found["kl_to_base"].keys() == found["sparse_loss"].keys()
    assert found["worst_layer_density"] == pytest.approx(max(found["density_per_layer"]), rel=1e-3)


def test_every_result_is_told():
    """A figure that no page speaks of is a figure nobody reads."""
    pages = "".join(page.read_text() for page in Path(FILES[0].parents[1], "docs").glob("*.md"))
    assert not [path.name for path in FILES if path.name not in pages]


@pytest.mark.parametrize("name", PAIRS)
def test_multipliers_are_where_compare_writes_them(name: str):
    """Task by task at the top, as `compare --json` has them; beneath, everything about them."""
    found = json.loads(Path(FILES[0].parent, f"compare-{name}.json").read_text())
    for task, details in found["tasks"].items():
        assert found[task] == details["multipliers"]
        row = found[task]["components"]["dense"]["0.9"]
        assert row["low"] <= row["multiplier"] <= row["high"]
        assert all("control" in baselines for baselines in found[task].values()), "no multiplier without its control"
