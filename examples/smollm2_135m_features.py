"""Features of SmolLM2-135M and of its sparse version, and three prompts traced through both (figure 4).

    python examples/smollm2_135m_features.py MODEL SPARSE_RUN --data prose.txt code.txt --out runs/smollm2-135m-features

As stories15m_features.py, on text from files, with per-layer transcoders: across 30 layers every feature would have up
to 30 decoders. `--only dense` and `--only sparse` can share a GPU; then `--only trace`.
"""

import argparse
from pathlib import Path

import torch
from stories15m_features import train_and_trace

from sparselens.config import Transcode
from sparselens.data.batches import TextBatches

# With the separator in front, as documents begin in training: without it the base says "small" at 0.13 instead of 0.74.
PROMPTS = {
    "opposite": ('<|endoftext|>The opposite of "large" is "', "small"),
    "capital": ("<|endoftext|>The capital of France is", " Paris"),
    "ioi": ("<|endoftext|>When Mary and John went to the store, John gave a drink to", " Mary"),
}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the dense model")
    parser.add_argument("sparse", help="the sparse Run or folder")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["dense", "sparse", "trace"])
    parser.add_argument("--features", type=int, default=8192 if gpu else 512)
    parser.add_argument("--k", type=int, default=48)
    parser.add_argument("--steps", type=int, default=1039 if gpu else 20, help="of --batch sequences of 512 tokens")
    parser.add_argument("--batch", type=int, default=16 if gpu else 2)
    a = parser.parse_args()
    settings = Transcode(
        features=a.features, k=a.k, cross_layer=False, activation="topk", steps=a.steps, batch=a.batch,
        evaluate_every=max(1, a.steps // 4), checkpoint_every=a.steps, evaluate_sequences=64 if gpu else 4,
    )  # fmt: skip
    need = a.steps * a.batch * 513

    def text(model, tokenizer) -> TextBatches:
        return TextBatches(a.data, tokenizer, 512, cache=Path(".sparselens-cache"), need=need)

    train_and_trace({"dense": a.model, "sparse": a.sparse}, text, a.out, settings, PROMPTS, a.only)


if __name__ == "__main__":
    main()
