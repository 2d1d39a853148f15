"""Sequences that are made instead of read, by name: how those of a Run are made again."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import Batches

_MAKERS: "dict[str, Callable[[Mapping[str, Any]], Batches]]" = {}


def register_data(name: str, make: "Callable[[Mapping[str, Any]], Batches]") -> None:
    """Say how to make sequences again whose `describe()` has this `name`; `make` is given that description.

    A Run keeps the description of what it was trained on: with this, `evaluate` finds the Run's own held-out sequences.
    """
    _MAKERS[name] = make


def make_again(description: Mapping[str, Any]) -> "Batches | None":
    """The sequences of this description; None where it has no name, as that of text."""
    name = description.get("name")
    if name is None:
        return None
    if name not in _MAKERS:
        known = ", ".join(sorted(_MAKERS)) or "none"
        raise ValueError(
            f"nobody has registered the data {name!r} (known: {known}); import the module that calls "
            "register_data for it first, or give text with --data"
        )
    return _MAKERS[name](description)
