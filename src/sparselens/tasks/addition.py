"""Addition: `36+28=?????` -> 00064, the toy model's own task. Corruption: another sum with other digits."""

import random

from ..demo.addition import ANSWER
from . import Pair, task
from .words import Words


def prompt(text: str) -> str:
    """`36+28` (with or without =?????) as the addition model reads it."""
    left, plus, right = text.partition("=")[0].partition("+")
    if not (plus and left.strip().isdecimal() and right.strip().isdecimal()) or max(int(left), int(right)) > 99:
        raise ValueError(f"prompt {text!r}: this Run's model adds two numbers from 0 to 99; write for example 36+28")
    return f"{int(left):02}+{int(right):02}=" + "?" * ANSWER


@task("addition", prompt=prompt)
def addition(rng: random.Random, words: Words) -> Pair:
    a, b = rng.randrange(100), rng.randrange(100)
    while True:
        c, d = rng.randrange(100), rng.randrange(100)
        # Ones and tens must both tell the two sums apart, or half of the task would not be measured.
        if (a + b) % 10 != (c + d) % 10 and (a + b) // 10 % 10 != (c + d) // 10 % 10:
            break
    unknown = "?" * ANSWER
    return Pair(
        f"{a:02}+{b:02}={unknown}", f"{c:02}+{d:02}={unknown}", f"{a + b:0{ANSWER}}", f"{c + d:0{ANSWER}}", filled=True
    )
