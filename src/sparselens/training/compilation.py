"""What makes a step faster on a GPU and changes nothing else: compiled blocks, a padded head, fused losses."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Training
from ..models.architectures import blocks
from ..runs import distributed

COMPILE_FROM = 500  # steps: fewer would not win back the minute that compiling takes
HEAD_MULTIPLE = 64  # vocabularies are padded to it
# Versions of a block that dynamo may compile: one for each kind of layer, with and without gradients, of teacher,
# control and sparse model, for each batch size. Gemma needs 7 before batch sizes count, and dynamo gives up after 8.
VERSIONS = 64


@contextmanager
def faster(models: list[nn.Module], settings: Training, device: str) -> Iterator[None]:
    """Within it the models compute faster. After it they are plain again: whoever looks inside next may want hooks."""
    compiled = [block for model in models for block in blocks(model)] if compiles(settings, device) else []
    for block in compiled:
        block.compile()  # blocks alike share their compiled code
    heads = []
    if device == "cuda" and not distributed.sharded():
        heads = [head for model in models if (head := pad_head(model)) is not None]
    try:
        with torch._dynamo.config.patch(recompile_limit=VERSIONS) if compiled else nullcontext():
            yield
    finally:
        for block in compiled:
            block._compiled_call_impl = None
        for head in heads:
            del head.forward


def compiles(settings: Training, device: str) -> bool:
    if settings.compile == "auto":
        return device == "cuda" and settings.steps >= COMPILE_FROM and not distributed.sharded()
    return settings.compile == "yes"


def pad_head(model: nn.Module) -> nn.Module | None:
    """Compute logits of a vocabulary such as GPT-2's 50,257 as if it were the next multiple of 64: the same logits.

    GPUs multiply such matrices several times faster. Returns the changed module, None where there is nothing to gain.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or head.bias is not None or head.out_features % HEAD_MULTIPLE == 0:
        return None

    def padded(hidden: Tensor) -> Tensor:
        size = head.out_features
        return F.linear(hidden, F.pad(head.weight, (0, 0, 0, -size % HEAD_MULTIPLE)))[..., :size]

    head.forward = padded
    return head


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def fused(function: Callable[..., Tensor], logits: Tensor) -> Callable[..., Tensor]:
    """The function, compiled on a GPU: of a small model's step, eager passes over the logits are half the time."""
    return _compiled(function) if logits.is_cuda else function
