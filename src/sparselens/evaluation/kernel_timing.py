"""How fast the fused kernels are on this GPU, beside PyTorch's own dense attention: `sparselens bench kernels`.

Every ratio is taken in one run: ours and scaled_dot_product_attention (SDPA), same tensors, same clock, medians of
repeated runs with the cache flushed in between. `sdpa_ms` is SDPA's flash backend; `cudnn_ms`, where that backend
exists, is the faster one PyTorch prefers on recent GPUs. `device_ratio` leaves the host's launching time out on both
sides, which is what decides short calls. Peak memory counts inputs, outputs and gradients.
"""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runs.run import check_writable, write_json

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]  # one measurement: shape, mode, milliseconds, ratios
# batch, heads, kv_heads, tokens, d_head
ISSUE = [(16, 12, 12, 1024, 64), (2, 32, 32, 2048, 128), (2, 32, 32, 4096, 64)]
LONG = [(1, 32, 32, 8192, 64), (1, 16, 16, 16384, 64), (1, 32, 32, 8192, 128), (1, 16, 16, 16384, 128)]
GROUPED = [(16, 9, 3, 1024, 64), (2, 32, 8, 4096, 128)]
LADDER = [(1, 16, 16, tokens, 64) for tokens in (1024, 2048, 4096, 8192, 16384, 32768)]
OPEN_TOKENS = (4096, 8192, 16384, 32768, 65536)
DENSITIES = (0.003, 0.01)


def bench_kernels(quick: bool = False, json_path: str | Path | None = None, say: Callable[[str], None] = print) -> Row:
    """Measure, print a table, write JSON if asked. quick: three shapes and the reference, under two minutes."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("`bench kernels` measures CUDA kernels and found no CUDA device")
    check_writable(None if json_path is None else Path(json_path))
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    say(" ".join(f"{key}={value}" for key, value in result["environment"].items()))
    say(
        f"{'mode':22} {'batch,heads,kv,tokens,d':>24} {'ours ms':>8} {'SDPA ms':>8} {'ratio':>6} {'MiB':>7} {'SDPA':>7}"
    )

    def add(rows: list[Row]) -> None:
        for row in rows:
            result["rows"].append(row)
            shape = ",".join(str(row[key]) for key in ("batch", "heads", "kv_heads", "tokens", "d_head"))
            note = " ".join(f"{key}={row[key]}" for key in row if key in NOTES)
            say(
                f"{row['mode']:22} {shape:>24} {row['ours_ms']:8.3f} {row['sdpa_ms']:8.3f} {row['ratio']:6.2f}"
                f" {row['ours_mib']:7.0f} {row['sdpa_mib']:7.0f} {note}"
            )

    for shape in ISSUE + ([] if quick else LONG + GROUPED):
        add(attention_rows(*shape))
    if quick:
        add(reference_rows())
    else:
        ladder = [attention_rows(*shape, modes=("train-sampled",))[0] for shape in LADDER]
        add(ladder)
        span = math.log(ladder[-1]["tokens"] / ladder[0]["tokens"])
        for name in ("ours_mib", "sdpa_mib"):
            slope = math.log(ladder[-1][name] / ladder[0][name]) / span
            result[f"memory_slope_{name.removesuffix('_mib')}"] = round(slope, 3)
        say(f"memory grows as tokens^{result['memory_slope_ours']} (SDPA {result['memory_slope_sdpa']})")
        for density in DENSITIES:
            for tokens in OPEN_TOKENS:
                add([prefill_row(1, 8, tokens, d_head, density) for d_head in (64, 128)])
        for density in DENSITIES:
            for tokens in OPEN_TOKENS:
                add([decode_row(8, 32, 8, tokens, 128, density)])
        # At 16 sequences the host can only just keep this device busy; at 32 the device decides.
        for name, batch in (("train_step", 32), ("train_step_small_batch", 16)):
            result[name] = train_step(batch)
            say(f"{name} {json.dumps(result[name])}")
    if json_path is not None:
        write_json(Path(json_path), result)
    return result


NOTES = ("cudnn_ms", "device_ratio", "reference_ms", "density", "local", "sinks")


def environment() -> dict[str, str]:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "command": "sparselens bench kernels",
    }


# ---------------------------------------------------------------- measuring


def median_ms(function: Callable[[], object], repeat_ms: int = 100) -> float:
    import triton

    return float(triton.testing.do_bench(function, warmup=25, rep=repeat_ms, return_mode="median"))


def peak_mib(function: Callable[[], object]) -> float:
    """Peak memory while `function` runs, everything alive included, after it has run once."""
    import torch

    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def sdpa(q: "Tensor", k: "Tensor", v: "Tensor", causal: bool = True) -> "Tensor":
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def flash() -> AbstractContextManager[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def cudnn_ms(function: Callable[[], object]) -> dict[str, float]:
    """{"cudnn_ms": ...} where SDPA has a cuDNN backend for this call, {} elsewhere."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return {"cudnn_ms": round(median_ms(function), 4)}
    except RuntimeError:
        return {}


