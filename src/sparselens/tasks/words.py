"""A prompt as tokens; and words that one tokenizer treats alike, so that swapping them keeps a prompt's length."""

from collections import defaultdict
from typing import TYPE_CHECKING

from ..data.documents import first_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def piece(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """A token as text, its leading space included."""
    raw = str(tokenizer.convert_ids_to_tokens(int(token)))
    return raw.replace("\u2581", " ") if "\u2581" in raw else str(tokenizer.decode([int(token)])) or raw


class Words:
    """What a task may ask of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        self._alike: dict[tuple[str, ...], list[str]] = {}
        self._first = first_token(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: in front the token that training sequences start with (data/batches.py), no end token.

        Models lean on their first token. A sparse model that has only ever seen this one there is 1.4 nats away from
        its base on prompts without it, with it 0.17 (SmolLM2-135M, docs/LOG.md).
        """
        ids = list(self.tokenizer(text)["input_ids"])
        if ids and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(self.tokenizer.eos_token or "\0"):
            ids.pop()
        return self.begin(ids)

    def begin(self, ids: list[int]) -> list[int]:
        """The same with that first token, where it is not there yet."""
        return ids if self._first is None or ids[:1] == [self._first] else [self._first, *ids]

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def after(self, prompt: str, ids: list[int], answer: str) -> list[int]:
        """The tokens with which `answer` continues `prompt` (whose tokens are `ids`)."""
        both = self.encode(prompt + answer)
        if both[: len(ids)] == ids and len(both) > len(ids):
            return both[len(ids) :]
        # The tokenizer would merge across the border (" 17" + "76" -> " 1776"): the answer on its own, then.
        return list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])

    def alike(self, words: tuple[str, ...], enough: int = 16) -> list[str]:
        """The largest set of these words with one number of tokens; if enough, with first tokens that all differ."""
        if words not in self._alike:
            start = self.encode("and")
            groups: dict[int, dict[str, int]] = defaultdict(dict)
            for word in words:
                tokens = self.after("and", start, f" {word}")
                groups[len(tokens)][word] = tokens[0]
            largest = max(groups.values(), key=len)
            different = {first: word for word, first in reversed(largest.items())}
            self._alike[words] = list(largest) if len(different) < enough else sorted(different.values())
        return self._alike[words]
