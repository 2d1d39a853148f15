"""examples/pareto.py: a row per budget beside one control; what is done stays done."""

import importlib.util
import json
from pathlib import Path

import pytest
from models import tiny_model, tiny_tokenizer

import sparselens as sl

spec = importlib.util.spec_from_file_location("pareto", Path(__file__).parents[1] / "examples" / "pareto.py")
assert spec is not None and spec.loader is not None
pareto = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pareto)


def command(folder: Path, *densities: str) -> list[str]:
    text = "\n<|endoftext|>\n".join([" ".join(f"w{i}" for i in range(20))] * 60)
    (folder / "text.txt").write_text(text)
    (folder / "heldout.txt").write_text(text)
    sl.save(tiny_model("llama"), tiny_tokenizer(), folder / "model")
    sizes = ["--steps", "4", "--batch", "2", "--length", "16", "--closing", "0.5"]
    files = ["--out", folder / "runs", "--json", folder / "rows.json", "--picture", folder / "picture.png"]
    data = ["--data", folder / "text.txt", "--heldout", folder / "heldout.txt"]
    return [str(folder / "model"), *map(str, data + files), *sizes, "--densities", *densities]


def test_budgets_share_a_control_and_are_not_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the cache of tokens
    pareto.main(command(tmp_path, "0.5"))
    asked = []
    monkeypatch.setattr(pareto.sl, "sparsify", lambda *a, run=sl.sparsify, **k: asked.append(k) or run(*a, **k))
    pareto.main(command(tmp_path, "0.5", "0.2"))
    assert [(k["density"], k["control"]) for k in asked] == [(0.2, False)]
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["kind"], row.get("budget")) for row in found["rows"]] == [
        ("base", None), ("control", None), ("sparse", 0.5), ("sparse", 0.2)
    ]  # fmt: skip
    control, rows = found["rows"][1]["loss"], found["rows"][2:]
    assert sorted(gap for _, gap, _ in pareto.gaps(found["rows"])) == pytest.approx(
        sorted(row["loss"] - control for row in rows)
    )
    assert (tmp_path / "picture.png").stat().st_size > 5000 and "loss - control" in capsys.readouterr().out


def test_a_density_in_per_cent_is_refused_before_any_work(tmp_path, capsys):
    with pytest.raises(SystemExit):
        pareto.main(["nowhere", "--data", "none.txt", "--out", str(tmp_path / "runs"), "--densities", "5"])
    assert "0.5 % is 0.005" in capsys.readouterr().err and not (tmp_path / "runs").exists()
