"""What the page shows of a Run, one module per section: files of the Run in, plain JSON values out. No torch.

A section is two files: the module here (or anywhere else, with `register`),

    def weather(shown):                           # shown.run is the Run; shown["circuits"] are another section's rows
        return shown.run.find("weather.json", None)       # None: nothing yet

    SECTION = Section("weather", "Weather", weather, lambda run: f"weather --out {run.path}", place=60)

and its script, assets/weather.js (or another, named with `script`), which shows those rows (docs/report.md has one).

Imports what reporting may.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ...runs.run import Run, reading

NAME = re.compile(r"[a-z][a-z0-9-]*")


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


class Shown:
    """What the page shows of one Run: the rows of every section, made when first asked for, and once."""

    def __init__(self, run: Run, share: float = 1.0):
        self.run, self.share = run, share  # of the page's budget
        self._rows: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows:
            with reading(self.run.path):
                self._rows[name] = sections()[name].rows(self)
        return self._rows[name]

    def forget(self, name: str) -> None:
        """Make a section's rows again when they are next asked for: the Run has changed."""
        self._rows.pop(name, None)

    def value(self) -> dict[str, Any]:
        """{section: rows}, and under "commands" {section: what would fill it}."""
        found = {name: self[name] for name in sections()}
        with reading(self.run.path):
            return found | {"commands": {name: section.command(self.run) for name, section in sections().items()}}


def open_runs(runs: Sequence[Path | str | Run]) -> list[Shown]:
    """One or two Runs, ready to be shown."""
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"a report shows one or two Runs, not {len(runs)}")
    return [Shown(run if isinstance(run, Run) else Run(run), 1 / len(runs)) for run in runs]


def payload(runs: Sequence[Path | str | Run] | list[Shown], live: bool = False) -> dict[str, Any]:
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
