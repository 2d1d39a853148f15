"""examples/gpt2_shaped.py: it learns, it goes on where it stopped, and what it writes is an ordinary model."""

import importlib.util
from pathlib import Path

import pytest
import torch
from models import tiny_tokenizer

from sparselens.huggingface import load, save

spec = importlib.util.spec_from_file_location("gpt2_shaped", Path(__file__).parents[1] / "examples" / "gpt2_shaped.py")
assert spec is not None and spec.loader is not None
gpt2_shaped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt2_shaped)


class Counting:
    """Sequences that count up by one, from anywhere."""

    length, n_heldout = 16, 16

    def train(self, start, count):
        tokens = (torch.arange(start, start + count)[:, None] * 7 + torch.arange(17)) % 60
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    heldout = train


def fresh():
    return gpt2_shaped.make_model(2, 32, 4, 16, 64, 0, seed=0)


def pretrain(model, folder, steps=60, every=20):
    return gpt2_shaped.pretrain(
        model, Counting(), folder, steps=steps, batch=8, micro_batch=4, lr=5e-3, every=every
    )  # fmt: skip


def test_it_learns_to_count(tmp_path):
    model = fresh()
    lines = pretrain(model, tmp_path)
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[-1]["heldout_loss"] < 1.0 < lines[0]["heldout_loss"]
    save(model.eval(), tiny_tokenizer(), tmp_path / "model")
    again, _ = load(tmp_path / "model")
    tokens = Counting().heldout(0, 4)["input_ids"]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    whole = fresh()
    pretrain(whole, tmp_path / "whole")
    stopped, calls = fresh(), []
    write = gpt2_shaped.checkpoint

    def die_after_the_second(*arguments):
        write(*arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(gpt2_shaped, "checkpoint", die_after_the_second)
    with pytest.raises(KeyboardInterrupt):
        pretrain(stopped, tmp_path / "parts")
    again = fresh()
    lines = pretrain(again, tmp_path / "parts")
    assert [line["step"] for line in lines] == [20, 40, 60] and len(calls) == 3
    assert len(list((tmp_path / "parts").glob("checkpoint-*"))) == 1
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_every_weight_has_one_optimiser():
    model = fresh()
    muon, adam = gpt2_shaped.make_optimizers(model, 1e-3)
    sizes = [{id(p) for group in o.param_groups for p in group["params"]} for o in (muon, adam)]
    assert not sizes[0] & sizes[1] and sizes[0] | sizes[1] == {id(p) for p in model.parameters()}
    assert all(p.ndim == 2 for group in muon.param_groups for p in group["params"]) and len(sizes[0]) == 8
    assert gpt2_shaped.schedule(0) < 0.1 and gpt2_shaped.schedule(0.3) == 1 and gpt2_shaped.schedule(1) == 0
