"""Readings as they are shown: in which order, in which words, and a ratio written one way everywhere. No torch."""

import math
from collections.abc import Iterable

from ..circuits.rows import SCOPES, TASK, WORDING, Ratio, Reading, Scope, wording

THRESHOLD = "0.9"  # of what is told first


def ordered(readings: Iterable[str]) -> list[str]:
    """The headline first: WORDING's order, one circuit for a whole task after one per prompt, unknown names last."""
    known = list(WORDING)

    def place(reading: str) -> tuple[int, bool]:
        base = reading.removesuffix(TASK)
        return known.index(base) if base in known else len(known), reading.endswith(TASK)

    return sorted(dict.fromkeys(readings), key=place)


def question(reading: str, scope: str | None) -> str:
    """What a reading asks and of how much at a time, in two short sentences."""
    found = SCOPES.get(scope, "") if scope in ("prompt", "task") else ""  # type: ignore[call-overload]
    how = "" if not found else f"{found[0].upper()}{found[1:]}."
    return f"{wording(reading).others} {how}".strip()


def scope_of(models: Iterable[Reading]) -> Scope | None:
    """The scope of a reading, from what any model's row says."""
    return next((model["scope"] for model in models if "scope" in model), None)


def fewer(row: Ratio, interval: bool = True) -> str:
    """2.2x fewer (1.9 to 2.5), or 1.9x more (1.2 to 2.4): the interval always in the direction of the word."""
    value, low, high = (float(number or 0.0) for number in (row["multiplier"], row["low"], row["high"]))
    word = "fewer"
    if not value > 0:  # not measured
        return "–"
    if value < 1:
        word, value, low, high = "more", 1 / value, 1 / high if high else 0.0, 1 / low if low else float("inf")
    return f"{times(value)} {word}" + (f" ({_ratio(low)} to {_ratio(high)})" if interval else "")


def times(ratio: float) -> str:
    """16.2x, 0.4x, 177x."""
    return f"{_ratio(ratio)}x"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 0.095 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def count(value: float | None) -> str:
    """Edges or heads, whole ones or a mean over prompts: 9,809, 15, 2.4."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
