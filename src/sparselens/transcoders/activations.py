"""Which features are active: JumpReLU, TopK, BatchTopK."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

Activation = Literal["jumprelu", "topk", "batchtopk"]


def check_activation(activation: str, k: int | None, n_features: int) -> Activation:
    """ValueError for an unknown activation, or a k that it does not have or cannot have."""
    if activation not in get_args(Activation):
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(get_args(Activation))}")
    if activation != "jumprelu" and (k is None or not 1 <= k <= n_features):
        raise ValueError(f"k={k}: {activation} expects between 1 and {n_features} (the features of a layer)")
    return activation  # type: ignore[return-value]  # one of them


def active(pre: Tensor, threshold: Tensor) -> Tensor:
    """JumpReLU's mask. A feature is never active below zero, whatever its threshold."""
    return (pre > threshold) & (pre > 0)


def topk_mask(pre: Tensor, k: int) -> Tensor:
    """The k largest positive pre-activations of every token; bool, like pre [n_tokens, n_features]."""
    return torch.zeros_like(pre, dtype=torch.bool).scatter_(1, pre.topk(k, 1).indices, True) & (pre > 0)


def batch_topk_mask(pre: Tensor, k: int) -> Tensor:
    """The k * n_tokens largest positive pre-activations of all tokens [n_tokens, n_features] together."""
    chosen = torch.zeros(pre.numel(), dtype=torch.bool, device=pre.device)
    chosen[pre.flatten().topk(k * len(pre), sorted=False).indices] = True
    return chosen.view_as(pre) & (pre > 0)


def batch_topk_threshold(pre: Tensor, k: int) -> float:
    """The number between the smallest chosen pre-activation and the largest one left out, never below zero."""
    ranked = pre.flatten().topk(min(k * len(pre) + 1, pre.numel())).values
    if len(ranked) <= k * len(pre):
        return 0.0  # everything positive is chosen
    smallest, next_one = ranked[-2], ranked[-1]
    middle = (smallest + next_one) / 2
    return max(0.0, (middle if middle < smallest else next_one).item())


class _JumpReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        on = active(pre, threshold)
        ctx.save_for_backward(pre, threshold, on)
        ctx.bandwidth = bandwidth
        return pre * on

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pre, threshold, on = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.bandwidth / 2
        return gradient * on, -(threshold / ctx.bandwidth) * near * gradient, None


def jumprelu(pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """pre where it exceeds its threshold, else 0, with a straight-through gradient for the threshold.

    The true derivative by the threshold is zero almost everywhere; over a small change of the data it is, on average,
    -threshold * density(pre = threshold). The density is estimated by a rectangle: 1/bandwidth for a pre-activation
    within bandwidth/2 of the threshold. pre and threshold have the same shape.
    """
    found: Tensor = _JumpReLU.apply(pre, threshold, bandwidth)  # type: ignore[no-untyped-call]
    return found
