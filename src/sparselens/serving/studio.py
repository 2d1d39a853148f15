"""`sl.studio`: the live page of a Run, from Python."""

from collections.abc import Callable
from pathlib import Path

from ..runs.run import Run
from .serve import serve


def studio(run: str | Path | Run, port: int = 8765, *, say: Callable[[str], None] = print) -> None:
    """Serve the report of a Run on this machine until Ctrl-C; it reloads itself while the Run goes on.

    port: 0 takes any free one.
    """
    serve([run.path if isinstance(run, Run) else Path(run)], port, say=say)
