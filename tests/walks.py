"""Which modules a command walks through, in the order it enters them: counted by a profiler on tiny models.

python tests/walks.py FOLDER      prints the walks of docs/architecture.md
"""

import contextlib
import io
import sys
import threading
from pathlib import Path

from golden import ASK, CACHE, QUICK, SEARCH, SMALL, prepare

WALKS = {
    "sparsify": ["sparsify", "base", "--data", "text.txt", "--out", "run", "--control", *QUICK, *CACHE, "--lr", "1e-4"],
    "compare": ["compare", "base", "run", "--tasks", "pairs.jsonl", "--out", "run/circuits", *SEARCH],
    "transcode": ["transcode", "run", "--data", "text.txt", "--out", "coder", *QUICK, *CACHE, *SMALL],
    "trace": ["trace", "run", "--transcoder", "coder", "--out", "run/trace", "--checks", "3", *ASK],
    "report": ["report", "run"],
    "report, attention kept": ["report", "run"],
}


def walk(arguments: list[str]) -> list[str]:
    """Modules of the package, functions of which are called; importing a module is not walking through it."""
    import sparselens
    from sparselens.cli import main

    root = str(Path(sparselens.__file__).parent)
    entered: dict[str, None] = {}

    def note(frame, event, argument) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(root) and not _defining(frame):
            name = file[len(root) + 1 :].removesuffix(".py").removesuffix("/__init__")
            entered.setdefault(name.replace("/", "."))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(entered)


def _defining(frame) -> bool:
    """Whether this happens while a module is being imported: decorators, class bodies, registries."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and "sparselens" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        prepare()
        for name, arguments in WALKS.items():
            found = walk(arguments)
            print(f"{name}: {len(found)} modules\n  {' > '.join(found)}", flush=True)
