"""Checkpoints: tensors in safetensors, everything else in JSON, checksums over both. Never a pickle.

    step-N/state.safetensors          tensors; with FSDP2, the main process' rows of them
    step-N/state-0000n.safetensors    the rows of process n, where tensors are split over several
    step-N/state.json                 everything that is not a tensor
    step-N/checksums.json             sha256 of all of these

Rows put together in the order of the processes are the whole tensor: it does not matter how many processes there were.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import distributed
from .run import fresh_name, read_json, whole_folder, write_json


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, object], keep: int = 2,
    also: Sequence[int] = (),
) -> Path:  # fmt: skip
    """Publish `folder/step-N` atomically and drop all but the newest ones, and the steps in `also`.

    tensors: `distributed.own_part` of them. A full disk costs only the new one. The main process writes
    state.safetensors; where tensors are split over several processes (FSDP2), each writes its rows of them beside it.
    """
    final = folder / _name(step)
    try:
        with whole_folder(final) if distributed.is_main() else nullcontext(fresh_name(final)) as fresh:
            distributed.on_main(fresh.mkdir)
            digest = distributed.together(lambda: _write_part(fresh, tensors))
            sums = {_part(process): its for process, its in distributed.gather_checksums(digest).items()}
            distributed.on_main(lambda: _write_rest(fresh, state, sums))
    except OSError as error:
        kept = [path.name for path in checkpoints(folder)]
        raise OSError(
            f"could not write the checkpoint of step {step} ({error.__cause__ or error}); "
            f"{'kept ' + kept[0] if kept else 'none was written before'}. Free some space and continue with --resume."
        ) from error

    def drop_old() -> None:
        # Later ones are of a run that was killed and has been resumed before them: another run's future.
        mine = [path for path in checkpoints(folder) if path.name <= final.name]
        stay = {path.name for path in mine[:keep]} | {*map(_name, also)}
        for old in checkpoints(folder):
            if old.name not in stay:
                shutil.rmtree(old, ignore_errors=True)

    distributed.on_main(drop_old)
    return final


def _write_part(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write what is this process' to write; returns the checksum, or nothing where nothing is."""
    if not tensors and not distributed.is_main():
        return ""
    path = folder / _part(distributed.rank())
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return _checksum(path)


def _write_rest(folder: Path, state: Mapping[str, object], sums: dict[str, str]) -> None:
    (folder / "state.json").write_text(json.dumps(state))
    write_json(folder / "checksums.json", sums | {"state.json": _checksum(folder / "state.json")})


def _part(process: int) -> str:
    return f"state-{process:05d}.safetensors" if process else "state.safetensors"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def checkpoint_states(folder: Path) -> list[dict[str, Any]]:
    """What the published checkpoints hold beside tensors, newest first; damaged ones are left out."""
    states = []
    for path in checkpoints(folder):
        with suppress(OSError, ValueError):
            states.append(read_json(path / "state.json"))
    return states


class Saved(Mapping[str, Tensor]):
    """The tensors of a checkpoint, read when asked for; what several processes wrote in parts is whole again."""

    def __init__(self, path: Path, sums: dict[str, str]):
        self._files: dict[str, list[Any]] = {}  # name of a tensor -> the files that have rows of it, first to last
        for part in range(len(sums) - 1):
            file = safe_open(path / _part(part), framework="pt")
            for name in file.keys():  # noqa: SIM118 (not a dict)
                self._files.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        rows = [file.get_tensor(name) for file in self._files[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_checkpoint(folder: Path, step: int | None = None) -> tuple[Saved, dict[str, Any], list[str]] | None:
    """(tensors, state, complaints) of the newest checkpoint that is whole, or None if there was never one.

    step: try this one first. A damaged checkpoint is passed over with a complaint; when all are damaged, ValueError.
    Of several processes the main one decides. How many there were when it was written does not matter.
    """
    complaints: list[str] = []
    found: list[int] = []
    distributed.on_main(lambda: found.append(_newest_whole(folder, step, complaints)))
    chosen = distributed.from_main(found[0] if found else -1)
    if chosen < 0:
        return None
    path = checkpoints(folder)[chosen]
    return Saved(path, read_json(path / "checksums.json")), read_json(path / "state.json"), complaints


def _newest_whole(folder: Path, step: int | None, complaints: list[str]) -> int:
    """Which of the `checkpoints`; -1 where there are none."""
    found = checkpoints(folder)
    for path in sorted(found, key=lambda path: step is None or path.name != _name(step)):
        try:
            sums = read_json(path / "checksums.json")
            if not isinstance(sums, dict) or sums.keys() != {"state.json", *map(_part, range(max(1, len(sums) - 1)))}:
                raise ValueError("checksum mismatch in its list of files")
            wrong = [name for name in sums if _checksum(path / name) != sums[name]]
            if wrong:
                raise ValueError(f"checksum mismatch in {', '.join(wrong)}")
            Saved(path, sums)
            read_json(path / "state.json")
            return found.index(path)
        except (OSError, ValueError, SafetensorError) as error:
            complaints.append(f"{path} is damaged ({error}); trying the one before")
    if complaints:
        raise ValueError("no checkpoint can be read: " + "; ".join(complaints))
    return -1


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fill(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Put saved tensors back into the parameters of the same names."""
    another = "the checkpoint belongs to another model; choose another --out"
    if parameters.keys() != {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}:
        raise ValueError(another)
    with torch.no_grad():
        for name, p in parameters.items():
            saved = tensors[prefix + name]
            if saved.shape != p.shape:
                raise ValueError(f"{another} ({name}: {tuple(saved.shape)} there, {tuple(p.shape)} here)")
            p.copy_(distributed.split_like(saved, p))


def fill_optimizer(optimizer: Any, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Put the saved moments and step counts back."""
    for name, p in parameters.items():
        prefix = f"adam.{name}."
        saved = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
        if not saved:  # written before the first step: what the optimiser has gathered since goes, too
            optimizer.state.pop(p, None)
            continue
        step = saved.pop("step", None)  # AdamW's; it keeps it beside the parameter when fused, which is on a GPU
        optimizer.state[p] = {key: distributed.split_like(moment, p) for key, moment in saved.items()}
        if step is not None:
            optimizer.state[p]["step"] = step.to(p.device) if p.is_cuda else step
