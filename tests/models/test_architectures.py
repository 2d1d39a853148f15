"""A family nobody here has heard of: made known in one place, it can do what the others can."""

import pytest
import torch
from pairs import random_prompts
from tiny_models import tiny_tokenizer
from tracing_setup import PROMPT
from transformers import LlamaConfig, LlamaForCausalLM

import sparselens as sl
from sparselens.circuits.run import Patcher
from sparselens.models import architectures
from sparselens.models.architectures import Architecture, register_architecture
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates
from sparselens.transcoders.transcoder import Transcoder


class StrangerConfig(LlamaConfig):
    model_type = "stranger"


class Stranger(LlamaForCausalLM):
    config_class = StrangerConfig


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(architectures, "ARCHITECTURES", dict(architectures.ARCHITECTURES))
    torch.manual_seed(0)
    config = StrangerConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Stranger(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def test_a_registered_family_has_gates_circuits_and_traces(model):
    with pytest.raises(ValueError, match=r"'stranger' model.*register_architecture"):
        add_gates(model, sl.Gate())
    register_architecture("stranger", Architecture(layers="model.layers", attention="self_attn"))
    ids = random_prompts().clean
    with torch.no_grad():
        before = model(ids).logits
        add_gates(model, sl.Gate(bias=1e4))
        torch.testing.assert_close(model(ids).logits, before)
    assert max(Patcher(Decoder(model), random_prompts()).checks.values()) < 1e-5
    transcoder = Transcoder.random(2, 48, 32, dtype=torch.float32)
    graph = sl.trace(model, tiny_tokenizer(), transcoder, PROMPT)
    assert graph.settings["self_check"] < 1e-5


def test_a_name_is_given_once(model):
    register_architecture("stranger", architectures.ARCHITECTURES["llama"])
    register_architecture("stranger", architectures.ARCHITECTURES["llama"])  # the same once more: a module read twice
    with pytest.raises(ValueError, match="another architecture 'stranger'"):
        register_architecture("stranger", architectures.ARCHITECTURES["gpt2"])
