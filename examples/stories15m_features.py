"""Features of the TinyStories model and of its sparse version, and three prompts traced through both (figure 4).

    python examples/stories15m_features.py MODEL SPARSE_RUN --text tokens.npy --out runs/stories15m-features

1. train a cross-layer transcoder on each model, on the same stories (`--only dense` or `--only sparse`: just that one,
   so that two processes can share a GPU); an interrupted run goes on where it stopped
2. trace the prompts through both: clusters, the heads that carry the main edge, predicted against measured changes

--text is the file of sampled tokens that examples/stories15m.py leaves; without it, stories are sampled first.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from stories15m import Stories, sample

import sparselens as sl
from sparselens.config import Transcode
from sparselens.data.batches import Batches, separator_id
from sparselens.models.architectures import dimensions
from sparselens.reporting.figures.attribution import draw_trace
from sparselens.runs.run import provenance, write_json

PROMPTS = {
    "opposite": ("<s>The elephant is big, but the mouse is very", "small"),
    "cake": ("<s>Once upon a time, Sue and Ben had a cake. Ben gave a piece of cake to", "Sue"),
    "not-empty": ("<s>The box was not empty. The box was", "full"),
}


def stories(path: Path | None, model, tokenizer, tokens: int) -> Stories:
    separator = separator_id(tokenizer)
    if path is not None and path.is_file():
        return Stories(np.load(path), separator)
    rows = sample(
        model,
        separator,
        dimensions(model.config).max_tokens - 1,
        tokens,
        8192 if torch.cuda.is_available() else 32,
        seed=0,
    )
    if path is not None:
        np.save(path, rows)
    return Stories(rows, separator)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the dense model")
    parser.add_argument("sparse", help="the sparse Run or folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--only", choices=["dense", "sparse", "trace"])
    parser.add_argument("--tokens", type=int, default=20_000_000 if gpu else 200_000)
    parser.add_argument("--features", type=int, default=4096 if gpu else 512)
    parser.add_argument("--steps", type=int, default=2500 if gpu else 100)
    parser.add_argument("--batch", type=int, default=32 if gpu else 4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sparsity", type=float, default=Transcode.sparsity)
    a = parser.parse_args()
    settings = Transcode(
        features=a.features, steps=a.steps, batch=a.batch, lr=a.lr, sparsity=a.sparsity,
        evaluate_every=max(1, a.steps // 4), checkpoint_every=a.steps, evaluate_sequences=64,
    )  # fmt: skip
    train_and_trace(
        {"dense": a.model, "sparse": a.sparse},
        lambda model, tokenizer: stories(a.text, model, tokenizer, a.tokens),
        a.out, settings, PROMPTS, a.only,
    )  # fmt: skip


def train_and_trace(
    sources: dict[str, str],
    text: Callable[..., Batches],
    out: Path,
    settings: Transcode,
    prompts: dict[str, tuple[str, str]],
    only: str | None,
) -> None:
    """Transcoders of the dense and the sparse model, then the prompts through both."""
    for name, source in sources.items():
        if only in (None, name) and not (out / name / "results.json").is_file():
            model, tokenizer = sl.load(source, device="cuda" if torch.cuda.is_available() else "cpu")
            resume = (out / name / "run.json").is_file()
            sl.transcode(
                model, tokenizer, data=text(model, tokenizer), out=out / name, settings=settings, name=source,
                resume=resume,
            )  # fmt: skip
    if only in ("dense", "sparse"):
        return
    rows = {name: json.loads((out / name / "results.json").read_text()) for name in sources}
    traces = {}
    for name, (prompt, target) in prompts.items():
        print(f"\n== {prompt} -> {target}", flush=True)
        traces[name] = sl.trace(
            sources["sparse"], out / "sparse", prompt, target, against=(sources["dense"], out / "dense"),
            names=("Sparse", "Dense"), checks=20, json=out / f"trace-{name}.json", say=print,
        ).rows  # fmt: skip
        draw_trace(traces[name], out / f"figure4-{name}.png")
    write_json(out / "features.json", {"transcoders": rows, "provenance": provenance()})
    for name, row in traces.items():
        heads = {kind: r["main"]["n_heads_for_80"] for kind, r in (("sparse", row), ("dense", row["against"]))}
        print(
            name, row["main"]["source"], "->", row["main"]["target"], heads, row["agreement"], row["agreement_direct"]
        )


if __name__ == "__main__":
    main()
