"""`sparselens evaluate`: a Run's base, control and sparse model, or models by name, side by side."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .. import tasks as registry
from ..config import Text
from ..data.batches import Batches, TextBatches
from ..data.registry import make_again
from ..models.architectures import base_model, dimensions
from ..models.loading import Source, check_source, is_gated, name_of, resolve
from ..runs import distributed
from ..runs.rows import EvaluationRow
from ..runs.run import Run, check_folder, check_writable, provenance, reading, write_bytes, write_json
from ..training.measure import in_bf16, measure
from ..training.sparsify import loss_table, patterns_of, report_slice
from .behaviour import behaviour as behaviour_of, check_one_vocabulary, markdown, read_prompts
from .differences import differences
from .lm_eval import answer_benchmarks, benchmark_table, find_benchmarks
from .nothing import is_run, nothing_to_evaluate_on

Slice = tuple[Batches, int, int]  # held-out sequences, the first of them, how many
FindText = Callable[[nn.Module, PreTrainedTokenizerBase], Slice | None]


@dataclass(frozen=True)
class Asked:
    """What to find out, checked before any model is loaded."""

    data: list[str]  # other text than a Run's own
    sequences: int
    benchmarks: list[Any]  # lm-eval's tasks
    limit: int | None  # questions of each
    behaviour: Path | None  # folder for what the models say, side by side
    prompts: list[str]
    tasks: list[registry.Task]
    say: Callable[[str], None]

    @property
    def without_text(self) -> bool:
        """Whether there is something to find out that needs no held-out text."""
        return bool(self.benchmarks) or self.behaviour is not None


def evaluate(
    models: Source | list[Source], *, data: str | Path | Sequence[str | Path] = (), sequences: int = 64,
    benchmarks: str | Sequence[str] = (), questions: str | Path | None = None, limit: int | None = None,
    behaviour: str | Path | None = None, prompts: str | Path | None = None, tasks: registry.Tasks = (),
    json: str | Path | None = None, say: Callable[[str], None] = print,
) -> list[EvaluationRow]:  # fmt: skip
    """One row per model, with loss, KL and density on the Run's held-out text or on `data`.

    A Run brings its base, control (where there is one) and sparse model. Other models are compared with the first of
    them; they have a loss only where `data` is given. benchmarks: names lm-eval knows; questions: a folder of their
    files instead of the hub; limit: ask only so many. behaviour: a folder for what the models say side by side,
    after `prompts` (a file; default: fifty ordinary ones) and on `tasks`.
    """
    sources = models if isinstance(models, list) else [models]
    for source in sources:
        check_source(source)
    benchmarks, data = patterns_of(benchmarks), patterns_of(data)
    questions, behaviour, prompts = (None if p is None else Path(p) for p in (questions, behaviour, prompts))
    for name, number in (("sequences", sequences), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: expected at least 1")
    _refuse_alone(bool(behaviour), "--prompts and --tasks are for --behaviour FOLDER; give it, too", prompts, tasks)
    _refuse_alone(
        bool(benchmarks), "--questions and --limit are for --benchmarks NAMES; give them, too", questions, limit
    )
    runs, others = _sort(sources, bool(data or benchmarks or behaviour))
    if behaviour is not None and len(runs) + bool(others) > 1:
        raise ValueError("--behaviour compares the models of one Run, or models by name; leave out the others")
    check_writable(None if json is None else Path(json))
    check_folder(behaviour)
    asked = Asked(
        data=data, sequences=sequences, behaviour=behaviour, prompts=read_prompts(prompts),
        tasks=registry.find_all(tasks), limit=limit, say=say,
        benchmarks=find_benchmarks(benchmarks, questions) if benchmarks else [],
    )  # fmt: skip
    rows: list[EvaluationRow] = []
    for run in runs:
        with reading(run.path / "run.json"):
            new = _of_run(run, asked)
        rows += _tell(str(run.path), new, say)
    if others:
        rows += _tell("", _of_models(others, asked), say)
    if behaviour is not None:
        say(f"side by side: {behaviour / 'behaviour.md'}")
    if json is not None:
        write_json(Path(json), rows)
    return rows


def _refuse_alone(asked: bool, why: str, *details: object) -> None:
    """ValueError for details of something that was not asked for."""
    if not asked and any(details):
        raise ValueError(why)


def _sort(sources: list[Source], more: bool) -> tuple[list[Run], list[Source]]:
    """Runs, and models that are in none. more: whether there is more to find out than a Run's own text says."""
    if not sources:
        raise ValueError("nothing to evaluate: name a Run or a model")
    runs: list[Run] = []
    others: list[Source] = []
    for source in sources:
        if isinstance(source, Run):
            runs.append(_checked(source, more))
        elif is_run(source):
            runs.append(_checked(Run(source), more))  # type: ignore[arg-type]
        elif not more:
            raise nothing_to_evaluate_on(source)
        else:
            others.append(source)
    return runs, others


