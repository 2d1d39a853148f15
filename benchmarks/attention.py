"""Everything docs/kernels.md says about speed: `sparselens bench kernels`, inference with open gates, a training step.

    python benchmarks/attention.py --json results/kernels-h200.json        # one CUDA device, about two minutes

After the package's own rows: prefill and decoding with normalise="open" on synthetic gates at two densities, and a
whole optimiser step of a 135M-parameter Llama, dense and gated.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sparselens.config import Gate
from sparselens.evaluation.kernel_timing import Row, bench_kernels, cudnn_ms, row_of, sdpa, told
from sparselens.gating import gated_attention
from sparselens.models.loading import add_gates
from sparselens.runs.run import check_writable, write_json

OPEN_TOKENS = (4096, 8192, 16384, 32768, 65536)
DENSITIES = (0.003, 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    path = parser.parse_args().json
    check_writable(path)
    result = bench_kernels()
    result["environment"]["command"] = "python benchmarks/attention.py"
    points = [(tokens, density) for density in DENSITIES for tokens in OPEN_TOKENS]
    for tokens, density in points:
        result["rows"] += [told(prefill_row(1, 8, tokens, d_head, density), print) for d_head in (64, 128)]
    for tokens, density in points:
        result["rows"].append(told(decode_row(8, 32, 8, tokens, 128, density), print))
    # At 16 sequences the host can only just keep an H200 busy; at 32 the device decides.
    for name, batch in (("train_step", 32), ("train_step_small_batch", 16)):
        result[name] = train_step(batch)
        print(name, json.dumps(result[name]))
    if path is not None:
        write_json(path, result)


# ---- sparsity that pays at inference ---------------------------------------------------------------------------------


def sparse_inputs(
    batch: int, heads: int, kv_heads: int, tokens: int, d_head: int, density: float
) -> tuple[Tensor, ...]:
    """q, k, v, bias whose open gates are a mixture of near keys, four sink keys and scattered keys.

    Position enters through random Fourier features, as with rotary embeddings, the wider the more edges there are; the
    bias is set so that `density` of all pairs are open. Rows report the shares: most edges of long texts are scattered.
    """
    generator = torch.Generator(device="cuda").manual_seed(0)
    near, sink = 16, 1  # dimensions that encode position and "I am a sink"; the rest is content
    content = d_head - near - sink
    width = max(1.5, density * tokens / 8)
    frequency = torch.randn(near // 2, device="cuda", generator=generator) / width
    phase = torch.arange(tokens, device="cuda")[:, None] * frequency
    place = torch.cat([phase.cos(), phase.sin()], -1) * (8 / (near / 2)) ** 0.5  # own position: 8, far away: about 0
    is_sink = (torch.arange(tokens, device="cuda") < 4).float()[:, None]

    def build(n: int, ours: bool) -> Tensor:
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


def shares_of(inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """How much of the open edges is near (within 64 keys) or at a sink, on the sampled queries of the first head."""
    q, k, _, bias, _, rows = inputs
    keys = torch.arange(k.shape[2], device="cuda")
    opened = (q[0, 0, rows].float() @ k[0, 0].float().T + bias[0] > 0) & (keys[None, :] <= rows[:, None])
    near = opened & (rows[:, None] - keys[None, :] < 64) & (keys >= 4)
    sinks = opened & (keys < 4)
    return {"local": round(float(near.sum() / opened.sum()), 2), "sinks": round(float(sinks.sum() / opened.sum()), 2)}


def prefill_row(batch: int, heads: int, tokens: int, d_head: int, density: float) -> Row:
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
    inputs = sparse_inputs(batch, heads, kv_heads, tokens, d_head, density)
    q, k, v, bias = inputs[0][:, :, -1:].contiguous(), inputs[1], inputs[2], inputs[3]
    with torch.no_grad():
        _, edges = gated_attention(q, k, v, bias, scale=1.0, normalise="open")
        return row_of(
            (batch, heads, kv_heads, tokens, d_head), "decode-open",
            lambda: gated_attention(q, k, v, bias, scale=1.0, normalise="open"), lambda: sdpa(q, k, v, causal=False),
            density=round(float(edges.mean()) / tokens, 5), **shares_of(inputs),
        )  # fmt: skip


# ---- a whole training step -------------------------------------------------------------------------------------------


def train_step(batch: int = 32, tokens: int = 1024, steps: int = 15) -> dict[str, float]:
    """Tokens per second and peak memory of one optimiser step of a 135M-parameter Llama, dense (SDPA) and gated.

    fp32 weights, bf16 autocast, AdamW, random weights; the gated step draws gates and adds density to the loss.
    """
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
                drawn = {"gate_sample": True, "gate_seed": seed}
                options = {"output_attentions": True, "gate_output": "edges", **drawn} if gated else {}
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


if __name__ == "__main__":
    main()
