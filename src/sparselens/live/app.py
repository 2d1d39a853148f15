"""What the studio's page may ask, and the answers: plain JSON values in and out. The server around it is server.py."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..reporting import build_page, payload
from ..reporting.page import only
from ..runs.run import Run, one_line
from ..tasks.registry import Pair
from .session import Session
from .worker import Job, Worker

MOST_TEXT = 4000  # characters of a prompt
Say = Callable[[str], None]
Body = dict[str, Any]


class Studio:
    """The models (once they are loaded), the worker that runs them, and what was kept."""

    def __init__(self, source: "str | Path | Run | None", prepare: Callable[[Say], Path] | None = None):
        """prepare: makes the Run that is opened, where no source is named."""
        self.worker = Worker()
        self.models: Any = None  # a models.Models; torch is imported in the worker, the page comes at once
        self.features: Any = None
        self.session = Session(run := _run_at(source))
        self.run = run
        self.state, self.message = "preparing", "starting"
        self._page, self._making = ("", ""), threading.Lock()
        self._source, self._prepare = source, prepare
        self.worker.start("open", self._open)

    def _open(self, job: Job) -> None:
        def say(text: str) -> None:
            self.message = text

        try:
            say("importing torch")
            from .features import Features
            from .models import Models

            source = self._prepare(say) if self._source is None and self._prepare else self._source
            assert source is not None
            self.models = Models.open(source, say)
            self.models.pause = self.worker.pause
            self.features = Features(self.models)
            if self.run is None and self.models.run is not None:
                self.session, self.run = Session(self.models.run), self.models.run
            self.state, self.message = "ready", ""
        except Exception as error:
            self.state, self.message = "failed", one_line(error, 400)

    # ---- the page ----

    def page(self) -> str:
        """The report's page with the studio first; without a Run, the studio alone."""
        with self._making:  # twenty tabs want one page
            stamp = f"{self.run is None} {self.session.version} {self.worker.finished}"
            if self._page[0] != stamp:
                self._page = (stamp, self._made())
            return self._page[1]

    def _made(self) -> str:
        if self.run is None:
            value: Any = {"runs": [{"studio": None, "commands": {}}], "live": False, "studio": True}
            return build_page(value, only("studio"))
        return build_page({**payload([self.run]), "studio": True}, only("studio", first=True))

    # ---- questions ----

    def status(self) -> dict[str, Any]:
        """Small: every tab asks for it every second. What is kept is asked for when its version is another."""
        told: dict[str, Any] = {"state": self.state, "message": self.message, "kept": self.session.version}
        told["jobs"] = [job.row() for job in tuple(self.worker.latest) if job.kind != "open"]
        if self.state == "ready":
            told |= self.models.describe() | {"run": None if self.run is None else self.run.path.name}
        return told

    def kept(self) -> dict[str, Any]:
        return {"kept": self.session.kept, "version": self.session.version}

    def answer(self, verb: str, body: Body) -> Any:
        """One of VERBS; runs in the worker."""
        return VERBS[verb](self, body)

    def check_ready(self) -> None:
        if self.state != "ready":
            raise ValueError(f"the models are not there yet: {self.message}")

    def look(self, body: Body) -> Any:
        begun = time.perf_counter()
        found = self.models.look(_text(body, "text"), _numbers(body, "more"), _maybe(body, "position"))
        return found | {"seconds": time.perf_counter() - begun}

    def maps(self, body: Body) -> Any:
        return self.models.maps(_text(body, "role"), _text(body, "text"), _numbers(body, "more"))

    def effects(self, body: Body) -> Any:
        role, question = self._question(body)
        return {"edges": self.models.effects(role, question)}

    def active(self, body: Body) -> Any:
        return {"features": self.features.active(*self._question(body))}

    def opened(self, body: Body) -> Any:
        return self.features.opened(*self._question(body), _places(body, "edge", 4, one=True)[0])

    def touch(self, body: Body) -> Any:
        begun = time.perf_counter()
        role, question = self._question(body)
        changes = self._changes(body)
        how = self.features if changes.scaled else self.models
        return how.touch(role, question, changes) | {"seconds": time.perf_counter() - begun}

    def keep(self, body: Body) -> Any:
        """Measured again here: what is kept was never a number from the page."""
        role, question = self._question(body)
        found, changes = self.touch(body), self._changes(body)
        member = self.models.member(role)
        told = {
            "role": role, "text": _text(body, "text"), "more": _numbers(body, "more"),
            "tokens": member.pieces(question.ids),
            "position": question.position, "answer": question.answer, "says": member.pieces([question.answer])[0],
            "changes": {name: [list(place) for place in many] for name, many in changes._asdict().items()},
        }  # fmt: skip
        self.session.keep("experiment", told | found)
        return self.kept()

    def remove(self, body: Body) -> Any:
        self.session.remove(_text(body, "id"))
        return self.kept()

    def export(self, body: Body) -> Any:
        if self.run is None:
            raise ValueError("there is no Run to write a report into; start the studio on a Run")
        from ..serving.publish import report

        path = report(self.run, say=lambda text: None)
        return {"file": str(path.name), "folder": self.run.path.name}

    # ---- jobs ----

    def start(self, verb: str, body: Body) -> Any:
        if verb == "discover":
            pair = Pair(_text(body, "clean"), _text(body, "corrupted"), _text(body, "answer"), _text(body, "wrong", ""))
            role = _text(body, "role")
            self.models.member(role)
            return self.worker.start("discover", lambda job: self._discover(role, pair)).row()
        role, question = self._question(body)
        self.features.check(role)
        if (run := self.run) is None:
            raise ValueError("a trace is kept in a Run; start the studio on one")
        return self.worker.start("trace", lambda job: self._trace(job, role, question, run)).row()

    def _discover(self, role: str, pair: Pair) -> Any:
        from .circuit import circuit

        if self.models.filled:
            pair = Pair(pair.clean, pair.corrupted, pair.answer, pair.wrong, filled=True)
        found = circuit(self.models, role, pair, self.worker.step)
        self.session.keep("circuit", found)
        return {"n_edges": found["n_edges"]}

    def _trace(self, job: Job, role: str, question: Any, run: Run) -> Any:
        from ..attribution.trace import trace
        from ..config import Trace

        def model(role: str) -> Any:
            member = self.models.member(role)
            return (member.decoder.model, member.words.tokenizer), self.features.transcoder(role)

        def told(words: str) -> None:
            job.message = "measuring"
            self.worker.step(job.done, job.of)

        others = [name for name in ("dense", "sparse") if name != role and name in self.models.members]
        against = model(others[0]) if others and self.models.members[others[0]].transcoder else None
        folder = next(path for n in itertools.count(1) if not (path := run.path / f"trace-studio-{n}").exists())
        names = [role, *others][: 1 if against is None else 2]
        (loaded, coder) = model(role)
        trace(
            loaded, coder, list(question.ids), question.answer, against=against, names=names, out=folder, say=told,
            step=self.worker.step, settings=Trace(position=question.position, budget=300, checks=10, cuts=20),
        )  # fmt: skip
        return {"folder": folder.name}

    def cancel(self, body: Body) -> Any:
        self.worker.cancel(_number(body, "number"))
        return {}

    # ---- what a request says ----

    def _question(self, body: Body) -> tuple[str, Any]:
        role = _text(body, "role")
        place = (_number(body, "answer"), _maybe(body, "position"), _numbers(body, "more"))
        return role, self.models.question(role, _text(body, "text"), *place)

    def _changes(self, body: Body) -> Any:
        from .models import Changes

        closed, silenced = _places(body, "closed", 4), _places(body, "silenced", 2)
        return Changes(closed, silenced, _places(body, "scaled", 4, factor=True))


