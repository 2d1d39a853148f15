"""Training, for the page: metrics.jsonl thinned to what a screen can show, and which charts to draw of it.

A chart's line names a table and a column of `series`; every table has a column `step`.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from ...runs.rows import MetricsLine, budget_in_words
from ...runs.run import Metrics, Run
from . import Section, short

MOST = 1500  # points per line
MOST_COLUMNS = 80  # of a heat map over time


class Chart(TypedDict):
    title: str
    unit: str
    lines: list[dict[str, object]]  # name, of (table and column), colour, style
    log: bool
    share: bool


def training(run: Run) -> dict[str, object] | None:
    """{"series", "charts", "per_layer", "best_step", "lead", "how"} of a Run; None without metrics."""
    lines = _lines(run.path)
    if not lines:
        return None
    return short(_transcoder(lines) if run.record.get("kind") == "transcode" else _sparsified(run, lines))


def _sparsified(run: Run, lines: list[MetricsLine]) -> dict[str, object]:
    config = run.record.get("config", {})
    summary = run.find("summary.json", {})
    control = _lines(run.path / "control")
    steps = config.get("training", {}).get("steps") or lines[-1]["step"]
    share = config.get("edges") is None  # what the budget counts
    counted = "density" if share else "edges_per_query"
    series = {
        "sparse": _columns(thin(lines), "loss", counted, "lambda", "tokens_per_second"),
        "heldout": _columns(_with(lines, "heldout_loss"), "heldout_loss", f"heldout_{counted}"),
        "heldout_text": _columns(_with(lines, "heldout_cross_entropy"), "heldout_cross_entropy"),
        "control_text": _columns(_with(control, "heldout_cross_entropy"), "heldout_cross_entropy"),
        "control": _columns(thin(control), "tokens_per_second"),
        "control_heldout": _columns(_with(control, "heldout_loss"), "heldout_loss"),
        "allowed": _allowed(summary.get("target"), config, steps),
    }
    loss = "KL to base" if config.get("loss") == "kl" else "Loss"
    allowed = [("allowed", "allowed", "loss", "limit", "dashed")]
    apart = loss == "KL to base" and summary.get("target_of") == "held-out loss"  # trained on one, judged by the other
    charts = [
        _chart(loss, "nats per token", ("training batches", "sparse", "loss", "sparse", "faint"),
               ("held out", "heldout", "heldout_loss", "ink", "points"),
               ("control, held out", "control_heldout", "heldout_loss", "control", "line"),
               *([] if apart else allowed), log=True),
        *([_chart("Loss", "nats per token", ("held out", "heldout_text", "heldout_cross_entropy", "ink", "points"),
                  ("control, held out", "control_text", "heldout_cross_entropy", "control", "line"), *allowed)]
          if apart else []),
        _chart(*("Density", "open edges of possible ones") if share else ("Open edges", "per head and query"),
               ("in training", "sparse", counted, "sparse", "line"),
               ("held out, gates fixed", "heldout", f"heldout_{counted}", "ink", "points"), log=True, share=share),
        _chart("Lambda", "weight of the loss", ("lambda", "sparse", "lambda", "sparse", "line"), log=True),
        _chart("Speed", "tokens per second", ("sparse", "sparse", "tokens_per_second", "sparse", "line"),
               ("control", "control", "tokens_per_second", "control", "faint")),
    ]  # fmt: skip
    layers = _per_layer(lines, "heldout_density_per_layer", "Density of every layer over time", "held out")
    words = BUDGET if budget_in_words(config) else CONSTRAINT
    return {"series": series, "charts": charts, "best_step": summary.get("best_step"), "per_layer": layers, **words}


BUDGET = {
    "lead": "Gates close until the budget of edges is met; then the weights learn to do without the closed ones.",
    "how": [
        "The dashed line is the loss that was hoped for. Points are held-out text with gates fixed, which is what "
        "counts; lines are training batches, with sampled gates while the budget falls and fixed ones afterwards.",
        "The state that was kept has the least held-out loss among those within the budget. Lambda, the weight of the "
        "loss against density, falls while too many edges are open.",
    ],
}
CONSTRAINT = {
    "lead": "Gates close while the loss is held at its target.",
    "how": [
        "The dashed line is what the constraint allows: the target, plus the slack that shrinks to nothing on the "
        "way. Points are held-out text with gates fixed, which is what counts; lines are training batches with "
        "sampled gates.",
        "The state that was kept is the sparsest one that met the target on held-out text, not the last one. "
        "Lambda rises while the loss is above its target and falls while there is room.",
    ],
}


def _transcoder(lines: list[MetricsLine]) -> dict[str, object]:
    checks = _with(lines, "heldout_fvu")
    series = {
        "training": _columns(thin(lines), "fvu", "l0", "dead_share", "tokens_per_second"),
        "heldout": _columns(checks, "heldout_fvu", "heldout_l0", "heldout_replacement_loss", "heldout_model_loss"),
    }
    charts = [
        _chart("FVU", "share of the variance of MLP outputs not explained",
               ("training batches", "training", "fvu", "sparse", "line"),
               ("held out", "heldout", "heldout_fvu", "ink", "points"), log=True),
        _chart("L0", "active features per token and layer", ("training batches", "training", "l0", "sparse", "line"),
               ("held out", "heldout", "heldout_l0", "ink", "points"), log=True),
        _chart("Dead features", "share that has not fired lately",
               ("dead", "training", "dead_share", "sparse", "line"), share=True),
        _chart("Loss with MLPs replaced", "nats per token, held out",
               ("replaced", "heldout", "heldout_replacement_loss", "sparse", "line"),
               ("the model itself", "heldout", "heldout_model_loss", "dense", "line")),
        _chart("Speed", "tokens per second", ("training", "training", "tokens_per_second", "sparse", "line")),
    ]  # fmt: skip
    filled = [[table, name] for table in series for name in series[table] if set(series[table][name]) - {None}]
    return {
        "series": series, "best_step": None,
        "charts": [chart for chart in charts if any(line["of"] in filled for line in chart["lines"])],
        "per_layer": _per_layer(lines, "fvu_per_layer", "FVU of every layer over time", "training batches"),
        "lead": "Features learn to write what the MLPs write, few of them at a time.",
        "how": ["FVU 0 is perfect reconstruction, 1 is no better than the mean. L0 counts active features."],
    }  # fmt: skip


def _chart(title: str, unit: str, *lines: tuple[str, ...], log: bool = False, share: bool = False) -> Chart:
    """Each line: name, table, column, colour, style (line, faint, dashed or points)."""
    parts = [dict[str, object](name=n, of=[table, column], colour=c, style=s) for n, table, column, c, s in lines]
    return {"title": title, "unit": unit + (", log scale" if log else ""), "lines": parts, "log": log, "share": share}


def _allowed(target: float | None, config: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """The target plus what is left of the slack, over the whole run."""
    if target is None:
        return {"step": [], "loss": []}
    slack, until = 0.0 if budget_in_words(config) else config.get("slack") or 0.0, config.get("slack_until") or 1.0
    at = [steps * i / 100 for i in range(101)]
    return {"step": at, "loss": [target + slack * max(0.0, 1 - step / steps / until) for step in at]}


def _per_layer(
    lines: list[MetricsLine], name: Literal["heldout_density_per_layer", "fvu_per_layer"], title: str, unit: str
) -> dict[str, object] | None:
    """Rows of a heat map, one per layer, at most MOST_COLUMNS steps."""
    kept = thin(_with(lines, name), MOST_COLUMNS)
    if not kept:
        return None
    values = [list(layer) for layer in zip(*(line[name] for line in kept), strict=True)]
    return {"title": title, "unit": f"{unit}, log colour", "step": [line["step"] for line in kept], "values": values}


def _lines(folder: Path) -> list[MetricsLine]:
    return Metrics.read(folder) if (folder / "metrics.jsonl").is_file() else []


def _with(lines: list[MetricsLine], name: str) -> list[MetricsLine]:
    return [line for line in lines if line.get(name) is not None]


def thin(lines: list[MetricsLine], most: int = MOST) -> list[MetricsLine]:
    """At most `most` lines, evenly spaced, the first and the last among them."""
    if len(lines) <= most:
        return lines
    return [lines[round(i * (len(lines) - 1) / (most - 1))] for i in range(most)]


def _columns(lines: Sequence[Mapping[str, object]], *names: str) -> dict[str, list[object]]:
    return {name: [line.get(name) for line in lines] for name in ("step", *names)}


def resume_command(run: Run) -> str:
    """What goes on with an unfinished Run: the command it was started with."""
    again = str(run.record.get("provenance", {}).get("command", ""))
    if not again.startswith(("sparselens sparsify ", "sparselens transcode ")):
        again = f"sparselens sparsify {shlex.quote(title(run))} --data TEXT --out {shlex.quote(str(run.path))}"
    return again if "--resume" in again.split() else f"{again} --resume"


def title(run: Run) -> str:
    """The model's name, without the folders on the way to it."""
    name = str(run.record.get("config", {}).get("model") or run.path.name)
    return Path(name).name if name.startswith((".", "/", "~")) or Path(name).exists() else name


SECTION = Section("training", "Training", lambda shown: training(shown.run), resume_command, place=20)
