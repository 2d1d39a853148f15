"""Sparse decoding of a cross-layer transcoder against the plain dense product: same inputs, same gradients, times.

    python benchmarks/transcode.py --json results/transcode.json

One training step of all decoders, forward and backward: activations [tokens, n_features] of every layer times decoders
[n_features, n_layers - layer, d_model], gradients for active activations and for decoders. `dense` multiplies the full
matrices, `sparse` follows the active entries, training takes the faster one (`chosen`). Beside them, what a step costs
in either case: the encoder's dense product (forward) and the optimiser, which visits every weight. Runs on a GPU where
there is one; sizes can be given.
"""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sparselens.runs.run import provenance, write_json
from sparselens.transcoders.decoding import Entries, dense_is_faster, entries, write, write_densely


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 512)
    parser.add_argument("--layers", type=int, default=12 if gpu else 6)
    parser.add_argument("--width", type=int, default=768 if gpu else 288)
    parser.add_argument("--features", type=int, nargs="+", default=[4096, 8192, 16384] if gpu else [1024, 4096, 8192])
    parser.add_argument("--l0", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+",
                        default=["float32", "bfloat16"] if gpu else ["float32"])  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    torch.set_num_threads(torch.get_num_threads() if gpu else 1)  # CPU time of one core is not disturbed by others
    machine = torch.cuda.get_device_name() if gpu else f"one core ({platform.processor() or platform.machine()})"
    print(f"{machine}: {arguments.tokens} tokens, {arguments.layers} layers of width {arguments.width}")
    print(f"{'dtype':>9}{'features':>10}{'L0':>5}{'dense':>11}{'sparse':>11}{'ratio':>8}{'encoder':>11}{'Adam':>10}"
          f"{'max error':>12}")  # fmt: skip
    rows = []
    for dtype in arguments.dtype:
        for features in arguments.features:
            for l0 in arguments.l0:
                row = compare(arguments, features, l0, getattr(torch, dtype), device)
                rows.append({"dtype": dtype} | row)
                print(f"{dtype:>9}{features:10,}{l0:5}{row['dense_ms']:8.1f} ms{row['sparse_ms']:8.1f} ms"
                      f"{row['dense_ms'] / row['sparse_ms']:7.1f}x{row['encoder_ms']:8.1f} ms{row['adam_ms']:7.1f} ms"
                      f"{row['max_error']:12.1e}", flush=True)  # fmt: skip
    if arguments.json:
        shape = {name: getattr(arguments, name) for name in ("tokens", "layers", "width", "repeats")}
        write_json(arguments.json, {"machine": machine, "shape": shape, "rows": rows, "provenance": provenance()})


def compare(arguments: argparse.Namespace, features: int, l0: int, dtype: torch.dtype, device: str) -> dict:
    """Times of one shape, and the largest difference between both ways, relative to the largest number."""
    tokens, layers, width = arguments.tokens, arguments.layers, arguments.width
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    masks = [torch.rand(tokens, features, generator=generator, device=device) < l0 / features for _ in range(layers)]
    at = [entries(mask) for mask in masks]
    values = [normal(len(one.tokens)).abs().to(dtype).requires_grad_() for one in at]
    decoders = [(normal(features, layers - i, width) / l0**0.5).requires_grad_() for i in range(layers)]
    gradient = normal(tokens, layers, width)

    def step(decode: Callable[[Tensor, Entries, Tensor], Tensor]) -> list[Tensor]:
        total = None
        for i in range(layers):
            written = decode(values[i], at[i], decoders[i]).float()
            total = written if total is None else torch.cat([total[:, :i], total[:, i:] + written], 1)
        return list(torch.autograd.grad(total, values + decoders, gradient))  # type: ignore[arg-type]

    error = max(
        ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(step(write_densely), step(write), strict=True)
    )
    sparse_ms = measure(lambda: step(write), arguments.repeats)
    dense_ms = measure(lambda: step(write_densely), arguments.repeats)
    x, encoder = normal(tokens, width).to(dtype), normal(features, width).to(dtype)
    encoder_ms = layers * measure(lambda: x @ encoder.T, arguments.repeats)
    weights = [decoder.detach().clone().requires_grad_() for decoder in decoders]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adam = torch.optim.Adam(weights, fused=device == "cuda" or None)
    return {
        "features": features, "l0": l0, "chosen": "dense" if dense_is_faster(values[0], at[0]) else "sparse",
        "dense_ms": dense_ms, "sparse_ms": sparse_ms, "encoder_ms": encoder_ms,
        "adam_ms": measure(adam.step, arguments.repeats), "max_error": error,
    }  # fmt: skip


def measure(work: Callable, repeats: int) -> float:
    """Milliseconds, best of the repeats, after one warm-up: wall time on a GPU, CPU time on one core."""

    def now() -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(repeats + 1):
        began = now()
        work()
        times.append(1000 * (now() - began))
    return min(times[1:])


if __name__ == "__main__":
    main()
