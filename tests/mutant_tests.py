"""Which test runs which line, and runs of chosen tests in a fork of this process. For mutants.py."""

import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
SOURCE, TESTS, BUILD = ROOT / "src" / "sparselens", ROOT / "tests", ROOT / "build" / "mutants"
PRELOADED = ("torch", "transformers", "numpy", "datasets", "safetensors", "accelerate", "matplotlib")


class Watch:
    """A pytest plugin: runs the chosen tests in the order given, or all; keeps time and lines of those that pass."""

    def __init__(self, chosen: list[str] | None = None, files: dict[str, str] | None = None):
        self.chosen, self.files = chosen, files or {}
        self.lines: set[tuple[str, int]] = set()
        self.shared: dict[str, tuple[float, set]] = {}  # of fixtures that several tests use
        self.found: dict[str, dict] = {}

    def pytest_collection_modifyitems(self, items):
        if self.chosen is None:
            items[:] = [i for i in items if not (i.get_closest_marker("gpu") or i.get_closest_marker("browser"))]
        else:
            order = {name: i for i, name in enumerate(self.chosen)}
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        begin, before, self.lines = time.monotonic(), self.lines, set()
        result = yield
        self.shared[fixturedef.argname] = time.monotonic() - begin, self.lines
        self.lines = before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.lines = set()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" and report.passed:
            used = [self.shared[name] for name in item.fixturenames if name in self.shared]
            seconds = report.duration + sum(time for time, _ in used)
            lines = self.lines.union(*(lines for _, lines in used))
            self.found[item.nodeid] = {"seconds": seconds, "lines": sorted(f"{f}:{line}" for f, line in lines)}
        return report

    def trace(self, frame, event, arg):
        name = self.files.get(frame.f_code.co_filename)
        if name is None:
            return None
        self.lines.add((name, frame.f_lineno))
        return self.trace


def child(work: Callable[[], int], limit: float, log: Path) -> int | None:
    """The exit code of work() in a fork of this process with its output in a file; None if it took too long."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
        code = 99
        try:
            code = int(work())
        finally:
            os._exit(code)
    end, wait = time.monotonic() + limit, 0.005
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(wait)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_tests(watch: Watch, files: list[str]) -> int:
    # Without shrinking: that a test fails is all we want to know.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutants")
    return pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files], plugins=[watch])


def map_file(test: Path, kept: Path, core: list[str]) -> int:
    """In a child: which test of this file runs which lines of the core, how long it takes, and what it imports."""
    watch = Watch(files={str(SOURCE / f"{name}.py"): name for name in core})
    threading.settrace(watch.trace)  # a server computes in a thread of its own
    sys.settrace(watch.trace)
    code = run_tests(watch, [str(test)])
    sys.settrace(None)
    threading.settrace(None)
    modules = [name for name in sys.modules if name.split(".")[0] in PRELOADED]
    kept.write_text(json.dumps({"tests": watch.found, "modules": modules}))
    return code


def coverage(core: list[str], only: tuple[str, ...]) -> dict[str, dict]:
    """{test: {"seconds", "lines"}}, tests/faults left out; only files whose text, helpers or package changed run again.

    Imports what the tests import, so that a fork of this process need not.
    """
    every = sorted(TESTS.rglob("*.py"))
    files = [p for p in every if p.name.startswith("test_") and "faults" not in p.parts]
    files = [p for p in files if str(p.relative_to(ROOT)).startswith(only)]
    helpers = [p for p in every if not p.name.startswith(("test_", "muta"))]
    texts = [p.read_bytes() for p in [*sorted(SOURCE.rglob("*.py")), *helpers]]
    package = hashlib.sha256(b"".join([*texts, repr(core).encode()])).digest()
    found: dict[str, dict] = {}
    for i, test in enumerate(files):
        name = "-".join(test.relative_to(TESTS).with_suffix("").parts)
        kept = BUILD / f"{name}.{hashlib.sha256(package + test.read_bytes()).hexdigest()[:16]}.json"
        if not kept.exists():
            for old in BUILD.glob(f"{name}.*.json"):
                old.unlink()
            print(f"lines of {test.relative_to(ROOT)} ({i + 1}/{len(files)})", flush=True)
            log = BUILD / "map.log"
            code = child(lambda: map_file(test, kept, core), 600, log)  # noqa: B023
            if code not in (0, 5):  # 5: nothing to run here
                raise SystemExit(f"{test} does not pass without mutants:\n{log.read_text(errors='replace')[-3000:]}")
        data = json.loads(kept.read_text())
        found |= data["tests"]
        for module in data["modules"]:
            with suppress(ImportError):  # a few are only known under another's name
                importlib.import_module(module)
    return found
