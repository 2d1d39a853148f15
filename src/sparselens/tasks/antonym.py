"""Antonym: `The opposite of "large" is "` -> small. Corruption: another word, whose own antonym is the wrong answer."""

import random

from .registry import Pair, Words, register_task

OPPOSITES = (
    ("large", "small"), ("big", "small"), ("hot", "cold"), ("fast", "slow"), ("happy", "sad"), ("light", "dark"),
    ("old", "young"), ("high", "low"), ("open", "closed"), ("hard", "soft"), ("early", "late"), ("good", "bad"),
    ("strong", "weak"), ("rich", "poor"), ("full", "empty"), ("long", "short"), ("up", "down"), ("left", "right"),
    ("black", "white"), ("day", "night"), ("love", "hate"), ("win", "lose"), ("true", "false"), ("first", "last"),
    ("wide", "narrow"), ("wet", "dry"), ("clean", "dirty"), ("loud", "quiet"), ("near", "far"), ("above", "below"),
    ("north", "south"), ("east", "west"), ("male", "female"), ("buy", "sell"), ("begin", "end"), ("inside", "outside"),
)  # fmt: skip
TEMPLATES = (
    'The opposite of "{}" is "',
    'The antonym of "{}" is "',
    'The opposite of the word "{}" is the word "',
    'A word that means the opposite of "{}" is "',
)


@register_task("antonym")
def antonym(rng: random.Random, words: Words) -> Pair:
    both = OPPOSITES + tuple((b, a) for a, b in OPPOSITES)
    (word, answer), (other, wrong) = rng.sample(both, 2)
    template = rng.choice(TEMPLATES)
    return Pair(template.format(word), template.format(other), answer, wrong)
