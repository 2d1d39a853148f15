"""`sparselens evaluate`: base, control and sparse models of finished Runs, side by side."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .addition import AdditionBatches
from .data import Batches, TextBatches
from .evaluate import measure
from .huggingface import load
from .run import Run, write_json
from .sparsification import report_slice, table
from .training import precision_of


def evaluate(
    runs: list[str | Path] | str | Path,
    *,
    data: list[str] | None = None,
    sequences: int = 64,
    json_path: str | Path | None = None,
    say=print,
) -> list[dict[str, Any]]:
    """One row per model (base, control where there is one, sparse), on the Run's held-out text or on `data`."""
    rows: list[dict[str, Any]] = []
    paths = runs if isinstance(runs, list) else [runs]
    opened = [Run(path) for path in paths]  # all of them before any work
    for run in opened:
        if not (run.path / "model").is_dir():
            raise ValueError(f"{run.path} has no model yet; finish it with `--resume`")
        new = _rows(run, data or [], sequences)
        say(f"{run.path}\n{table(new)}\n")
        rows += new
    if json_path is not None:
        write_json(Path(json_path), rows)
    return rows


def _rows(run: Run, data: list[str], sequences: int) -> list[dict[str, Any]]:
    config = run.record["config"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    demo = run.record["kind"] == "demo"
    source = run.path / "base" / "model" if demo else config["model"]
    base, tokenizer = load(source, device=device)
    batches: Batches
    if demo:
        if data:
            raise ValueError("the addition model reads sums, not text; leave out --data")
        batches = AdditionBatches(config["seed"])
    else:
        batches = _text(run, data, tokenizer, sequences)
    start, count = report_slice(batches) if not data else (0, batches.n_heldout)
    count = count if demo else min(count, sequences)
    micro = config["training"]["micro_batch"] or config["training"]["batch"]
    autocast = torch.autocast(device, torch.bfloat16, enabled=precision_of(config["training"]["precision"]) == "bf16")

    def row(model: nn.Module, name: str, kind: str) -> dict[str, Any]:
        with autocast:
            return measure(model, batches, start, count, micro_batch=micro, base=base).row(name, kind)

    rows = [row(base, str(source), "base")]
    for kind, folder in (("control", run.path / "control" / "model"), ("sparse", run.path / "model")):
        if folder.is_dir():
            rows.append(row(load(folder, device=device)[0], str(folder), kind))
    return rows


def _text(run: Run, data: list[str], tokenizer, sequences: int) -> TextBatches:
    """The text the Run held out, found again through its token cache, or other text, all of it held out."""
    asked = run.record["config"]["text"]
    length = asked["length"]
    common: dict[str, Any] = dict(cache=Path(asked["cache"]), field=asked["text_field"], seed=0)
    if data:
        want = sequences * length
        return TextBatches(data, tokenizer, length, need=1, heldout_patterns=data, heldout_tokens=want, **common)
    training = run.record["config"]["training"]
    need = training["steps"] * training["batch"] * length
    return TextBatches(asked["patterns"], tokenizer, length, need=need, heldout_patterns=list(asked["heldout"]),
                       heldout_tokens=asked["heldout_tokens"], **common)  # fmt: skip
