"""Attention edges of single prompts against twenty lines of plain PyTorch hooks on the model itself."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import random_prompts
from tiny_models import CONFIGS, tiny_model

from sparselens.config import Gate
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates

spec = importlib.util.spec_from_file_location("readings", Path(__file__).parents[2] / "benchmarks" / "readings.py")
readings = importlib.util.module_from_spec(spec)
sys.modules["readings"] = readings  # dataclasses look their module up
spec.loader.exec_module(readings)


def by_hooks(model, ids, mask):
    """Logits with every attention weight multiplied by mask [n, layer, head, query, key]; of ours only the gates."""
    seen, handles = {}, []
    for layer, block in enumerate(model.model.layers):

        def keep(_, __, out, layer=layer):
            seen[layer] = out

        def replace(module, _, out, layer=layer):
            weights = out[1]  # [n, heads, queries, keys]
            n, heads, tokens, _ = weights.shape
            v = seen[layer].view(n, tokens, -1, module.head_dim).transpose(1, 2)
            v = v.repeat_interleave(heads // v.shape[1], 1)
            mixed = (mask[:, layer].to(weights) * weights) @ v
            return module.o_proj(mixed.transpose(1, 2).flatten(2)), weights

        module = block.self_attn
        handles += [module.v_proj.register_forward_hook(keep), module.register_forward_hook(replace)]
    options = {"gate_output": "pattern"} if hasattr(model.config, "sparselens") else {}
    with torch.no_grad():
        logits = model(ids, use_cache=False, output_attentions=True, **options).logits
    for handle in handles:
        handle.remove()
    return logits


def gated(family, bias):
    model = tiny_model(family)
    return model if bias is None else add_gates(model, Gate(bias=bias))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "olmo2"])
@pytest.mark.parametrize("bias", [None, 0.3], ids=["dense", "sparse"])
def test_random_circuits_are_what_hooks_make_of_the_model(family, bias):
    model, prompts = gated(family, bias), random_prompts(n=5)
    edges = readings.PromptEdges(Decoder(model), prompts)
    generator = torch.Generator().manual_seed(3)
    _, some = next(edges.parts())
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        mask = (torch.rand(5, *edges.shape, generator=generator) < share).float()
        with torch.no_grad():
            ours = edges.metric(mask, some)
        theirs = prompts.score(prompts.at_reads(by_hooks(model, prompts.clean, mask)).double())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("bias", [None, -0.5], ids=["dense", "sparse"])
def test_all_none_and_leading_edges(family, bias):
    """All edges are the model, none its silent attention; those that lead to the answer are enough, exactly."""
    for others in ("removed", "corrupted", "mean"):
        assert max(readings.PromptEdges(Decoder(gated(family, bias)), random_prompts(), others).check().values()) < 1e-5


def test_edges_needed_and_their_ratio():
    def run(sizes):
        return np.array([min(n, 40) / 40 for n in sizes], float)

    curves = readings.trace_curves(run, np.array([64, 64]), np.ones(2), np.zeros(2), points=6)
    assert curves.edges_at(0.8).tolist() == [32, 32] and curves.edges_at(0.9).tolist() == [36, 36]
    found = readings.geometric(np.array([100, 400]), np.array([10, 10]))
    assert found["multiplier"] == pytest.approx(20) and found["low"] == pytest.approx(10)
