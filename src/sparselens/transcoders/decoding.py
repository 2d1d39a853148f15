"""Which features are active (JumpReLU, TopK, BatchTopK), and work on these alone: reading, writing reconstructions.

A layer's activations are a matrix [tokens, n_features] that is almost entirely zero. Multiplying it with a decoder
[n_features, targets * d_model] costs tokens * n_features * targets * d_model; the same sum over its non-zero entries
costs n_entries * targets * d_model. `Entries` lists them, ordered by token:

  1. `entries(mask)`          which (token, feature) pairs take part
  2. `read(...)`              the pre-activations there, with gradient for the encoder rows that took part
  3. `spread(...)`            a number of each feature (its threshold, its decoder's norm), repeated for its entries
  4. `write(...)`             the weighted sum of decoder rows per token, with gradient for values and decoder rows

A dense product does more sums, but faster ones; above a share of active entries that depends on the machine
(`dense_is_faster`, measured by benchmarks/transcode.py) `decode` uses it instead of `write`.

The gradients of all weights are one operation, sum over a feature's entries of (number * row): an embedding bag
with the roles of tokens and features exchanged. It needs no atomics, so it gives the same bits every time.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Entries:
    """(token, feature) pairs, ordered by token."""

    tokens: Tensor  # [n]
    features: Tensor  # [n]
    offsets: Tensor  # [n_tokens + 1]: where each token's pairs begin
    n_features: int

    @cached_property
    def by_feature(self) -> tuple[Tensor, Tensor]:
        """(order [n] that sorts the pairs by feature, offsets [n_features + 1])."""
        order = self.features.argsort(stable=True)
        return order, _offsets(torch.bincount(self.features, minlength=self.n_features))

    def sum_by_feature(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """[n_features, d]: per feature, the sum over its pairs of number [n] times its token's row [n_tokens, d]."""
        order, offsets = self.by_feature
        return _bags(rows, self.tokens[order], offsets, numbers[order])

    def count_by_feature(self, numbers: Tensor) -> Tensor:
        """[n_features]: for every feature, the sum over its pairs of number [n]."""
        order, offsets = self.by_feature
        # Differences of one running sum would lose small numbers; a bag of ones keeps them.
        return _bags(numbers[order, None], torch.arange(len(order), device=order.device), offsets, None)[:, 0]


def entries(mask: Tensor) -> Entries:
    """The True pairs of a mask [n_tokens, n_features]."""
    tokens, features = mask.nonzero(as_tuple=True)
    return Entries(tokens, features, _offsets(mask.sum(1)), mask.shape[1])


def read(x: Tensor, weight: Tensor, bias: Tensor, pre: Tensor, at: Entries) -> Tensor:
    """[n]: the pre-activations `pre` [n_tokens, n_features] = x @ weight.T + bias at the entries.

    pre is computed without gradient; weight [n_features, d_model] and bias get theirs from the entries alone.
    """
    return _Read.apply(x, weight, bias, pre, at)  # type: ignore[no-any-return,no-untyped-call]


def spread(numbers: Tensor, at: Entries) -> Tensor:
    """[n]: every entry's own number of its feature, from [n_features]."""
    return _Spread.apply(numbers, at)  # type: ignore[no-any-return,no-untyped-call]


def write(values: Tensor, at: Entries, weight: Tensor) -> Tensor:
    """[n_tokens, targets, d_model]: for every token, the sum over its entries of value [n] times the feature's rows.

    weight: [n_features, targets, d_model]. Computes in the dtype of `values`; weight's gradient has weight's dtype.
    """
    found: Tensor = _Write.apply(values, weight.flatten(1), at)  # type: ignore[no-untyped-call]
    return found.view(len(found), *weight.shape[1:])


def decode(values: Tensor, at: Entries, weight: Tensor) -> Tensor:
    """What `write` gives, by whichever way is faster here."""
    return write_densely(values, at, weight) if dense_is_faster(values, at) else write(values, at, weight)


def write_densely(values: Tensor, at: Entries, weight: Tensor) -> Tensor:
    """What `write` gives, as one product with the full matrix of activations."""
    full = values.new_zeros(len(at.offsets) - 1, at.n_features).index_put((at.tokens, at.features), values)
    return (full @ weight.flatten(1).to(values.dtype)).view(len(full), *weight.shape[1:])


def dense_is_faster(values: Tensor, at: Entries) -> bool:
    """Whether so many features are active that the dense product wins: one in 8 on a CPU, 60 in fp32, 1,250 in bf16."""
    one_in = 8 if values.device.type == "cpu" else 60 if values.dtype == torch.float32 else 1250
    return len(at.tokens) * one_in > (len(at.offsets) - 1) * at.n_features


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pre: Tensor, at: Entries) -> Tensor:
        ctx.save_for_backward(x)
        ctx.at = at
        return pre[at.tokens, at.features].to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        return None, ctx.at.sum_by_feature(gradient, x), ctx.at.count_by_feature(gradient), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, at: Entries) -> Tensor:
        ctx.at = at
        return numbers[at.features]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.at.count_by_feature(gradient), None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, at: Entries) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.at = at
        return _bags(weight.to(values.dtype), at.features, at.offsets, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        at, gradient = ctx.at, gradient.contiguous()
        dots = _dots(gradient.to(weight.dtype), weight, at).to(values.dtype)
        return dots, at.sum_by_feature(values, gradient).to(weight.dtype), None


def _dots(rows: Tensor, weight: Tensor, at: Entries) -> Tensor:
    """[n]: for every pair, the product of its token's row and its feature's row, without gathering either.

    It is what PyTorch computes as the gradient of an embedding bag's weights. Called directly, it saves a forward pass.
    On a GPU it knows no bfloat16, so it gets the fp32 master weights.
    """
    backward = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return backward(rows, weight, at.features, at.offsets, at.tokens, 0)  # type: ignore[no-any-return]  # 0: a sum


def _bags(rows: Tensor, indices: Tensor, offsets: Tensor, numbers: Tensor | None) -> Tensor:
    return F.embedding_bag(indices, rows, offsets, mode="sum", per_sample_weights=numbers, include_last_offset=True)


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0))


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
    return _JumpReLU.apply(pre, threshold, bandwidth)  # type: ignore[no-any-return,no-untyped-call]
