"""Copies of a model to train: plain or with adapters, with gates or without, whole or but a few layers of it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..config import Sparsify, Training
from ..models.architectures import dimensions
from ..models.loading import add_gates, gate_biases

MOST_OPEN = 0.9  # share of a head's gates that may be open at the start


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards the model trains, and what of it does, as before: it may be the user's own."""
    training, wanted = model.training, {name for name, p in model.named_parameters() if p.requires_grad}
    try:
        yield
    finally:
        model.train(training)
        for name, p in model.named_parameters():
            p.requires_grad_(name in wanted)


def dense_copy(base: nn.Module, training: Training) -> nn.Module:
    """A trainable copy: all weights, or LoRA adapters from a fixed seed, so that control and sparse start alike."""
    return trainable(copy.deepcopy(base), training)


def gated_copy(base: nn.Module, settings: Sparsify) -> nn.Module:
    return with_gates(dense_copy(base, settings.training), settings)


def trainable(model: nn.Module, training: Training) -> nn.Module:
    """The model, ready to train: no dropout; LoRA adapters on it if the settings say so."""
    model.requires_grad_(True)
    for module in model.modules():  # noise that gated attention does not have, in the constrained loss
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
    if not training.lora:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs the peft package: pip install 'sparselens[lora]'") from None
    torch.manual_seed(training.seed)
    config = LoraConfig(
        r=training.lora, lora_alpha=2 * training.lora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def with_gates(model: nn.Module, settings: Sparsify) -> nn.Module:
    """The model, with gates that train."""
    add_gates(model.get_base_model() if settings.training.lora else model, settings.gate)  # type: ignore
    for bias in gate_biases(model):
        bias.requires_grad_(True)
    return model


def recompute(model: nn.Module) -> None:
    """Gradient checkpointing. Reentrant, it would lose the edge counts on their way out of the model."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore


@torch.no_grad()
def start_within_reach(model: nn.Module, input_ids: torch.Tensor) -> int:
    """Lower the bias of heads nearly all of whose attention logits are positive; returns how many there are.

    Softmax does not mind an offset, gates do: in Gemma, which normalises queries and keys, a third of the heads have
    one, of up to 11. Their gates would need more steps to close than `closing` has, and other heads would pay.
    """
    was_training, biases = model.training, gate_biases(model)
    starts = [bias.clone() for bias in biases]
    for bias in biases:
        bias.fill_(1000.0)  # wide open: the dense model's own logits
    ids = input_ids[:, :256].to(biases[0].device)
    margins = model.eval()(input_ids=ids, use_cache=False, output_attentions=True, gate_output="margin").attentions
    model.train(was_training)
    lowered = 0
    for bias, start, margin in zip(biases, starts, margins, strict=True):
        logits = margin.transpose(0, 1).flatten(1).float() - 1000.0
        offset = torch.stack([head[head.isfinite()].quantile(1 - MOST_OPEN) for head in logits]).clamp(min=0)
        bias.copy_(start - offset)
        lowered += int((offset > 0).sum())
    return lowered


def shallow(config: PretrainedConfig, layers: int) -> nn.Module:
    """The model with so many layers, and weights as they come: on the meta device none."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    attention = "sdpa" if has_fused_attention(config) else "eager"
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:  # sizes or names that no model has, in whatever words
        raise ValueError(f"no model can be built from this configuration: {error}") from error
    return model


def has_fused_attention(config: PretrainedConfig) -> bool:
    """Whether gated attention on a GPU keeps no patterns (gating/triton.py), just as PyTorch's own does."""
    d_head = dimensions(config).d_head
    return d_head <= 256 and d_head % 8 == 0 and getattr(config, "attn_logit_softcapping", None) is None


def shallow_trainable(config: PretrainedConfig, settings: Sparsify, layers: int, gated: bool) -> nn.Module:
    """The same, as a run of `sparsify` would train it."""
    model = trainable(shallow(config, layers), settings.training)
    if gated:
        with_gates(model, settings)
    if settings.training.gradient_checkpointing:
        recompute(model)
    return model.train()


def count_parameters(config: PretrainedConfig, settings: Sparsify) -> tuple[int, int]:
    """(numbers in the model with its gates and adapters, how many of them are trained)."""
    with torch.device("meta"):
        one, two = (sizes(shallow_trainable(config, settings, layers, gated=True)) for layers in (1, 2))
    rest = dimensions(config).n_layers - 1
    return one[0] + rest * (two[0] - one[0]), one[1] + rest * (two[1] - one[1])


def sizes(model: nn.Module) -> tuple[int, int]:
    """(parameters, how many of them are trained)."""
    numbers = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in numbers), sum(n for n, requires_grad in numbers if requires_grad)
