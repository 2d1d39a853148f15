"""What the page shows of a Run, one module per section: files of the Run in, plain JSON values out. No torch.

A section is two files: the module here (or anywhere else, with `register`),

    def weather(shown):                           # shown.run is the Run; shown["circuits"] are another section's rows
        return shown.run.find("weather.json", None)       # None: nothing yet

    SECTION = Section("weather", "Weather", weather, lambda run: f"weather --out {run.path}", place=60)

and its script, assets/weather.js (or another, named with `script`), which shows those rows (docs/report.md has one).

Imports what reporting may.
"""

import base64
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypedDict, TypeVar, cast

import numpy as np
from typing_extensions import NotRequired

from ...runs.run import Run, reading

NAME = re.compile(r"[a-z][a-z0-9-]*")
T = TypeVar("T")  # of JSON's values
OUTSIDE = -32768  # marks a pair the mask does not allow


@dataclass(frozen=True)
class Section:
    """One section of the page: what it is called, the rows it shows, and the script that shows them."""

    name: str  # its id on the page, and its key among the rows
    title: str  # in the navigation
    rows: "Callable[[Shown], Any]"  # values JSON can hold; None or empty where the Run has nothing yet
    command: Callable[[Run], str]  # what would fill it
    place: int = 100  # sections stand in this order, from the top
    script: Path | None = None  # default: assets/NAME.js

    def source(self) -> str:
        """The text of its script."""
        return asset(f"{self.name}.js") if self.script is None else self.script.read_text(encoding="utf-8")


class Payload(TypedDict):  # all the page shows
    runs: list[dict[str, object]]  # {section: its rows, ..., "commands"}
    live: bool
    stamp: NotRequired[str]  # of a served page: what it was made of
    studio: NotRequired[bool]  # a studio's page, which asks its server


class Packed(TypedDict):  # an array for decode() in data.js: value = integer * scale
    type: str
    scale: float
    data: str  # little-endian integers, deflated, in base64


class Shown:
    """What the page shows of one Run: the rows of every section, made when first asked for, and once."""

    def __init__(self, run: Run, share: float = 1.0):
        self.run, self.share = run, share  # of the page's budget
        self._rows: dict[str, object] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows:
            with reading(self.run.path):
                self._rows[name] = sections()[name].rows(self)
        return self._rows[name]

    def forget(self, name: str) -> None:
        """Make a section's rows again when they are next asked for: the Run has changed."""
        self._rows.pop(name, None)

    def value(self) -> dict[str, object]:
        """{section: rows}, and under "commands" {section: what would fill it}."""
        found: dict[str, object] = {name: self[name] for name in sections()}
        with reading(self.run.path):
            return found | {"commands": {name: section.command(self.run) for name, section in sections().items()}}


def open_runs(runs: Sequence[Path | str | Run]) -> list[Shown]:
    """One or two Runs, ready to be shown."""
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"a report shows one or two Runs, not {len(runs)}")
    return [Shown(run if isinstance(run, Run) else Run(run), 1 / len(runs)) for run in runs]


def payload(runs: Sequence[Path | str | Run] | list[Shown], live: bool = False) -> Payload:
    """All the page shows, as one JSON value: {"runs": [{section: rows, ..., "commands"}, ...], "live"}."""
    shown = [run for run in runs if isinstance(run, Shown)] or open_runs(runs)  # type: ignore[arg-type]
    return {"runs": [run.value() for run in shown], "live": live}


_registered: dict[str, Section] = {}


def register(section: Section) -> None:
    """Put a section on every page made from now on."""
    if not NAME.fullmatch(section.name):
        raise ValueError(f"section {section.name!r}: expected a name of small letters, digits and hyphens")
    if section.name in sections():
        raise ValueError(f"there is a section {section.name!r} already; choose another name")
    section.source()  # a script that is not there is an error now
    _registered[section.name] = section


def sections() -> dict[str, Section]:
    """Every section by its name, from the top of the page to its foot."""
    return {s.name: s for s in sorted((*_built_in(), *_registered.values()), key=lambda s: s.place)}


@cache
def _built_in() -> tuple[Section, ...]:
    modules = (import_module(f".{found.name}", __name__) for found in iter_modules(__path__))
    return tuple(module.SECTION for module in modules if hasattr(module, "SECTION"))


@cache
def asset(name: str) -> str:
    """A file of assets/, as text."""
    return (files("sparselens.reporting") / "assets" / name).read_text(encoding="utf-8")


# ---- numbers for the page: typed arrays, a tenth of what JSON takes --------------------------------------------------


def read_tensors(path: Path, remedy: str) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file; ValueError with the remedy where it cannot be read."""
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors has its own error type; all mean a damaged or missing file
        raise ValueError(f"{path} cannot be read ({error}); {remedy}") from error


def pack(array: np.ndarray, scale: float = 1.0) -> Packed:
    types = {"uint8": "Uint8Array", "uint16": "Uint16Array", "int16": "Int16Array"}
    content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    data = base64.b64encode(zlib.compress(content, 6)).decode("ascii")
    return {"type": types[array.dtype.name], "scale": scale, "data": data}


def triangle(maps: np.ndarray) -> np.ndarray:
    """[..., queries, keys] -> [..., pairs]: the pairs a causal model has, row by row."""
    rows, columns = np.tril_indices(maps.shape[-1])
    return maps[..., rows, columns]


def pack_weights(weights: np.ndarray, bits: int = 16) -> Packed:
    """Attention weights in [0, 1], [layers, heads, queries, keys]. What is open stays open, however weak."""
    top = 2**bits - 1
    pairs = triangle(weights).astype(np.float64)
    whole = np.where(pairs > 0, np.maximum(np.rint(pairs * top), 1), 0)
    return pack(whole.astype(f"uint{bits}"), 1 / top)


def pack_margins(margins: np.ndarray) -> Packed:
    """Gate margins; the sign, which says open or closed, survives rounding. -inf (no such pair) becomes OUTSIDE."""
    pairs = triangle(margins).astype(np.float64)
    real = np.isfinite(pairs)
    scale = max(float(np.abs(pairs[real]).max(initial=0.0)), 1e-6) / 32767
    whole = np.rint(np.where(real, pairs, 0) / scale)
    whole = np.where((pairs > 0) & (whole < 1), 1, whole)
    return pack(np.where(real, whole, OUTSIDE).astype(np.int16), scale)


def short(value: T, digits: int = 5) -> T:
    """Floats with this many significant digits, everywhere inside lists and dicts; what is not finite becomes None."""
    if isinstance(value, float):
        return cast(T, float(f"{value:.{digits}g}") if math.isfinite(value) else None)
    if isinstance(value, dict):
        return cast(T, {str(key): short(item, digits) for key, item in value.items()})
    return cast(T, [short(item, digits) for item in value]) if isinstance(value, list | tuple) else value


def finite(value: T) -> T:
    """The same numbers, to the last digit; NaN and infinities, which JSON does not have, become None."""
    return short(value, 17)