def device_only(ours: Callable[[], object], dense: Callable[[], object]) -> dict[str, float]:
    """Both replayed from a CUDA graph: what the device needs when it never waits for the host to launch.

    A training step of a large model hides the host's time; a loop over one small attention does not.
    """
    import triton

    def replay(function: Callable[[], object]) -> float:
        return float(triton.testing.do_bench_cudagraph(function, rep=50, return_mode="median"))

    ours_ms = replay(ours)
    with flash():
        sdpa_ms = replay(dense)
    times = {"ours_device_ms": ours_ms, "sdpa_device_ms": sdpa_ms, "device_ratio": ours_ms / sdpa_ms}
    return {name: round(value, 4) for name, value in times.items()}


def row_of(
    shape: tuple[int, int, int, int, int],
    mode: str,
    ours: Callable[[], object],
    dense: Callable[[], object],
    **notes: Any,
) -> Row:
    batch, heads, kv_heads, tokens, d_head = shape
    ours_ms = median_ms(ours)
    with flash():
        sdpa_ms = median_ms(dense)
    row = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "tokens": tokens, "d_head": d_head, "dtype": "bfloat16",
        "mode": mode, "ours_ms": round(ours_ms, 4), "sdpa_ms": round(sdpa_ms, 4), "ratio": round(ours_ms / sdpa_ms, 3),
    }  # fmt: skip
    row["ours_mib"] = round(peak_mib(ours), 1)
    with flash():
        row["sdpa_mib"] = round(peak_mib(dense), 1)
    return row | notes


def random_inputs(batch: int, heads: int, kv_heads: int, tokens: int, d_head: int) -> "tuple[Tensor, ...]":
    import torch

    torch.manual_seed(0)
    q = torch.randn(batch, heads, tokens, d_head, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, tokens, d_head, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, torch.full((heads,), -2.0, device="cuda")


def attention_rows(
    batch: int, heads: int, kv_heads: int, tokens: int, d_head: int,
    modes: tuple[str, ...] = ("forward-sampled", "forward-deterministic", "train-sampled"),
) -> list[Row]:  # fmt: skip
    import torch

    from ..gating import gated_attention

    shape = (batch, heads, kv_heads, tokens, d_head)
    q, k, v, bias = random_inputs(*shape)
    dout, dedges = torch.randn_like(q), torch.randn(batch, heads, device="cuda")
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), bias.requires_grad_())

    def forward(sample: bool) -> None:
        with torch.no_grad():
            gated_attention(q, k, v, bias, sample=sample, seed=1)

    def dense_forward() -> None:
        with torch.no_grad():
            sdpa(q, k, v)

    def train() -> None:
        out, edges = gated_attention(q, k, v, bias, sample=True, seed=1)
        torch.autograd.grad((out, edges), inputs, (dout, dedges))

    def dense_train() -> None:
        torch.autograd.grad(sdpa(q, k, v), inputs[:3], dout)

    runs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "forward-sampled": (lambda: forward(True), dense_forward),
        "forward-deterministic": (lambda: forward(False), dense_forward),
        "train-sampled": (train, dense_train),
    }
    rows = []
    for mode in modes:
        ours, dense = runs[mode]
        row = row_of(shape, mode, ours, dense) | cudnn_ms(dense)
        if mode == "train-sampled" and tokens <= 4096:
            row |= device_only(ours, dense)
        rows.append(row)
    return rows


