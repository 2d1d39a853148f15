"""Attention edges of single prompts: against plain hooks on the model itself, against differences, and by hand."""

import numpy as np
import pytest
import torch
from pairs import random_prompts
from tiny_models import CONFIGS, tiny_model

from sparselens.circuits.attention_edges import AttentionEdges, bytes_per_prompt
from sparselens.circuits.rankings import by_score, learn_masks, rank
from sparselens.config import Gate
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates
from sparselens.training.dry_run import PeakMemory

DENSE_AND_SPARSE = pytest.mark.parametrize("bias", [None, 0.3], ids=["dense", "sparse"])


def model_of(family, bias):
    model = tiny_model(family)
    return model if bias is None else add_gates(model, Gate(bias=bias))


def edges_of(family="llama", bias=None, others="removed", n=4, double=False):
    model = model_of(family, bias)
    edges = AttentionEdges(Decoder(model.double() if double else model), random_prompts(n), others)
    return edges, next(edges.parts())


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


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "olmo2"])
@DENSE_AND_SPARSE
def test_random_circuits_are_what_hooks_make_of_the_model(family, bias):
    model, prompts = model_of(family, bias), random_prompts(n=5)
    edges = AttentionEdges(Decoder(model), prompts)
    generator, some = torch.Generator().manual_seed(3), next(edges.parts())
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        mask = (torch.rand(5, *edges.shape, generator=generator) < share).float()
        with torch.no_grad():
            ours = edges.metric(mask, some)
        theirs = prompts.score(prompts.at_reads(by_hooks(model, prompts.clean, mask)).double())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("bias", [None, -0.5], ids=["dense", "sparse"])
def test_all_none_leading_and_closed_edges(family, bias):
    """All edges are the model, none its silent attention; leading ones are enough; closed ones change no bit."""
    for others in ("removed", "corrupted", "mean"):
        edges, some = edges_of(family, bias, others)
        found = edges.check(some)
        assert max(found.values()) < 1e-5 and found.get("closed", 0.0) == 0.0
        assert set(found) == ({"all", "none", "leading", "closed"} if others == "removed" else {"all"})


def test_the_self_check_notices_edges_that_are_missing(monkeypatch):
    edges, some = edges_of()
    leading = edges.leading(some)
    leading[:, 0, 0, 5, 2] = False
    monkeypatch.setattr(edges, "leading", lambda some: leading)
    with pytest.raises(ValueError, match="self-check failed: with leading edges"):
        edges.check(some)


def test_what_the_others_carry():
    """corrupted: with no edge kept, the clean prompt's embeddings and the corrupted prompt's attention. mean: by hand,
    in the last layer, where an edge changes nothing but what its own query reads."""
    edges, some = edges_of(others="corrupted", double=True)
    other = AttentionEdges(edges.decoder, edges.prompts, "removed")
    seen = other.seen(edges.decoder.begin(edges.prompts.corrupted))
    with torch.no_grad():
        final = edges.decoder.run(some.embedding, lambda layer, weights, values: seen[layer][0] @ seen[layer][1])
        by_hand = edges.prompts.score(edges.decoder.unembed(edges.prompts.at_reads(final)).double())
        torch.testing.assert_close(edges.metric(edges.all(some, 0.0), some), by_hand)

    edges, some = edges_of(others="mean", double=True)
    last = edges.shape[0] - 1
    carried = [weights[..., None] * values[:, :, None] for weights, values in edges.seen(some.embedding)]
    mask = edges.all(some).expand(4, *edges.shape).clone()
    mask[:, last, 1, :, 0] = 0
    mean = carried[last].mean(0)[1, :, 0] - carried[last][:, 1, :, 0]  # what changes: [n, queries, d_head]

    def mix(layer, weights, values):
        z = weights @ values
        return torch.stack([z[:, 0], z[:, 1] + mean, *z[:, 2:].unbind(1)], 1) if layer == last else z

    with torch.no_grad():
        final = edges.decoder.run(some.embedding, mix)
        by_hand = edges.prompts.score(edges.decoder.unembed(edges.prompts.at_reads(final)).double())
        torch.testing.assert_close(edges.metric(mask, some), by_hand)


