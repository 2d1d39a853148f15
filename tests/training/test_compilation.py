"""Compiled blocks: gates and all in one graph, which no later step compiles anew."""

import copy

import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from torch._dynamo.utils import counters

from sparselens.config import Gate, Training
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
