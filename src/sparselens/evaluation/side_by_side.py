"""`sparselens evaluate`: a Run's base, control and sparse model, or models by name, side by side."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import tasks as registry
from ..config import Text
from ..data.batches import Batches, TextBatches
from ..demo.addition import POSITIONS, AdditionBatches
from ..models.architectures import base_model, dimensions
from ..models.loading import is_gated, load
from ..runs import distributed
from ..runs.run import Run, check_folder, check_writable, provenance, reading, write_bytes, write_json
from ..training.measure import in_bf16, measure
from ..training.sparsify import loss_table, report_slice
from .behaviour import behaviour, check_one_vocabulary, markdown, read_prompts
from .lm_eval import answer_benchmarks, benchmark_table, find_benchmarks

Slice = tuple[Batches, int, int]  # held-out text, first sequence, how many


@dataclass(frozen=True)
class Asked:
    """What to find out beside loss and density, checked before any model is loaded."""

    benchmarks: list[Any] = field(default_factory=list)  # lm-eval's tasks
    limit: int | None = None  # questions of each
    behaviour: Path | None = None  # folder for what the models say, side by side
    prompts: list[str] = field(default_factory=list)
    tasks: list[registry.Task] = field(default_factory=list)


def evaluate(
    models: list[str | Path] | str | Path,
    *,
    data: list[str] | None = None,
    sequences: int = 64,
    benchmarks: list[str] | None = None,
    questions: Path | None = None,
    limit: int | None = None,
    behaviour: Path | None = None,
    prompts: Path | None = None,
    tasks: list[str] | None = None,
    json_path: str | Path | None = None,
    say=print,
) -> list[dict[str, Any]]:
    """One row per model, with loss, KL and density on the Run's held-out text or on `data`.

    A Run brings its base, control (where there is one) and sparse model. Models by name are compared with the first of
    them; they have a loss only where `data` is given. benchmarks: names lm-eval knows; questions: a folder of their
    files instead of the hub; limit: ask only so many. behaviour: a folder for what the models say side by side,
    after `prompts` (a file; default: fifty ordinary ones) and on `tasks`.
    """
    sources = models if isinstance(models, list) else [models]
    if not sources:
        raise ValueError("nothing to evaluate: name a Run or a model")
    if behaviour is None and (prompts is not None or tasks):
        raise ValueError("--prompts and --tasks are for --behaviour FOLDER; give it, too")
    if not benchmarks and (questions is not None or limit is not None):
        raise ValueError("--questions and --limit are for --benchmarks NAMES; give them, too")
    if sequences < 1:
        raise ValueError(f"sequences={sequences}: expected at least 1")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: expected at least 1 question")
    named = [source for source in sources if not (Path(source) / "run.json").is_file()]
    if named and not (data or benchmarks or behaviour):
        Run(named[0])  # says that it is none: there is no text to evaluate it on, and nothing else was asked for
    runs = [Run(source) for source in sources if source not in named]  # all of them before any work
    for run in runs:
        if not (run.path / "model").is_dir():
            raise ValueError(run.without_model())
        if run.record.get("kind") == "demo" and (data or benchmarks or behaviour):
            raise ValueError("the addition model reads sums, not text; leave out --data, --benchmarks and --behaviour")
    if behaviour is not None and len(runs) + bool(named) > 1:
        raise ValueError("--behaviour compares the models of one Run, or models by name; leave out the others")
    check_writable(None if json_path is None else Path(json_path))
    check_folder(behaviour)
    asked = Asked(
        behaviour=behaviour,
        prompts=read_prompts(prompts),
        tasks=[registry.find(task) for task in tasks or []],
        benchmarks=find_benchmarks(benchmarks, questions) if benchmarks else [],
        limit=limit,
    )
    rows: list[dict[str, Any]] = []
    for run in runs:
        with reading(run.path / "run.json"):
            new = _of_run(run, data or [], sequences, asked)
        rows += _tell(str(run.path), new, say)
    if named:
        rows += _tell("", _of_names([str(name) for name in named], data or [], sequences, asked), say)
    if asked.behaviour is not None:
        say(f"side by side: {asked.behaviour / 'behaviour.md'}")
    if json_path is not None:
        write_json(Path(json_path), rows)
    return rows


def _tell(title: str, rows: list[dict[str, Any]], say) -> list[dict[str, Any]]:
    lines = [title or "\n".join(f"{row['kind']}: {row['name']}" for row in rows)]
    if "loss" in rows[0]:
        lines.append(loss_table(rows))
    if "benchmarks" in rows[0]:
        lines.append(benchmark_table(rows))
    say("\n".join(lines) + "\n")
    return rows


def _of_run(run: Run, data: list[str], sequences: int, asked: Asked) -> list[dict[str, Any]]:
    config, training = run.record["config"], run.record["config"]["training"]
    demo = run.record["kind"] == "demo"

    def text(_model, tokenizer) -> Slice | None:
        if not demo and not data and "text" not in config:  # trained on sequences made in Python
            if asked.benchmarks or asked.behaviour:
                return None
            raise ValueError(f"{run.path} does not say where its text is; give some with --data")
        batches = AdditionBatches(config["seed"]) if demo else _text(run, data, tokenizer, sequences)
        start, count = report_slice(batches) if not data else (0, batches.n_heldout)
        return batches, start, count if demo else min(count, sequences)

    sources = [("base", str(run.path / "base" / "model" if demo else config["model"]))]
    for kind, folder in (("control", run.path / "control" / "model"), ("sparse", run.path / "model")):
        if folder.is_dir():
            sources.append((kind, str(folder)))
    length = POSITIONS if demo else config["data"].get("length") or Text().length
    micro = distributed.micro_batch(training["batch"], training["micro_batch"], length)
    return _rows(sources, text, asked, micro, bf16=in_bf16(training["precision"]))


def _of_names(names: list[str], data: list[str], sequences: int, asked: Asked) -> list[dict[str, Any]]:
    def text(model, tokenizer) -> Slice | None:
        if not data:
            return None
        length = min(Text().length, dimensions(base_model(model).config).max_tokens)
        batches = TextBatches(data, tokenizer, length, cache=Text().cache, need=length, heldout_patterns=data,
                              heldout_tokens=sequences * length)  # fmt: skip
        return batches, 0, min(batches.n_heldout, sequences)

    return _rows([("", name) for name in names], text, asked, micro=8, bf16=False)


def _rows(
    sources: list[tuple[str, str]], find_text: Callable[..., Slice | None], asked: Asked, micro: int, bf16: bool
) -> list[dict[str, Any]]:
    """One row per (kind, source), every model compared with the first; kind "": dense or sparse, as it turns out."""
    device = distributed.device()
    rows: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}  # the models, where they are to be put side by side
    text: Slice | None = None
    for kind, source in sources:
        model, tokenizer = load(source, device=device)
        if not kind:
            kind = "sparse" if is_gated(model) else "dense"
            alike = sum(row["kind"].split()[0] == kind for row in rows)
            kind = f"{kind} {alike + 1}" if alike else kind
        if not rows:
            base, shared = model, tokenizer
            text = find_text(model, tokenizer)
        elif text is not None or asked.behaviour:
            check_one_vocabulary({rows[0]["kind"]: base, kind: model})
        row: dict[str, Any] = {"name": source, "kind": kind}
        if text is not None:
            batches, start, count = text
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                row |= measure(model, batches, start, count, micro_batch=micro, base=base).row(source, kind)
        if asked.benchmarks:
            row["benchmarks"] = answer_benchmarks(model, tokenizer, asked.benchmarks, limit=asked.limit)
        if asked.behaviour:
            kept[kind] = model
        rows.append(row)
    if asked.behaviour:
        result = behaviour(kept, shared, asked.prompts, tasks=list(asked.tasks))
        if text is not None:
            result["text"] = {row["kind"]: row for row in rows}
        write_json(asked.behaviour / "behaviour.json", result | {"provenance": provenance()})
        write_bytes(asked.behaviour / "behaviour.md", markdown(result).encode())
    return rows


def _text(run: Run, data: list[str], tokenizer, sequences: int) -> TextBatches:
    """The text the Run held out, found again through its token cache, or other text, all of it held out."""
    known = dataclasses.asdict(Text(length=run.record["config"]["data"].get("length") or Text().length))
    asked = run.record["config"].get("text") or known
    length = asked["length"]
    cache = Path(asked["cache"])
    cache = cache if cache.is_dir() else Text().cache  # a Run may come from another machine
    common: dict[str, Any] = dict(cache=cache, field=asked["text_field"], seed=0)
    if data:
        want = sequences * length
        return TextBatches(data, tokenizer, length, need=length, heldout_patterns=data, heldout_tokens=want, **common)
    training = run.record["config"]["training"]
    need = training["steps"] * training["batch"] * length
    batches = TextBatches(asked["patterns"], tokenizer, length, need=need, heldout_patterns=list(asked["heldout"]),
                          heldout_tokens=asked["heldout_tokens"], **common)  # fmt: skip
    was, now = run.record["config"]["data"], batches.describe()
    # Names and times may differ on another machine, sizes may not.
    if was["tokens"] != now["tokens"] or _sizes(was["sources"]) != _sizes(now["sources"]):
        raise ValueError(
            f"the text of {run.path} has changed since: what would be held out now may have been trained on then; "
            "give other text with --data"
        )
    return batches


def _sizes(sources: dict[str, list]) -> dict[str, list]:
    """Of the files behind each part."""
    return {part: [stamp[:1] for _, *stamp in files] for part, files in sources.items()}
