"""benchmarks/peers.py: that it measures what it says, and that what it published is whole."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
COST = ("seconds", "wall_seconds", "loaded_mb", "work_mb", "peak_mb")
COMPARISONS = ("discover", "trace", "longest", "train_speed", "train_fit", "attention")


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers", ROOT / "benchmarks" / "peers.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return dict(json.loads((ROOT / "results" / "peers.json").read_text()))


def measured_rows(published: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [published[name] for name in ("discover", "trace")] + [{"rows": [published["train_speed"]]}]
    return [row for part in parts for row in part.get("rows", []) if "not_measured" not in row]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_memory_of_the_work_is_told_from_that_of_loading():
    """Loading takes 200 MiB and keeps 10; the work takes 100 for a moment."""
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from measuring import measured
def load():
    large = b"1" * (200 * 2**20)
    del large
    return b"1" * (10 * 2**20)
kept = load()
print(json.dumps(measured(lambda: len(b"2" * (100 * 2**20)))))
"""
    run = [sys.executable, "-c", code, str(ROOT / "benchmarks" / "peer_scripts")]
    done, cost = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert done == 100 * 2**20 and set(cost) == set(COST)
    assert 99 < cost["work_mb"] < 105
    assert cost["peak_mb"] > 200 and cost["loaded_mb"] < 60


def test_scores_are_compared_in_units_of_the_largest(peers: ModuleType, tmp_path: Path):
    scores = torch.arange(-200.0, 200).double().view(20, 20)
    for name, table in (("a", scores), ("b", scores + torch.eye(20).double())):
        save_file({"scores": table}, tmp_path / name)
    found = peers.agreement(tmp_path / "a", tmp_path / "b")
    assert found["largest_difference"] == pytest.approx(1 / 200)
    assert found["correlation"] > 0.999 and 90 < found["best_100_shared"] <= 100


def test_all_comparisons_are_there_and_say_how(published: dict[str, Any]):
    assert set(COMPARISONS) <= set(published)
    assert published["command"] and published["versions"]["torch"] and published["host"]["cores"]
    for name in COMPARISONS:
        found = published[name]
        assert "not_measured" in found or "notes" in found, name
        assert "not_measured" not in found or len(found["not_measured"]) > 20, "a reason, not a word"
    assert "/work" not in json.dumps(published) and "/tmp" not in json.dumps(published)


def test_both_sides_cost_something_and_the_ratio_is_theirs_to_ours(published: dict[str, Any]):
    rows = measured_rows(published)
    assert rows
    for row in rows:
        for who in ("ours", "theirs"):
            assert all(row[who][key] > 0 for key in COST), row
            assert row[who]["versions"]["torch"] and row[who]["every_seconds"]
        assert row["times_seconds"] == pytest.approx(row["theirs"]["seconds"] / row["ours"]["seconds"], rel=0.02)
        assert row["times_peak"] == pytest.approx(row["theirs"]["peak_mb"] / row["ours"]["peak_mb"], rel=0.02)


def test_the_numbers_agree(published: dict[str, Any]):
    rows = published["discover"]["rows"]
    assert {row["peer"] for row in rows} == {"EAP-IG 2.0", "TransformerLens"}
    assert {row["model"] for row in rows} == {"stories15m", "gpt2-shaped"}
    for row in rows:
        if row["method"] != "EAP-IG":  # other points on the path: another number
            assert row["largest_difference"] < 1e-4, row["method"]
    graphs = [row for row in published["trace"]["rows"] if "edges" in row]
    assert graphs
    for row in graphs:
        assert row["nodes_of_ours_alone"] == row["nodes_of_theirs_alone"] == 0 < row["nodes_shared"]
        assert row["largest_edge_difference"] < 1e-3 and row["edges"] > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_a_worker_loads_once_and_says_why_it_fails(peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Twice asked, loaded once; then an error, and the line that says it."""
    (tmp_path / "toy.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks" / "peer_scripts")!r})
from measuring import serve, spec
def work(calls):
    calls.append(1)
    if len(calls) > 2:
        raise ValueError("three is too many")
    print("noise")
    return len(calls)
serve(spec(), list, work, lambda calls, done: {{"call": done}})
""")
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    bench = SimpleNamespace(work=tmp_path, arguments=SimpleNamespace(timeout=60, threads=1))
    with peers.Worker(bench, Path(sys.executable), "toy.py", {}) as worker:
        found = [worker(), worker()]
        with pytest.raises(RuntimeError, match="ValueError: three is too many"):
            worker()
    assert [one["call"] for one in found] == [1, 2] and all(set(COST) < set(one) for one in found)
