"""What a studio keeps: experiments and circuits, in the Run, so that the report shows them and nobody loses them.

RUN/studio/session.json is written whole whenever something is kept. Without a Run it stays in memory.
"""

from typing import Any

from ..reporting.sections.studio import SESSION, check_session
from ..runs.run import Run

MOST_KEPT = 200


class Session:
    """Kept experiments (a prompt, what was changed, what came of it) and circuits, oldest first."""

    def __init__(self, run: Run | None):
        self.run = run
        self.rows = check_session(run.find(SESSION, {"kept": []}), str(run.path)) if run else {"kept": []}

    def keep(self, kind: str, row: dict[str, Any]) -> None:
        if len(self.rows["kept"]) >= MOST_KEPT:
            raise ValueError(f"{MOST_KEPT} things are kept already; remove some first")
        self._write([*self.rows["kept"], {"kind": kind, **row}])

    def remove(self, index: int) -> None:
        if not 0 <= index < len(self.rows["kept"]):
            raise ValueError("that is not kept any more")
        self._write([row for i, row in enumerate(self.rows["kept"]) if i != index])

    def _write(self, kept: list[dict[str, Any]]) -> None:
        rows = {"kept": kept}
        if self.run is not None:
            self.run.write(SESSION, rows)
        self.rows = rows  # only once it is on the disk
