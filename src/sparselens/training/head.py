"""Losses of all tokens without ever holding all their logits: head and loss, a stretch of tokens at a time.

Of a small model with a large vocabulary the logits are most of the memory and much of the time: 6 GiB for 65,536 tokens
of 49,152 words, times student and teacher, times what a loss makes of them. Here a stretch's logits, its loss and the
loss's gradient are computed together, and only the gradient at the hidden states (and at the head) is kept.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.architectures import base_model
from ..runs import distributed

MOST_LOGITS = 1 << 28  # of one model at once
MULTIPLE = 64  # vocabularies are padded to it on a GPU: GPT-2's 50,257 columns would take several times as long
_plain: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The model's head, if its logits are exactly what that gives (no softcap, no factor) and it is in one piece.

    Not looked up but tried, once per model, on two tokens: families differ, and strangers' may be registered.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear or distributed.world() > 1:
        return None
    if base not in _plain:
        seen: list[Tensor] = []
        hook = head.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            with torch.no_grad():
                logits = base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)).logits
        finally:
            hook.remove()
        _plain[base] = len(seen) == 1 and torch.equal(seen[0], logits)
    return head if _plain[base] else None


@contextmanager
def without_head(head: nn.Linear) -> Iterator[None]:
    """Within it the model gives its last hidden states where its logits were."""
    head.forward = lambda hidden: hidden  # type: ignore
    try:
        yield
    finally:
        del head.forward


def head_to_leave_out(model: nn.Module, tokens: int, always: bool = False) -> nn.Linear | None:
    """The head, where the logits of so many tokens had better be made in stretches; None where they may be whole."""
    size = base_model(model).get_output_embeddings().weight.shape[0]
    return plain_head(model) if always or tokens * size > MOST_LOGITS else None


def stretched_loss(hidden: Tensor, head: nn.Linear, labels: Tensor, base: tuple[Tensor, nn.Linear] | None) -> Tensor:
    """The sum over labelled tokens of KL(base || model), or of the cross-entropy where there is no base.

    hidden: [batch, tokens, d_model]. base: the teacher's hidden states and head, without gradients.
    """
    reference, base_head = base or (None, None)
    weights = (head.weight, head.bias, *((base_head.weight, base_head.bias) if base_head else (None, None)))
    result: Tensor = _Stretched.apply(hidden, reference, labels, *weights)  # type: ignore[no-untyped-call]
    return result


class _Stretched(torch.autograd.Function):
    """The gradient is made on the way forward, for a loss whose weight in the objective is known only later."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, reference: Tensor | None, labels: Tensor, weight: Tensor, bias: Tensor | None,
        base_weight: Tensor | None, base_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            matrix, offset = _padded(weight, bias, dtype)
            if reference is not None and base_weight is not None:
                base_matrix, base_offset = _padded(base_weight, base_bias, dtype)
                reference = reference.flatten(0, 1)
            states, targets = hidden.flatten(0, 1), labels.flatten()
            of_states = torch.empty_like(states)
            of_matrix = torch.zeros(matrix.shape, device=hidden.device) if ctx.needs_input_grad[3] else None
            of_offset = torch.zeros(len(matrix), device=hidden.device) if ctx.needs_input_grad[4] else None
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            rows = max(1, MOST_LOGITS // len(matrix))
            for first in range(0, len(states), rows):
                part = slice(first, first + rows)
                x = states[part].to(dtype)
                logits = F.linear(x, matrix, offset)
                if reference is None:
                    loss, gradient = _fast(cross_entropy, logits)(logits, targets[part], len(weight))
                else:
                    wanted = F.linear(reference[part].to(dtype), base_matrix, base_offset)
                    loss, gradient = _fast(divergence, logits)(logits, wanted, targets[part], len(weight))
                total += loss
                of_states[part] = gradient @ matrix
                if of_matrix is not None:
                    _add_product(of_matrix, gradient.T, x)
                if of_offset is not None:
                    of_offset += gradient.float().sum(0)
        size = len(weight)
        ctx.save_for_backward(
            of_states.view_as(hidden), None if of_matrix is None else of_matrix[:size].to(weight.dtype),
            None if of_offset is None else of_offset[:size].to(weight.dtype),
        )  # fmt: skip
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        scaled = [None if x is None else x * dloss for x in (of_hidden, of_weight, of_bias)]
        return scaled[0], None, None, scaled[1], scaled[2], None, None


def _padded(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Head and bias as they are multiplied with: on a GPU with rows of zeros up to the next multiple of 64."""
    missing = -len(weight) % MULTIPLE if weight.is_cuda else 0
    padded = weight.to(dtype) if not missing else F.pad(weight.to(dtype), (0, 0, 0, missing))
    return padded, None if bias is None else F.pad(bias.to(dtype), (0, missing))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the sum in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total += (a @ b).float()


def divergence(logits: Tensor, wanted: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(sum of KL(wanted || logits) over labelled rows, its gradient at the logits). Columns from `size` on are none."""
    used = (labels != -100)[:, None]
    ours, theirs = _log_softmax(logits, size), _log_softmax(wanted, size)
    probability = theirs.exp()
    kl = torch.where(probability > 0, probability * (theirs - ours), 0.0).sum(-1, keepdim=True)
    return (kl * used).sum(), ((ours.exp() - probability) * used).to(logits.dtype)


def cross_entropy(logits: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(sum of the cross-entropy over labelled rows, its gradient at the logits). Columns from `size` on are none."""
    used = (labels != -100)[:, None]
    ours = _log_softmax(logits, size)
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    loss = -torch.where(right, ours, 0.0).sum()  # no column of an unlabelled row is right
    return loss, ((ours.exp() - right.float()) * used).to(logits.dtype)


def _log_softmax(logits: Tensor, size: int) -> Tensor:
    logits = logits.float()
    if logits.shape[1] > size:
        logits = torch.where(torch.arange(logits.shape[1], device=logits.device) < size, logits, -torch.inf)
    return logits.log_softmax(-1)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _fast(function: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
    """The function, compiled on a GPU: eager passes over the logits would be half of a small model's step."""
    return _compiled(function) if logits.is_cuda else function
