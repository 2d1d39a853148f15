"""Features of the TinyStories model and of its sparse version: transcoders, faces, and ten prompts traced.

    python examples/stories15m_features.py MODEL SPARSE_RUN --stories tokens.npy --out runs/stories15m-features \
        --json results/stories15m-features.json

Cross-layer transcoders, on stories sampled from the dense model. --stories is the file of sampled tokens that
examples/stories15m.py leaves; without it, stories are sampled first. `--only` runs one stage (features_study.py).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from features_study import add_options, study
from stories15m import Stories, sample

from sparselens.config import Transcode
from sparselens.data.batches import separator_id
from sparselens.models.architectures import dimensions

PROMPTS = {
    "opposite": ("antonyms", "<s>The elephant is big, but the mouse is very", "small"),
    "opposite-sad": ("antonyms", "<s>Lily was not happy. Lily was", "sad"),
    "not-empty": ("antonyms", "<s>The box was not empty. The box was", "full"),
    "cake": ("indirect objects", "<s>Once upon a time, Sue and Ben had a cake. Ben gave a piece of cake to", "Sue"),
    "toy": ("indirect objects", "<s>Once upon a time, Tom and Lily had a toy. Tom gave the toy to", "Lily"),
    "ball": ("colours", "<s>Tim had a red ball. He liked to play with his red", "ball"),
    "hat": ("colours", "<s>Anna had a blue hat. She liked to wear her blue", "hat"),
    "quote": ("brackets", '<s>The dog was happy. "I like you', None),
    "once": ("beginnings", "<s>Once upon a", "time"),
    "name": ("beginnings", "<s>Once upon a time, there was a little girl named Lily. One day,", None),
}  # fmt: skip


def stories(path: Path | None, model, tokenizer, tokens: int) -> Stories:
    separator = separator_id(tokenizer)
    if path is not None and path.is_file():
        return Stories(np.load(path), separator)
    length, at_once = dimensions(model.config).max_tokens - 1, 8192 if torch.cuda.is_available() else 32
    rows = sample(model, separator, length, tokens, at_once, seed=0)
    if path is not None:
        np.save(path, rows)
    return Stories(rows, separator)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the dense model")
    parser.add_argument("sparse", help="the sparse Run or folder")
    parser.add_argument("--stories", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000_000 if gpu else 200_000, help="to sample")
    parser.add_argument("--features", type=int, default=4096 if gpu else 512)
    parser.add_argument("--steps", type=int, default=2500 if gpu else 100)
    parser.add_argument("--batch", type=int, default=32 if gpu else 4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sparsity", type=float, default=Transcode.sparsity)
    parser.add_argument("--evaluate-sequences", type=int, default=64)
    parser.add_argument("--prompts", nargs="*", default=list(PROMPTS), choices=list(PROMPTS))
    add_options(parser)
    a = parser.parse_args()
    settings = Transcode(
        features=a.features, steps=a.steps, batch=a.batch, lr=a.lr, sparsity=a.sparsity,
        evaluate_every=max(1, a.steps // 4), checkpoint_every=max(1, a.steps // 4),
        evaluate_sequences=a.evaluate_sequences,
    )  # fmt: skip
    a.out.mkdir(parents=True, exist_ok=True)
    kept = a.stories or a.out / "stories.npy"  # sampled once, by the dense model, for both

    def text(model, tokenizer, sequences: int | None) -> Stories:
        return stories(kept, model, tokenizer, a.tokens)

    prompts = {name: PROMPTS[name] for name in a.prompts}
    study({"dense": a.model, "sparse": a.sparse}, text, settings, prompts, a)


if __name__ == "__main__":
    main()
