"""Two-digit addition, filled in parallel: `36+28=?????` -> `00064`. The smallest real example of everything.

The model reads eleven characters and answers at the five question marks, all at once; attention is causal, so with
4 layers of 4 heads there are 4 * 4 * 66 = 1,056 possible edges.
"""

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

CHARACTERS = "0123456789+=?"
POSITIONS = 11
ANSWER = 5  # digits
EXAMPLE = (36, 28)  # the sum of the picture; always held out


def encode(pairs: Tensor) -> dict[str, Tensor]:
    """[n, 2] summands -> input_ids and labels, both [n, 11]; only the answer has labels."""
    a, b = pairs.unbind(-1)
    plus, equals, unknown = (torch.full_like(a, CHARACTERS.index(c)) for c in "+=?")
    inputs = torch.stack([a // 10, a % 10, plus, b // 10, b % 10, equals, *[unknown] * ANSWER], -1)
    labels = torch.full_like(inputs, -100)
    for place in range(ANSWER):
        labels[:, POSITIONS - 1 - place] = (a + b) // 10**place % 10
    return {"input_ids": inputs, "labels": labels}


class AdditionBatches:
    """All 10,000 sums of two numbers below 100; a fifth of them is held out."""

    length = POSITIONS
    n_heldout = 2000

    def __init__(self, seed: int = 0):
        self.seed = seed
        numbers = np.random.default_rng(seed).permutation(100 * 100)
        at = int(np.flatnonzero(numbers == EXAMPLE[0] * 100 + EXAMPLE[1])[0])
        numbers[[0, at]] = numbers[[at, 0]]
        pairs = torch.from_numpy(np.stack([numbers // 100, numbers % 100], -1))
        self.heldout_pairs, self._train = pairs[: self.n_heldout], pairs[self.n_heldout :]

    def train(self, start: int, count: int) -> dict[str, Tensor]:
        n = len(self._train)
        epochs = range(start // n, (start + count - 1) // n + 1)
        order = np.concatenate([np.random.default_rng([self.seed, epoch]).permutation(n) for epoch in epochs])
        first = start - epochs[0] * n
        return encode(self._train[order[first : first + count]])

    def heldout(self, start: int, count: int) -> dict[str, Tensor]:
        return encode(self.heldout_pairs[torch.arange(start, start + count) % self.n_heldout])

    def describe(self) -> dict[str, object]:
        return {"name": "addition", "seed": self.seed, "heldout_sequences": self.n_heldout, "length": self.length}


def make_model(seed: int = 0, dropout: float = 0.3) -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """An untrained 4-layer, 4-head, 64-wide GPT-2 and a tokenizer that reads characters.

    dropout: on attention weights alone. Without it so small a model concentrates by itself (docs/LOG.md).
    """
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(CHARACTERS), n_positions=POSITIONS, n_embd=64, n_layer=4, n_head=4, activation_function="relu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=dropout, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model, tokenizer = GPT2LMHeadModel(config), PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="?")  # type: ignore[no-untyped-call]
    return model, tokenizer


def answer(model: nn.Module, a: int, b: int) -> str:
    """The five digits the model writes for a + b."""
    with torch.no_grad():
        logits = model(encode(torch.tensor([[a, b]]))["input_ids"], use_cache=False).logits
    return "".join(CHARACTERS[i] for i in logits[0, -ANSWER:].argmax(-1))
