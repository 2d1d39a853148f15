"""Seconds and peak memory of scoring and of the curve, and how both grow: python benchmarks/discover.py

Random GPT-2s: time and memory depend on sizes, not on what was learnt. One base size, then twice the prompts, tokens
and layers. Seconds are CPU seconds of one thread (a busy machine does not change them much). Memory is what tensors
take beside the weights (counted by a dispatch mode, in a run of its own).
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sparselens.circuits.circuit import Circuit
from sparselens.circuits.faithfulness import log_sizes
from sparselens.circuits.run import Patcher
from sparselens.circuits.scores import eap, estimate_memory
from sparselens.models.architectures import mlp_width
from sparselens.models.decoder import Decoder
from sparselens.runs.run import provenance, write_json
from sparselens.tasks import Pair
from sparselens.tasks.prompts import Prompts
from sparselens.training.dry_run import PeakMemory

VOCABULARY = 1000
GROWING = ("scoring_seconds", "curve_seconds", "scoring_mb", "largest_circuit_mb")  # log2 of twice over once


def prompts_of(n: int, tokens: int) -> Prompts:
    draw = torch.Generator().manual_seed(0)
    clean, corrupted = (torch.randint(0, VOCABULARY, (n, tokens), generator=draw) for _ in range(2))
    right = torch.randint(0, VOCABULARY - 1, (n, 1, 1), generator=draw)
    shape = (n, 1)
    return Prompts(
        "logit", clean, corrupted, torch.full((n,), tokens), torch.full(shape, tokens - 1), right, right + 1,
        torch.full(shape, -1), torch.ones(shape, dtype=torch.bool), tuple(Pair("", "", "", "") for _ in range(n)),
    )  # fmt: skip


def measure(layers: int, heads: int, width: int, n: int, tokens: int, steps: int, points: int) -> dict:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_layer=layers, n_head=heads, n_embd=width, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    decoder, prompts = Decoder(model), prompts_of(n, tokens)
    began = time.process_time()
    scores = eap(decoder, prompts, steps, n)
    scoring = time.process_time() - began
    peak = PeakMemory().ignore(model)
    with peak:
        eap(decoder, prompts, 2, n)
    estimate = estimate_memory(decoder.dims, mlp_width(config), n, tokens, 1, VOCABULARY)

    c = decoder.components
    order = Circuit(c, scores, c.possible).order()
    began = time.process_time()
    patcher = Patcher(decoder, prompts)
    masks = torch.stack([torch.from_numpy(c.prune(c.mask(order[:size]))) for size in log_sizes(len(order), points)])
    patcher.run(masks)
    curve = time.process_time() - began
    curve_peak = PeakMemory().ignore(model)
    with curve_peak:
        Patcher(decoder, replace(prompts)).run(masks[-1:])
    return {
        "layers": layers, "heads": heads, "width": width, "prompts": n, "tokens": tokens, "steps": steps,
        "points": points, "edges": c.n_edges, "scoring_seconds": round(scoring, 2), "curve_seconds": round(curve, 2),
        "scoring_mb": round(peak.peak / 2**20, 1), "scoring_mb_per_token": round(peak.peak / 2**20 / n / tokens, 4),
        "estimated_mb": round(estimate.total / 2**20, 1), "largest_circuit_mb": round(curve_peak.peak / 2**20, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/discover-benchmark.json"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--gpt2", action="store_true", help="also GPT-2 small's own size (12 layers x 768)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base = dict(layers=4, heads=8, width=256, n=16, tokens=16, steps=arguments.steps, points=arguments.points)
    sizes = [base, base | {"n": 32}, base | {"tokens": 32}, base | {"layers": 8}]
    if arguments.gpt2:
        sizes.append(base | {"layers": 12, "heads": 12, "width": 768})
    rows = []
    for size in sizes:
        rows.append(measure(**size))
        print(rows[-1], flush=True)
    growth = {
        change: {key: round(math.log2(row[key] / rows[0][key]), 2) for key in GROWING}
        for change, row in zip(("prompts", "tokens", "layers"), rows[1:4], strict=True)
    }
    print("exponents:", growth)
    command = f"python benchmarks/discover.py --threads {arguments.threads}{' --gpt2' if arguments.gpt2 else ''}"
    write_json(
        arguments.out, {"command": command, "versions": provenance()["versions"], "exponents": growth, "rows": rows}
    )


if __name__ == "__main__":
    main()
