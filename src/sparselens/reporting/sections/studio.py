"""What was kept in a studio, for the page: experiments with their measured change, circuits of typed sentences."""

import shlex
from typing import Any

from ...runs.run import Run
from . import Section, Shown, finite

SESSION = "studio/session.json"


def check_session(rows: Any, where: str) -> dict[str, Any]:
    """The rows of a session.json; ValueError where it is none."""
    kept = rows.get("kept") if isinstance(rows, dict) else None
    if not isinstance(kept, list) or not all(isinstance(row, dict) and "kind" in row for row in kept):
        raise ValueError(f"{where}: {SESSION} is damaged: expected an object with a list of what was kept; remove it")
    return rows  # type: ignore[no-any-return]


def _rows(shown: Shown) -> dict[str, Any] | None:
    found = shown.run.find(SESSION, None)
    return None if found is None else finite(check_session(found, str(shown.run.path)))


def _command(run: Run) -> str:
    return f"sparselens studio {shlex.quote(str(run.path))}"


SECTION = Section("studio", "Studio", _rows, _command, place=90)
