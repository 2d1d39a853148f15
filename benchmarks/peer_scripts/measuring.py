"""Measured work in a process of its own: seconds and memory. Nothing but the standard library.

    python SCRIPT spec.json < a line for each time

A script loads once. Then, for every line that comes in, it works once, writes what it found to spec["found"] and says
DONE: so two tools can take turns. Imported by every script here, in the environment of the tool that is measured.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def resident(field: str) -> float:
    """MiB of this process: VmRSS, what it has now; VmHWM, the most it had since `forget`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def forget() -> None:
    """Start the peak (VmHWM) anew; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What the work gives, and what it cost.

    seconds: CPU seconds, which other programs on the machine hardly change (one thread: a quiet machine's clock shows
    the same); wall_seconds: what the clock said. peak_mb: the most the whole process ever had, importing and loading
    included. work_mb: the most it had while it worked, less loaded_mb, what it had when the work began.
    """
    gc.collect()
    before, earlier = resident("VmRSS"), resident("VmHWM")
    forget()
    began, cpu_began = time.perf_counter(), time.process_time()
    done = work()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    peak = resident("VmHWM")
    return done, {
        "seconds": round(cpu, 3), "wall_seconds": round(wall, 3), "loaded_mb": round(before, 1),
        "work_mb": round(max(0.0, peak - before), 1), "peak_mb": round(max(peak, earlier), 1),
    }  # fmt: skip


def serve(
    asked: dict[str, Any],
    load: Callable[[], Any],
    work: Callable[[Any], Any],
    tell: Callable[[Any, Any], dict[str, Any]],
) -> None:
    """Work whenever asked to. tell(loaded, done): what else to say of it, once it is measured."""
    loaded, first = load(), {}
    for _ in sys.stdin:
        done, cost = measured(lambda: work(loaded))
        # Memory is that of the first time: later ones find what it left behind.
        first = first or {key: cost[key] for key in ("loaded_mb", "work_mb", "peak_mb")}
        Path(asked["found"]).write_text(json.dumps({**cost, **first, **tell(loaded, done)}))
        del done
        print("DONE", flush=True)


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def spec() -> dict[str, Any]:
    """What the process was asked for."""
    return json.loads(Path(sys.argv[1]).read_text())
