"""A Run -> all the page shows, as one JSON value. A section without rows says on the page what would fill it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runs.run import Run
from .sections import Shown


def open_runs(runs: Sequence[Path | str | Run]) -> list[Shown]:
    """One or two Runs, ready to be shown."""
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"a report shows one or two Runs, not {len(runs)}")
    return [Shown(run if isinstance(run, Run) else Run(run), 1 / len(runs)) for run in runs]


def payload(runs: Sequence[Path | str | Run] | Sequence[Shown], live: bool = False) -> dict[str, Any]:
    """{"runs": [{section: rows, ..., "commands"}, ...], "live"} of one or two Runs."""
    shown = [run for run in runs if isinstance(run, Shown)] or open_runs(runs)  # type: ignore[arg-type]
    return {"runs": [run.value() for run in shown], "live": live}
