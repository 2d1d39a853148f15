"""Inference with normalise="open": closed gates are not computed with, and in decoding their values are not read.

Only open edges enter the softmax here, so everything about a closed edge beyond the sign of its gate logit is waste.

Prefill, one block of M queries at a time:
1. Find: walk over the keys computing Q K^T only, and flag the keys that at least one of the M queries opens.
2. List: turn the flags into a list of key numbers.
3. Attend: gather the listed keys and values and run ordinary attention over them, closed gates masked.
The first step costs half the multiplications of dense attention and no exponential, the last shrinks with density.

Decode, one query against a cache: every key is scored, values are read only for keys some head of the group opens.

Every decision is exact: the result equals the reference's up to rounding, whatever the gates look like.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton import key_range
from .triton_tile import (
    LOG2E,
    allowed,
    block_of,
    ceil_div,
    document_bounds,
    launch,
    load_tile,
    power_of_two,
    unit_stride,
)

KEYS = 64  # keys per tile in decoding


@triton.jit
def flag_keys(
    FLAGS, threshold, q, KEY, stride_k, DOCUMENT, batch, position, lo, gap, skip, hi, keys, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """Writes for each key of tiles lo..hi (but `skip` tiles from `gap` on) whether some q k^T exceeds the threshold."""
    column = tl.arange(0, BLOCK_D)
    for step in tl.range(lo, hi - skip):
        tile = step
        if MASKED:
            tile = tl.where(step < gap, step, step + skip)
        key = tile * N + tl.arange(0, N)
        k = load_tile(KEY, key, column, stride_k, keys, D, BLOCK_D, MASKED)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        if MASKED:
            pairs = allowed(position[None, :], key[:, None], keys, DOCUMENT, batch, window, CAUSAL, WINDOW, DOCS)
            s = tl.where(pairs, s, float("-inf"))
        tl.store(FLAGS + key, (tl.max(s, 1) > threshold).to(tl.int8), mask=key < keys)


@triton.jit(do_not_specialize=["n_heads", "group", "window", "blocks"])
def prefill_kernel(
    QUERY, KEY, VALUE, BIAS, DOCUMENT, BOUNDS, FLAGS, LISTS, OUT, EDGES, scale,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, n_heads, group, queries, keys, window, blocks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GATHER: tl.constexpr, CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share the query blocks, so that flags and lists take memory linear in keys."""
    tiles = tl.cdiv(queries, M)
    FLAGS += tl.program_id(0).to(tl.int64) * keys
    LIST = LISTS + tl.program_id(0).to(tl.int64) * keys
    column = tl.arange(0, BLOCK_D)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        tile = tiles - 1 - block % tiles
        batch_head = block // tiles
        batch, head = (batch_head // n_heads).to(tl.int64), batch_head % n_heads
        q_base = QUERY + batch * stride_qb + head * stride_qh.to(tl.int64)
        k_base = KEY + batch * stride_kb + (head // group) * stride_kh.to(tl.int64)
        v_base = VALUE + batch * stride_vb + (head // group) * stride_vh.to(tl.int64)
        row = tile * M + tl.arange(0, M)
        position = row + (keys - queries)
        q = load_tile(q_base, row, column, stride_qn, queries, D, BLOCK_D, True)
        bias = tl.load(BIAS + head) * LOG2E
        lo, hi, full_lo, full_hi = key_range(
            tile * M, M, N, queries, keys, window, BOUNDS, batch, tile, CAUSAL, WINDOW, DOCS
        )
        # Rows past the end would open keys nobody asked for: the last block has no tiles without a mask.
        full_hi = tl.where(tile == tiles - 1, full_lo, full_hi)
        # S + b > 0 for some query, without scaling every logit; a hair lower, because rounding differs by a hair.
        threshold = -bias / scale - 1e-4 * tl.abs(bias / scale) - 1e-6
        flag_keys(
            FLAGS, threshold, q, k_base, stride_kn, DOCUMENT, batch, position, full_lo, 0, 0, full_hi, keys, window,
            D, BLOCK_D, N, False, CAUSAL, WINDOW, DOCS,
        )  # fmt: skip
        flag_keys(
            FLAGS, threshold, q, k_base, stride_kn, DOCUMENT, batch, position, lo, full_lo, full_hi - full_lo, hi, keys,
            window, D, BLOCK_D, N, True, CAUSAL, WINDOW, DOCS,
        )  # fmt: skip
        tl.debug_barrier()  # flags, and below the list, are read by other threads than wrote them
        found = tl.full([], 0, tl.int32)
        end = tl.minimum(hi * N, keys)
        for start in tl.range(lo * N, end, CHUNK):
            key = start + tl.arange(0, CHUNK)
            flag = tl.load(FLAGS + key, mask=key < end, other=0).to(tl.int32)
            tl.store(LIST + found + tl.cumsum(flag, 0) - 1, key, mask=flag != 0)
            found += tl.sum(flag, 0)
        tl.debug_barrier()

        acc = tl.zeros([M, BLOCK_D], tl.float32)
        total = tl.zeros([M], tl.float32)
        opened = tl.zeros([M], tl.float32)
        top = tl.zeros([M], tl.float32)  # open logits are positive
        for start in tl.range(0, found, GATHER):
            slot = start + tl.arange(0, GATHER)
            key = tl.load(LIST + slot, mask=slot < found, other=keys)
            k = load_tile(k_base, key, column, stride_kn, keys, D, BLOCK_D, True)
            v = load_tile(v_base, key, column, stride_vn, keys, D, BLOCK_D, True)
            x = tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, bias)
            pairs = allowed(position[:, None], key[None, :], keys, DOCUMENT, batch, window, CAUSAL, WINDOW, DOCS)
            gate = pairs & (x > 0.0)
            opened += tl.sum(tl.where(gate, 1.0, 0.0), 1)
            x = tl.where(gate, x, float("-inf"))
            new_top = tl.maximum(top, tl.max(x, 1))
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(x - new_top[:, None])
            total = total * shrink + tl.sum(weight, 1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        tl.debug_barrier()  # the next block overwrites the list
        out = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(OUT.dtype.element_ty)
        o_base = OUT + batch * stride_ob + head * stride_oh.to(tl.int64)
        inside = (row < queries)[:, None] & (column < D)[None, :]
        tl.store(o_base + row[:, None] * stride_on + column[None, :], out, inside)
        tl.store(EDGES + block, tl.sum(tl.where(row < queries, opened, 0.0)))


@triton.jit(do_not_specialize=["n_heads", "group", "window", "tiles_each"])
def decode_kernel(
    QUERY, KEY, VALUE, BIAS, DOCUMENT, PARTIAL, STATE, scale,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    n_heads, group, keys, window, tiles_each,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One query of each head of a group against a stretch of `tiles_each` tiles of keys: a partial softmax."""
    part, batch_group = tl.program_id(0), tl.program_id(1)
    n_groups = n_heads // group
    batch, kv_head = (batch_group // n_groups).to(tl.int64), batch_group % n_groups
    member = tl.arange(0, G)
    head = kv_head * group + member
    column = tl.arange(0, BLOCK_D)
    real = (member < group)[:, None] & (column < D)[None, :]
    q = tl.load(QUERY + batch * stride_qb + head[:, None] * stride_qh + column[None, :], real, other=0.0)
    bias = tl.load(BIAS + head, member < group, other=float("-inf")) * LOG2E
    KEY += batch * stride_kb + kv_head * stride_kh.to(tl.int64)
    VALUE += batch * stride_vb + kv_head * stride_vh.to(tl.int64)
    mine = 0
    if DOCS:
        mine = tl.load(DOCUMENT + batch * keys + keys - 1)

    acc = tl.zeros([G, BLOCK_D], tl.float32)
    total = tl.zeros([G], tl.float32)
    opened = tl.zeros([G], tl.float32)
    top = tl.zeros([G], tl.float32)
    first, last = part * tiles_each, tl.minimum((part + 1) * tiles_each, tl.cdiv(keys, N))
    if WINDOW:
        first = tl.maximum(first, tl.maximum(0, keys - window) // N)
    for tile in tl.range(first, last):
        key = tile * N + tl.arange(0, N)
        k = load_tile(KEY, key, column, stride_kn, keys, D, BLOCK_D, True)
        x = tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, bias[:, None])
        exists = key < keys
        if WINDOW:
            exists = exists & (keys - 1 - key < window)
        if DOCS:
            of_key = tl.load(DOCUMENT + batch * keys + key, key < keys, other=0)
            exists = exists & (of_key == mine) & (of_key != 0)
        x = tl.where(exists[None, :] & (x > 0.0), x, float("-inf"))
        needed = tl.max(x, 0) > 0.0
        if tl.max(needed.to(tl.int32), 0) != 0:
            inside = needed[:, None] & (column < D)[None, :]
            v = tl.load(VALUE + key[:, None] * stride_vn + column[None, :], inside, other=0.0)
            new_top = tl.maximum(top, tl.max(x, 1))
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(x - new_top[:, None])
            opened += tl.sum(tl.where(x > 0.0, 1.0, 0.0), 1)
            total = total * shrink + tl.sum(weight, 1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = new_top
    # [batch * n_heads, parts, ...]: sums relative to each part's own maximum.
    here = (batch * n_heads + head) * tl.num_programs(0) + part
    tl.store(PARTIAL + here[:, None] * D + column[None, :], acc, real)
    tl.store(STATE + here * 3, top, member < group)
    tl.store(STATE + here * 3 + 1, total, member < group)
    tl.store(STATE + here * 3 + 2, opened, member < group)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(PARTIAL, STATE, OUT, EDGES, parts, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """Adds the parts of one head's query, each rescaled to the common maximum."""
    here = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, BLOCK_D)
    STATE += (here * parts + part) * 3
    top = tl.load(STATE, part < parts, other=0.0)
    factor = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(STATE + 1, part < parts, other=0.0) * factor, 0)
    tl.store(EDGES + here, tl.sum(tl.load(STATE + 2, part < parts, other=0.0), 0))
    inside = (part < parts)[:, None] & (column < D)[None, :]
    acc = tl.load(PARTIAL + (here * parts + part)[:, None] * D + column[None, :], inside, other=0.0)
    out = tl.sum(acc * factor[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(OUT + here * D + column, out.to(OUT.dtype.element_ty), column < D)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def open_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, documents: Tensor | None, scale: float, causal: bool,
    window: int | None, config: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out like q, edges [batch, n_heads]) with deterministic gates, normalised over open edges; no gradients."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    if q.shape[2] == 1:
        return _decode(q, k, v, bias, documents, scale, window or 0, config or {})
    return _prefill(q, k, v, bias, documents, scale, causal, window or 0, config or {})


def _prefill(q, k, v, bias, documents, scale, causal, window, config):
    batch, n_heads, queries, d_head = q.shape
    n_kv_heads, keys = k.shape[1:3]
    if q.dtype == torch.float32:
        fastest = {"M": 32, "N": 32, "GATHER": 32, "num_warps": 4, "num_stages": 1, "programs": 2}
    else:
        fastest = {"M": 64, "N": 64, "GATHER": 64, "num_warps": 4, "num_stages": 3, "programs": 3, "maxnreg": 168}
        if d_head > 64:
            fastest |= {"N": 128, "programs": 2, "maxnreg": 255}
    config = fastest | config
    M, N, gather = config.pop("M"), config.pop("N"), config.pop("GATHER")
    tiles = ceil_div(queries, M)
    blocks = batch * n_heads * tiles
    per_processor = config.pop("programs")
    programs = blocks
    if q.is_cuda:
        programs = min(blocks, per_processor * multiprocessors(q.device))
    lists = torch.empty(programs, keys, dtype=torch.int32, device=q.device)
    flags = torch.empty(programs, keys, dtype=torch.int8, device=q.device)
    out = torch.empty_like(q)
    edges = torch.empty(batch, n_heads, tiles, dtype=torch.float32, device=q.device)
    bounds = None if documents is None else document_bounds(documents, queries, M, N, False)
    launch(
        prefill_kernel, (programs, 1), (q, k, v, bias, documents, bounds, flags, lists, out, edges),
        (scale * LOG2E.value,),
        (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], n_heads, n_heads // n_kv_heads, queries,
         keys, window, blocks),
        (d_head, block_of(d_head), M, N, gather, 1024, causal, window > 0, documents is not None),
        **config,
    )  # fmt: skip
    return out, edges.sum(-1)


def _decode(q, k, v, bias, documents, scale, window, config):
    batch, n_heads, _, d_head = q.shape
    n_kv_heads, keys = k.shape[1:3]
    group = n_heads // n_kv_heads
    config = {"num_warps": 4, "num_stages": 3, "parts": 64, **config}
    tiles = ceil_div(keys, KEYS)
    parts = config.pop("parts")
    if q.is_cuda:  # enough programs for about four on each multiprocessor
        parts = 4 * multiprocessors(q.device) // (batch * n_kv_heads)
    tiles_each = ceil_div(tiles, max(1, min(parts, tiles, 256)))
    parts = ceil_div(tiles, tiles_each)
    block_d = block_of(d_head)
    partial = torch.empty(batch, n_heads, parts, d_head, dtype=torch.float32, device=q.device)
    state = torch.empty(batch, n_heads, parts, 3, dtype=torch.float32, device=q.device)
    launch(
        decode_kernel, (parts, batch * n_kv_heads), (q, k, v, bias, documents, partial, state), (scale * LOG2E.value,),
        (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], n_heads, group, keys, window, tiles_each),
        (d_head, block_d, max(16, power_of_two(group)), KEYS, window > 0, documents is not None),
        **config,
    )  # fmt: skip
    out = torch.empty(batch, n_heads, 1, d_head, dtype=q.dtype, device=q.device)
    edges = torch.empty(batch, n_heads, dtype=torch.float32, device=q.device)
    launch(
        combine_kernel, (batch * n_heads, 1), (partial, state, out, edges), (), (parts,),
        (d_head, block_d, power_of_two(parts)),
    )  # fmt: skip
    return out, edges
