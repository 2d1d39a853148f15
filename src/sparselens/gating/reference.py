"""Gated attention in plain PyTorch: the specification every faster version is tested against.

For one query head, with masked pairs being no pairs at all:

    S = softcap(scale * Q K^T)             logits
    G = S + b                              gate logit, b one number per head
    A = [u * (1 + exp(-G)) < 1]            the gate: open with probability sigmoid(G)
    O = (A * softmax(S)) V                 normalise="all": softmax over every allowed key, not renormalised
    O = softmax over open keys of S, V     normalise="open"
    edges = sum of sigmoid(G)              when sampling: the expected number of open edges
    edges = sum of A                       otherwise: the number of open edges, with the gradient of the expected one

`u` is uniform noise when sampling and the constant 1/2 otherwise, which makes A = [G > 0]. The gate's gradient is
straight-through: in the backward pass A behaves as s = (1 - u) / ((1 - u) + u exp(-G)), a sigmoid of G plus logistic
noise (of G alone when u = 1/2). A row with every gate closed gives zero: the head does nothing there.

Noise is a hash of (seed, batch, head, query, key). Gates are redrawn in the backward pass, under gradient checkpointing
and in kernels with different tile sizes, so the draw for a pair must not depend on anything but its address. A stateful
generator cannot promise that; a hash can. All arithmetic is modulo 2**32:

    word(b, h, q) = mix(mix(seed + GOLDEN * (b * n_heads + h)) + q)
    slope, offset = word | 1, mix(word + GOLDEN)                       once per query
    col(k)        = mix(k + COLUMN)                                    once per key
    bits          = slope * col + offset                               once per pair: a single multiply-add
    u             = ((bits >> 9) + 1/2) / 2**23                        in (0, 1), never 0 or 1, exact in fp32

`mix` is a full 32-bit avalanche. A multiply-add with random slope and offset is the classic strongly universal hash:
any two draws of a row are independent, and so are all four draws of a 2 x 2 rectangle, because the two rows have
slopes and offsets of their own. Only the high bits are used, the low bits of a product being weaker
(tests/gating/test_noise.py checks moments, neighbours and rectangles). The fused kernel is why the per-pair step must
be this short: it draws one number for every pair, twice per training step (docs/kernels.md has the count). It repeats
these lines; a test compares them bit by bit.
"""

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

GOLDEN, COLUMN = 0x9E3779B9, 0x68E31DA4
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B


class PatternOptions(TypedDict, total=False):
    """How attention looks, beside queries, keys and bias: arguments of `gated_attention`, which explains them."""

    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    mask: Tensor | None
    sample: bool
    seed: int | Tensor
    normalise: str


class GatedPattern(NamedTuple):
    """What one gated attention layer looks at. All [batch, n_heads, queries, keys]; masked pairs are 0 / False."""

    weights: Tensor  # what multiplies V: gate * softmax, straight-through gradient
    gate: Tensor  # bool: open edges
    margin: Tensor  # G = S + b: how far the gate is from closing (-inf where masked)
    allowed: Tensor  # bool: pairs the mask allows


def allowed_pairs(
    queries: int, keys: int, *, causal: bool = True, window: int | None = None, mask: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
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
    q: Tensor, k: Tensor, bias: Tensor | float, *, scale: float | None = None, causal: bool = True,
    window: int | None = None, softcap: float | None = None, mask: Tensor | None = None, sample: bool = False,
    seed: int | Tensor = 0, normalise: str = "all",
) -> tuple[GatedPattern, Tensor]:  # fmt: skip
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

    scores = logits.masked_fill(~allowed, -torch.inf)
    if normalise == "all":
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min).detach()
        weight = torch.exp(scores - top)
        # A row without any pair (padding) divides 0 by 1 instead of 0 by 0.
        total = weight.sum(-1, keepdim=True)
        weights = through * (weight / torch.where(total > 0, total, 1.0))
    else:
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
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, **options: Unpack[PatternOptions]
) -> tuple[Tensor, Tensor]:
    """`gated_attention` computed in full: out [batch, n_heads, queries, d_head] and edges [batch, n_heads]."""
    batch, n_heads, queries, _ = q.shape
    n_kv_heads, keys, d_value = v.shape[1:]
    pattern, edges = gated_pattern(q, k, bias, **options)
    weights = pattern.weights.view(batch, n_kv_heads, n_heads // n_kv_heads * queries, keys)
    with torch.autocast(q.device.type, enabled=False):
        out = (weights @ v.to(weights.dtype)).view(batch, n_heads, queries, d_value)
    return out.to(v.dtype), edges


def dense_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    """Attention without gates over the same pairs; a row without any pair is zero. window: 0 for none."""
    pairs = allowed_pairs(
        q.shape[2], k.shape[2], causal=causal, window=window or None, mask=mask, device=q.device
    )  # fmt: skip
    exists = pairs.any(-1, keepdim=True)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs | ~exists, scale=scale)
    return torch.where(exists, out, 0.0)


def signed(word: int) -> int:
    """The int32 with the same bits as this unsigned 32-bit word."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int32 (torch's own shift copies the sign bit)."""
    return (x >> n).bitwise_and_((1 << (32 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """Full-avalanche 32-bit hash of an int32 tensor."""
    x = (x ^ _shift(x, 16)) * signed(MIX_1)
    x = (x ^ _shift(x, 15)) * signed(MIX_2)
    return x ^ _shift(x, 16)


def kernel_seed(seed: int | Tensor) -> int | Tensor:
    """The low 32 bits of `seed` as an int32: what noise is made of."""
    if isinstance(seed, Tensor):
        return seed if seed.dtype == torch.int32 else seed.to(torch.int32)  # keeps the low bits
    return signed(seed)


def layer_seed(seed: int, layer: int) -> int:
    """A different 32-bit seed for each layer (splitmix64, so that neighbouring seeds share nothing)."""
    z = (seed * 0x9E3779B97F4A7C15 + layer * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
    return (z ^ (z >> 31)) & 0xFFFFFFFF


def later_seed(seed: int, first: int, n_heads: int) -> int:
    """The seed with which sequence 0 draws what sequence `first` draws with `seed`: a batch may be run in parts."""
    return (seed + GOLDEN * first * n_heads) & 0xFFFFFFFF


def _arange(n: int, device: torch.device | str) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=device)


def column_keys(keys: int, device: torch.device | str) -> Tensor:
    """One hashed word per key: int32 [keys]. The same for every seed, so kernels keep it."""
    return mix(_arange(keys, device) + COLUMN)


def row_keys(
    seed: int | Tensor, batch: int, n_heads: int, queries: int, keys: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Slope and offset of each query's row: two int32 [batch, n_heads, queries]."""
    # Queries are numbered from the end of the keys, so that a pair keeps its draw when a prompt is cut in two.
    query = _arange(queries, device) + (keys - queries)
    head = mix(_arange(batch * n_heads, device) * signed(GOLDEN) + kernel_seed(seed))
    word = mix(head[:, None] + query).view(batch, n_heads, queries)
    return word | 1, mix(word + signed(GOLDEN))


def uniform(
    seed: int | Tensor, batch: int, n_heads: int, queries: int, keys: int, device: torch.device | str
) -> Tensor:
    """u in (0, 1) for every pair: fp32 [batch, n_heads, queries, keys]. seed: any int, or a tensor."""
    slope, offset = row_keys(seed, batch, n_heads, queries, keys, device)
    bits = (slope[..., None] * column_keys(keys, device)).add_(offset[..., None])
    return _shift(bits, 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
