"""Cross-layer transcoders for a dense model and a sparse one, on the same text, side by side.

    python benchmarks/stories_transcoders.py MODEL SPARSE_RUN --data text.jsonl --out runs/stories-transcoders

Made for a 15M-parameter TinyStories model (6 layers of width 288, 256 tokens) and about three minutes of one GPU each.
An interrupted run goes on where it stopped. Writes both Runs and a summary.json with FVU, L0 and replacement loss.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import sparselens as sl
from sparselens.config import Text, Transcode
from sparselens.run import provenance, write_json


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="model folders, names or Runs")
    parser.add_argument("--data", nargs="+", required=True, help="text files (.txt, .jsonl, ...)")
    parser.add_argument("--heldout", nargs="*", default=[], help="held-out text; default: every 20th document")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path(".sparselens-cache"))
    parser.add_argument("--features", type=int, default=4096 if gpu else 512)
    parser.add_argument("--steps", type=int, default=3000 if gpu else 100)
    parser.add_argument("--batch", type=int, default=32 if gpu else 4)
    parser.add_argument("--length", type=int, default=256 if gpu else 128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sparsity", type=float, default=Transcode.sparsity)
    parser.add_argument("--activation", choices=["jumprelu", "topk", "batchtopk"], default="jumprelu")
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    settings = Transcode(
        features=a.features, activation=a.activation, k=a.k, sparsity=a.sparsity, steps=a.steps, batch=a.batch, lr=a.lr,
        evaluate_every=max(1, a.steps // 4), checkpoint_every=max(1, a.steps // 3), seed=a.seed,
    )  # fmt: skip
    text = Text(length=a.length, heldout=tuple(a.heldout), cache=a.cache)
    rows: dict[str, Any] = {}
    for number, model in enumerate(a.models):
        out = a.out / f"{number}-{Path(model).name}"
        print(f"\n== {model} -> {out}", flush=True)
        resume = (out / "run.json").is_file()
        sl.transcode(model, data=a.data, out=out, settings=settings, text=text, resume=resume)
        rows[model] = json.loads((out / "results.json").read_text())
    write_json(a.out / "summary.json", {"models": rows, "provenance": provenance()})
    print(
        f"\n{'':34}{'FVU':>8}{'L0':>8}{'dead':>8}{'loss':>9}{'replaced':>10}{'silent':>9}{'recovered':>11}{'tokens/s':>11}"
    )
    for model, r in rows.items():
        print(f"{model[-32:]:34}{r['fvu']:8.4f}{r['l0']:8.2f}{r['dead_share']:8.1%}{r['model_loss']:9.4f}"
              f"{r['replacement_loss']:10.4f}{r['zero_loss']:9.4f}{r['loss_recovered']:11.1%}"
              f"{r['tokens_per_second']:11,.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
