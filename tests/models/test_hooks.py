"""Looking into models and changing what they compute."""

import pytest
import torch
from pairs import random_prompts
from tiny_models import CONFIGS, tiny_model

from sparselens.circuits.attention_edges import AttentionEdges
from sparselens.circuits.run import run_nodes
from sparselens.config import Gate
from sparselens.models.architectures import Site
from sparselens.models.decoder import Decoder
from sparselens.models.hooks import capture, patch
from sparselens.models.loading import add_gates

IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", CONFIGS)
def test_captured_nodes_are_the_decoders(family):
    """The model's own forward pass and the pieces agree node by node."""
    model = tiny_model(family)
    decoder = Decoder(model)
    with torch.no_grad(), capture(model, ["a0", "a1.h2", "m1"]) as seen:
        embedding, _ = decoder.begin_with_logits(IDS)
    run = run_nodes(decoder, embedding)
    if decoder.gains[0] is None:  # NodeValues keep z with its post-norm factor
        assert torch.allclose(seen["a0"].transpose(1, 2), run.z[0], atol=1e-5)
        assert torch.allclose(seen["a1.h2"], run.z[1][:, 2], atol=1e-5)
    if decoder.parts[0].mlp_post is None:
        assert torch.allclose(seen["m1"], run.mlp_out[1], atol=1e-5)


def test_patching_with_what_was_there_changes_nothing_and_hooks_go_away():
    model = tiny_model("llama")
    with torch.no_grad():
        before = model(IDS).logits
        with capture(model, ["a0", "a1.h1", "m0"]) as seen:
            model(IDS)
        with patch(model, dict(seen)):
            assert torch.allclose(model(IDS).logits, before, atol=1e-6)
        with patch(model, {"a1.h1": 0.0, "m0": lambda out: out * 2}):
            assert not torch.allclose(model(IDS).logits, before, atol=1e-3)
        assert torch.equal(model(IDS).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_silencing_every_head_is_silencing_attention():
    model = tiny_model("gpt2")
    with torch.no_grad(), patch(model, {"a0": 0.0}):
        one = model(IDS).logits
    with torch.no_grad(), patch(model, {f"a0.h{h}": 0.0 for h in range(4)}):
        assert torch.allclose(model(IDS).logits, one, atol=1e-6)


def test_gradients_flow_through_captured_values():
    model = tiny_model("gpt_neox")
    with capture(model, ["a0.h3"]) as seen:
        loss = model(IDS).logits.sum()
    (gradient,) = torch.autograd.grad(loss, seen["a0.h3"])
    assert gradient.shape == seen["a0.h3"].shape and gradient.abs().sum() > 0


def test_sites():
    assert str(Site.parse("a3.h1")) == "a3.h1" and str(Site.parse("m4")) == "m4" and Site.parse("a0") == Site("a", 0)
    for bad in ("h3", "a3h1", "m3.h1", "a-1", ""):
        with pytest.raises(ValueError, match="unknown site"):
            Site.parse(bad)
    with pytest.raises(ValueError, match="no site a9"), capture(tiny_model("gpt2"), ["a9"]):
        pass


@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
def test_keeping_all_heads_is_the_model_and_none_is_all_corrupted(gated):
    model, prompts = tiny_model("llama"), random_prompts()
    if gated:
        add_gates(model, Gate(bias=0.5))
    edges = AttentionEdges(Decoder(model), prompts, "corrupted")
    some = next(edges.parts())
    with torch.no_grad():
        full, none = (edges.metric(edges.all(some, share)[..., :1, :1], some) for share in (1.0, 0.0))
    with torch.no_grad():
        own = prompts.score(prompts.at_reads(model(prompts.clean).logits).double())
        with capture(model, ["a0", "a1"]) as corrupted:
            model(prompts.corrupted)
        with patch(model, dict(corrupted)):
            silenced = prompts.score(prompts.at_reads(model(prompts.clean).logits).double())
    assert torch.allclose(full, own, atol=1e-5) and torch.allclose(none, silenced, atol=1e-5)