@DENSE_AND_SPARSE
@pytest.mark.parametrize("others", ["removed", "corrupted"])
def test_gradients_are_differences_of_the_metric(bias, others):
    edges, some = edges_of("gpt2", bias, others, double=True)
    mask = torch.rand(4, *edges.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient = edges.gradient(mask, some)
    assert not gradient[:, ~edges.possible].any()
    strongest = gradient.flatten(1).abs().topk(3).indices
    for prompt, places in enumerate(strongest.tolist()):
        for place in places:
            at = np.unravel_index(place, edges.shape)
            up, down = mask.clone(), mask.clone()
            up[prompt][at] += 1e-6
            down[prompt][at] -= 1e-6
            with torch.no_grad():
                slope = (edges.metric(up, some) - edges.metric(down, some))[prompt] / 2e-6
            assert float(slope) == pytest.approx(float(gradient[prompt][at]), rel=1e-4)


def test_integrated_gradients_sum_to_the_effect():
    edges, some = edges_of("gpt2", others="corrupted", double=True)
    with torch.no_grad():
        effect = edges.metric(edges.all(some), some) - edges.metric(edges.all(some, 0.0), some)
    torch.testing.assert_close(edges.integrated(some).flatten(1).sum(1), effect, rtol=0.1, atol=0.02)


def test_places_go_by_size_and_halves_are_scored_again():
    scores = torch.tensor([[5.0, -4, 3, -2, 1, 0, 0, 0.5]]).view(1, 1, 1, 2, 4)
    ranks = by_score(scores)
    assert ranks.places.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 5] and ranks.alive.tolist() == [6]
    asked = []

    def again(mask):
        asked.append(mask.flatten().bool().tolist())
        return torch.arange(8.0).view(1, 1, 1, 2, 4)  # the later the better

    ranks = by_score(scores, again)
    assert asked == [[True] * 3 + [False] * 5, [False, False, True] + [False] * 5]
    assert ranks.places.flatten().tolist() == [2, 1, 0, 3, 4, 6, 7, 5]
    assert ranks.kept(torch.tensor([2]), scores).flatten().tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    # A prompt with nothing left to halve does not stop the others.
    scores = torch.tensor([[5.0, 4, 3, 2], [1, 0, 0, 0]]).view(2, 1, 1, 2, 2)
    ranks = by_score(scores, lambda mask: torch.arange(4.0).expand(2, 4).view_as(mask))
    assert ranks.places.flatten(1).tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]] and ranks.alive.tolist() == [4, 1]


def test_edges_go_by_their_own_scores():
    """gradient: at the whole model. rescored: again with half of the edges left, and again. integrated: all the way."""
    edges, some = edges_of()
    gradient = edges.gradient(edges.all(some), some)
    again = by_score(gradient, lambda mask: edges.gradient(mask, some)).places
    wanted = {"gradient": by_score(gradient).places, "rescored": again}
    wanted["integrated"] = by_score(edges.integrated(some)).places
    for ranking, places in wanted.items():
        assert torch.equal(rank(edges, some, ranking).places, places), ranking
    assert not torch.equal(again, wanted["gradient"]) and not torch.equal(wanted["integrated"], wanted["gradient"])


def test_heads_and_random_orders():
    edges, some = edges_of(bias=0.3)
    gradient = edges.gradient(edges.all(some), some)
    for ranking, scores in (("net", gradient), ("gross", gradient.abs())):
        ranks = rank(edges, some, ranking)
        sums = scores.sum((-1, -2)).abs().flatten(1)
        order = ranks.places.flatten(1).argsort(1)
        assert (sums.gather(1, order).diff(dim=1) <= 1e-6).all() and ranks.alive.tolist() == [8] * 4
    ranks = rank(edges, some, "random", seed=1)
    assert torch.equal(ranks.places < ranks.alive.view(-1, 1, 1, 1, 1), gradient != 0)  # those that do something first
    assert torch.equal(ranks.places, rank(edges, some, "random", seed=1).places)
    assert not torch.equal(ranks.places, rank(edges, some, "random", seed=2).places)


@DENSE_AND_SPARSE
def test_learnt_masks_reach_the_effect_with_few_edges(bias):
    edges, some = edges_of("gpt2", bias)
    found = learn_masks(edges, some, 0.9, steps=120)
    with torch.no_grad():
        whole, nothing = edges.metric(edges.all(some), some), edges.metric(edges.all(some, 0.0), some)
        effect = (edges.metric(found.masks.float(), some) - nothing) / (whole - nothing)
    raised = (whole > nothing) & found.reached
    assert raised.any() and (effect[raised] >= 0.9).all()
    assert torch.equal(found.edges, found.masks.flatten(1).sum(1))
    alive = (edges.gradient(edges.all(some), some) != 0).flatten(1).sum(1)
    assert found.edges[raised].sum() < 0.8 * alive[raised].sum()
    # Searched again with these made dear, it finds others.
    again = learn_masks(edges, some, 0.9, steps=120, taken=found.masks)
    shared, first = (again.masks & found.masks).flatten(1).sum(1), found.edges
    both = raised & again.reached
    assert both.any() and (shared[both].sum() < 0.8 * first[both].sum())


def test_prompts_of_several_lengths_are_refused():
    prompts = random_prompts()
    prompts.lengths[0] = 7
    with pytest.raises(ValueError, match="prompts of one length"):
        AttentionEdges(Decoder(tiny_model("llama")), prompts)


@pytest.mark.parametrize("tokens", [8, 48])
def test_memory_stays_below_its_estimate(tokens):
    model, prompts = tiny_model("llama"), random_prompts(6, tokens)
    decoder = Decoder(model)
    estimate = 6 * bytes_per_prompt(decoder, prompts)
    edges = AttentionEdges(decoder, prompts, memory_mb=1e4)
    some = next(edges.parts())
    with PeakMemory().ignore(model) as memory:
        ranks = rank(edges, some, "rescored")
        with torch.no_grad():
            edges.metric(ranks.kept(ranks.alive // 2, some.embedding), some)
    assert 0.2 * estimate < memory.peak < estimate
