"""A model of GPT-2 small's shape, from nothing: something to make sparse where GPT-2's own weights are out of reach.

    python examples/gpt2_shaped.py --tokenizer gpt2 --data prose.txt code.txt --heldout prose-val.txt --out runs/gpt2

12 layers of 12 heads, 768 wide, 1,024 learned positions, LayerNorm with biases, 50,257 tokens. 6,000 steps of 64
sequences are 393M tokens, trained by the loop that trains everything here: progress, held-out loss, checkpoints. With
Muon and small steps: its held-out loss after 11M tokens, 5.5 nats, took AdamW with steps of 256 sequences 150M tokens.
3,863 steps, 13 minutes of an H200, gave a model that copies, opposes and mostly counts years (docs/results.md).
Killed or stopped, the same command goes on from the last checkpoint. The result is an ordinary Hugging Face folder,
OUT/model, to be made sparse with `python examples/smollm2_135m.py OUT/model ...`. On a CPU try
`--layers 2 --width 64 --heads 4 --length 64 --batch 8 --steps 20`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from sparselens.config import Training
from sparselens.data.batches import TextBatches, separator_id
from sparselens.models.loading import save
from sparselens.training.loop import Stage, train
from sparselens.training.sparsify import steering_count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="gpt2", help="folder or Hugging Face name")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--heldout", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.0, help="GPT-2's own: 0.1, on attention weights, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path(".sparselens-cache"))
    a = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(a.tokenizer, trust_remote_code=False)
    batches = TextBatches(
        a.data, tokenizer, a.length, cache=a.cache, need=a.steps * a.batch * a.length, heldout_patterns=a.heldout,
        seed=a.seed,
    )  # fmt: skip
    end = separator_id(tokenizer)
    torch.manual_seed(a.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=a.length, n_embd=a.width, n_layer=a.layers, n_head=a.heads,
            bos_token_id=end, eos_token_id=end,
            resid_pdrop=a.dropout, embd_pdrop=a.dropout, attn_pdrop=a.dropout,
        )
    )  # fmt: skip
    settings = Training(
        steps=a.steps, batch=a.batch, lr=a.lr, optimizer="muon", weight_decay=0.1, decay=0.6, seed=a.seed,
        evaluate_every=max(1, a.steps // 20), checkpoint_every=max(1, a.steps // 4),
    )  # fmt: skip
    stage = Stage("dense", model, batches, a.out, settings, steering=steering_count(batches))
    train(stage, resume=(a.out / "checkpoints").is_dir())
    save(model, tokenizer, a.out / "model")
    print(f"{a.out / 'model'} is ready for sparselens sparsify; held-out losses: {a.out / 'metrics.jsonl'}")


if __name__ == "__main__":
    main()