def _checked(run: Run, more: bool) -> Run:
    if not (run.path / "model").is_dir():
        raise ValueError(run.without_model())
    if more and run.record["kind"] != "sparsify":
        kind = run.record["kind"]
        refused = "leave out --data, --benchmarks and --behaviour"
        raise ValueError(f"{run.path} was not trained on text (its kind is {kind!r}); {refused}")
    return run


def _tell(title: str, rows: list[EvaluationRow], say: Callable[[str], None]) -> list[EvaluationRow]:
    lines = [title or "\n".join(f"{row['kind']}: {row['name']}" for row in rows)]
    if "loss" in rows[0]:
        lines.append(loss_table(rows))
    if "benchmarks" in rows[0]:
        lines.append(benchmark_table(rows))
    say("\n".join(lines) + "\n")
    return rows


# ---- which models, which text ----------------------------------------------------------------------------------------


def _of_run(run: Run, asked: Asked) -> list[EvaluationRow]:
    config, training = run.record["config"], run.record["config"]["training"]
    about_data = config.get("data", {})

    def text(_: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Slice | None:
        return _report_text(run, tokenizer, asked)

    sources: list[tuple[str, Source]] = [("base", run.started_from)]
    for kind, folder in (("control", run.path / "control" / "model"), ("sparse", run.path / "model")):
        if folder.is_dir():
            sources.append((kind, str(folder)))
    length = about_data.get("length") or Text().length
    micro = distributed.micro_batch(training["batch"], training["micro_batch"], length)
    return _rows(sources, text, asked, micro, bf16=in_bf16(training["precision"]))


def _report_text(run: Run, tokenizer: PreTrainedTokenizerBase, asked: Asked) -> Slice | None:
    """What the Run held out and steered nothing, or other text; None where nobody can make the sequences again."""
    config = run.record["config"]
    made = None if asked.data else make_again(config.get("data", {}))
    if made is not None:
        return made, *report_slice(made)
    if not asked.data and "text" not in config:
        if asked.without_text:
            return None
        raise ValueError(f"{run.path} does not say where its text is; give some with --data")
    batches = _text(run, tokenizer, asked)
    start, count = report_slice(batches) if not asked.data else (0, batches.n_heldout)
    return batches, start, min(count, asked.sequences)


def heldout_of(run: Run, tokenizer: PreTrainedTokenizerBase, sequences: int = 64) -> Slice | None:
    """(batches, first, count): some of the sequences a Run is reported on; None where they are not to be had."""
    try:
        return _report_text(run, tokenizer, Asked([], sequences, [], None, None, [], [], print))
    except (ValueError, OSError):  # sequences made in Python, or text that is gone or has changed
        return None


def _of_models(sources: list[Source], asked: Asked) -> list[EvaluationRow]:
    def text(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Slice | None:
        if not asked.data:
            return None
        length = min(Text().length, dimensions(base_model(model).config).max_tokens)
        batches = _other_text(tokenizer, asked, length, cache=Text().cache)
        return batches, 0, min(batches.n_heldout, asked.sequences)

    return _rows([("", source) for source in sources], text, asked, micro=8, bf16=False)


def _other_text(tokenizer: PreTrainedTokenizerBase, asked: Asked, length: int, **options: Any) -> TextBatches:
    """What was given as data, all of it held out."""
    enough = asked.sequences * length
    return TextBatches(
        asked.data, tokenizer, length, need=length, heldout_patterns=asked.data, heldout_tokens=enough, **options
    )


def _text(run: Run, tokenizer: PreTrainedTokenizerBase, asked: Asked) -> TextBatches:
    """The text the Run held out, found again through its token cache, or other text, all of it held out."""
    config = run.record["config"]
    text = config.get("text") or dataclasses.asdict(Text(length=config["data"].get("length") or Text().length))
    length, cache = text["length"], Path(text["cache"])
    cache = cache if cache.is_dir() else Text().cache  # a Run may come from another machine
    field = text["text_field"]
    if asked.data:
        return _other_text(tokenizer, asked, length, cache=cache, field=field, seed=0)
    need = config["training"]["steps"] * config["training"]["batch"] * length
    make = functools.partial(
        TextBatches, text["patterns"], tokenizer, length, need=need, heldout_patterns=list(text["heldout"]),
        heldout_tokens=text["heldout_tokens"], cache=cache, field=field, seed=0,
    )  # fmt: skip
    was, batches = config["data"], make()
    if "later" in batches.cache.index["tokens"] and "later" not in was["tokens"]:  # a Run of version 0.1.0
        batches = make(read_on=False)
    tokens = batches.cache.index["tokens"]
    # Names and times may differ on another machine, sizes may not.
    if was["tokens"] != tokens or _sizes(was["sources"]) != _sizes(batches.sources):
        raise ValueError(
            f"the text of {run.path} has changed since: what would be held out now may have been trained on then; "
            "give other text with --data"
        )
    return batches


def _sizes(sources: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Of the files behind each part."""
    return {part: [stamp[:1] for _, *stamp in files] for part, files in sources.items()}


# ---- what they say ---------------------------------------------------------------------------------------------------


def _rows(
    sources: list[tuple[str, Source]], find_text: FindText, asked: Asked, micro: int, bf16: bool
) -> list[EvaluationRow]:
    """One row per (kind, source), every model compared with the first; kind "": dense or sparse, as it turns out."""
    rows: list[EvaluationRow] = []
    kept: dict[str, nn.Module] = {}  # the models, where they are to be put side by side
    text: Slice | None = None
    for kind, source in sources:
        model, tokenizer = resolve(source, say=asked.say)
        if tokenizer is None:
            raise ValueError("a model without a tokenizer cannot be evaluated: give (model, tokenizer)")
        kind = kind or _kind(model, rows)
        if not rows:
            base, shared = model, tokenizer
            text = find_text(model, tokenizer)
        elif text is not None or asked.behaviour:
            check_one_vocabulary({rows[0]["kind"]: base, kind: model})
        name = str(source) if isinstance(source, str | Path) else name_of(source)
        row = cast(EvaluationRow, {"name": name, "kind": kind})  # all there is where there is no text
        if text is not None:
            batches, start, count = text
            with torch.autocast(distributed.device(), torch.bfloat16, enabled=bf16):
                row = measure(model, batches, start, count, micro_batch=micro, base=base).row(name, kind)
        if asked.benchmarks:
            row["benchmarks"] = answer_benchmarks(model, tokenizer, asked.benchmarks, limit=asked.limit)
        if asked.behaviour:
            kept[kind] = model
        rows.append(row)
    if asked.behaviour:
        result = behaviour_of(kept, shared, asked.prompts, tasks=list(asked.tasks))
        if text is not None:
            result["text"] = {row["kind"]: row for row in rows}
            with torch.autocast(distributed.device(), torch.bfloat16, enabled=bf16):
                result["differences"] = {
                    kind: differences(base, model, shared, batches, start, count)
                    for kind, model in kept.items()
                    if model is not base
                }
        write_json(asked.behaviour / "behaviour.json", result | {"provenance": provenance()})
        write_bytes(asked.behaviour / "behaviour.md", markdown(result).encode())
    return rows


def _kind(model: nn.Module, rows: list[EvaluationRow]) -> str:
    """dense or sparse, numbered from the second on."""
    kind = "sparse" if is_gated(model) else "dense"
    alike = sum(row["kind"].split()[0] == kind for row in rows)
    return f"{kind} {alike + 1}" if alike else kind
