"""Greater-than: `The war lasted from the year 1732 to the year 17` -> a year after 32. Corruption: 1732 -> 1701.

Metric: P(years > YY) - P(years <= YY), not renormalised. Where a tokenizer writes YY as one token that is one softmax.
Where it splits digits, the first digit decides unless it equals YY's, and then the second does:

    P(> YY) = P(first > Y1) + P(first = Y1) P(second > Y2 | Y1)

Y1 is appended to both prompts, so that one forward pass gives both softmaxes. The decomposition is found from the
answers' tokens (prompts.py), not from a rule about tokenizers.
"""

import random

from .registry import Pair, Words, register_task

NOUNS = (
    "war", "siege", "voyage", "project", "conflict", "expedition", "reign", "dispute", "plague", "campaign", "drought",
    "famine", "alliance", "occupation", "journey", "construction", "rebellion", "treaty", "empire", "investigation",
)  # fmt: skip


@register_task("greater-than", metric="probability")
def greater_than(rng: random.Random, words: Words) -> Pair:
    noun, century, year = rng.choice(NOUNS), rng.randint(11, 17), rng.randint(2, 98)
    prompt = f"The {noun} lasted from the year {century}{{:02}} to the year {century}"
    years = [f"{y:02}" for y in range(100)]
    return Pair(prompt.format(year), prompt.format(1), tuple(years[year + 1 :]), tuple(years[: year + 1]))