VERBS: dict[str, Callable[[Studio, Body], Any]] = {
    "look": Studio.look, "maps": Studio.maps, "effects": Studio.effects, "active": Studio.active,
    "opened": Studio.opened, "touch": Studio.touch, "keep": Studio.keep, "remove": Studio.remove,
    "export": Studio.export,
}  # fmt: skip
QUICK = ("look", "maps")  # answered in the middle of slower questions
JOBS = ("discover", "trace")


def _run_at(source: "str | Path | Run | None") -> Run | None:
    """The Run that a source names. Its page can be shown before torch is there."""
    if source is None or isinstance(source, Run):
        return source
    return Run(source) if (Path(source) / "run.json").is_file() else None


def _text(body: Body, name: str, missing: str | None = None) -> str:
    value = body.get(name, missing)
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise ValueError(f"{name}: expected a text of at most {MOST_TEXT} characters")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _number(body: Body, name: str) -> int:
    value = body.get(name)
    if not _whole(value):
        raise ValueError(f"{name}: expected a whole number")
    return int(value)  # type: ignore[arg-type]


def _maybe(body: Body, name: str) -> int | None:
    return None if body.get(name) is None else _number(body, name)


def _numbers(body: Body, name: str) -> list[int]:
    value = body.get(name) or []
    if not isinstance(value, list) or len(value) > 256 or not all(map(_whole, value)):
        raise ValueError(f"{name}: expected a list of whole numbers")
    return value


def _places(body: Body, name: str, size: int, factor: bool = False, one: bool = False) -> tuple[Any, ...]:
    """Lists of `size` whole numbers; with `factor` the last is a number between -10 and 10."""
    value = [body.get(name)] if one else body.get(name) or []
    if not isinstance(value, list) or len(value) > 400:
        raise ValueError(f"{name}: expected at most 400 places")
    for place in value:
        whole = place[: size - factor] if isinstance(place, list) and len(place) == size else [None]
        if not all(map(_whole, whole)) or (factor and not _factor(place[-1])):
            raise ValueError(f"{name}: expected places of {size} numbers each")
    return tuple(tuple(place) for place in value)


def _factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -10 <= value <= 10
