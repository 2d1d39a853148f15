"""Gated attention in plain PyTorch: the specification every faster version is tested against.

For one query head, with masked pairs being no pairs at all:

    S = softcap(scale * Q K^T)             logits
    G = S + b                              gate logit, b one number per head
    A = [u * (1 + exp(-G)) < 1]            the gate: open with probability sigmoid(G)
    O = (A * softmax(S)) V                 normalise="all": softmax over every allowed key, not renormalised
    O = softmax over open keys of S, V     normalise="open"
    edges = sum of sigmoid(G)              expected number of open edges

`u` is uniform noise when sampling and the constant 1/2 otherwise, which makes A = [G > 0]. The gate's gradient is
straight-through: in the backward pass A behaves as s = (1 - u) / ((1 - u) + u exp(-G)), a sigmoid of G plus logistic
noise (of G alone when u = 1/2). A row with every gate closed gives zero: the head does nothing there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .noise import uniform


class GatedPattern(NamedTuple):
    """What one gated attention layer looks at. All [batch, n_heads, queries, keys]; masked pairs are 0 / False."""

    weights: Tensor  # what multiplies V: gate * softmax, straight-through gradient
    gate: Tensor  # bool: open edges
    margin: Tensor  # G = S + b: how far the gate is from closing (-inf where masked)
    allowed: Tensor  # bool: pairs the mask allows


def allowed_pairs(
    queries: int,
    keys: int,
    *,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which (query, key) pairs exist: bool, broadcastable to [batch, n_heads, queries, keys].

    The last query stands on the last key, as in decoding with a cache. `mask` is one of
      [batch, keys]                  document number of each token, 0 for padding (a padding mask is the simple case)
      [batch or 1, heads or 1, queries, keys]   bool, True where the pair is allowed
    """
    query = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed & (key <= query)
    if window is not None:
        allowed = allowed & (query - key < window)
    if mask is None:
        return allowed
    if mask.ndim == 2:
        document = mask.to(torch.int32)
        same = document[:, keys - queries :, None] == document[:, None, :]
        return allowed & (same & (document != 0)[:, None, :])[:, None]
    return allowed & mask


def gated_pattern(
    q: Tensor,
    k: Tensor,
    bias: Tensor | float,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sample: bool = False,
    seed: int = 0,
    normalise: str = "all",
) -> tuple[GatedPattern, Tensor]:
    """The gated attention pattern and the edge counts [batch, n_heads] (arguments as in `gated_attention`)."""
    batch, n_heads, queries, d_head = q.shape
    n_kv_heads, keys = k.shape[1:3]
    # Half-precision inputs are scored in fp32, as the fused kernel does; fp64 stays fp64 for the tests.
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = d_head**-0.5 if scale is None else scale
    group = n_heads // n_kv_heads
    grouped = q.to(dtype).reshape(batch, n_kv_heads, group * queries, d_head)
    with torch.autocast(q.device.type, enabled=False):  # autocast would round the logits to bf16, and flip gates
        logits = (grouped @ k.to(dtype).transpose(-1, -2) * scale).view(batch, n_heads, queries, keys)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = allowed_pairs(queries, keys, causal=causal, window=window, mask=mask, device=q.device)

    bias = torch.as_tensor(bias, dtype=dtype, device=q.device)
    margin = logits + bias.reshape(-1, 1, 1)
    probability = torch.sigmoid(margin)
    if sample:
        u = uniform(seed, batch, n_heads, queries, keys, q.device).to(dtype)
        # Same numbers as (1 - u) / ((1 - u) + u exp(-G)), without overflow for G far below zero.
        surrogate = probability * (1 - u) / (probability * (1 - u) + (1 - probability) * u)
        hard = u < probability
    else:
        surrogate, hard = probability, margin > 0
    gate = hard & allowed
    # Value: the hard gate. Gradient: the surrogate's, also for closed edges.
    through = torch.where(allowed, gate.to(dtype) + (surrogate - surrogate.detach()), 0.0)

    if normalise == "all":
        scores = logits.masked_fill(~allowed, -torch.inf)
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min).detach()
        weight = torch.exp(scores - top)
        # A row without any pair (padding) divides 0 by 1 instead of 0 by 0.
        total = weight.sum(-1, keepdim=True)
        weights = through * (weight / torch.where(total > 0, total, 1.0))
    else:
        scores = logits.masked_fill(~allowed, -torch.inf)
        top = scores.masked_fill(~gate, -torch.inf).amax(-1, keepdim=True)
        top = torch.where(top.isfinite(), top, scores.amax(-1, keepdim=True)).clamp(min=torch.finfo(dtype).min)
        # Closed keys can outweigh every open one: they carry gradient only, and a bounded weight keeps it finite.
        weight = through * torch.exp((scores - top.detach()).clamp(max=0.0))
        total = weight.sum(-1, keepdim=True)
        weights = weight / torch.where(gate.any(-1, keepdim=True), total, 1.0)

    expected = torch.where(allowed, probability, 0.0).sum((-1, -2), dtype=dtype)
    # Deterministic gates report the edges that are really open, with the gradient of the expectation.
    edges = expected if sample else gate.sum((-1, -2)).to(dtype) + (expected - expected.detach())
    return GatedPattern(weights, gate, margin.masked_fill(~allowed, -torch.inf), allowed), edges


def gated_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, **options
) -> tuple[Tensor, Tensor]:
    """`gated_attention` computed in full: out [batch, n_heads, queries, d_head] and edges [batch, n_heads]."""
    batch, n_heads, queries, _ = q.shape
    n_kv_heads, keys, d_value = v.shape[1:]
    pattern, edges = gated_pattern(q, k, bias, **options)
    weights = pattern.weights.view(batch, n_kv_heads, n_heads // n_kv_heads * queries, keys)
    with torch.autocast(q.device.type, enabled=False):
        out = (weights @ v.to(weights.dtype)).view(batch, n_heads, queries, d_value)
    return out.to(v.dtype), edges
