"""Induction: a list of words begins again; which comes next? Corruption: another word stood there the first time."""

import random

from .registry import Pair, Words, register_task

WORDS = (
    "apple", "river", "stone", "cloud", "train", "glass", "paper", "horse", "table", "green", "music", "light",
    "water", "house", "bread", "chair", "storm", "clock", "field", "north", "metal", "sugar", "plant", "heart",
    "queen", "beach", "tower", "mouse", "dance", "smoke", "wheel", "grass", "piano", "tiger", "lemon", "ocean",
    "brick", "candle", "winter",
)  # fmt: skip
LENGTH = 8


@register_task("induction")
def induction(rng: random.Random, words: Words) -> Pair:
    first = rng.sample(words.alike(WORDS), LENGTH + 1)
    other = first.pop()
    at = rng.randrange(3, LENGTH)  # the repeated part has at least three words to be recognised by
    replaced = [*first[:at], other, *first[at + 1 :]]
    again = " ".join(first[:at])
    return Pair(f"{' '.join(first)} {again}", f"{' '.join(replaced)} {again}", f" {first[at]}", f" {other}")
