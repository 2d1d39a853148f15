"""examples/gpt2_shaped.py: it learns, it goes on where it stopped, and what it writes is an ordinary model."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_tokenizer

from sparselens.models.loading import load
from sparselens.training import engine

spec = importlib.util.spec_from_file_location("gpt2_shaped", Path(__file__).parents[2] / "examples" / "gpt2_shaped.py")
assert spec is not None and spec.loader is not None
gpt2_shaped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt2_shaped)


def command(folder, out):
    """Documents that count from w0 up, over and over."""
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join([" ".join(f"w{i}" for i in range(20))] * 200))
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    sizes = ["--layers", "1", "--width", "32", "--heads", "2", "--length", "16", "--batch", "8", "--steps", "60"]
    places = ["--data", folder / "text.txt", "--cache", folder / "cache", "--out", folder / out]
    return ["--tokenizer", str(folder / "tokenizer"), *map(str, places), *sizes, "--lr", "1e-2"]


def test_it_learns_to_count_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    gpt2_shaped.main(command(tmp_path, "whole"))
    assert "ready for sparselens sparsify" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
    assert len(losses) == 20 and losses[-1] < 0.5 < losses[0]
    model, tokenizer = load(tmp_path / "whole" / "model")
    ids = tokenizer("w3 w4 w5", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "w6"

    write, written = engine.checkpoint, []

    def die_half_way(stage):
        write(stage)
        written.append(stage.progress.step)
        if stage.progress.step == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "checkpoint", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        gpt2_shaped.main(command(tmp_path, "parts"))
    gpt2_shaped.main(command(tmp_path, "parts"))
    assert written == [0, 15, 30, 45, 60]  # no step twice
    again, _ = load(tmp_path / "parts" / "model")
    for (name, a), b in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b[1]), name
    with pytest.raises(ValueError, match=r"another model.*there, \(64, 16\) here"):
        gpt2_shaped.main([*command(tmp_path, "parts"), "--width", "16"])


def test_dropout_is_at_work_while_it_learns(tmp_path):
    gpt2_shaped.main([*command(tmp_path, "with"), "--steps", "2", "--dropout", "0.5"])
    gpt2_shaped.main([*command(tmp_path, "without"), "--steps", "2"])
    first = [json.loads((tmp_path / out / "metrics.jsonl").read_text().splitlines()[0]) for out in ("with", "without")]
    assert abs(first[0]["loss"] - first[1]["loss"]) > 1e-3
