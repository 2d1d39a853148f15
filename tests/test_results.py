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


ROW = ["dense_edges", "control_edges", "sparse_edges", "multiplier", "low", "high", "n_prompts", "possible_edges"]


def comparison(name: str) -> dict[str, Any]:
    return dict(json.loads(Path(FILES[0].parent, f"compare-{name}.json").read_text()))


def within(row: dict[str, Any]) -> bool:
    return bool(row["low"] <= row["multiplier"] <= row["high"])


@pytest.mark.parametrize("name", PAIRS)
def test_multipliers_are_where_compare_writes_them(name: str):
    """readings.READING.TASK.THRESHOLD, as `compare --json` has them, each with its control; beneath, the curves."""
    found = comparison(name)
    assert found["readings"]
    for reading, tasks in found["readings"].items():
        for task, thresholds in tasks.items():
            details, where = found["tasks"][task], f"{reading}, {task}"
            ours = details["models"]["sparse"]["readings"][reading]
            assert within(thresholds["0.9"]) and within(thresholds["0.9"]["against_control"]), where
            for threshold, row in thresholds.items():
                assert not [key for key in ROW if key not in row], f"{where}, {threshold}"
                told = details["multipliers"][reading]
                assert row["multiplier"] == told["dense"][threshold]["multiplier"]
                assert row["against_control"]["multiplier"] == told["control"][threshold]["multiplier"]
                assert row["sparse_edges"] <= row["possible_edges"] == ours["n_edges"]
                if threshold != "mean":
                    assert row["multiplier"] == pytest.approx(row["dense_edges"] / row["sparse_edges"], rel=1e-3)
                    assert row["sparse_edges"] == pytest.approx(ours["edges_at"][threshold], rel=1e-4)
                    assert ("ranking" in row) == ("ranking" in ours), "where there are several, the best is named"


@pytest.mark.parametrize("name", PAIRS)
def test_all_of_it_has_its_control(name: str):
    found = comparison(name)
    assert set(found.get("open_edges", {})) == {task for task, row in found["tasks"].items() if "open_edges" in row}
    for task, row in found.get("open_edges", {}).items():
        assert within(row) and within(row["against_control"]), task
        assert row["multiplier"] == pytest.approx(row["dense"] / row["sparse"], rel=1e-4)
        assert row["sparse"] < row["control"] <= row["possible_edges"]


def test_tinystories_has_every_reading_and_what_its_figures_need(tmp_path: Path):
    from sparselens.circuits.rows import comparison as rows_of
    from sparselens.reporting.figures.curves import draw_curves
    from sparselens.reporting.figures.token_circuits import draw_token_circuits, enough

    path = Path(FILES[0].parent, "compare-stories15m.json")
    found = comparison("stories15m")
    asked = {"removed", "removed-task", "share", "heads", "heads-corrupted", "learnt"}
    assert set(found["readings"]) == asked | {"components"}
    for reading in asked:
        assert list(found["readings"][reading]) == ["ioi", "ioi-long"]
    assert list(found["readings"]["removed"]["ioi"]) == ["0.8", "0.9", "0.95", "0.98"]
    rows = rows_of({name: found[name] for name in ("names", "tasks")}, path)
    assert rows is not None
    for reading in ("removed", "share"):
        draw_curves(rows, [("ioi", reading), ("ioi-long", reading)], tmp_path / f"{reading}.png")
    draw_token_circuits(rows, "ioi", "removed", tmp_path / "figure3.png")
    for model in rows["tasks"]["ioi"]["models"].values():
        circuit = model["readings"]["removed"]
        assert len(circuit["circuit"]) >= enough(circuit), "figure 3 draws them all"


def test_smollm2_is_read_by_attention_edges_at_three_densities():
    found = comparison("smollm2-135m")
    sparser, denser = found["sparser"], found["denser"]
    tasks = ["greater-than", "ioi", "docstring", "ioi-long"]
    for reading in ("removed", "share", "heads"):
        rows = found["readings"][reading]
        assert list(rows) == tasks and all(list(row) == ["0.8", "0.9", "0.95", "0.98"] for row in rows.values())
        assert [row["0.9"]["n_prompts"] for row in rows.values()] == [100, 100, 100, 40]
    for part in (found, sparser):
        assert list(part["open_edges"]) == tasks
    assert list(denser["open_edges"]) == tasks[:3]
    edges = [part["pair"]["edges_per_query"] for part in (sparser, found, denser)]
    assert edges[0] < 0.35 < edges[1] < 0.5 < edges[2]
    for part in (found, sparser):
        assert part["pair"]["loss"]["control"] == part["pair"]["loss"]["base"], "taught by the base it stays the base"
    for task in tasks[:3]:  # fewer edges, smaller circuits
        first, second, third = (part["readings"]["removed"][task]["0.9"] for part in (sparser, found, denser))
        assert first["multiplier"] > second["multiplier"] > third["multiplier"]
        assert second["low"] > third["high"] or task == "docstring"
        assert first["dense_edges"] == third["dense_edges"], "read on the same prompts"


def test_the_gpt2_shaped_model_is_read_by_attention_edges():
    found = comparison("gpt2-shaped")
    for reading in ("removed", "share", "heads"):
        rows = found["readings"][reading]
        assert [row["0.9"]["n_prompts"] for row in rows.values()] == [80, 100], list(rows)
    assert all(row["0.9"]["low"] > 5 for row in found["readings"]["removed"].values())
    assert list(found["earlier"]["readings"]) == ["components"], "the other pair's"


def test_seeds_are_told_one_by_one():
    for seed, found in comparison("smollm2-135m-seeds")["by_seed"].items():
        for reading, tasks in found["readings"].items():
            for task, thresholds in tasks.items():
                assert all(map(within, thresholds.values())), f"{reading}, {task}, seed {seed}"
