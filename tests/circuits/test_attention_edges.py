"""Circuits of single attention edges (head, query, key)."""

import dataclasses

import numpy as np
import pytest
import torch
from pairs import random_prompts
from tiny_models import CONFIGS, tiny_model

from sparselens.circuits.attention_edges import MOST, AttentionPatcher, attention_curve, keep_in
from sparselens.circuits.heads import HeadPatcher
from sparselens.config import Gate
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates
from sparselens.tasks.prompts import of_common_length


def gated(family: str, bias: float = 0.3):
    return add_gates(tiny_model(family), Gate(bias=bias))


@pytest.mark.parametrize("make", [tiny_model, gated], ids=["dense", "gated"])
@pytest.mark.parametrize("family", CONFIGS)
def test_all_edges_are_the_model_and_whole_heads_are_heads(family, make):
    """Keeping every edge of some heads and none of the others is what HeadPatcher does on the unmodified model."""
    model, prompts = make(family).double(), random_prompts(4, 8)
    patcher = AttentionPatcher(Decoder(model), prompts)
    full = patcher.possible
    kept = [(0, 1), (1, 0), (1, 3)]
    some = np.zeros_like(full)
    for layer, head in kept:
        some[layer, head] = full[layer, head]
    found = patcher.run(np.stack([full, some, np.zeros_like(full)]))
    own = prompts.score(prompts.at_reads(model(prompts.clean).logits).double())
    assert torch.allclose(found[0], own, atol=1e-6)
    everything = [(layer, head) for layer in range(2) for head in range(4)]
    assert torch.allclose(found, HeadPatcher(model, prompts).run([everything, kept, []]), atol=1e-5)


@pytest.mark.parametrize("make", [tiny_model, gated], ids=["dense", "gated"])
def test_scores_are_mask_gradients_and_sum_to_the_effect(make):
    model, prompts = make("gpt2").double(), random_prompts(3, 6)
    patcher = AttentionPatcher(Decoder(model), prompts)
    scores, possible = patcher.scores(), patcher.possible
    whole, nothing = patcher.run(np.stack([possible, np.zeros_like(possible)])).mean(1)
    if make is tiny_model:  # gates jump on the way
        assert abs(scores.sum() - float(whole - nothing)) < 0.05 * float((whole - nothing).abs())
    # One edge by central differences at the same five masks.
    at = np.unravel_index(np.abs(scores).argmax(), scores.shape)
    slope = 0.0
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        masks = torch.full((2, *scores.shape), share, dtype=torch.float64)
        masks[0][at] += 1e-4
        masks[1][at] -= 1e-4
        values = patcher.run(masks).mean(1)
        slope += float(values[0] - values[1]) / 2e-4 / 5
    assert slope == pytest.approx(scores[at], rel=1e-3)


def test_closed_edges_are_not_there():
    """What no gate opens, on either prompt, is not counted, and keeping it or not changes nothing."""
    model, prompts = gated("gpt2", bias=-0.3), random_prompts(6, 8)
    decoder = Decoder(model)
    curve, row = attention_curve(decoder, prompts, prompts, points=8, memory_mb=64)
    patcher = AttentionPatcher(decoder, prompts)
    assert 0 < row["n_alive"] < row["n_edges"] == 2 * 4 * 36
    opened = np.zeros(patcher.shape, bool)
    for _, _, clean, corrupted in patcher._parts(prompts):
        seen: list = []
        decoder.run(clean, keep_in(seen))
        for layer, ((now, _), (then, _)) in enumerate(zip(seen, corrupted, strict=True)):
            opened[layer] |= ((now > 0) | (then > 0)).any(0).numpy()
    assert not patcher.scores()[0][~opened[0]].any()  # (between the two prompts, gates of later layers may open)
    assert torch.equal(*patcher.run(np.stack([patcher.possible, opened])))
    assert curve.effects()[-1] == pytest.approx(1.0)


def test_edges_are_listed_best_first_with_weight_and_tokens():
    """What the report draws: the prefixes the curve has measured, how much each edge weighs, the example's tokens."""
    model, prompts = gated("llama"), random_prompts(6, 8)
    prompts = dataclasses.replace(prompts, piece=lambda token: f"w{token}")
    _, row = attention_curve(Decoder(model), prompts, prompts, points=8, memory_mb=64)
    listed = [dict(zip(row["columns"], edge, strict=True)) for edge in row["circuit"]]
    assert len(listed) == row["n_alive"] <= MOST
    sizes = [abs(edge["score"]) for edge in listed]
    assert sizes == sorted(sizes, reverse=True)
    assert row["tokens"] == [f"w{token}" for token in prompts.clean[0].tolist()]
    with torch.no_grad():
        output = model(prompts.clean, use_cache=False, output_attentions=True, gate_output="pattern")
    pattern = torch.stack(output.attentions).mean(1)  # [layers, heads, queries, keys]
    for edge in listed[:50]:
        at = tuple(edge[name] for name in ("layer", "head", "query", "key"))
        assert edge["weight"] == pytest.approx(float(pattern[at]), abs=1e-6)


def test_positions_mean_the_same_in_all_prompts():
    prompts = random_prompts(6, 8)
    prompts.lengths[:] = torch.tensor([8, 7, 7, 7, 6, 8])
    prompts.position[:] = prompts.position.clamp(max=5)
    (chosen,) = of_common_length(prompts)
    assert len(chosen) == 3 and chosen.clean.shape == (3, 7)
