"""What may be in a field of the settings, and the sentence about what may not."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def require(condition: bool, message: str) -> None:
    """ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


_NUMBERS: dict[type, tuple[type, str]] = {
    int: (Integral, "a whole number"), float: (Real, "a number"), bool: (bool, "True or False")
}  # fmt: skip


def check_kinds(settings: Any) -> None:
    """Numbers are numbers, one of several words is one of them, and one of many needs no tuple around it."""
    for name, kind in get_type_hints(type(settings)).items():
        value, parts = getattr(settings, name), get_args(kind)
        if get_origin(kind) is Literal:
            require(value in parts, f"{name}={value!r}: expected one of {', '.join(parts)}")
        elif get_origin(kind) is tuple:
            many = (value,) if isinstance(value, str | Path) else tuple(value)
            object.__setattr__(settings, name, many)
        else:
            optional = isinstance(kind, UnionType) and type(None) in parts
            kind = parts[0] if optional else kind
            if kind in _NUMBERS and not (optional and value is None):
                expected, words = _NUMBERS[kind]
                right = isinstance(value, expected) and (kind is bool or not isinstance(value, bool))
                require(right, f"{name}={value!r}: expected {words}" + " or None" * optional)
            elif kind is Path:
                require(isinstance(value, str | Path), f"{name}={value!r}: expected a path")
                object.__setattr__(settings, name, Path(value))


_RULES: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda value: value >= 1,
    "zero or more": lambda value: 0 <= value < math.inf,
    "zero or a positive number below 2^63": lambda value: 0 <= value < 1 << 63,
    "a positive number": lambda value: 0 < value < math.inf,
    "a share between 0 and 1": lambda value: 0 <= value <= 1,
    "a share above 0, up to 1": lambda value: 0 < value <= 1,
}


def expect(settings: Any, what: str, *names: str) -> None:
    """ValueError where one of these fields breaks the rule of that name."""
    for name in names:
        value = getattr(settings, name)
        require(_RULES[what](value), f"{name}={value}: expected {what}")
