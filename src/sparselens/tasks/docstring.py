"""Docstring: a Python def with its arguments documented in order -> the next argument. Corruption: unrelated names."""

import random

from .registry import Pair, Words, register_task

ARGUMENTS = (
    "load", "size", "file", "name", "path", "data", "mode", "user", "index", "value", "key", "line", "text", "host",
    "port", "image", "table", "field", "label", "model", "result", "target", "source", "time", "date", "state",
    "group", "role", "node", "cache", "offset", "count", "width", "height", "color", "token", "query", "parent",
    "child", "status", "level", "shape", "scale", "page", "item", "option", "event", "message", "config", "output",
    "input", "sample", "window", "rate",
)  # fmt: skip
FUNCTIONS = ("port", "update", "create", "send", "render", "parse", "check", "build", "fetch", "apply")
PHRASES = (
    "the first element", "a short string", "the total number", "an optional flag", "the current one",
    "a list of things",
)  # fmt: skip


def text(function: str, names: list[str], documented: list[str], phrases: list[str]) -> str:
    lines = [f"def {function}(self, {', '.join(names)}):", '    """do something useful', ""]
    lines += [f"    :param {name}: {phrase}" for name, phrase in zip(documented, phrases, strict=True)]
    return "\n".join([*lines, "    :param"])


@register_task("docstring")
def docstring(rng: random.Random, words: Words) -> Pair:
    names = rng.sample(words.alike(ARGUMENTS), 14)
    mine, other, other_documented = names[:6], names[6:12], names[12:]
    function, phrases = rng.choice(FUNCTIONS), rng.sample(PHRASES, 2)
    answer = mine[4]
    clean, corrupted = text(function, mine, mine[2:4], phrases), text(function, other, other_documented, phrases)
    return Pair(clean, corrupted, f" {answer}", tuple(f" {name}" for name in mine if name != answer))
