"""Features of SmolLM2-135M and of its sparse version: transcoders, faces, and ten prompts of five kinds traced.

    python examples/smollm2_135m_features.py MODEL SPARSE_RUN --data prose.txt code.txt \
        --out runs/smollm2-135m-features --json results/smollm2-135m-features.json

Per-layer transcoders, as across 30 layers every feature would have up to 30 decoders. `--only dense` and
`--only sparse` can share a GPU; `--only faces` is the pass over text alone; `--only trace` the prompts
(examples/features_study.py).
"""

import argparse
from pathlib import Path

import torch
from features_study import add_options, study

from sparselens.config import Transcode
from sparselens.data.batches import TextBatches

# With the separator in front, as documents begin in training: without it the base says "small" at 0.13 instead of 0.74.
START, LENGTH = "<|endoftext|>", 512
PROMPTS = {
    "opposite-large": ("antonyms", 'The opposite of "large" is "', "small"),
    "opposite-hot": ("antonyms", 'The opposite of "hot" is "', "cold"),
    "capital-france": ("capitals", "The capital of France is", " Paris"),
    "capital-italy": ("capitals", "The capital of Italy is", " Rome"),
    "ioi-mary": ("indirect objects", "When Mary and John went to the store, John gave a drink to", " Mary"),
    "ioi-paul": ("indirect objects", "When Paul and Anna went to the park, Anna gave a ball to", " Paul"),
    "years-war": ("years", "The war lasted from the year 1732 to the year 17", None),
    "years-project": ("years", "The project lasted from the year 1641 to the year 16", None),
    "brackets-call": ("brackets", "print(max(len(a), len(b)", None),
    "brackets-list": ("brackets", "x = [1, 2, [3, 4], [5, 6", None),
}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the dense model")
    parser.add_argument("sparse", help="the sparse Run or folder")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--features", type=int, default=8192 if gpu else 512)
    parser.add_argument("--k", type=int, default=48)
    parser.add_argument("--lr", type=float, default=Transcode.lr)
    parser.add_argument("--batch", type=int, default=16 if gpu else 2)
    parser.add_argument("--tokens", type=int, default=100_000_000 if gpu else 20_000, help="to train each one on")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--evaluate-sequences", type=int, default=64 if gpu else 4)
    parser.add_argument("--prompts", nargs="*", default=list(PROMPTS), choices=list(PROMPTS))
    add_options(parser)
    a = parser.parse_args()
    steps = max(1, a.tokens // (a.batch * a.length))
    settings = Transcode(
        features=a.features, k=a.k, cross_layer=False, activation="topk", steps=steps, batch=a.batch, lr=a.lr,
        evaluate_every=max(1, steps // 4), checkpoint_every=max(1, steps // 8), evaluate_sequences=a.evaluate_sequences,
    )  # fmt: skip

    def text(model, tokenizer, sequences: int | None) -> TextBatches:
        need = max(steps * a.batch * a.length, a.faces_tokens)  # the same for all stages: tokenised once
        return TextBatches(a.data, tokenizer, a.length, cache=Path(".sparselens-cache"), need=need)

    prompts = {
        name: (kind, START + prompt, target) for name, (kind, prompt, target) in PROMPTS.items() if name in a.prompts
    }
    study({"dense": a.model, "sparse": a.sparse}, text, settings, prompts, a)


if __name__ == "__main__":
    main()
