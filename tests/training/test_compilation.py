"""Compiled blocks: gates and all in one graph, which no later step compiles anew."""

import copy
from functools import partial

import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from torch._dynamo.utils import counters

from sparselens.config import Gate, Training
from sparselens.models.architectures import attention_modules, blocks
from sparselens.models.loading import add_gates
from sparselens.training.compilation import faster, in_one_graph
from sparselens.training.copies import trainable
from sparselens.training.measure import forward


@pytest.mark.parametrize("family", CONFIGS)
def test_a_block_is_one_graph(family, monkeypatch):
    """For every kind of layer: sampled gates of four steps, packed documents, transformers' hooks installed before."""
    model = trainable(add_gates(tiny_model(family), Gate(bias=0.5)), Training()).train()
    model(torch.zeros(1, 4, dtype=torch.long), output_attentions=True)
    plain = copy.deepcopy(model)
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: whole(self, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    graphs = []
    with faster([model], Training(compile="yes"), "cpu"):
        assert in_one_graph(model) and not in_one_graph(plain)
        for step in range(4):
            torch.manual_seed(step)
            batch = {"input_ids": torch.randint(0, 60, (2, 24)), "position_ids": positions}
            mine, other = (forward(one, batch, sample=True, seed=(step * 77, 3)) for one in (model, plain))
            torch.testing.assert_close(mine.logits, other.logits, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mine.counts, other.counts, rtol=1e-5, atol=1e-4)
            gradients = []
            for one, out in ((model, mine), (plain, other)):
                one.zero_grad()
                (out.logits.square().mean() + out.counts[..., 0].mean()).backward()
                gradients.append([p.grad for p in one.parameters() if p.grad is not None])
            for ours, theirs in zip(*gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    kinds = len(set(getattr(model.config, "layer_types", None) or [0]))
    assert graphs == [kinds] * 4, "one for each kind of layer, none for a later step"
    assert not counters["graph_break"]
    assert not in_one_graph(model)
    assert torch.stack(model(batch["input_ids"], output_attentions=True).attentions).shape[-2:] == (24, 24), "hooks"


@pytest.fixture
def compiled(monkeypatch):
    """A tiny gated model whose blocks are compiled as far as the code around them can tell."""
    model = trainable(add_gates(tiny_model("llama"), Gate(bias=0.5)), Training()).train()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", self._call_impl))
    with faster([model], Training(compile="yes"), "cpu"):
        assert in_one_graph(model)
        yield model


BATCH = {"input_ids": torch.arange(24).view(2, 12) % 60}


def test_a_pass_that_fails_holds_on_to_nothing(compiled, monkeypatch):
    """Out of memory in the last layer: what the others counted would keep their whole graph in memory."""

    def fail(*arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory")

    last = attention_modules(compiled)[-1]
    monkeypatch.setattr(last, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        forward(compiled, BATCH, sample=True, seed=3)
    assert not any(hasattr(module, "kept_counts") for module in attention_modules(compiled))
    monkeypatch.undo()


@pytest.mark.parametrize("micro", [1, 2])
def test_a_sequence_draws_the_same_gates_wherever_the_batch_is_cut(compiled, micro):
    """Kept seeds: of every micro-batch its own, in the backward pass too, although the next one's are there by then."""
    plain = copy.deepcopy(compiled)
    for block in blocks(plain):
        block._compiled_call_impl = None
    found = []
    for model in (compiled, plain):
        parts = [
            forward(model, {"input_ids": part}, sample=True, seed=(11, first))
            for first, part in zip(range(0, 2, micro), BATCH["input_ids"].split(micro), strict=True)
        ]
        for out in parts:  # after all forward passes
            (out.logits.square().sum() + out.counts[..., 0].sum()).backward()
        counts = torch.cat([out.counts for out in parts], 1)
        found.append([counts, *(p.grad for p in model.parameters() if p.grad is not None)])
    whole = forward(plain, BATCH, sample=True, seed=(11, 0)).counts
    torch.testing.assert_close(found[0][0], whole)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hooks_without_a_name_are_left_alone(monkeypatch):
    """A partial function has none, and the model may be anybody's."""
    model = tiny_model("llama")
    seen = []
    model.model.layers[0].register_forward_hook(partial(lambda seen, *_: seen.append(1), seen))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", self._call_impl))
    with faster([model], Training(compile="yes"), "cpu"):
        model(BATCH["input_ids"])
    assert seen
