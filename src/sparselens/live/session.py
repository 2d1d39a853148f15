"""What a studio keeps: experiments and circuits, in the Run, so that the report shows them and nobody loses them.

RUN/studio/session.json is read and written whole whenever something is kept: two studios on one Run lose nothing of
each other. Without a Run it stays in memory.
"""

import secrets
from collections.abc import Callable
from typing import Any

from ..reporting.sections.studio import SESSION, check_session
from ..runs.run import Run, give_back, take_lock

MOST_KEPT = 200
Rows = list[dict[str, Any]]


class Session:
    """Kept experiments (a prompt, what was changed, what came of it) and circuits, oldest first."""

    def __init__(self, run: Run | None):
        self.run = run
        self.kept: Rows = self._read()
        self.version = 0  # of what is kept: another number, other rows

    def keep(self, kind: str, row: dict[str, Any]) -> None:
        def added(kept: Rows) -> Rows:
            if len(kept) >= MOST_KEPT:
                raise ValueError(f"{MOST_KEPT} things are kept already; remove some first")
            return [*kept, {"id": secrets.token_hex(4), "kind": kind, **row}]

        self._change(added)

    def remove(self, name: str) -> None:
        """By its id: in another tab it may stand in another place."""

        def without(kept: Rows) -> Rows:
            left = [row for row in kept if row.get("id") != name]
            if len(left) == len(kept):
                raise ValueError("that is not kept any more")
            return left

        self._change(without)

    def _read(self) -> Rows:
        if self.run is None:
            return []
        kept: Rows = check_session(self.run.find(SESSION, {"kept": []}), str(self.run.path))["kept"]
        return kept

    def _change(self, change: Callable[[Rows], Rows]) -> None:
        if self.run is None:
            self.kept = change(self.kept)
        else:
            folder = (self.run.path / SESSION).parent
            folder.mkdir(exist_ok=True)
            lock = take_lock(folder / ".lock", wait=True)
            assert lock is not None
            try:
                kept = change(self._read())
                self.run.write(SESSION, {"kept": kept})
                self.kept = kept  # only once it is on the disk
            finally:
                give_back(lock)
        self.version += 1
