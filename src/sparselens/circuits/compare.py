"""The same task in a dense model, a sparse one and, where there is one, the matched dense control."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import tasks as registry
from ..config import Search
from ..models.loading import load
from ..runs import distributed
from .circuit import Circuit, overlap
from .discover import discover_on, prepare, split
from .faithfulness import THRESHOLDS, NoEffect, mean_multiplier, multiplier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Source = str | Path | nn.Module | tuple[nn.Module, PreTrainedTokenizerBase]


# What is set against the sparse model: the other model, the curve, and how a row of the table says so.
PAIRS = {
    "thresholds": ("dense", "curve", ""),
    "thresholds_control": ("control", "curve", " (ctrl)"),
    "attention_edges": ("dense", "token_curve", " by token"),
    "attention_edges_control": ("control", "token_curve", " by token (ctrl)"),
}


class Comparison(dict):
    """Per task: multipliers at the thresholds, curves, overlap. The circuits are in `.circuits[task][model]`."""

    circuits: dict[str, dict[str, Circuit]]


def compare(
    dense: "Source",
    sparse: "Source",
    tasks: "list[str] | tuple[str, ...] | str" = ("ioi",),
    *,
    control: "Source | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    settings: Search | None = None,
    names: tuple[str, str] = ("dense", "sparse"),
    show_progress: bool = False,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Paired curves of explained effect and, per threshold, how many times fewer edges the sparse model needs.

    Models are names, folders, Runs or loaded models (then with `tokenizer`, or as (model, tokenizer)). All run on the
    same prompts, those that every one of them gets right. A Run with a control brings it along.
    """
    settings = settings or Search()
    wanted = [tasks] if isinstance(tasks, str) else list(tasks)
    if not wanted:
        raise ValueError("no task to compare; name at least one with --tasks")
    found = [registry.find(task) for task in wanted]  # unknown names before any model is loaded
    if len({task.name for task in found}) < len(found):
        raise ValueError("two tasks of the same name: " + ", ".join(task.name for task in found) + "; rename a file")
    if control is None and isinstance(sparse, str | Path) and (Path(sparse) / "control" / "model").is_dir():
        control = Path(sparse) / "control" / "model"
    models: dict[str, nn.Module] = {}
    for role, source in (("dense", dense), ("sparse", sparse), ("control", control)):
        if source is not None:
            models[role], own = _open(source)
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
                circuits[role] = discover_on(
                    model, name, scoring, heldout, settings, show_progress=show_progress, say=say
                )
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
    return result


def _open(source: "Source") -> "tuple[nn.Module, PreTrainedTokenizerBase | None]":
    if isinstance(source, str | Path):
        return load(source, device=distributed.device())
    return source if isinstance(source, tuple) else (source, None)


def _row(circuits: dict[str, Circuit], seed: int) -> dict[str, Any]:
    dense, sparse = circuits["dense"], circuits["sparse"]
    row: dict[str, Any] = {
        "overlap": overlap(dense.mask, sparse.mask) if dense.mask.shape == sparse.mask.shape else None,
        "models": {role: circuit.results for role, circuit in circuits.items()},
        "mean_multiplier": {},
    }
    # The control shows what sparsity alone buys: against a dense model that has had the same training.
    for name, (other, kind, _) in PAIRS.items():
        theirs, ours = getattr(circuits.get(other), kind, None), getattr(sparse, kind)
        if theirs is not None and ours is not None:
            row[name] = {str(t): multiplier(theirs, ours, t, seed) for t in THRESHOLDS}
            row["mean_multiplier"][name] = mean_multiplier(theirs, ours, seed)
    return row


def table(result: Comparison) -> str:
    """The multipliers as text."""
    lines = [f"{'task':24}{'effect':>8}{'dense':>9}{'sparse':>8}{'multiplier':>12}   95 % interval"]
    for task, row in result["tasks"].items():
        for name, (*_, label) in PAIRS.items():
            found = {f"{float(t):.0%}": m for t, m in row.get(name, {}).items()}
            if name in row["mean_multiplier"]:
                found["50-95%"] = row["mean_multiplier"][name]
            for effect, m in found.items():
                lines.append(
                    f"{task + label:24}{effect:>8}{m['dense_edges']:9,.0f}{m['sparse_edges']:8,.0f}"
                    f"{m['multiplier']:11.1f}x   {m['low']:.1f} to {m['high']:.1f}, n = {m['n_prompts']} prompts"
                )
    lines.append("50-95%: geometric mean over ten effects; steadier than the multiplier at one of them")
    return "\n".join(lines)
