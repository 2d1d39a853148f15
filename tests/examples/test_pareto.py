"""examples/pareto.py: a row per budget beside one control; what is done stays done."""

import importlib.util
import json
from pathlib import Path

import pytest
from pairs import chosen
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl

spec = importlib.util.spec_from_file_location("pareto", Path(__file__).parents[2] / "examples" / "pareto.py")
assert spec is not None and spec.loader is not None
pareto = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pareto)


def write_inputs(folder: Path) -> None:
    text = "\n<|endoftext|>\n".join([" ".join(f"w{i}" for i in range(20))] * 60)
    (folder / "text.txt").write_text(text)
    (folder / "heldout.txt").write_text(text)
    sl.save(tiny_model("llama"), tiny_tokenizer(), folder / "model")


def command(folder: Path, *edges: str, steps: int = 4, tasks: tuple[str, ...] = ()) -> list[str]:
    sizes = ["--steps", str(steps), "--batch", "2", "--length", "16", "--closing", "0.5"]
    files = ["--out", folder / "runs", "--json", folder / "rows.json", "--picture", folder / "picture.png"]
    data = ["--data", folder / "text.txt", "--heldout", folder / "heldout.txt"]
    return [str(folder / "model"), *map(str, data + files), *sizes, "--edges", *edges, "--tasks", *tasks]


def test_budgets_share_a_control_and_are_not_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the cache of tokens
    write_inputs(tmp_path)
    pareto.main(command(tmp_path, "5"))
    lines = [tmp_path / "runs" / "5" / name for name in ("metrics.jsonl", "control/model/model.safetensors")]
    before = [path.read_bytes() for path in lines]
    pareto.main(command(tmp_path, "2", "5"))  # another budget, and in front: the control stays where it is
    assert [path.read_bytes() for path in lines] == before
    assert not (tmp_path / "runs" / "2" / "control").exists()
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["kind"], row.get("budget")) for row in found["rows"]] == [
        ("base", None), ("control", None), ("sparse", 5), ("sparse", 2)
    ]  # fmt: skip
    control, rows = found["rows"][1]["loss"], found["rows"][2:]
    assert sorted(gap for _, gap, _ in pareto.gaps(found["rows"])) == pytest.approx(
        sorted(row["loss"] - control for row in rows)
    )
    assert (tmp_path / "picture.png").stat().st_size > 5000 and "loss - control" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds another run"):  # points of other runs are not mixed in
        pareto.main(command(tmp_path, "5", "2", steps=5))


def test_what_a_budget_buys_is_asked_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    rows = [
        {"clean": p.clean, "corrupted": p.corrupted, "answer": p.answer, "wrong": p.wrong}
        for p in chosen([tiny_model("llama")]).pairs
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = [*command(tmp_path, "7", "6", steps=2, tasks=(str(tmp_path / "mine.jsonl"),)), "--prompts", "6"]
    pareto.main(asked)
    said = capsys.readouterr().out
    found = [row for row in json.loads((tmp_path / "rows.json").read_text())["rows"] if row["kind"] == "sparse"]
    for row in found:
        bought = row["removed"]["mine"]
        assert bought["dense_edges"] / bought["sparse_edges"] == pytest.approx(bought["multiplier"], rel=0.5)
        assert f"{bought['multiplier']:.1f}x fewer" in said
    monkeypatch.setattr(pareto.sl, "compare", lambda *a, **k: pytest.fail("again"))
    pareto.main(asked)
    nothing = [row | {"removed": {"mine": bought | {"multiplier": None}}} for row in found]
    assert "not reached" in pareto.table([{"kind": "control", "loss": 1.0}, *nothing])
    pareto.draw([{"kind": "control", "loss": 1.0}, *nothing], tmp_path / "nothing.png")  # what it costs, all the same


def test_a_budget_of_nothing_is_refused_before_any_work(tmp_path, capsys):
    with pytest.raises(SystemExit):
        pareto.main(["nowhere", "--data", "none.txt", "--out", str(tmp_path / "runs"), "--edges", "0"])
    assert "try 0.5" in capsys.readouterr().err and not (tmp_path / "runs").exists()
