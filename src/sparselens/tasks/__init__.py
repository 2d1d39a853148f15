"""Tasks: clean/corrupted prompt pairs with an answer, for any tokenizer.

A task is a function (rng, words) -> Pair, registered under a name. Yours takes ten lines:

    import sparselens as sl

    @sl.register_task("capital")
    def capital(rng, words):
        (country, city), (other, other_city) = rng.sample([("France", "Paris"), ("Italy", "Rome")], 2)
        return sl.Pair(f"The capital of {country} is", f"The capital of {other} is", f" {city}", f" {other_city}")

Lengths, answer tokens and positions are worked out and checked for every pair before anything runs (prompts.py).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    from torch import Tensor

    from .prompts import Prompts
    from .words import Words

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


Generator = Callable[[random.Random, "Words"], Pair]


@dataclass(frozen=True)
class Task:
    """A named source of pairs and the metric they are judged by."""

    name: str
    generate: Generator | None
    metric: Metric | Score = "logit"
    pairs: tuple[Pair, ...] = ()  # a fixed list (a user's file) instead of a generator
    prompt: Callable[[str], str] | None = None  # what a person typed -> a prompt of the task; ValueError if it is none


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
        import_module(f".{module}", __name__)
    return sorted(_REGISTRY)


def find(name: "str | Path | Task") -> Task:
    """The task of that name, or a user's own pairs from a .jsonl file."""
    if isinstance(name, Task):
        return name
    if str(name).endswith(".jsonl"):
        from .jsonl import read_pairs

        return read_pairs(Path(name))
    known = names()
    if str(name) not in _REGISTRY:
        raise ValueError(
            f"unknown task {str(name)!r}: expected one of {', '.join(known)}, or a .jsonl file of your own pairs"
        )
    return _REGISTRY[str(name)]
