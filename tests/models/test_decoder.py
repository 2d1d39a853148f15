"""A decoder in pieces: the one forward pass, and what takes the place of its parts."""

import pytest
import torch
from tiny_models import CONFIGS, tiny_model

from sparselens.config import Gate
from sparselens.models.decoder import Decoder
from sparselens.models.hooks import patch
from sparselens.models.loading import add_gates

IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_the_walk_is_the_model_and_attention_can_be_changed_on_the_way(family, gated):
    """Weights of one head set to zero: the model with that head silenced."""
    model = tiny_model(family)
    model = add_gates(model, Gate(bias=0.3)) if gated else model
    decoder = Decoder(model)
    embedding = decoder.begin(IDS)
    *_, last = decoder.walk(embedding)
    torch.testing.assert_close(decoder.unembed(last.after), model(IDS).logits, rtol=1e-4, atol=1e-4)

    def without(layer, weights, values):
        kept = weights.clone()
        kept[:, 2] *= layer != 1
        return kept @ values

    with patch(model, {"a1.h2": 0.0}):
        silenced = model(IDS).logits
    torch.testing.assert_close(decoder.unembed(decoder.run(embedding, without)), silenced, rtol=1e-4, atol=1e-4)
