"""A small house with one of everything (model, text, Run, transcoder, circuit, trace), and the command line run inside.

`Outcome.refused()` is what every bad input must lead to: exit code 2, one sentence, and not a byte written anywhere.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from pairs import chosen
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.models.loading import load

PROMPT = "w3 w5 w8 w13 w21 w3 w9"
QUICK = ["--length", "16", "--batch", "2", "--steps", "20", "--evaluate-every", "10", "--heldout-tokens", "300"]
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}


def build(folder: Path) -> None:
    """base, text.txt, run (with circuits, trace, attention, report), coder, pairs.jsonl, clusters.json."""
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), folder / "base")
    documents = (" ".join(f"w{(i * j + j) % 62}" for j in range(40)) for i in range(200))
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    _do(folder, ["sparsify", "base", "--data", "text.txt", "--out", "run", "--cache", "cache", *QUICK])
    coder = ["--features", "16", "--k", "4", "--normalise-over", "1"]
    _do(folder, ["transcode", "run", "--data", "text.txt", "--out", "coder", "--cache", "cache", *QUICK, *coder])
    pairs = chosen([load(folder / "base")[0]]).pairs[:16]
    rows = [{"clean": p.clean, "corrupted": p.corrupted, "answer": p.answer, "wrong": p.wrong} for p in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    search = ["--prompts", "4", "--points", "3", "--steps", "2", "--no-random-control"]
    search += ["--readings", "removed", "components"]
    _do(folder, ["discover", "base", "--task", "pairs.jsonl", "--out", "run/circuits", *search])
    _do(folder, ["trace", "run", "--transcoder", "coder", "--prompt", PROMPT, "--out", "run/trace", "--checks", "2"])
    _do(folder, ["report", "run"])
    (folder / "clusters.json").write_bytes((folder / "run" / "trace" / "clusters.json").read_bytes())
    for drawing in [*folder.rglob("*.png"), *folder.rglob("*.svg"), *folder.rglob("*.pdf"), *folder.rglob("*.html")]:
        drawing.unlink()


def _do(folder: Path, arguments: list[str]) -> None:
    done = command(folder, *arguments)
    assert done.code == 0, done.err


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    changed: list[str]  # files and folders that appeared, disappeared or changed
    outside: list[str]  # what was opened for writing elsewhere

    def refused(self, cache: bool = False) -> str:
        """The sentence. cache: text that could be read is tokenised before it turns out to be too short."""
        assert self.code == 2, f"exit code {self.code}: {self.out[-500:]} {self.err[-2000:]}"
        assert "Traceback" not in self.err + self.out
        lines = [line for line in self.err.replace("\r", "\n").splitlines() if line.strip() and "[00:" not in line]
        if "For full helptext" in self.err:  # the parser's own words
            sentence = " ".join(self.err.split())
            assert "__tyro" not in sentence
        else:
            assert len(lines) == 1 and lines[0].startswith("sparselens: "), self.err
            sentence = lines[0]
            assert sentence.isprintable() and len(sentence) < 1200, sentence
        assert len(sentence) > 20, sentence
        changed = [name for name in self.changed if not (cache and name.startswith("cache/"))]
        assert not changed and not self.outside, (changed, self.outside)
        return sentence

    def survived(self) -> None:
        """Refused, or done."""
        if self.code != 0:
            self.refused()
        assert not self.outside, self.outside


def command(folder: Path, *arguments: str) -> Outcome:
    """Run the command line in this process, inside the folder, and watch what it writes."""
    before = _state(folder)
    out, err = io.StringIO(), io.StringIO()
    _watched[:] = [str(folder)]
    _written.clear()
    try:
        with (
            contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):  # fmt: skip
            main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        _watched.clear()
    after = _state(folder)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return Outcome(code, out.getvalue(), err.getvalue(), changed, sorted(set(_written)))


def _state(folder: Path) -> dict[str, tuple]:
    found = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        is_folder = path.is_dir()  # its time changes with a temporary file that is gone again
        found[str(path.relative_to(folder))] = (is_folder, None if is_folder else (about.st_size, about.st_mtime_ns))
    return found


# Python tells a hook about every file it opens and every folder it makes. A hook cannot be removed, only put to sleep.
_watched: list[str] = []
_written: list[str] = []
_ALLOWED = (
    tempfile.gettempdir() + "/tmp",
    "/dev/",
    "/proc/",
    str(Path.home() / ".cache"),
    str(Path.home() / ".config"),
)


def _hook(event: str, arguments: tuple) -> None:
    if not _watched or (event != "open" and event not in WRITES):
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    else:
        path = arguments[0]
    if isinstance(path, int) or path is None:
        return
    name = os.path.abspath(os.fsdecode(path))
    if name != tempfile.gettempdir() and not name.startswith((_watched[0], *_ALLOWED)) and "__pycache__" not in name:
        _written.append(f"{event} {name}")


sys.addaudithook(_hook)
