"""The Run: a directory with what was asked, what happened and what came out, readable at every moment.

    run.json        what was asked (config) and where it came from (versions, command, data)
    metrics.jsonl   one line per step or evaluation
    checkpoints/    the last two states to resume from, with checksums
    model/          the result; summary.json, evaluation.json and pictures beside it

Files appear whole or not at all: they are written under another name, flushed to disk and renamed.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader never sees half of it, not even after a power cut."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def fresh_folder(folder: Path) -> Path:
    """Where to write a folder that shall appear whole or not at all; `put_in_place` then gives it its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    return fresh


def put_in_place(fresh: Path, folder: Path) -> None:
    """Give a finished folder its name; one that has it already makes way."""
    if not folder.exists():
        fresh.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)


def provenance() -> dict[str, Any]:
    """Versions, command and machine, so that a number can be made again."""
    versions = {}
    for package in ("sparselens", "torch", "transformers", "triton", "peft", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"versions": versions, "python": platform.python_version(), "commit": commit or None, "command": command}


class Run:
    """One directory, one writer."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not (self.path / "run.json").is_file():
            raise ValueError(f"{path} is not a Run (it has no run.json)")
        try:
            self.record: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path / 'run.json'} is damaged: {error}") from error
        self._lock: Any = None

    @classmethod
    def create(cls, path: Path | str, kind: str, config: dict[str, Any], resume: bool = False) -> "Run":
        """Start a Run in an empty folder, or, with `resume`, open the one that was started with the same settings."""
        path = Path(path)
        if (path / "run.json").is_file():
            run = cls(path)
            if not resume:
                raise ValueError(f"{path} already holds a run; continue it with --resume or choose another --out")
            run._refuse_other(kind, config)
        else:
            if path.exists() and not path.is_dir():
                raise ValueError(f"{path} is a file; --out needs a folder")
            if path.is_dir() and any(path.iterdir()):
                raise ValueError(f"{path} is not empty and holds no run; choose another --out")
            if resume:
                raise ValueError(f"nothing to resume: {path} holds no run")
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"cannot write to {path}: {error.strerror}") from error
            write_json(path / "run.json", {"kind": kind, "config": config, "provenance": provenance()})
            run = cls(path)
        run.lock()
        return run

    def _refuse_other(self, kind: str, config: dict[str, Any]) -> None:
        before = self.record["config"]
        now = json.loads(json.dumps(config, default=str))
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if self.record["kind"] != kind or changed:
            differs = ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed) or kind
            raise ValueError(
                f"{self.path} holds another run ({differs}); resume with its settings or choose another --out"
            )

    def lock(self) -> None:
        """Refuse to share the folder with a second process. The lock dies with the process that holds it."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another process is writing to {self.path}; wait for it or choose another --out"
            ) from None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            (self.path / ".lock").unlink(missing_ok=True)

    def write(self, name: str, value: Any) -> Path:
        write_json(self.path / name, value)
        return self.path / name

    def read(self, name: str) -> Any:
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{self.path} has no {name}; the run did not get that far")
        return json.loads(path.read_text())


class Metrics:
    """metrics.jsonl: one flushed line per call; on resume, lines after the checkpoint are dropped."""

    def __init__(self, folder: Path, after_step: int | None = None):
        self.path = folder / "metrics.jsonl"
        if after_step is not None and self.path.is_file():
            kept = [line for line in self.read(folder) if line["step"] <= after_step]
            write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.file = self.path.open("a")

    def log(self, **values: Any) -> None:
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """Every whole line; a last line cut off by a crash is not one."""
        lines = []
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return lines


# ---- checkpoints: tensors in safetensors, everything else in JSON, checksums over both -------------------------------


def save_checkpoint(
    folder: Path, step: int, tensors: "dict[str, Tensor]", state: dict[str, Any], keep: int = 2
) -> Path:
    """Publish `folder/step-N` atomically and drop all but the newest ones. A full disk costs only the new one."""
    from safetensors.torch import save_file

    final = folder / f"step-{step:08d}"
    temporary = folder / f".step-{step:08d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, temporary / "state.safetensors")
        (temporary / "state.json").write_text(json.dumps(state))
        sums = {name: _checksum(temporary / name) for name in ("state.safetensors", "state.json")}
        write_json(temporary / "checksums.json", sums)
    except Exception as error:  # OSError, or safetensors' own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        kept = [path.name for path in checkpoints(folder)]
        raise OSError(
            f"could not write the checkpoint of step {step} ({error}); "
            f"{'kept ' + kept[0] if kept else 'none was written before'}. Free some space and continue with --resume."
        ) from error
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    for old in checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def load_checkpoint(folder: Path) -> "tuple[dict[str, Tensor], dict[str, Any], list[str]] | None":
    """(tensors, state, complaints) of the newest checkpoint that is whole, or None if there was never one.

    A damaged checkpoint is passed over with a complaint; when all are damaged, ValueError.
    """
    from safetensors.torch import load_file

    complaints: list[str] = []
    for path in checkpoints(folder):
        try:
            sums = json.loads((path / "checksums.json").read_text())
            wrong = [name for name, expected in sums.items() if _checksum(path / name) != expected]
            if wrong or set(sums) != {"state.safetensors", "state.json"}:
                raise ValueError(f"checksum mismatch in {', '.join(wrong) or 'its list of files'}")
            return load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text()), complaints
        except (OSError, ValueError) as error:
            complaints.append(f"{path} is damaged ({error}); trying the one before")
    if complaints:
        raise ValueError("no checkpoint can be read: " + "; ".join(complaints))
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
