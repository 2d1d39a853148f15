"""The same task in a dense model, a sparse one and, where there is one, the matched dense control."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from .. import tasks as registry
from ..config import Search
from ..models.loading import Source, resolve
from ..runs.run import Run, check_folder, check_writable, provenance, write_json
from .circuit import Circuit, overlap
from .discover import discover_on, prepare, split
from .faithfulness import NoEffect, multipliers
from .rows import MEAN, Multipliers, TaskRow, wording

# The control shows what sparsity alone buys: against a dense model that has had the same training.
BASELINES = {"dense": "", "control": " (ctrl)"}  # what the sparse model is set against; how a table says so


class Comparison(dict[str, Any]):
    """rows.ComparisonRows: per task multipliers, curves, overlap. The circuits are in `.circuits[task][model]`."""

    circuits: dict[str, dict[str, Circuit]]


def compare(
    dense: Source,
    sparse: Source,
    tasks: str | Sequence[str | registry.Task] = ("ioi",),
    *,
    control: Source | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Search | None = None,
    names: tuple[str, str] = ("dense", "sparse"),
    out: str | Path | None = None,
    json: str | Path | None = None,
    show_progress: bool = False,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Paired curves of explained effect and, per threshold, how many times fewer edges the sparse model needs.

    Models are names, paths, Runs or loaded models (then with `tokenizer`, or as (model, tokenizer)). All run on the
    same prompts, those that every one of them gets right. A Run with a control brings it along. out: a folder for the
    circuits and results.json; json: a file for the multipliers alone.
    """
    settings = settings or Search()
    folder, file = (Path(path) if path is not None else None for path in (out, json))
    check_folder(folder)  # what can be refused is refused before a model is loaded
    check_writable(file)
    found = _found(tasks)
    sources = {"dense": dense, "sparse": sparse, "control": _control(sparse) if control is None else control}
    models: dict[str, nn.Module] = {}
    for role, source in sources.items():
        if source is not None:
            models[role], own = resolve(source, tokenizer)
            tokenizer = tokenizer or own
    if tokenizer is None:
        raise ValueError("compare needs a tokenizer beside loaded models: compare(dense, sparse, tokenizer=tokenizer)")

    result = Comparison(settings=vars(settings), names=dict(zip(("dense", "sparse"), names, strict=True)), tasks={})
    result.circuits = {}
    # What a model cannot do is said before any work on the others.
    halves = {task.name: split(prepare(list(models.values()), tokenizer, task, settings, say)) for task in found}
    for name, (scoring, heldout) in halves.items():
        circuits = {}
        try:
            for role, model in models.items():
                say(f"{name}: {role}")
                prompts = name, scoring, heldout
                circuits[role] = discover_on(model, *prompts, settings, show_progress=show_progress, say=say)
        except NoEffect as error:
            if len(found) == 1:
                raise
            say(f"{name} is left out: {error}")
            result.setdefault("left_out", {})[name] = str(error)
            continue
        result["tasks"][name] = _row(circuits, settings.seed)
        result.circuits[name] = circuits
    if not result["tasks"]:
        raise NoEffect("no task is left: " + "; ".join(result["left_out"].values()))
    if file is not None:
        write_json(file, {task: row["multipliers"] for task, row in result["tasks"].items()})
    if folder is not None:
        write_json(folder / "results.json", result | {"provenance": provenance()})
        for task, circuits in result.circuits.items():
            for role, circuit in circuits.items():
                circuit.save(folder / f"circuit-{task}-{role}.json")
    return result


def _found(tasks: str | Sequence[str | registry.Task]) -> list[registry.Task]:
    wanted = [tasks] if isinstance(tasks, str) else list(tasks)
    if not wanted:
        raise ValueError("no task to compare; name at least one with --tasks")
    found = [registry.find(task) for task in wanted]
    if len({task.name for task in found}) < len(found):
        raise ValueError("two tasks of the same name: " + ", ".join(task.name for task in found) + "; rename a file")
    return found


def _control(sparse: Source) -> Path | None:
    """The matched control of a sparse Run."""
    folder = sparse.path if isinstance(sparse, Run) else sparse
    control = Path(folder) / "control" / "model" if isinstance(folder, str | Path) else None
    return control if control is not None and control.is_dir() else None


def _row(circuits: dict[str, Circuit], seed: int) -> TaskRow:
    dense, sparse = circuits["dense"], circuits["sparse"]
    found: Multipliers = {}
    for reading, ours in sparse.curves.items():
        for baseline in (role for role in BASELINES if role in circuits and reading in circuits[role].curves):
            found.setdefault(reading, {})[baseline] = multipliers(circuits[baseline].curves[reading], ours, seed)
    return {
        "overlap": overlap(dense.mask, sparse.mask) if dense.mask.shape == sparse.mask.shape else None,
        "models": {role: circuit.results for role, circuit in circuits.items()},
        "multipliers": found,
    }


def table(result: Comparison) -> str:
    """The multipliers as text."""
    lines = [f"{'task':24}{'effect':>8}{'dense':>9}{'sparse':>8}{'multiplier':>12}   95 % interval"]
    for task, row in result["tasks"].items():
        for reading, baselines in row["multipliers"].items():
            for baseline, thresholds in baselines.items():
                name = f"{task} {wording(reading).short}".rstrip() + BASELINES[baseline]
                for threshold, m in thresholds.items():
                    effect = "50-95%" if threshold == MEAN else f"{float(threshold):.0%}"
                    lines.append(
                        f"{name:24}{effect:>8}{m['dense_edges']:9,.0f}{m['sparse_edges']:8,.0f}"
                        f"{m['multiplier']:11.1f}x   {m['low']:.1f} to {m['high']:.1f}, n = {m['n_prompts']} prompts"
                    )
    lines.append("50-95%: geometric mean over ten effects; steadier than the multiplier at one of them")
    return "\n".join(lines)
