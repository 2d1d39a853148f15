"""How fast the fused kernels are on this GPU, beside PyTorch's own dense attention: `sparselens bench kernels`.

Every ratio is taken in one run: ours and scaled_dot_product_attention (SDPA), same tensors, same clock, medians of
repeated runs with the cache flushed in between. `sdpa_ms` is SDPA's flash backend; `cudnn_ms`, where that backend
exists, is the faster one PyTorch prefers on recent GPUs. `device_ratio` leaves the host's launching time out on both
sides, which is what decides short calls. Peak memory counts inputs, outputs and gradients.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..gating import gated_attention
from ..runs.run import check_writable, write_json

Row = dict[str, float | str]  # one measurement: shape, mode, milliseconds, ratios
Call = Callable[[], object]
Shape = tuple[int, int, int, int, int]  # batch, heads, kv_heads, tokens, d_head
ISSUE = [(16, 12, 12, 1024, 64), (2, 32, 32, 2048, 128), (2, 32, 32, 4096, 64)]
LONG = [(1, 32, 32, 8192, 64), (1, 16, 16, 16384, 64), (1, 32, 32, 8192, 128), (1, 16, 16, 16384, 128)]
GROUPED = [(16, 9, 3, 1024, 64), (2, 32, 8, 4096, 128)]
LADDER = [(1, 16, 16, tokens, 64) for tokens in (1024, 2048, 4096, 8192, 16384, 32768)]
MODES = ("forward-sampled", "forward-deterministic", "train-sampled")
DIMENSIONS = ("batch", "heads", "kv_heads", "tokens", "d_head")
NOTES = ("cudnn_ms", "device_ratio", "reference_ms", "density", "local", "sinks")


def bench_kernels(
    quick: bool = False, json_path: str | Path | None = None, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measure, print a table, write JSON if asked. quick: three shapes and the reference, under two minutes."""
    if not torch.cuda.is_available():
        raise ValueError("`bench kernels` measures CUDA kernels and found no CUDA device")
    check_writable(None if json_path is None else Path(json_path))
    where, slopes = environment(), dict[str, float]()
    say(" ".join(f"{key}={value}" for key, value in where.items()))
    times, memory = f"{'ours ms':>8} {'SDPA ms':>8} {'ratio':>6}", f"{'MiB':>7} {'SDPA':>7}"
    say(f"{'mode':22} {'batch,heads,kv,tokens,d':>24} {times} {memory}")
    rows = [told(row, say) for shape in ISSUE + ([] if quick else LONG + GROUPED) for row in attention_rows(shape)]
    if quick:
        rows.append(told(reference_row(), say))
    else:
        ladder = [told(attention_rows(shape, ("train-sampled",))[0], say) for shape in LADDER]
        rows += ladder
        for name in ("ours", "sdpa"):
            first, last = (float(row[f"{name}_mib"]) for row in (ladder[0], ladder[-1]))
            slope = math.log(last / first) / math.log(LADDER[-1][3] / LADDER[0][3])  # in tokens
            slopes[f"memory_slope_{name}"] = round(slope, 3)
        say(f"memory grows as tokens^{slopes['memory_slope_ours']} (SDPA {slopes['memory_slope_sdpa']})")
    result: dict[str, object] = {"environment": where, "rows": rows, **slopes}
    if json_path is not None:
        write_json(Path(json_path), result)
    return result


def told(row: Row, say: Callable[[str], None]) -> Row:
    """The row, after it was said."""
    shape, note = ",".join(str(row[key]) for key in DIMENSIONS), " ".join(f"{k}={row[k]}" for k in row if k in NOTES)
    times = f"{row['ours_ms']:8.3f} {row['sdpa_ms']:8.3f} {row['ratio']:6.2f}"
    say(f"{row['mode']:22} {shape:>24} {times} {row['ours_mib']:7.0f} {row['sdpa_mib']:7.0f} {note}")
    return row


def environment() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda),
        "triton": triton.__version__, "dtype": "bfloat16", "command": "sparselens bench kernels",
    }  # fmt: skip


# ---- measuring -------------------------------------------------------------------------------------------------------


def median_ms(function: Call) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=25, rep=100, return_mode="median"))


def peak_mib(function: Call) -> float:
    """Peak memory while `function` runs, everything alive included, after it has run once."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def cudnn_ms(function: Call) -> Row:
    """{"cudnn_ms": ...} where SDPA has a cuDNN backend for this call, {} elsewhere."""
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return {"cudnn_ms": round(median_ms(function), 4)}
    except RuntimeError:
        return {}


def device_only(ours: Call, dense: Call) -> Row:
    """Both replayed from a CUDA graph: what the device needs when it never waits for the host to launch.

    A training step of a large model hides the host's time; a loop over one small attention does not.
    """
    from triton.testing import do_bench_cudagraph

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ours_ms, sdpa_ms = (float(do_bench_cudagraph(f, rep=50, return_mode="median")) for f in (ours, dense))
    times = {"ours_device_ms": ours_ms, "sdpa_device_ms": sdpa_ms, "device_ratio": ours_ms / sdpa_ms}
    return {name: round(value, 4) for name, value in times.items()}


def row_of(shape: Shape, mode: str, ours: Call, dense: Call, **notes: Any) -> Row:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which our kernels do not ask
        ours_ms, sdpa_ms, ours_mib, sdpa_mib = (f(run) for f in (median_ms, peak_mib) for run in (ours, dense))
    return {
        **dict(zip(DIMENSIONS, shape, strict=True)), "dtype": "bfloat16", "mode": mode, "ours_ms": round(ours_ms, 4),
        "sdpa_ms": round(sdpa_ms, 4), "ratio": round(ours_ms / sdpa_ms, 3), "ours_mib": round(ours_mib, 1),
        "sdpa_mib": round(sdpa_mib, 1), **notes,
    }  # fmt: skip


def random_inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and gate biases that all want gradients."""
    batch, heads, kv_heads, tokens, d_head = shape
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, tokens, d_head, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    return q, k, v, torch.full((heads,), -2.0, device="cuda", requires_grad=True)


def attention_rows(shape: Shape, modes: tuple[str, ...] = MODES) -> list[Row]:
    q, k, v, bias = inputs = random_inputs(shape)
    dout, dedges = torch.randn_like(q), torch.randn(shape[:2], device="cuda")

    def train() -> None:
        torch.autograd.grad(gated_attention(q, k, v, bias, sample=True, seed=1), inputs, (dout, dedges))

    def dense_train() -> None:
        torch.autograd.grad(sdpa(q, k, v), inputs[:3], dout)

    rows = []
    for mode in modes:
        if mode == "train-sampled":
            row = row_of(shape, mode, train, dense_train) | cudnn_ms(dense_train)
            rows.append(row | (device_only(train, dense_train) if shape[3] <= 4096 else {}))
            continue
        with torch.no_grad():
            ours = partial(gated_attention, q, k, v, bias, sample=mode == "forward-sampled", seed=1)
            rows.append(row_of(shape, mode, ours, partial(sdpa, q, k, v)) | cudnn_ms(partial(sdpa, q, k, v)))
    return rows


def reference_row() -> Row:
    """One training shape, small enough for the reference's queries x keys tensors."""
    shape = (2, 12, 12, 1024, 64)
    (row,) = attention_rows(shape, ("train-sampled",))
    q, k, v, bias = inputs = random_inputs(shape)

    def reference() -> None:
        out, edges = gated_attention(q, k, v, bias, sample=True, seed=1, backend="reference")
        torch.autograd.grad(out.sum() + edges.sum(), inputs)

    return row | {"reference_ms": round(median_ms(reference), 3)}
