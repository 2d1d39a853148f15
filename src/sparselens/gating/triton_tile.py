"""What every kernel does with a tile of pairs: load it, mask it, draw its noise, know which tiles hold pairs at all.

Logits are in base 2 throughout (the scale arrives multiplied by log2 e, the bias is multiplied on loading).
"""

import functools
import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import GOLDEN, MIX_1, MIX_2, column_keys

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
LOG2E = tl.constexpr(math.log2(math.e))
# a * b + c as one instruction with one rounding, in every kernel alike: forward and backward must draw the same gates.
FUSED = {"enable_fp_fusion": True}
# Row sums of w that the short path may be trusted with. Above: a product of two w would overflow (2 x 60 < 127).
# Below: terms flushed to zero (2^-126) could matter.
SUM_MIN, SUM_MAX = tl.constexpr(2.0**-80), tl.constexpr(2.0**60)
ODDS_MAX = tl.constexpr(60.0)  # log2 of the largest w; sigmoid is 1 in fp32 long before

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def reciprocal(x):
    """1/x to one unit in the last place; Triton's own division costs eight instructions instead of one."""
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    return x ^ (x >> 16)


@triton.jit
def seed_of(seed, IN_MEMORY: tl.constexpr):
    """The seed, which is a number or the address of one: what compiled graphs and graph replays can change."""
    if IN_MEMORY:
        return tl.load(seed)
    else:
        return seed


@triton.jit
def row_keys(seed, batch_head, position):
    """Slope and offset of the rows at these positions (reference.row_keys)."""
    head = mix(batch_head.to(tl.uint32) * _GOLDEN + seed.to(tl.uint32))
    word = mix(head + position.to(tl.uint32))
    return word | 1, mix(word + _GOLDEN)


@triton.jit
def draw(slope, offset, column):
    """Uniform noise of a tile (reference.uniform), fp32. The three words arrive broadcastable to the tile."""
    bits = slope * column + offset
    # 23 random bits under the exponent of 1.0 make a float in [1, 2): no integer conversion.
    one_to_two = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return one_to_two - 0.999999940395355224609375  # 1 - 2^-24


@triton.jit
def allowed(
    position, key, keys, DOCUMENT, batch, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr
):
    """Which pairs of a tile exist (reference.allowed_pairs), bool. position and key are broadcastable to the tile."""
    pairs = (position < keys) & (key < keys)
    if CAUSAL:
        pairs = pairs & (key <= position)
    if WINDOW:
        pairs = pairs & (position - key < window)
    if DOCS:
        of_query = tl.load(DOCUMENT + batch * keys + position, mask=position < keys, other=0)
        of_key = tl.load(DOCUMENT + batch * keys + key, mask=key < keys, other=0)
        pairs = pairs & (of_query == of_key) & (of_key != 0)
    return pairs


