"""Fused gated attention, backward: one pass over the pairs gives dq, dk, dv and dbias.

With w = exp(G) as in the forward pass, r = s(1 - s) the gate's straight-through slope, g the gradient at edges and
D = rowsum(dO * O), a pair needs

    dG = r P U + g p (1 - p)                    U = dO V^T
    dS = dG + P (A U - D)                       dV += (A P)^T dO,  dK += dS^T Q,  dQ += dS K

p = w / (1 + w) and s = (1 - u) w / ((1 - u) w + u) share one reciprocal. A block owns a tile of keys and walks over the
queries; its dk and dv stay in registers, dq is added to memory in fp32 (so dq is reproducible up to the order of fp32
additions; gates, edges, dk, dv and dbias are reproducible exactly). Gates are redrawn from the seed, from logits
computed by the same instructions as in the forward pass.
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


@triton.jit(do_not_specialize=["seed", "n_heads"])
def rows_kernel(
    OUT, DOUT, LSE, ROWS, WIDE, seed, stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
    n_heads, queries, keys, total,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, SAMPLE: tl.constexpr,
    SEED_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """What the main pass needs of each query, and which heads are wide (have row sums beyond the short path).

    ROWS is fp32 [4, total]: D = rowsum(dO * O), 1 / row sum of w, and the bits of the noise's slope and offset.
    """
    batch_head = tl.program_id(1)
    batch, head = (batch_head // n_heads).to(tl.int64), batch_head % n_heads
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, BLOCK_D)
    OUT += batch * stride_ob + head * stride_oh.to(tl.int64)
    DOUT += batch * stride_gb + head * stride_gh.to(tl.int64)
    out = load_tile(OUT, row, column, stride_on, queries, D, BLOCK_D, True).to(tl.float32)
    dout = load_tile(DOUT, row, column, stride_gn, queries, D, BLOCK_D, True).to(tl.float32)
    here = batch_head.to(tl.int64) * queries + row
    lse = tl.load(LSE + here, row < queries, other=float("inf"))
    tl.store(ROWS + here, tl.sum(out * dout, 1), row < queries)
    tl.store(ROWS + total + here, tl.exp2(-lse), row < queries)
    if SAMPLE:
        slope, offset = row_keys(seed_of(seed, SEED_IN_MEMORY), batch_head, row + (keys - queries))
        tl.store(ROWS + 2 * total + here, slope.to(tl.float32, bitcast=True), row < queries)
        tl.store(ROWS + 3 * total + here, offset.to(tl.float32, bitcast=True), row < queries)
    outside = (lse < float("inf")) & ((lse < tl.log2(SUM_MIN)) | (lse > tl.log2(SUM_MAX)))
    if tl.max(outside.to(tl.int32), 0) == 1:
        tl.store(WIDE + batch_head, 1.0)


@triton.jit
def query_range(
    first, M: tl.constexpr, N: tl.constexpr, queries, keys, window, BOUNDS, batch, tile,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """Query tiles for a key tile: [lo, hi) may hold pairs; those in [full_lo, full_hi) hold nothing but pairs."""
    shift = keys - queries  # position of query 0
    last = tl.minimum(first + N, keys) - 1
    lo, hi, full_lo, full_hi = 0, tl.cdiv(queries, M), 0, queries // M
    if CAUSAL:
        lo = tl.maximum(0, first - shift) // M
        full_lo = tl.cdiv(tl.maximum(0, last - shift), M)
    if WINDOW:
        hi = tl.minimum(hi, tl.cdiv(tl.maximum(0, last + window - shift), M))
        full_hi = tl.minimum(full_hi, tl.maximum(0, first + window - shift) // M)
    if DOCS:
        BOUNDS += (batch * tl.cdiv(keys, N) + tile) * 4
        lo = tl.maximum(lo, tl.load(BOUNDS))
        hi = tl.minimum(hi, tl.load(BOUNDS + 1))
        full_lo = tl.maximum(full_lo, tl.load(BOUNDS + 2))
        full_hi = tl.minimum(full_hi, tl.load(BOUNDS + 3))
    hi = tl.maximum(hi, lo)
    if first + N > keys:  # a tile that hangs over the end holds non-pairs everywhere
        full_hi = lo
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    return lo, hi, full_lo, full_hi


@triton.jit
def load_rows(BASE, row, rows, other, CHECK: tl.constexpr):
    if CHECK:
        return tl.load(BASE + row, row < rows, other=other)
    else:
        return tl.load(BASE + row)


@triton.jit
def backward_tiles(
    dk, dv, dbias, k, v, QUERY, DOUT, LSE, ROWS, DQUERY, stride_q, stride_g, noise_column, total, DOCUMENT,
    batch, key, lo, gap, skip, hi, queries, keys, window, scale, bias, dedges,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, SAMPLE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Adds query tiles lo..hi (of which `skip` tiles from `gap` on are left out) to dk, dv, dbias and, in memory, dq.

    Pairs lie transposed, [N keys, M queries], so that (A P)^T and dS^T are in place as left factors of dv and dk.
    """
    column = tl.arange(0, BLOCK_D)
    for step in tl.range(lo, hi - skip):
        tile = step
        if MASKED:
            tile = tl.where(step < gap, step, step + skip)
        row = tile * M + tl.arange(0, M)
        q = load_tile(QUERY, row, column, stride_q, queries, D, BLOCK_D, MASKED)
        dout = load_tile(DOUT, row, column, stride_g, queries, D, BLOCK_D, MASKED)
        x = tl.fma(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, bias)
        du = tl.dot(v, tl.trans(dout), input_precision="ieee")
        if MASKED:
            position = (row + (keys - queries))[None, :]
            pairs = allowed(position, key[:, None], keys, DOCUMENT, batch, window, CAUSAL, WINDOW, DOCS)
            x = tl.where(pairs, x, float("-inf"))
        if WIDE:
            w = tl.exp2(tl.minimum(x, ODDS_MAX))
            weight = tl.exp2(x - load_rows(LSE, row, queries, float("inf"), MASKED)[None, :])
        else:
            w = tl.exp2(x)
            weight = w * load_rows(ROWS + total, row, queries, 0.0, MASKED)[None, :]
        if DENSE:
            opened = weight
            ds = (weight * (du - load_rows(ROWS, row, queries, 0.0, MASKED)[None, :])).to(q.dtype)
        else:
            above = 1.0 + w
            if SAMPLE:
                slope = load_rows(ROWS + 2 * total, row, queries, 0.0, MASKED).to(tl.uint32, bitcast=True)
                offset = load_rows(ROWS + 3 * total, row, queries, 0.0, MASKED).to(tl.uint32, bitcast=True)
                u = draw(slope[None, :], offset[None, :], noise_column[:, None])
                numerator = w - u * w
                denominator = numerator + u
                gate = tl.where(u < numerator, 1.0, 0.0)
                both = reciprocal(above * denominator)
                p = w * (both * denominator)
                s = numerator * (both * above)
            else:
                gate = tl.where(x > 0.0, 1.0, 0.0)
                p = w * reciprocal(above)
                s = p
            opened = gate * weight
            dgate = tl.fma((s - s * s) * weight, du, dedges * (p - p * p))
            # Per-thread sums (a thread's elements repeat over 8 columns), reduced across threads once, at the end.
            dbias += tl.sum(tl.reshape(dgate, [N, M // 8, 8]), 1)
            delta = load_rows(ROWS, row, queries, 0.0, MASKED)
            ds = tl.fma(opened, du, dgate - weight * delta[None, :]).to(q.dtype)
        dv = tl.dot(opened.to(q.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot(ds, q, dk, input_precision="ieee")
        dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
        pointers = DQUERY + row[:, None] * D + column[None, :]
        if D != BLOCK_D:
            tl.atomic_add(pointers, dq, (row < queries)[:, None] & (column < D)[None, :], sem="relaxed")
        elif MASKED:
            tl.atomic_add(pointers, dq, (row < queries)[:, None], sem="relaxed")
        else:
            tl.atomic_add(pointers, dq, sem="relaxed")
    return dk, dv, dbias


@triton.jit(do_not_specialize=["n_heads", "group", "window"])
def backward_kernel(
    QUERY, KEY, VALUE, BIAS, DOCUMENT, BOUNDS, COLUMN_KEYS, DOUT, DEDGES, LSE, ROWS, WIDE, DQUERY, DKEY, DVALUE, DBIAS,
    scale, natural_scale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    n_heads, group, queries, keys, window, total,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, SAMPLE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one query head: its dk, dv and share of dbias; dq is accumulated in fp32 in memory."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    batch, head = (batch_head // n_heads).to(tl.int64), batch_head % n_heads
    QUERY += batch * stride_qb + head * stride_qh.to(tl.int64)
    DOUT += batch * stride_gb + head * stride_gh.to(tl.int64)
    KEY += batch * stride_kb + (head // group) * stride_kh.to(tl.int64)
    VALUE += batch * stride_vb + (head // group) * stride_vh.to(tl.int64)
    rows = batch_head.to(tl.int64) * queries
    LSE += rows
    ROWS += rows
    DQUERY += rows * D

    key = tile * N + tl.arange(0, N)
    column = tl.arange(0, BLOCK_D)
    k = load_tile(KEY, key, column, stride_kn, keys, D, BLOCK_D, True)
    v = load_tile(VALUE, key, column, stride_vn, keys, D, BLOCK_D, True)
    noise_column = tl.load(COLUMN_KEYS + key, mask=key < keys, other=0).to(tl.uint32, bitcast=True)
    bias = 0.0 if DENSE else tl.load(BIAS + head) * LOG2E
    dedges = 0.0 if DENSE else tl.load(DEDGES + batch_head)
    lo, hi, full_lo, full_hi = query_range(
        tile * N, M, N, queries, keys, window, BOUNDS, batch, tile, CAUSAL, WINDOW, DOCS
    )
    dk = tl.zeros([N, BLOCK_D], tl.float32)
    dv = tl.zeros([N, BLOCK_D], tl.float32)
    dbias = tl.zeros([N, 8], tl.float32)
    if tl.load(WIDE + batch_head) == 0.0:
        dk, dv, dbias = backward_tiles(
            dk, dv, dbias, k, v, QUERY, DOUT, LSE, ROWS, DQUERY, stride_qn, stride_gn, noise_column, total, DOCUMENT,
            batch, key, full_lo, 0, 0, full_hi, queries, keys, window, scale, bias, dedges,
            D, BLOCK_D, M, N, False, False, CAUSAL, WINDOW, DOCS, SAMPLE, DENSE,
        )  # fmt: skip
        dk, dv, dbias = backward_tiles(
            dk, dv, dbias, k, v, QUERY, DOUT, LSE, ROWS, DQUERY, stride_qn, stride_gn, noise_column, total, DOCUMENT,
            batch, key, lo, full_lo, full_hi - full_lo, hi, queries, keys, window, scale, bias,
            dedges, D, BLOCK_D, M, N, True, False, CAUSAL, WINDOW, DOCS, SAMPLE, DENSE,
        )  # fmt: skip
    else:
        dk, dv, dbias = backward_tiles(
            dk, dv, dbias, k, v, QUERY, DOUT, LSE, ROWS, DQUERY, stride_qn, stride_gn, noise_column, total, DOCUMENT,
            batch, key, lo, hi, 0, hi, queries, keys, window, scale, bias, dedges,
            D, BLOCK_D, M, N, True, True, CAUSAL, WINDOW, DOCS, SAMPLE, DENSE,
        )  # fmt: skip
    inside = (key < keys)[:, None] & (column < D)[None, :]
    DKEY += batch * stride_dkb + head * stride_dkh.to(tl.int64)
    DVALUE += batch * stride_dvb + head * stride_dvh.to(tl.int64)
    dk = (dk * natural_scale).to(DKEY.dtype.element_ty)
    tl.store(DKEY + key[:, None] * stride_dkn + column[None, :], dk, inside)
    tl.store(DVALUE + key[:, None] * stride_dvn + column[None, :], dv.to(DVALUE.dtype.element_ty), inside)
    tl.store(DBIAS + batch_head * tl.num_programs(0) + tile, tl.sum(dbias))


def backward_config(d_head: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and resources, the fastest measured on an H200 (docs/kernels.md)."""
    if dtype == torch.float32:
        tile = 32 if d_head <= 128 else 16
        return {"M": tile, "N": tile, "num_warps": 4, "num_stages": 1}
    if d_head > 128:  # the largest that needs no memory beside its 255 registers; not timed
        return {"M": 32, "N": 32, "num_warps": 8, "num_stages": 2}
    if d_head <= 64:
        return {"M": 64, "N": 64, "num_warps": 4, "num_stages": 2}
    return {"M": 32, "N": 128, "num_warps": 8, "num_stages": 2}


def accumulate(
    dout: Tensor, dedges: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    documents: Tensor | None, out: Tensor, lse: Tensor, scale: float, causal: bool, window: int, sample: bool,
    seed: int | Tensor, config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients as the main pass leaves them, for gradients `dout` at out and `dedges` [batch, n_heads] at edges.

    dq / scale [batch, n_heads, queries, d_head] in fp32; dk and dv of every query head [batch, n_heads, keys, d_head];
    dbias [batch, n_heads]. The rest as in `forward`. `op.finished` makes of them what they are called.
    """
    batch, n_heads, queries, d_head = q.shape
    n_kv_heads, keys = k.shape[1:3]
    group = n_heads // n_kv_heads
    config = dict(config or backward_config(d_head, q.dtype))
    M, N = config.pop("M"), config.pop("N")
    dout, q, k, v = unit_stride(dout), unit_stride(q), unit_stride(k), unit_stride(v)
    device, block_d = q.device, block_of(d_head)
    heads = batch * n_heads
    total = heads * queries

    # One zeroed buffer: dq in fp32, then one flag per head for "wide".
    accumulated = torch.zeros(total * d_head + heads, dtype=torch.float32, device=device)
    dq, wide = accumulated[: total * d_head].view(batch, n_heads, queries, d_head), accumulated[total * d_head :]
    rows = torch.empty(4, total, dtype=torch.float32, device=device)
    launch(
        rows_kernel, (ceil_div(queries, 64), heads), (out, dout, lse, rows, wide), (kernel_seed(seed),),
        (*out.stride()[:3], *dout.stride()[:3], n_heads, queries, keys, total),
        (d_head, block_d, 64, sample, isinstance(seed, Tensor)),
        num_warps=4,
    )  # fmt: skip

    # Grouped heads each write their own dk and dv, summed later: more blocks, evenly loaded, no waiting.
    if group == 1:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        dk, dv = (x.new_empty(batch, n_heads, keys, d_head) for x in (k, v))
    tiles = ceil_div(keys, N)
    dbias = torch.empty(batch, n_heads, tiles, dtype=torch.float32, device=device)
    bounds = None if documents is None else document_bounds(documents, queries, N, M, True)
    dedges = None if bias is None or dedges is None else dedges.contiguous()
    launch(
        backward_kernel, (tiles, heads),
        (q, k, v, bias, documents, bounds, column_key_table(keys, device), dout, dedges, lse, rows, wide,
         dq, dk, dv, dbias),
        (scale * LOG2E.value, scale),
        (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
         n_heads, group, queries, keys, window, total),
        (d_head, block_d, M, N, causal, window > 0, documents is not None, sample, bias is None),
        **FUSED, **config,
    )  # fmt: skip
    return dq, dk, dv, dbias.sum(-1)
