"""Indirect object over a distance: neutral filler of exactly DISTANCE tokens between the clauses.

`register_distance(256)` makes the task `ioi-long-256`.
"""

import random

from .ioi import pair
from .registry import Pair, Words, register_task

DISTANCE = 100
TEMPLATES = (
    "Today {a} and {b} went to the {place}.{filler} Then {s} gave a {thing} to",
    "This morning {a} and {b} met at the {place}.{filler} In the end {s} handed a {thing} to",
    "Yesterday {a} and {b} had lunch near the {place}.{filler} Afterwards {s} gave a {thing} to",
)
SENTENCES = (
    " The weather was mild and the streets were quiet.",
    " A light wind moved the leaves of the trees.",
    " Nothing much happened for a while.",
    " Some clouds passed, and the light changed slowly.",
    " In the distance a bell was ringing.",
    " The afternoon went by as afternoons do.",
    " It was warm, and the air smelled of rain.",
    " The road was long, and few cars passed.",
)


def filler(rng: random.Random, words: Words, distance: int) -> str:
    """Sentences without people, `distance` tokens in all; the last one is stretched word by word to fit."""
    before = "the park."
    at = words.count(before)
    text = ""
    while True:
        longer = text + rng.choice(SENTENCES)
        if words.count(before + longer) - at > distance - 8:
            break
        text = longer
    for n in range(4 * distance):
        end = f" It was a{' very' * n} calm day."
        if words.count(before + text + end) - at >= distance:
            return text + end
    return text


def register_distance(distance: int, name: str | None = None) -> None:
    @register_task(name or f"ioi-long-{distance}")
    def ioi_long(rng: random.Random, words: Words) -> Pair:
        template = rng.choice(TEMPLATES).replace("{filler}", filler(rng, words, distance))
        return pair(rng, words, template)


register_distance(DISTANCE, "ioi-long")
