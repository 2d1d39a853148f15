"""The Run: a directory with what was asked, what happened and what came out, readable at every moment.

    run.json        what was asked (config) and where it came from (versions, command, data)
    metrics.jsonl   one line per step or evaluation
    checkpoints/    the last two states to resume from, with checksums
    model/          the result; summary.json, evaluation.json and pictures beside it

Files appear whole or not at all: they are written under another name, flushed to disk and renamed.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from . import distributed, pictures
from .rows import MetricsLine, Provenance

DEVICES = Path("/dev")
LATER = {"optimizer": "adamw"}  # settings that runs recorded before they existed were made with


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader never sees half of it, not even after a power cut."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"
    # Half a character (a file name that is not UTF-8, a broken prompt) becomes the escape that JSON has for it.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    if path.absolute().parent == DEVICES:  # /dev/stdout is not a name to put a file under
        with path.open("wb") as file:
            file.write(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link that somebody has put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError naming the file where it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


@contextmanager
def reading(what: Any) -> Iterator[None]:
    """What is wrong inside readable files (a missing key, a text for a number) as one sentence, not as a traceback."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} does not hold what was expected ({why}); it is damaged or not ours") from error


def one_line(error: Exception, most: int = 1000) -> str:
    """What went wrong, in one line that a terminal can show, whatever a file or an argument put into it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def check_writable(*paths: Path | None) -> None:
    """ValueError, before any work, for a file that could not be written afterwards."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{path} is a folder; expected the name of a file")
        if path.absolute().parent != DEVICES:
            _check_place(path.absolute().parent)


def check_folder(path: Path | None) -> None:
    """ValueError, before any work, for a folder that could not be written into afterwards."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; --out needs a folder")
    _check_place(path.absolute())


def _check_place(folder: Path) -> None:
    """The nearest folder on the way that exists must be a folder, and ours to write to."""
    place = _existing(folder)
    if not place.is_dir():
        raise ValueError(f"cannot write to {folder}: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: no permission, or a read-only disk")


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def free_disk(out: Path) -> float:
    """Bytes free where `out` is or will be."""
    return shutil.disk_usage(_existing(out)).free


def refuse_full_disk(out: Path, need: float, instead: str) -> None:
    """ValueError, before any work, where so many bytes will not fit; instead: what would need fewer."""
    if (free := free_disk(out)) < need:
        raise ValueError(
            f"{_existing(out)} has {free / 1e9:.1f} GB free; this run may need {need / 1e9:.1f} GB. Free some space, "
            f"choose another --out, or {instead}."
        )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name when all is in it; on a full disk nothing is left of it."""
    from safetensors import SafetensorError  # which is what a full disk is called there

    fresh = fresh_name(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        yield fresh
        _put_in_place(fresh, folder)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"could not write {folder} ({error}); free some space, then try again") from error
        raise


def fresh_name(folder: Path) -> Path:
    """What a folder is called while it is being written."""
    return folder.with_name(f".{folder.name}.tmp")


def as_readable_as_others(path: Path) -> None:
    """Give a file the rights any new file has: safetensors writes weights that only their owner may read."""
    os.umask(mask := os.umask(0o077))  # the only way to ask for it
    path.chmod(0o666 & ~mask)


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Give a finished folder its name, its files on the disk; one that has the name already makes way."""
    for path in fresh.rglob("*"):
        if path.is_file():
            as_readable_as_others(path)
            with path.open("r+b") as file:
                os.fsync(file.fileno())
    old = folder.with_name(f".{folder.name}.old")
    if there := folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    fresh.rename(folder)
    if there:
        shutil.rmtree(old)


def sweep(folder: Path) -> None:
    """Clear up behind a killed process, holding the lock; a folder left under its old name alone gets its own back."""
    for path in [*folder.rglob(".*.old"), *folder.rglob(".*.tmp")]:
        if path.suffix == ".old" and not (place := path.with_name(path.name[1:-4])).exists():
            path.rename(place)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def take_lock(path: Path, wait: bool = False) -> FileLock | None:
    """The lock, held until `give_back` or until the process dies; None where another one has it (and not `wait`)."""
    lock = FileLock(path, timeout=-1 if wait else 0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def give_back(lock: FileLock) -> None:
    """Remove the lock's file, then release it: whoever holds a file that has lost its name begins again."""
    with suppress(OSError):  # Windows removes no file that is open; there the release does
        Path(lock.lock_file).unlink()
    lock.release()


