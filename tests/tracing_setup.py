"""Tiny models with every bias set, a random transcoder, and one traced prompt: what the tracing tests share."""

import torch
from tiny_models import tiny_model, tiny_tokenizer

from sparselens.attribution.growth import attribution_graph
from sparselens.config import Gate
from sparselens.models.loading import add_gates
from sparselens.transcoders.transcoder import Transcoder

PROMPT = " ".join(f"w{i}" for i in (3, 5, 8, 13, 21, 3, 5))  # eight tokens: <|endoftext|> comes in front
FAMILIES = ["gpt2", "gpt_neox", "llama", "qwen3", "olmo", "olmo2", "gemma2"]


def biased_model(family, gated=False, dtype=torch.float64, normalise="all", gate_bias=0.0):
    """Random weights, norms and biases: nothing is zero or one by accident. Half of the gates are closed."""
    model = tiny_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    if gated:
        add_gates(model, Gate(bias=gate_bias, normalise=normalise))
    return model.to(dtype)


def traced(family="gpt2", gated=False, dtype=torch.float64, cross_layer=True, target=None, hook="mlp-input", **options):
    model = biased_model(family, gated, dtype, options.pop("normalise", "all"), options.pop("gate_bias", 0.0))
    activation = options.pop("activation", "jumprelu")
    transcoder = Transcoder.random(2, 48, 32, cross_layer=cross_layer, activation=activation, dtype=dtype)
    if hook == "residual":  # the residual stream is small before its norm
        transcoder.input_hook = hook
        for threshold in transcoder.threshold:
            threshold.mul_(0.02)
    return attribution_graph(model, tiny_tokenizer(), transcoder, options.pop("prompt", PROMPT), target, **options)


def total_effects(replacement, ids):
    """Every source's effect on targets [n, n_sources] when active features follow what reaches them (slope 1).

    All chains at once: E = R + (R of features / activation) E, for the rows R of all features.
    """
    n, rows = len(replacement.layer), lambda ids: replacement.rows(replacement.reads(ids))
    among = rows(torch.arange(n))
    through = torch.linalg.solve(torch.eye(n).to(among) - among[:, :n] / replacement.activation, among)
    own = rows(ids)
    return own + (own[:, :n] / replacement.activation) @ through
