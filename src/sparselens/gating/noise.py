"""Uniform noise that depends only on (seed, batch, head, query, key).

Gates are redrawn in the backward pass, under gradient checkpointing and in kernels with different tile sizes, so the
draw for a pair must not depend on anything but its address. A stateful generator cannot promise that; a hash can.

    word(b, h, q) = mix(mix(seed + GOLDEN * (b * n_heads + h)) + q)
    slope, offset = word | 1, mix(word + GOLDEN)                       once per query
    col(k)        = mix(k + COLUMN)                                    once per key
    bits          = slope * col + offset                               once per pair: a single multiply-add
    u             = ((bits >> 9) + 1/2) / 2**23                        in (0, 1), never 0 or 1, exact in fp32

`mix` is a full 32-bit avalanche. A multiply-add with random slope and offset is the classic strongly universal hash:
any two draws of a row are independent, and so are all four draws of a 2 x 2 rectangle, because the two rows have
slopes and offsets of their own. Only the high bits are used, the low bits of a product being weaker
(tests/gating/test_noise.py checks moments, neighbours and rectangles). The fused kernel is why the per-pair step must
be this short: it draws one number for every pair, twice per training step (docs/kernels.md has the count).
All arithmetic is modulo 2**32. The fused kernel repeats these lines; a test compares them bit by bit.
"""

import torch
from torch import Tensor

GOLDEN, COLUMN = 0x9E3779B9, 0x68E31DA4
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B


def _signed(word: int) -> int:
    """The int32 with the same bits as this unsigned 32-bit word."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int32 (torch's own shift copies the sign bit)."""
    return (x >> n).bitwise_and_((1 << (32 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """Full-avalanche 32-bit hash of an int32 tensor."""
    x = (x ^ _shift(x, 16)) * _signed(MIX_1)
    x = (x ^ _shift(x, 15)) * _signed(MIX_2)
    return x ^ _shift(x, 16)


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
    seed: int, batch: int, n_heads: int, queries: int, keys: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Slope and offset of each query's row: two int32 [batch, n_heads, queries]."""
    # Queries are numbered from the end of the keys, so that a pair keeps its draw when a prompt is cut in two.
    query = _arange(queries, device) + (keys - queries)
    head = mix(_arange(batch * n_heads, device) * _signed(GOLDEN) + _signed(seed))
    word = mix(head[:, None] + query).view(batch, n_heads, queries)
    return word | 1, mix(word + _signed(GOLDEN))


def uniform(seed: int, batch: int, n_heads: int, queries: int, keys: int, device: torch.device | str) -> Tensor:
    """u in (0, 1) for every pair: fp32 [batch, n_heads, queries, keys]. `seed` is any int; 32 bits of it count."""
    slope, offset = row_keys(seed, batch, n_heads, queries, keys, device)
    bits = (slope[..., None] * column_keys(keys, device)).add_(offset[..., None])
    return _shift(bits, 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
