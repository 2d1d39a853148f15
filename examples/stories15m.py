"""The 15M TinyStories model with one attention edge in a hundred, on text it wrote itself.

    python examples/stories15m.py MODEL --out runs/stories15m-sparse --unseen other.txt --json results/stories15m.json

1. sample stories from the model, each from its first token to the end of its context (--tokens of them; kept in --text)
2. sparsify under KL(base || model), with the matched dense control: same stories, same order, no gates
3. print base, control and sparse on stories that neither training nor selection has seen, and on text that is no story
   at all (--unseen)

A story that ends before the context does is followed by the next one, which does not see it. On a CPU try
`--tokens 200000 --steps 50 --batch 8`.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from smollm2_135m import publish, whole_text
from torch import Tensor

import sparselens as sl
from sparselens.data.batches import Batches, separator_id
from sparselens.models.architectures import dimensions

HELDOUT = 2048  # stories kept from training


class Stories:
    """Rows of sampled tokens as numbered sequences (see `sparselens.data.batches.Batches`)."""

    def __init__(self, rows: np.ndarray, separator: int):
        self.separator, self.length = separator, rows.shape[1] - 1
        self.n_heldout = min(HELDOUT, len(rows) // 10)
        self._heldout, self._train = rows[: self.n_heldout], rows[self.n_heldout :]

    def train(self, start: int, count: int) -> dict[str, Tensor]:
        return self._batch(self._train[np.arange(start, start + count) % len(self._train)])

    def heldout(self, start: int, count: int) -> dict[str, Tensor]:
        return self._batch(self._heldout[np.arange(start, start + count) % self.n_heldout])

    def _batch(self, rows: np.ndarray) -> dict[str, Tensor]:
        tokens = torch.from_numpy(rows.astype(np.int64))
        inputs = tokens[:, :-1]
        position = torch.arange(self.length).expand_as(inputs)
        # A story that ends early is followed by another one, which does not see it.
        first = torch.where(inputs == self.separator, position, 0).cummax(1).values
        return {"input_ids": inputs, "labels": tokens[:, 1:], "position_ids": position - first}

    def describe(self) -> dict:
        return {"text": "the model's own samples", "train_sequences": len(self._train), "length": self.length,
                "heldout_sequences": self.n_heldout}  # fmt: skip


@torch.no_grad()
def sample(model, separator: int, length: int, tokens: int, batch: int, seed: int) -> np.ndarray:
    """Rows of `length` + 1 tokens (the last one is only a label), drawn at temperature 1 from the first token on."""
    device = next(model.parameters()).device
    torch.manual_seed(seed)
    rows: list[np.ndarray] = []
    while len(rows) * batch * length < tokens:
        token = torch.full((batch, 1), separator, device=device)
        drawn, cache = [token], None
        for _ in range(length):
            output = model(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            p = output.logits[:, -1].float().softmax(-1)
            token = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)  # a draw from p
            drawn.append(token)
        rows.append(torch.cat(drawn, 1).cpu().numpy().astype(np.uint16))
    return np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hugging Face name of the stories15m model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="file for the sampled tokens; an existing one is used again")
    parser.add_argument("--tokens", type=int, default=82_500_000, help="as many as training takes: none twice")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--closing", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--decay", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unseen", nargs="+", default=[], help="text of another kind, for the report alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    text = arguments.text or arguments.out.with_name(arguments.out.name + "-text.npy")
    model, tokenizer = sl.load(arguments.model)
    length, separator = dimensions(model.config).max_tokens, separator_id(tokenizer)
    corpora: dict[str, Batches] = {}
    if arguments.unseen:
        corpora["unseen"] = whole_text(arguments.unseen, tokenizer, length)
    if not text.is_file():
        began = time.perf_counter()
        cuda = torch.cuda.is_available()
        model = model.to("cuda", torch.bfloat16) if cuda else model
        rows = sample(model, separator, length, arguments.tokens, 8192 if cuda else 128, arguments.seed)
        text.parent.mkdir(parents=True, exist_ok=True)
        np.save(text, rows, allow_pickle=False)
        print(f"sampled {rows[:, 1:].size:,} tokens in {time.perf_counter() - began:.0f} s: {text}")
    del model
    stories = Stories(np.load(text, allow_pickle=False), separator)
    run = sl.sparsify(
        arguments.model, stories, arguments.out,
        loss="kl", tolerance=0.05, density=arguments.density, closing=arguments.closing, control=True,
        steps=arguments.steps, batch=arguments.batch, lr=arguments.lr, optimizer=arguments.optimizer,
        decay=arguments.decay, seed=arguments.seed,
        evaluate_every=max(1, arguments.steps // 20), evaluate_sequences=256, checkpoint_every=arguments.steps,
        resume=arguments.resume,
    )  # fmt: skip
    publish(run, arguments.model, {"heldout": stories} | corpora, arguments.json)


if __name__ == "__main__":
    main()
