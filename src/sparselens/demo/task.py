"""The demo's task and data, registered as any user's would be. Without torch: every command knows them.

Addition: `36+28=?????` -> 00064. Corruption: another sum with other digits.
"""

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..data.registry import register_data
from ..tasks import Pair, register_task

if TYPE_CHECKING:
    from ..tasks.registry import Words
    from .addition import AdditionBatches

UNKNOWN = "?????"  # where the model puts the sum, all digits at once


def prompt_of(text: str) -> str:
    """`36+28` (with or without =?????) as the addition model reads it."""
    left, plus, right = text.partition("=")[0].partition("+")
    if not (plus and left.strip().isdecimal() and right.strip().isdecimal()) or max(int(left), int(right)) > 99:
        raise ValueError(f"prompt {text!r}: this Run's model adds two numbers from 0 to 99; write for example 36+28")
    return f"{int(left):02}+{int(right):02}={UNKNOWN}"


@register_task("addition", prompt=prompt_of)
def addition(rng: random.Random, words: "Words") -> Pair:
    a, b = rng.randrange(100), rng.randrange(100)
    while True:
        c, d = rng.randrange(100), rng.randrange(100)
        # Ones and tens must both tell the two sums apart, or half of the task would not be measured.
        if (a + b) % 10 != (c + d) % 10 and (a + b) // 10 % 10 != (c + d) // 10 % 10:
            break
    answer, wrong = (f"{total:0{len(UNKNOWN)}}" for total in (a + b, c + d))
    return Pair(prompt_of(f"{a}+{b}"), prompt_of(f"{c}+{d}"), answer, wrong, filled=True)


def _batches(description: Mapping[str, Any]) -> "AdditionBatches":
    from .addition import AdditionBatches

    return AdditionBatches(description["seed"])


register_data("addition", _batches)
