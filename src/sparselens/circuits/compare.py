"""The same task in a dense model, a sparse one and, where there is one, the matched dense control."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from .. import tasks as registry
from ..config import Search, changed
from ..models.loading import Source, check_source, resolve
from ..runs import distributed
from ..runs.run import Run, check_folder, check_writable, provenance, write_json
from .circuit import Circuit, overlap
from .discover import Chosen, alternatives_table, discover_on, prepare
from .faithfulness import NoEffect, multipliers
from .prompt_curves import geometric_mean, ratio
from .rows import (
    MEAN,
    ControlledRow,
    MultiplierRow,
    Multipliers,
    OpenRow,
    Published,
    PublishedRow,
    Ratio,
    Reading,
    TaskRow,
)

# The control shows what sparsity alone buys: against a dense model that has had the same training.
BASELINES = {"dense": "", "control": " (ctrl)"}  # what the sparse model is set against; how a table says so


class Comparison(dict[str, object]):
    """rows.ComparisonRows: per task multipliers, curves, overlap. The circuits are in `.circuits[task][model]`."""

    circuits: dict[str, dict[str, Circuit]]
    if TYPE_CHECKING:

        @overload
        def __getitem__(self, key: Literal["tasks"]) -> dict[str, TaskRow]: ...
        @overload
        def __getitem__(self, key: Literal["names", "left_out"]) -> dict[str, str]: ...
        @overload
        def __getitem__(self, key: Literal["settings"]) -> Mapping[str, object]: ...
        @overload
        def __getitem__(self, key: str) -> object: ...
        def __getitem__(self, key: str) -> object: ...


def compare(
    dense: Source,
    sparse: Source,
    tasks: registry.Tasks = ("ioi",),
    *,
    control: Source | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Search | None = None,
    names: tuple[str, str] = ("dense", "sparse"),
    out: str | Path | None = None,
    json: str | Path | None = None,
    show_progress: bool = False,
    say: Callable[[str], None] = print,
    **changes: Any,
) -> Comparison:
    """Paired curves of explained effect and, per threshold, how many times fewer edges the sparse model needs.

    Models are names, paths, Runs or loaded models (then with `tokenizer`, or as (model, tokenizer)). All run on the
    same prompts, those that every one of them gets right. A Run with a control brings it along. Settings are those of
    config.Search; single ones may be given by name, as in discover: prompts=8. out: a folder for the circuits and
    results.json; json: a file for the multipliers alone.
    """
    settings = changed(settings or Search(), changes)
    folder, file = (Path(path) if path is not None else None for path in (out, json))
    check_folder(folder)  # what can be refused is refused before a model is loaded
    check_writable(file)
    found = _found(tasks)
    for given in (dense, sparse) if control is None else (dense, sparse, control):
        check_source(given)
    sources = {"dense": dense, "sparse": sparse, "control": _control(sparse) if control is None else control}
    models: dict[str, nn.Module] = {}
    for role, source in sources.items():
        if source is not None:
            models[role], own = resolve(source, tokenizer, say)
            tokenizer = tokenizer or own
    if tokenizer is None:
        raise ValueError("compare needs a tokenizer beside loaded models: compare(dense, sparse, tokenizer=tokenizer)")
    alike = "control" in models and _alike(models["dense"], models["control"])
    if alike:  # taught by the base it stays the base
        say("the control has the weights of the dense model: what holds for the one holds for the other")
        del models["control"]

    result = Comparison(settings=vars(settings), names=dict(zip(("dense", "sparse"), names, strict=True)), tasks={})
    result.circuits, lost = {}, dict[str, str]()

    @contextmanager
    def left_out(name: str) -> Iterator[None]:
        """A task without an effect does not cost the others their work."""
        try:
            yield
        except NoEffect as error:
            if len(found) == 1:
                raise
            say(f"{name} is left out: {error}")
            lost[name] = str(error)
            result["left_out"] = lost

    chosen: dict[str, Chosen] = {}
    for one in found:  # what a model cannot do is said before any work on the others
        with left_out(one.name):
            chosen[one.name] = prepare(list(models.values()), tokenizer, one, settings, say)
    for name, prompts in chosen.items():
        circuits = {}
        with left_out(name):
            for role, model in models.items():
                say(f"{name}: {role}")
                circuits[role] = discover_on(model, name, prompts, settings, show_progress=show_progress, say=say)
            if alike:
                circuits["control"] = circuits["dense"]
            result["tasks"][name], result.circuits[name] = _row(circuits, settings.seed), circuits
            _write(result, name, folder, file)  # after every task: what is measured is not lost with a later one
    if not result["tasks"]:
        raise NoEffect("no task is left: " + "; ".join(lost.values()))
    if lost:
        _write(result, next(iter(result["tasks"])), folder, file)
    return result


def _write(result: Comparison, task: str, folder: Path | None, file: Path | None) -> None:
    """Everything measured so far, and the circuits of this task."""
    if file is not None:
        write_json(file, published(result) | {"provenance": provenance()})
    if folder is not None:
        write_json(folder / "results.json", result | {"provenance": provenance()})
        for role, circuit in result.circuits[task].items():
            if "components" in circuit.results["readings"]:
                circuit.save(folder / f"circuit-{task}-{role}.json")


def _found(tasks: registry.Tasks) -> list[registry.Task]:
    found = registry.find_all(tasks)
    if not found:
        raise ValueError("no task to compare; name at least one with --tasks")
    if len({task.name for task in found}) < len(found):
        raise ValueError("two tasks of the same name: " + ", ".join(task.name for task in found) + "; rename a file")
    return found


def _control(sparse: Source) -> Path | None:
    """The matched control of a sparse Run."""
    folder = sparse.path if isinstance(sparse, Run) else sparse
    control = Path(folder) / "control" / "model" if isinstance(folder, str | Path) else None
    return control if control is not None and control.is_dir() else None


def _alike(a: nn.Module, b: nn.Module) -> bool:
    """Whether all weights are the same; not asked of models that are split over processes."""
    if distributed.is_sharded(a) or distributed.is_sharded(b):
        return False
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        one.shape == theirs[name].shape and bool((one == theirs[name].to(one.device)).all())
        for name, one in mine.items()
    )


def _row(circuits: dict[str, Circuit], seed: int) -> TaskRow:
    dense, sparse = circuits["dense"], circuits["sparse"]
    found: Multipliers = {}
    for reading, ours in sparse.results["readings"].items():
        for baseline in (role for role in BASELINES if role in circuits):
            theirs = circuits[baseline].results["readings"].get(reading)
            if theirs is None:  # no effect to explain there
                continue
            if "edges_per_prompt" in ours:
                rows = _prompt_by_prompt(theirs, ours, seed)
            else:
                rows = multipliers(circuits[baseline].curves[reading], sparse.curves[reading], seed)
                if "ranking" in ours:
                    for threshold in ours["ranking"]:
                        rows[threshold]["ranking"] = _rankings(theirs, ours, threshold)
            found.setdefault(reading, {})[baseline] = rows
    row: TaskRow = {
        "models": {role: circuit.results for role, circuit in circuits.items()}, "multipliers": found, "overlap": None,
    }  # fmt: skip
    if dense.mask.shape == sparse.mask.shape and dense.n_edges:
        row["overlap"] = overlap(dense.mask, sparse.mask)
    if "leading" in sparse.results:
        row["open_edges"] = _open_row(circuits, seed)
    return row


def _prompt_by_prompt(dense: Reading, sparse: Reading, seed: int) -> dict[str, MultiplierRow]:
    """The ratio of edges on every prompt, at every threshold."""
    found = {}
    for threshold, ours in sparse["edges_per_prompt"].items():
        theirs = dense["edges_per_prompt"][threshold]
        found[threshold] = ratio(np.array(theirs), np.array(ours), seed)
        found[threshold]["ranking"] = _rankings(dense, sparse, threshold)
    return found


def _rankings(dense: Reading, sparse: Reading, threshold: str) -> dict[str, str]:
    return {"dense": dense["ranking"][threshold], "sparse": sparse["ranking"][threshold]}


def _open_row(circuits: dict[str, Circuit], seed: int) -> OpenRow:
    """All edges that lead to the answer: no ranking, no threshold, no search."""
    counts = {role: np.array(circuit.results["leading"]["per_prompt"]) for role, circuit in circuits.items()}
    found = {role: ratio(counts[role], counts["sparse"], seed) for role in BASELINES if role in circuits}
    against = found["dense"]
    row: OpenRow = {
        "multiplier": against["multiplier"], "low": against["low"], "high": against["high"],
        "n_prompts": against["n_prompts"], "dense": geometric_mean(counts["dense"]),
        "sparse": geometric_mean(counts["sparse"]),
        "possible_edges": circuits["dense"].results["leading"]["n_possible"],
    }  # fmt: skip
    if "control" in found:
        row["control"] = geometric_mean(counts["control"])
        row["against_control"] = _ratio(found["control"])
    return row


def published(result: Comparison) -> Published:
    """The multipliers by reading, task and threshold, as `compare --json` writes them."""
    readings: dict[str, dict[str, dict[str, PublishedRow]]] = {}
    for task, row in result["tasks"].items():
        for reading, baselines in row["multipliers"].items():
            if "dense" not in baselines:
                continue
            rows = readings.setdefault(reading, {}).setdefault(task, {})
            possible = row["models"]["dense"]["readings"][reading]["n_edges"]
            for threshold, found in baselines["dense"].items():
                rows[threshold] = {**found, "possible_edges": possible}
                if "control" in baselines:
                    rows[threshold] = _with_control(rows[threshold], baselines["control"][threshold])
    opened = {task: row["open_edges"] for task, row in result["tasks"].items() if "open_edges" in row}
    about: Published = {"readings": readings, "open_edges": opened, "names": result["names"]}
    if "settings" in result:
        about["settings"] = result["settings"]
    if "left_out" in result:
        about["left_out"] = result["left_out"]
    return about


def _with_control(row: PublishedRow, other: MultiplierRow) -> ControlledRow:
    return {**row, "control_edges": other["dense_edges"], "against_control": _ratio(other)}


def _ratio(row: MultiplierRow) -> Ratio:
    return {"multiplier": row["multiplier"], "low": row["low"], "high": row["high"]}


def table(result: Comparison) -> str:
    """The multipliers as text: all of it first, then a line per reading and baseline, 90 % of the effect in full."""
    line = "{:36}{:>10}{:>9}{:>11}   {}".format
    lines = [line("90 % of the effect", "dense", "sparse", "multiplier", "95 % interval; at other effects")]

    def add(name: str, dense: float, sparse: float, m: Ratio, n: int, more: str = "") -> None:
        span = f"{m['low']:.1f} to {m['high']:.1f}, n = {n}{more}"
        lines.append(line(name, f"{dense:,.0f}", f"{sparse:,.0f}", f"{m['multiplier']:.1f}x", span))

    for task, row in result["tasks"].items():
        if opened := row.get("open_edges"):
            add(f"{task}: all that lead to the answer", opened["dense"], opened["sparse"], opened, opened["n_prompts"])
        for reading, baselines in row["multipliers"].items():
            for baseline, thresholds in baselines.items():
                if baseline == "control" and row["models"]["control"] == row["models"]["dense"]:
                    continue
                m, others = thresholds["0.9"], ((t, m) for t, m in thresholds.items() if t != "0.9")
                more = [f"{'mean' if t == MEAN else f'{float(t):.0%}'} {m['multiplier']:.1f}x" for t, m in others]
                name = f"{task}: {reading}{BASELINES[baseline]}"
                add(name, m["dense_edges"], m["sparse_edges"], m, m["n_prompts"], "; " * bool(more) + ", ".join(more))
        for role, model in row["models"].items():
            learnt = model["readings"].get("learnt")
            if learnt is not None and "alternatives" in learnt:
                lines += [f"{task}, {role}: circuits found one after another", *alternatives_table(learnt)]
    lines.append(
        "all that lead to the answer: 100 % of it, no search. mean: geometric mean over 50 to 95 % of the effect"
    )
    return "\n".join(lines)
