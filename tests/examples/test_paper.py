"""examples/paper.py: every figure of the paper with one command, on tiny models of GPT-2's and OLMo's shape."""

import importlib.util
import json
from pathlib import Path

import pytest
from pairs import chosen
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl

spec = importlib.util.spec_from_file_location("paper", Path(__file__).parents[2] / "examples" / "paper.py")
assert spec is not None and spec.loader is not None
paper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paper)


@pytest.mark.parametrize("family", ["gpt2", "olmo"])
def test_all_figures_and_nothing_twice(family, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tiny_model(family)
    sl.save(model, tiny_tokenizer(), tmp_path / "model")
    words = " ".join(f"w{i}" for i in range(40))
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join([words] * 200))
    rows = [
        {"clean": p.clean, "corrupted": p.corrupted, "answer": p.answer, "wrong": p.wrong}
        for p in chosen([model]).pairs
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["model", "--data", "text.txt", "--out", "run", "--tasks", "mine.jsonl", "ioi", "--prompt", "w1 w2 w3"]
    command += ["--target", "w4", "--density", "0.9", "--steps", "2", "--batch", "4", "--length", "16"]
    command += ["--prompts", "6", "--features", "32", "--feature-steps", "2", "--feature-batch", "2", "--per-layer"]
    paper.main(command)
    out = capsys.readouterr().out
    assert "memory" in out and "attention edges each" in out  # what it needs, said first
    assert "ioi is left out" in out  # a task that cannot be written with this tokenizer
    run = tmp_path / "run"
    comparison = json.loads((run / "circuits" / "results.json").read_text())
    assert list(comparison["tasks"]) == ["mine"] and "removed" in comparison["tasks"]["mine"]["multipliers"]
    for name in ("figure2.png", "figure3.png", "figure4.png", "report.html"):
        assert (run / name).is_file(), name
    # Started again, only what is missing is made.
    (run / "trace" / "trace.json").unlink()
    for verb in ("sparsify", "transcode"):
        monkeypatch.setattr(paper.sl, verb, lambda *a, **k: pytest.fail("again"))
    before = (run / "tasks" / "mine" / "results.json").read_bytes()
    paper.main([*command[:9], *command[9:]])
    assert (run / "trace" / "trace.json").is_file()
    assert (run / "tasks" / "mine" / "results.json").read_bytes() == before
