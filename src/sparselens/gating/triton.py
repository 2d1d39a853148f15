"""Fused gated attention, forward: the tiles, the noise and the arithmetic of `reference.py` in one Triton kernel.

Everything a pair needs comes from one number, its odds of being open, w = exp(G) = exp(S + b):

    softmax weight   P = w / (sum of w)              the bias cancels: it is the same for the whole row
    gate             A = [u < (1 - u) w]             the same event as u < sigmoid(G)
    open probability p = w / (1 + w)                 two pairs share one reciprocal

So a pair costs one exponential and half a reciprocal, and no running maximum, as long as w and its sum stay inside
fp32. The kernel assumes they do, checks the sums at the end, and repeats a block of rows with the usual running
maximum if they did not: large logits cost time, never accuracy. docs/kernels.md counts the instructions.

Shapes: q, out [batch, n_heads, queries, d_head]; k, v [batch, n_kv_heads, keys, d_head]; rows are queries, columns
keys; M and N are tile rows and columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import kernel_seed
from .triton_tile import (
    FUSED,
    LOG2E,
    ODDS_MAX,
    SUM_MAX,
    SUM_MIN,
    allowed,
    block_of,
    ceil_div,
    column_key_table,
    document_bounds,
    draw,
    launch,
    load_tile,
    reciprocal,
    row_keys,
    seed_of,
    unit_stride,
)


@triton.jit
def key_range(
    first, M: tl.constexpr, N: tl.constexpr, queries, keys, window, BOUNDS, batch, tile,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """Key tiles for a query tile: [lo, hi) may hold pairs; those in [full_lo, full_hi) hold nothing but pairs."""
    least = first + keys - queries
    most = tl.minimum(least + M, keys) - 1
    lo, hi, full_lo, full_hi = 0, tl.cdiv(keys, N), 0, keys // N
    if CAUSAL:
        hi = tl.cdiv(most + 1, N)
        full_hi = (least + 1) // N
    if WINDOW:
        lo = tl.maximum(0, least - window + 1) // N
        full_lo = tl.cdiv(tl.maximum(0, most - window + 1), N)
    if DOCS:
        BOUNDS += (batch * tl.cdiv(queries, M) + tile) * 4
        lo = tl.maximum(lo, tl.load(BOUNDS))
        hi = tl.minimum(hi, tl.load(BOUNDS + 1))
        full_lo = tl.maximum(full_lo, tl.load(BOUNDS + 2))
        full_hi = tl.minimum(full_hi, tl.load(BOUNDS + 3))
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.maximum(hi, lo))
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), tl.maximum(hi, lo))
    return lo, tl.maximum(hi, lo), full_lo, full_hi


@triton.jit
def forward_tiles(
    acc, total, opened, q, KEY, VALUE, stride_k, stride_v, COLUMN_KEYS, DOCUMENT, batch, position, slope, offset,
    lo, gap, skip, hi, keys, window, scale, bias,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, SAMPLE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Adds tiles lo..hi (of which `skip` tiles from `gap` on are left out) to acc = (A w) V, the sum of w, the edges.

    Sums are kept per thread (the 8 columns a thread's elements repeat over) and reduced across threads once, outside.
    """
    column = tl.arange(0, BLOCK_D)
    for step in tl.range(lo, hi - skip):
        tile = step
        if MASKED:
            tile = tl.where(step < gap, step, step + skip)
        key = tile * N + tl.arange(0, N)
        k = load_tile(KEY, key, column, stride_k, keys, D, BLOCK_D, MASKED)
        x = tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, bias)
        if MASKED:
            pairs = allowed(position[:, None], key[None, :], keys, DOCUMENT, batch, window, CAUSAL, WINDOW, DOCS)
            x = tl.where(pairs, x, float("-inf"))
        w = tl.exp2(x)
        even, odd = tl.split(tl.reshape(w, [M, N // 2, 2]))
        both = even + odd
        total += tl.sum(tl.reshape(both, [M, N // 8, 4]), 1)
        if SAMPLE:
            product = even * odd
            expected = (both + 2.0 * product) * reciprocal((1.0 + both) + product)
            opened += tl.sum(tl.reshape(expected, [M, N // 8, 4]), 1)
            if MASKED:
                noise_column = tl.load(COLUMN_KEYS + key, mask=key < keys, other=0)
            else:
                noise_column = tl.load(COLUMN_KEYS + key)
            u = draw(slope[:, None], offset[:, None], noise_column.to(tl.uint32, bitcast=True)[None, :])
            w = tl.where(u < w - u * w, 1.0, 0.0) * w
        elif not DENSE:
            gate = tl.where(x > 0.0, 1.0, 0.0)
            even, odd = tl.split(tl.reshape(gate, [M, N // 2, 2]))
            opened += tl.sum(tl.reshape(even + odd, [M, N // 8, 4]), 1)
            w = gate * w
        v = load_tile(VALUE, key, column, stride_v, keys, D, BLOCK_D, MASKED)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision="ieee")
    return acc, total, opened


@triton.jit
def forward_tiles_any_range(
    q, KEY, VALUE, stride_k, stride_v, COLUMN_KEYS, DOCUMENT, batch, position, slope, offset, lo, hi, keys, window,
    scale, bias, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, SAMPLE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The same with a running maximum, for logits of any size: (acc, row sums and edges as [M], row maximum)."""
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    total = tl.zeros([M], tl.float32)
    opened = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    for tile in tl.range(lo, hi):
        key = tile * N + tl.arange(0, N)
        k = load_tile(KEY, key, column, stride_k, keys, D, BLOCK_D, True)
        x = tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, bias)
        pairs = allowed(position[:, None], key[None, :], keys, DOCUMENT, batch, window, CAUSAL, WINDOW, DOCS)
        x = tl.where(pairs, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(x - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if SAMPLE:
            w = tl.exp2(tl.minimum(x, ODDS_MAX))
            opened += tl.sum(w * reciprocal(1.0 + w), 1)
            noise_column = tl.load(COLUMN_KEYS + key, mask=key < keys, other=0)
            u = draw(slope[:, None], offset[:, None], noise_column.to(tl.uint32, bitcast=True)[None, :])
            weight = tl.where(u < w - u * w, 1.0, 0.0) * weight
        elif not DENSE:
            gate = tl.where(x > 0.0, 1.0, 0.0)
            opened += tl.sum(gate, 1)
            weight = gate * weight
        v = load_tile(VALUE, key, column, stride_v, keys, D, BLOCK_D, True)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, total, opened, top


@triton.jit(do_not_specialize=["seed", "n_heads", "group", "window"])
def forward_kernel(
    QUERY, KEY, VALUE, BIAS, DOCUMENT, BOUNDS, COLUMN_KEYS, OUT, LSE, EDGES, scale, seed,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, n_heads, group, queries, keys, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, SAMPLE: tl.constexpr, ANY_RANGE: tl.constexpr,
    SEED_IN_MEMORY: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: out, log2 of the row sums of w, and this block's share of the edges."""
    # The last queries see the most keys: start them first, so that no long block is left alone at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head = tl.program_id(1)
    batch, head = (batch_head // n_heads).to(tl.int64), batch_head % n_heads
    QUERY += batch * stride_qb + head * stride_qh.to(tl.int64)
    KEY += batch * stride_kb + (head // group) * stride_kh.to(tl.int64)
    VALUE += batch * stride_vb + (head // group) * stride_vh.to(tl.int64)
    OUT += batch * stride_ob + head * stride_oh.to(tl.int64)

    row = tile * M + tl.arange(0, M)
    position = row + (keys - queries)
    column = tl.arange(0, BLOCK_D)
    q = load_tile(QUERY, row, column, stride_qn, queries, D, BLOCK_D, True)
    bias = 0.0 if DENSE else tl.load(BIAS + head) * LOG2E
    slope, offset = row_keys(seed_of(seed, SEED_IN_MEMORY), batch_head, position)
    lo, hi, full_lo, full_hi = key_range(
        tile * M, M, N, queries, keys, window, BOUNDS, batch, tile, CAUSAL, WINDOW, DOCS
    )
    # A row exists unless it lies past the end or is padding; rows that exist have at least one pair, their own key.
    exists = row < queries
    if DOCS:
        exists = exists & (tl.load(DOCUMENT + batch * keys + position, mask=exists, other=0) != 0)

    trusted = False
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    lse = tl.zeros([M], tl.float32)
    edges = 0.0
    if not ANY_RANGE:
        total = tl.zeros([M, 4], tl.float32)
        opened = tl.zeros([M, 4], tl.float32)
        acc, total, opened = forward_tiles(
            acc, total, opened, q, KEY, VALUE, stride_kn, stride_vn, COLUMN_KEYS, DOCUMENT, batch, position, slope,
            offset, full_lo, 0, 0, full_hi, keys, window, scale, bias,
            D, BLOCK_D, M, N, False, CAUSAL, WINDOW, DOCS, SAMPLE, DENSE,
        )  # fmt: skip
        acc, total, opened = forward_tiles(
            acc, total, opened, q, KEY, VALUE, stride_kn, stride_vn, COLUMN_KEYS, DOCUMENT, batch, position, slope,
            offset, lo, full_lo, full_hi - full_lo, hi, keys, window, scale, bias,
            D, BLOCK_D, M, N, True, CAUSAL, WINDOW, DOCS, SAMPLE, DENSE,
        )  # fmt: skip
        row_sum = tl.sum(total, 1)
        inside = (row_sum >= SUM_MIN) & (row_sum <= SUM_MAX)  # False for NaN as well
        trusted = tl.max((exists & (inside == 0)).to(tl.int32), 0) == 0
        edges = tl.sum(tl.where(exists[:, None], opened, 0.0))
        lse = tl.where(exists, tl.log2(tl.where(inside, row_sum, 1.0)), float("inf"))
    if not trusted:
        acc, row_sum, row_opened, top = forward_tiles_any_range(
            q, KEY, VALUE, stride_kn, stride_vn, COLUMN_KEYS, DOCUMENT, batch, position, slope, offset, lo, hi, keys,
            window, scale, bias, D, BLOCK_D, M, N, CAUSAL, WINDOW, DOCS, SAMPLE, DENSE,
        )  # fmt: skip
        edges = tl.sum(tl.where(exists, row_opened, 0.0))
        lse = tl.where(exists, tl.log2(row_sum) + top, float("inf"))
    out = acc * tl.where(exists, 1.0 / row_sum, 0.0)[:, None]
    # Rows that do not exist may hold 0 * inf.
    out = tl.where(exists[:, None], out, 0.0).to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * stride_on + column[None, :], out, (row < queries)[:, None] & (column < D)[None, :])
    tl.store(LSE + batch_head.to(tl.int64) * queries + row, lse, row < queries)
    tl.store(EDGES + batch_head * tl.num_programs(0) + tile, edges)


def forward_config(d_head: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and resources, the fastest measured on an H200 (docs/kernels.md)."""
    if dtype == torch.float32:
        tile = 32 if d_head <= 128 else 16
        return {"M": tile, "N": tile, "num_warps": 4, "num_stages": 1}
    if d_head > 128:  # the largest that needs no memory beside its 255 registers; not timed
        return {"M": 64, "N": 32, "num_warps": 4, "num_stages": 2}
    if d_head <= 64:  # 128 registers: four blocks on a multiprocessor, one multiplies while another exponentiates
        return {"M": 64, "N": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
    return {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3}


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, documents: Tensor | None, scale: float, causal: bool,
    window: int, sample: bool, seed: int | Tensor, config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out like q, edges [batch, n_heads] fp32, log2 row sums of w [batch, n_heads, queries] fp32).

    bias: fp32 [n_heads]; None: no gates, dense attention, edges 0. documents: int32 [batch, keys] or None.
    window: 0 for none. seed: an int, or a tensor of one.
    """
    batch, n_heads, queries, d_head = q.shape
    n_kv_heads, keys = k.shape[1:3]
    config = dict(config or forward_config(d_head, q.dtype))
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    out = torch.empty_like(q)
    lse = torch.empty(batch, n_heads, queries, dtype=torch.float32, device=q.device)
    M, N = config.pop("M"), config.pop("N")
    tiles = ceil_div(queries, M)
    edges = torch.empty(batch, n_heads, tiles, dtype=torch.float32, device=q.device)
    bounds = None if documents is None else document_bounds(documents, queries, M, N, False)
    any_range = q.dtype == torch.float16  # fp16 cannot hold w beyond 2^15: always with the running maximum
    launch(
        forward_kernel, (tiles, batch * n_heads),
        (q, k, v, bias, documents, bounds, column_key_table(keys, q.device), out, lse, edges),
        (scale * LOG2E.value, kernel_seed(seed)),
        (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], n_heads, n_heads // n_kv_heads, queries,
         keys, window),
        (d_head, block_of(d_head), M, N, causal, window > 0, documents is not None, sample, any_range,
         isinstance(seed, Tensor), bias is None),
        **FUSED, **config,
    )  # fmt: skip
    return out, edges.sum(-1), lse  # blocks' shares, added in a fixed order
