"""What a task is, which there are, and a user's own pairs: one JSON object per line.

    {"clean": "The capital of France is", "corrupted": "The capital of Italy is", "answer": " Paris", "wrong": " Rome"}

`answer` and `wrong` are strings or lists of strings, with their leading space. Without `wrong` the metric is the
answer's log-probability. `"metric": "probability"` in the first line makes it P(answer) - P(wrong) for all of them.

`Words` is what a task may ask of a tokenizer: a prompt as tokens, and words that it treats alike, so that swapping them
keeps a prompt's length.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from .prompts import Prompts

Metric = Literal["logit", "probability", "log-probability"]
# One's own: (prompts, logits at the reads [..., n, reads, vocabulary]) -> [..., n], larger for better; right above 0.
Score = Callable[["Prompts", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Pair:
    """One prompt and its counterpart, as text. Both must have the same number of tokens."""

    clean: str
    corrupted: str
    answer: str | tuple[str, ...]  # how the clean prompt goes on; several where any of them is right
    wrong: str | tuple[str, ...] = ()  # what to compare with; empty: the answer's own log-probability is the metric
    filled: bool = False  # the answer stands at the prompt's last tokens (as in addition), not after them


def piece(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """A token as text, its leading space included."""
    raw = str(tokenizer.convert_ids_to_tokens(int(token)))
    return raw.replace("\u2581", " ") if "\u2581" in raw else str(tokenizer.decode([int(token)])) or raw


class Words:
    """What a task may ask of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        from ..models.loading import first_token  # where a tokenizer is, torch has been imported; not before

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


Generator = Callable[[random.Random, Words], Pair]


@dataclass(frozen=True)
class Task:
    """A named source of pairs and the metric they are judged by."""

    name: str
    generate: Generator | None
    metric: Metric | Score = "logit"
    pairs: tuple[Pair, ...] = ()  # a fixed list (a user's file) instead of a generator
    prompt: Callable[[str], str] | None = None  # what a person typed -> a prompt of the task; ValueError if it is none


Tasks = str | Path | Task | Sequence[str | Path | Task]  # as verbs take them
_REGISTRY: dict[str, Task] = {}
_BUILT_IN = ("antonym", "docstring", "greater_than", "induction", "ioi", "ioi_long")


@overload
def register_task(task: Task) -> Task: ...


@overload
def register_task(
    task: str, metric: Metric | Score = "logit", prompt: Callable[[str], str] | None = None
) -> Callable[[Generator], Generator]: ...


def register_task(
    task: Task | str, metric: Metric | Score = "logit", prompt: Callable[[str], str] | None = None
) -> Task | Callable[[Generator], Generator]:
    """Make a task known by its name to every verb and command: a Task, or, as a decorator, a generator of pairs."""
    if isinstance(task, Task):
        _REGISTRY[task.name] = task
        return task

    def register(generate: Generator) -> Generator:
        register_task(Task(task, generate, metric, prompt=prompt))
        return generate

    return register


def names() -> list[str]:
    """Every registered task."""
    for module in _BUILT_IN:
        import_module(f".{module}", __package__)
    return sorted(_REGISTRY)


def find(name: "str | Path | Task") -> Task:
    """The task of that name, or a user's own pairs from a .jsonl file."""
    if isinstance(name, Task):
        return name
    if str(name).endswith(".jsonl"):
        return read_pairs(Path(name))
    known = names()
    if str(name) not in _REGISTRY:
        raise ValueError(
            f"unknown task {str(name)!r}: expected one of {', '.join(known)}, or a .jsonl file of your own pairs"
        )
    return _REGISTRY[str(name)]


def find_all(names: Tasks) -> list[Task]:
    """The tasks of these names; one of them need not be put in a list."""
    return [find(name) for name in ([names] if isinstance(names, str | Path | Task) else names)]


def read_pairs(path: Path) -> Task:
    """A task of the pairs in a file; ValueError with the line where one cannot be used."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv") from None
    pairs: list[Pair] = []
    metric: Any = None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            row = _object(line, where)
            if pairs and bool(row.get("wrong")) != bool(pairs[0].wrong):
                raise ValueError(f"{where}: either every pair has a wrong answer to compare with, or none")
            metric = metric or row.get("metric") or ("logit" if row.get("wrong") else "log-probability")
            _check_metric(metric, bool(row.get("wrong")), where)
            pairs.append(_pair(row, where))
    if not pairs:
        raise ValueError(f"{path} holds no pairs")
    return Task(path.stem, None, metric, tuple(pairs))


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict) or not {"clean", "corrupted", "answer"} <= row.keys():
        raise ValueError(f"{where}: expected an object with clean, corrupted and answer (and wrong), got {line[:80]}")
    return row


def _check_metric(metric: Any, has_wrong: bool, where: str) -> None:
    if not isinstance(metric, str) or metric not in get_args(Metric):
        raise ValueError(f"{where}: metric {metric!r}; expected logit, probability or log-probability")
    if has_wrong == (metric == "log-probability"):
        needs = "takes no wrong answers" if has_wrong else "needs wrong answers to compare with"
        raise ValueError(f"{where}: metric {metric} {needs}")


def _pair(row: dict[str, Any], where: str) -> Pair:
    answer, wrong = (_texts(row.get(name) or [], f"{where}: {name}") for name in ("answer", "wrong"))
    if not answer:
        raise ValueError(f"{where}: no answer")
    for name in ("clean", "corrupted"):
        if not isinstance(row[name], str) or not row[name]:
            raise ValueError(f"{where}: {name} must be a text, got {row[name]!r}")
    try:
        "".join((row["clean"], row["corrupted"], *answer, *wrong)).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half a character, which no tokenizer can read") from None
    return Pair(row["clean"], row["corrupted"], answer, wrong)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in values):
        raise ValueError(f"{where} must be a text or a list of texts, got {value!r}")
    return tuple(values)