def reference_rows() -> list[Row]:
    """One training shape, small enough for the reference's queries x keys tensors."""
    import torch

    from ..gating import gated_attention

    shape = (2, 12, 12, 1024, 64)
    (row,) = attention_rows(*shape, modes=("train-sampled",))
    q, k, v, bias = (x.requires_grad_() for x in random_inputs(*shape))

    def reference() -> None:
        out, edges = gated_attention(q, k, v, bias, sample=True, seed=1, backend="reference")
        torch.autograd.grad(out.sum() + edges.sum(), (q, k, v, bias))

    return [row | {"reference_ms": round(median_ms(reference), 3)}]


# ---------------------------------------------------------------- sparsity that pays at inference


def sparse_inputs(
    batch: int, heads: int, kv_heads: int, tokens: int, d_head: int, density: float
) -> "tuple[Tensor, ...]":
    """q, k, v, bias whose open gates are a mixture of near keys, four sink keys and scattered keys.

    Position enters through random Fourier features, as with rotary embeddings, the wider the more edges there are; the
    bias is set so that `density` of all pairs are open. Rows report the shares: most edges of long texts are scattered.
    """
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    near, sink = 16, 1  # dimensions that encode position and "I am a sink"; the rest is content
    content = d_head - near - sink
    width = max(1.5, density * tokens / 8)
    frequency = torch.randn(near // 2, device="cuda", generator=generator) / width
    phase = torch.arange(tokens, device="cuda")[:, None] * frequency
    place = torch.cat([phase.cos(), phase.sin()], -1) * (8 / (near / 2)) ** 0.5  # own position: 8, far away: about 0
    is_sink = (torch.arange(tokens, device="cuda") < 4).float()[:, None]

    def build(n: int, ours: bool) -> "Tensor":
        noise = torch.randn(batch, n, tokens, content, device="cuda", generator=generator) * (1.5 / content**0.5) ** 0.5
        marks = torch.ones_like(is_sink) * 8 if ours else is_sink
        fixed = torch.cat([place, marks], -1).expand(batch, n, -1, -1)
        return torch.cat([fixed, noise], -1).to(torch.bfloat16)

    q, k = build(heads, True), build(kv_heads, False)
    v = torch.randn(batch, kv_heads, tokens, d_head, device="cuda", generator=generator).to(torch.bfloat16)
    # The bias closes all but the wanted share of pairs, judged on a sample of queries of the first head.
    rows = torch.arange(tokens // 256, tokens, max(1, tokens // 256), device="cuda")
    logits = q[0, 0, rows].float() @ k[0, 0].float().T
    logits = logits[torch.arange(tokens, device="cuda")[None, :] <= rows[:, None]]
    threshold = logits.sort(descending=True).values[int(len(logits) * density)]
    return q, k, v, (-threshold).expand(heads).contiguous(), logits > threshold, rows


def shares_of(inputs: "tuple[Tensor, ...]") -> dict[str, float]:
    """How much of the open edges is near (within 64 keys) or at a sink, on the sampled queries of the first head."""
    import torch

    q, k, _, bias, _, rows = inputs
    keys = torch.arange(k.shape[2], device="cuda")
    opened = (q[0, 0, rows].float() @ k[0, 0].float().T + bias[0] > 0) & (keys[None, :] <= rows[:, None])
    near = opened & (rows[:, None] - keys[None, :] < 64) & (keys >= 4)
    sinks = opened & (keys < 4)
    return {"local": round(float(near.sum() / opened.sum()), 2), "sinks": round(float(sinks.sum() / opened.sum()), 2)}


def prefill_row(batch: int, heads: int, tokens: int, d_head: int, density: float) -> Row:
    import torch

    from ..gating import gated_attention

    inputs = sparse_inputs(batch, heads, heads, tokens, d_head, density)
    q, k, v, bias = inputs[:4]
    with torch.no_grad():
        _, edges = gated_attention(q, k, v, bias, scale=1.0, normalise="open")
        measured = float(edges.mean()) / (tokens * (tokens + 1) / 2)
        return row_of(
            (batch, heads, heads, tokens, d_head), "prefill-open",
            lambda: gated_attention(q, k, v, bias, scale=1.0, normalise="open"), lambda: sdpa(q, k, v),
            density=round(measured, 5), **shares_of(inputs), **cudnn_ms(lambda: sdpa(q, k, v)),
        )  # fmt: skip


def decode_row(batch: int, heads: int, kv_heads: int, tokens: int, d_head: int, density: float) -> Row:
    """One new token against a cache of `tokens`."""
    import torch

    from ..gating import gated_attention

    inputs = sparse_inputs(batch, heads, kv_heads, tokens, d_head, density)
    q, k, v, bias = inputs[0][:, :, -1:].contiguous(), inputs[1], inputs[2], inputs[3]
    with torch.no_grad():
        _, edges = gated_attention(q, k, v, bias, scale=1.0, normalise="open")
        return row_of(
            (batch, heads, kv_heads, tokens, d_head), "decode-open",
            lambda: gated_attention(q, k, v, bias, scale=1.0, normalise="open"), lambda: sdpa(q, k, v, causal=False),
            density=round(float(edges.mean()) / tokens, 5), **shares_of(inputs),
        )  # fmt: skip


# ---------------------------------------------------------------- a whole training step


def train_step(batch: int = 32, tokens: int = 1024, steps: int = 15) -> dict[str, float]:
    """Tokens per second and peak memory of one optimiser step of a 135M-parameter Llama, dense (SDPA) and gated.

    fp32 weights, bf16 autocast, AdamW, random weights; the gated step draws gates and adds density to the loss.
    """
    import gc
    import statistics
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..config import Gate
    from ..models.loading import add_gates

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (batch, tokens), device="cuda")
    result: dict[str, float] = {"batch": batch, "tokens": tokens}
    for name in ("dense", "sparse"):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to("cuda").train()  # type: ignore[no-untyped-call]
        if name == "sparse":
            add_gates(model, Gate(bias=0.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(seed: int, gated: bool = name == "sparse", model: Any = model, optimizer: Any = optimizer) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                options = {"output_attentions": True, "gate_sample": True, "gate_seed": seed} if gated else {}
                output = model(input_ids=ids, labels=ids, use_cache=False, **options)
                loss = output.loss
                if gated:
                    opened, possible = torch.stack(output.attentions).unbind(-1)
                    loss = loss + opened.sum() / possible.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for seed in range(3):
            step(seed)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for seed in range(steps):
            began = time.perf_counter()
            step(seed)
            torch.cuda.synchronize()  # a real step reads its loss, too
            seconds.append(time.perf_counter() - began)
        result[f"{name}_tokens_per_second"] = round(batch * tokens / statistics.median(seconds))
        result[f"{name}_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        del model, optimizer, step
        gc.collect()
        torch.cuda.empty_cache()
    result["speed_ratio"] = round(result["sparse_tokens_per_second"] / result["dense_tokens_per_second"], 3)
    result["memory_ratio"] = round(result["sparse_peak_mib"] / result["dense_peak_mib"], 3)
    return result