@triton.jit
def load_tile(BASE, row, column, stride, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """Rows of a [rows, D] matrix as [len(row), BLOCK_D]; out-of-range entries are 0."""
    pointers = BASE + row[:, None] * stride + column[None, :]
    if D != BLOCK_D:
        return tl.load(pointers, mask=(row < rows)[:, None] & (column < D)[None, :], other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
    else:
        return tl.load(pointers)


# ---------------------------------------------------------------- documents


@triton.jit
def document_bounds_kernel(
    DOCUMENT, BOUNDS, rows, columns, keys, row_shift, column_shift, R: tl.constexpr, C: tl.constexpr
):
    """Per tile of R rows: lo, hi, full_lo, full_hi over tiles of C columns, from document numbers alone.

    Tiles in [lo, hi) may hold a pair of one document; those in [full_lo, full_hi) hold nothing else. Work is quadratic
    but has neither heads nor d_head in it; memory is not quadratic.
    """
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    DOCUMENT += batch * keys
    row = tile * R + tl.arange(0, R)
    # Different impossible numbers for "past the end" and "padding" on the two sides: they match nothing.
    of_row = tl.load(DOCUMENT + row_shift + row, row < rows, other=0)
    of_row = tl.where(of_row == 0, -1, of_row)
    lo, hi, full_lo, full_hi = tl.cdiv(columns, C), 0, 0, 0
    for other in range(0, tl.cdiv(columns, C)):
        column = other * C + tl.arange(0, C)
        of_column = tl.load(DOCUMENT + column_shift + column, column < columns, other=0)
        same = (of_row[:, None] == of_column[None, :]).to(tl.int32)
        count = tl.sum(tl.sum(same, 1), 0)
        if count > 0:
            lo = tl.minimum(lo, other)
            hi = other + 1
        if count == R * C:
            if full_hi != other:  # a new run; of several runs the last one is used
                full_lo = other
            full_hi = other + 1
    BOUNDS += (batch * tl.num_programs(0) + tile) * 4
    tl.store(BOUNDS, lo)
    tl.store(BOUNDS + 1, hi)
    tl.store(BOUNDS + 2, full_lo)
    tl.store(BOUNDS + 3, full_hi)


def document_bounds(documents: Tensor, queries: int, R: int, C: int, rows_are_keys: bool) -> Tensor:
    """Tile ranges by document: int32 [batch, row tiles, 4]. Rows are queries, or keys for the backward pass."""
    batch, keys = documents.shape
    shift = keys - queries
    rows, columns = (keys, queries) if rows_are_keys else (queries, keys)
    row_shift, column_shift = (0, shift) if rows_are_keys else (shift, 0)
    bounds = torch.empty(batch, ceil_div(rows, R), 4, dtype=torch.int32, device=documents.device)
    grid = (bounds.shape[1], batch)
    sizes = (rows, columns, keys, row_shift, column_shift)
    launch(document_bounds_kernel, grid, (documents, bounds), (), sizes, (R, C), num_warps=4)
    return bounds


# ---------------------------------------------------------------- on the host


_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int], pointers: tuple, free: tuple, sizes: tuple, constants: tuple, **options: int
) -> None:
    """kernel[grid](*pointers, *free, *sizes, *constants), at a fraction of the host time from the second call on.

    Triton looks at every argument of every launch to find the right compiled kernel, which takes longer than a short
    attention runs. Here that is done once per combination of everything a compiled kernel can depend on: sizes (ints),
    constants, options, dtypes, alignment, device. `free` numbers (floats, the seed) are not specialised on.
    """
    if INTERPRET.value:
        kernel[grid](*pointers, *free, *sizes, *constants, **options)
        return
    dtypes: list[torch.dtype | None] = []
    address = 0
    for tensor in pointers:
        if tensor is None:
            dtypes.append(None)
        else:
            dtypes.append(tensor.dtype)
            address |= tensor.data_ptr()
    key = (id(kernel), sizes, constants, *options.items(), *dtypes, address & 15, torch.cuda.current_device())
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) > 4096:
            _compiled.clear()
        _compiled[key] = kernel[grid](*pointers, *free, *sizes, *constants, **options)
    else:
        compiled[(*grid, 1)](*pointers, *free, *sizes, *constants)


# Plain integers: triton.cdiv and triton.next_power_of_2 take microseconds each, and these run on every call.


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def block_of(d_head: int) -> int:
    """Width of the tiles that hold d_head columns."""
    return max(16, power_of_two(d_head))


@functools.lru_cache(maxsize=16)
def cached_column_keys(size: int, device: torch.device) -> Tensor:
    return column_keys(size, device)


def column_key_table(keys: int, device: torch.device) -> Tensor:
    """Hashed words of at least the first `keys` keys (they do not depend on the seed, so they are kept)."""
    return cached_column_keys(max(1024, power_of_two(keys)), device)


def unit_stride(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, which is all the kernels ask for."""
    return x if x.stride(-1) == 1 else x.contiguous()
