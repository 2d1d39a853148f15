"""One computation at a time: questions in a queue, and long jobs that let questions through.

A job calls `step(done, of)` now and then. There, questions that have come in meanwhile are answered, and a job that was
cancelled ends. A question that takes a while calls `pause()`, where quick ones are answered: whoever types on must not
wait for the edges of what was typed before. Everything runs in one thread, so models need no locks.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..runs.run import one_line

MOST_WAITING = 64  # questions; more are refused rather than remembered
MOST_JOBS = 8


Question = tuple[Callable[[], Any], "Future[Any]", bool]  # what to compute, where its answer goes, whether it is quick


class Busy(ValueError):
    """Too much is waiting already."""


class Cancelled(Exception):
    """Somebody has pressed cancel."""


class Job:
    """Something that takes a while: what it is, how far it is, and what came of it."""

    def __init__(self, number: int, kind: str, work: "Callable[[Job], Any]"):
        self.number, self.kind, self.work = number, kind, work
        self.state, self.done, self.of, self.message = "waiting", 0, 0, ""
        self.result: Any = None
        self.cancelled = threading.Event()

    def row(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("number", "kind", "state", "done", "of", "message")}
        return told | ({"result": self.result} if self.state == "done" else {})


class Worker:
    """The thread that computes."""

    def __init__(self) -> None:
        self._questions: deque[Question] = deque()
        self._jobs: deque[Job] = deque()
        self._news = threading.Condition()
        self._stopping = False
        self.latest: deque[Job] = deque(maxlen=2 * MOST_JOBS)  # those that wait, and some that have ended
        self.finished = 0  # jobs that came to a good end
        self._count = 0
        self._current: Job | None = None
        self._thread = threading.Thread(target=self._work, name="studio", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[], Any], quick: bool = False) -> Future[Any]:
        """Its answer, when it is its turn. A future that is cancelled before that is not computed.

        quick: it may be answered in the middle of another question that is not, and calls no `pause` itself.
        """
        answer: Future[Any] = Future()
        with self._news:
            if len(self._questions) >= MOST_WAITING:
                raise Busy("too many questions at once; wait a moment")
            self._questions.append((question, answer, quick))
            self._news.notify()
        return answer

    def start(self, kind: str, work: Callable[[Job], Any]) -> Job:
        with self._news:
            if len(self._jobs) >= MOST_JOBS:
                raise Busy(f"{MOST_JOBS} jobs are waiting already; cancel one first")
            self._count += 1
            job = Job(self._count, kind, work)
            self._jobs.append(job)
            self.latest.append(job)
            self._news.notify()
        return job

    def cancel(self, number: int) -> None:
        with self._news:
            for job in self.latest:
                if job.number == number:
                    job.cancelled.set()
                    if job in self._jobs:  # its place is free again
                        self._jobs.remove(job)
                        job.state, job.message = "cancelled", "cancelled"

    def step(self, done: int, of: int) -> None:
        """Called by the job that is running."""
        job = self._current
        assert job is not None
        job.done, job.of = done, of
        self._answer_all()
        if job.cancelled.is_set() or self._stopping:
            raise Cancelled

    def stop(self) -> None:
        with self._news:
            self._stopping = True
            self._news.notify()

    def pause(self) -> None:
        """Called by a question that takes a while."""
        with self._news:
            quick = [one for one in self._questions if one[2]]
            for one in quick:
                self._questions.remove(one)
        for question, answer, _ in quick:
            self._answer(question, answer)

    def _answer_all(self) -> None:
        while self._questions:
            self._answer(*self._questions.popleft()[:2])

    def _answer(self, question: Callable[[], Any], answer: Future[Any]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question())
        except BaseException as error:  # whoever asked hears it; this thread goes on
            answer.set_exception(error)

    def _work(self) -> None:
        while not self._stopping:
            with self._news:
                self._news.wait_for(lambda: self._questions or self._jobs or self._stopping)
            self._answer_all()
            with self._news:
                job = self._jobs.popleft() if self._jobs and not self._stopping else None
            if job is not None:
                self._run(job)

    def _run(self, job: Job) -> None:
        if job.cancelled.is_set():
            return
        self._current, job.state = job, "running"
        try:
            job.result = job.work(job)
            job.state = "done"
            self.finished += 1
        except Cancelled:
            job.state, job.message = "cancelled", "cancelled"
        except Exception as error:
            job.state, job.message = "failed", one_line(error, 400)
        finally:
            self._current = None
            job.work = lambda job: None  # what it held on to may go