def _git(*arguments: str) -> str:
    """What git says about the folder of this file; nothing where there is no git."""
    with suppress(OSError):
        command = ["git", "-C", str(Path(__file__).parent)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True).stdout.strip()
    return ""


def provenance() -> Provenance:
    """Versions, command and machine, so that a number can be made again."""
    versions = {}
    for package in ("sparselens", "torch", "transformers", "triton", "peft", "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    own = _git("ls-files", Path(__file__).name)  # installed inside somebody's repository, HEAD would be theirs
    commit = _git("rev-parse", "HEAD") if own else ""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"versions": versions, "python": platform.python_version(), "commit": commit or None, "command": command}


def _leaves(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings by their dotted names: training.lr."""
    found: dict[str, object] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= _leaves(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


class Run:
    """One directory, one writer."""

    def __init__(self, path: "Path | str | Run"):
        if not isinstance(path, str | Path | Run):
            raise ValueError(f"expected a Run or its folder, got {type(path).__name__}")
        self.path: Path = path.path if isinstance(path, Run) else Path(path)
        if not (self.path / "run.json").is_file():
            raise ValueError(f"{path} is not a Run (it has no run.json)")
        self.record: dict[str, Any] = read_json(self.path / "run.json")
        parts = self.record if isinstance(self.record, dict) else {}
        if not isinstance(parts.get("kind"), str) or not isinstance(parts.get("config"), dict):
            raise ValueError(f"{self.path / 'run.json'} is damaged: expected an object with kind and config")
        self._lock: FileLock | None = None

    @classmethod
    def create(cls, path: Path | str, kind: str, config: Mapping[str, object], resume: bool = False) -> "Run":
        """Start a Run in an empty folder, or, with `resume`, open the one that was started with the same settings.

        Of several processes, the main one does that; the others only read.
        """
        return distributed.main_first(
            lambda: cls._create(Path(path), kind, config, resume) if distributed.is_main() else cls(path)
        )

    @classmethod
    def _create(cls, path: Path, kind: str, config: Mapping[str, object], resume: bool) -> "Run":
        cls.check(path, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path / ".lock")
        except OSError as error:
            raise ValueError(f"cannot write to {path}: {error.strerror}") from error
        if lock is None:
            raise ValueError(f"another process is writing to {path}; wait for it or choose another --out")
        try:
            cls.check(path, resume)  # again: another process may have finished in between
            sweep(path)
            if (path / "run.json").is_file():
                cls(path)._refuse_other(kind, config)
            else:
                write_json(path / "run.json", {"kind": kind, "config": config, "provenance": provenance()})
            run = cls(path)
        except BaseException:
            give_back(lock)
            raise
        run._lock = lock
        return run

    @classmethod
    def check(cls, path: Path | str, resume: bool = False) -> None:
        """ValueError where `create` will refuse the folder, whatever the settings are. Writes nothing."""
        path = Path(path)
        if (path / "run.json").is_file():
            cls(path)
            if not resume:
                raise ValueError(f"{path} already holds a run; continue it with --resume or choose another --out")
            return
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; --out needs a folder")
        # Killed before its first file was whole, a run leaves these: nothing is lost by starting over them.
        if path.is_dir() and any(found.name not in (".lock", ".run.json.tmp") for found in path.iterdir()):
            raise ValueError(f"{path} is not empty and holds no run; choose another --out")
        if resume and not path.is_dir():
            raise ValueError(f"nothing to resume: {path} holds no run")

    def _refuse_other(self, kind: str, config: Mapping[str, object]) -> None:
        before = {
            key: LATER | value if key in ("training", "dense") and isinstance(value, dict) else value
            for key, value in self.record["config"].items()
        }
        now = json.loads(json.dumps(config, default=str))
        before, now = _leaves(before), _leaves(now)
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if self.record["kind"] != kind or changed:
            differs = ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed) or kind
            raise ValueError(
                f"{self.path} holds another run ({differs}); resume with its settings or choose another --out"
            )

    def __repr__(self) -> str:
        """Its folder, what made it, and the two numbers one asks for first, where it has got that far."""
        summary = self.find("summary.json", {})
        rows = {name: row for name in ("base", "control", "sparse") if isinstance(row := summary.get(name), dict)}
        numbers = [f"{name} loss {row['loss']:.4f}" for name, row in rows.items()]
        if "sparse" in rows:
            numbers.append(f"{rows['sparse']['density']:.2%} of the edges open")
        state = ", ".join(numbers) or ("finished" if (self.path / "results.json").is_file() else "not finished")
        return f"Run({self.path}: {self.record['kind']}, {state})"

    def _repr_html_(self) -> str:
        """For notebooks: figure 1 where it is drawn, else the loss as it went."""
        lines = Metrics.read(self.path) if (self.path / "metrics.jsonl").is_file() else []
        losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        return pictures.page(repr(self), pictures.of_run(self.path, losses))

    @property
    def started_from(self) -> str:
        """The dense model it began with: a name or path, or a folder of its own where it made that one, too."""
        own, name = self.path / "base" / "model", self.record["config"].get("model")
        if not own.is_dir() and not isinstance(name, str):
            raise ValueError(f"{self.path} does not say which model it started from")
        return str(own if own.is_dir() else name)

    def without_model(self) -> str:
        """Why it has no model, in a sentence."""
        if self.record.get("kind") == "transcode":
            return f"{self.path} holds a transcoder, not a model; name the model it was trained on"
        return f"{self.path} has no model yet; finish it with `--resume`"

    def unlock(self) -> None:
        if self._lock is not None:
            give_back(self._lock)
            self._lock = None

    def write(self, name: str, value: Any) -> Path:
        if distributed.is_main():
            write_json(self.path / name, value)
        return self.path / name

    def read(self, name: str) -> Any:
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{self.path} has no {name}; the run did not get that far")
        return read_json(path)

    def find(self, name: str, missing: Any) -> Any:
        """The same, or `missing` where there is no such file."""
        return self.read(name) if (self.path / name).is_file() else missing


@dataclass(frozen=True)
class About:
    """What a Run says about itself to whoever shows it: about.json in its folder, anybody's, all of it optional.

    {"name": "The addition model", "task": "addition", "exact": true, "filled": 5, "prompts": ["36+28=?????"]}
    """

    name: str = ""  # who a headline speaks of; "": the model's name
    task: str = ""  # a registered task, whose prompts people may type; "": any text is a prompt
    exact: bool = False  # exactly right sequences mean something
    filled: int = 0  # the answer stands at so many last tokens of a prompt; 0: it follows the prompt
    prompts: list[str] = field(default_factory=list)  # to look at attention with; none: the built-in ones


def about(run: Run) -> About:
    """The Run's about.json; where there is none, nothing special."""
    path, nothing = run.path / "about.json", vars(About())
    found = run.find("about.json", {})
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object")
    for key, usual in nothing.items():
        if type(found.get(key, usual)) is not type(usual):
            raise ValueError(f"{path}: {key} is {found[key]!r}; expected something like {usual!r}")
    if not all(isinstance(prompt, str) for prompt in found.get("prompts", [])):
        raise ValueError(f"{path}: prompts holds something that is no text")
    return About(**{key: found[key] for key in nothing.keys() & found.keys()})


class Metrics:
    """metrics.jsonl: one flushed line per call; on resume, lines after the checkpoint are dropped."""

    def __init__(self, folder: Path, after_step: int | None = None):
        self.path = folder / "metrics.jsonl" if distributed.is_main() else Path(os.devnull)
        if after_step is not None and self.path.is_file():
            kept = [line for line in self.read(folder) if line["step"] <= after_step]
            write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.file = self.path.open("a")

    def log(self, line: MetricsLine) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    @staticmethod
    def read(folder: Path) -> list[MetricsLine]:
        """Every whole line; a last line cut off by a crash is not one."""
        lines = []
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                values = json.loads(line)
                if isinstance(values, dict) and isinstance(values.get("step"), int):
                    lines.append(cast(MetricsLine, values))  # what it lacks shows when it is read
        return lines
