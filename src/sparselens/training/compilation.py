"""What makes training steps faster on a GPU and changes nothing else: compiled blocks, one attention for all."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..config import Training
from ..models.architectures import base_model, blocks
from ..models.attention import UNGATED
from ..models.loading import is_gated
from ..runs import distributed
from .copies import has_fused_attention

COMPILE_FROM = 500  # steps: fewer would not win back the minute that compiling takes
# Versions of a block that dynamo may compile: one for each kind of layer, with and without gradients, of teacher,
# control and sparse model, for each batch size. Gemma needs 7 before batch sizes count, and dynamo gives up after 8.
VERSIONS = 64
CAPTURING = "output_capturing_hook"  # transformers' name for it


@contextmanager
def faster(models: list[nn.Module], settings: Training, device: str) -> Iterator[None]:
    """Within it the models compute faster. After it they are plain again: whoever looks inside next may want hooks."""
    compiling = _compiled(models) if compiles(settings, device) else nullcontext()
    with _sharing_kernels(models, device), compiling, _not_capturing(models):
        yield


@contextmanager
def _sharing_kernels(models: list[nn.Module], device: str) -> Iterator[None]:
    dense = [base for model in models if can_share_kernels(base := base_model(model), device)]
    before = [base.config._attn_implementation for base in dense]
    for base in dense:
        base.set_attn_implementation(UNGATED)
    try:
        yield
    finally:
        for base, attention in zip(dense, before, strict=True):
            base.set_attn_implementation(attention)


@contextmanager
def _compiled(models: list[nn.Module]) -> Iterator[None]:
    compiled = [block for model in models for block in blocks(model)]
    for block in compiled:
        block.compile()  # blocks alike share their compiled code
    try:
        with torch._dynamo.config.patch(recompile_limit=VERSIONS):
            yield
    finally:
        for block in compiled:
            block._compiled_call_impl = None


@contextmanager
def _not_capturing(models: list[nn.Module]) -> Iterator[None]:
    """Within it blocks in one graph are without what transformers collects outputs with: no graph can hold it."""
    whole = [block for model in models if in_one_graph(model) for block in blocks(model)]
    hooks = [(module, module._forward_hooks) for block in whole for module in block.modules()]
    for module, found in hooks:
        # Nobody asks for such outputs here.
        kept = [(key, hook) for key, hook in found.items() if getattr(hook, "__name__", "") != CAPTURING]
        module._forward_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        for module, found in hooks:
            module._forward_hooks = found


def can_share_kernels(model: Any, device: str) -> bool:
    """Whether a dense model's attention is as fast or faster by the kernels of the sparse one, with the same result."""
    if device != "cuda" or is_gated(model) or not has_fused_attention(model.config):
        return False
    return not any(getattr(module, "attention_dropout", 0) or is_active_dropout(module) for module in model.modules())


def is_active_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.p > 0 and module.training


def compiles(settings: Training, device: str) -> bool:
    if settings.compile == "auto":
        return device == "cuda" and settings.steps >= COMPILE_FROM and not distributed.sharded()
    return settings.compile == "yes"


def in_one_graph(model: nn.Module) -> bool:
    """Whether the model's blocks are compiled, gates and all.

    Checkpointed ones are not: counts left on a module would keep what was recomputed for it from being freed.
    """
    checkpointed: Any = base_model(model)
    return blocks(model)[0]._compiled_call_impl is not None and not checkpointed.is_gradient_checkpointing
