"""A Run -> all the page shows, as one JSON value. A section without rows is None; the page says what would fill it."""

import shlex
from pathlib import Path
from typing import Any

from ..runs.run import Run, reading
from .sections.attention import BUDGET, attention
from .sections.attribution import traces
from .sections.circuits import circuits
from .sections.summary import overview, title
from .sections.training import training


def payload(runs: "list[Path | str | Run]", live: bool = False) -> dict[str, Any]:
    """{"runs": [{"overview", "training", "attention", "circuits", "traces"}, ...], "live"} of one or two Runs."""
    if not 1 <= len(runs) <= 2:
        raise ValueError(f"a report shows one or two Runs, not {len(runs)}")
    opened = [run if isinstance(run, Run) else Run(run) for run in runs]
    found = []
    for run in opened:
        with reading(run.path):
            found.append(_run(run, BUDGET // len(opened)))
    return {"runs": found, "live": live}


def _run(run: Run, budget: int) -> dict[str, Any]:
    found_circuits, found_traces = circuits(run), traces(run)
    return {
        "overview": overview(run, found_circuits, found_traces),
        "training": training(run),
        "attention": attention(run, budget),
        "circuits": found_circuits,
        "traces": found_traces,
        "commands": _commands(run),
    }


def _commands(run: Run) -> dict[str, str]:
    """What would fill a section that has no rows yet."""
    model = str(run.record.get("config", {}).get("model", "MODEL"))
    folder = shlex.quote(str(run.path))
    task = "addition" if model == "addition" else "ioi"
    dense = f"{folder}/base/model" if model == "addition" else shlex.quote(model)
    prompt = "36+28=?????" if model == "addition" else 'The opposite of "large" is "'
    again = str(run.record.get("provenance", {}).get("command", ""))  # an unfinished Run goes on with the same settings
    if not again.startswith(("sparselens sparsify ", "sparselens transcode ")):
        again = f"sparselens sparsify {shlex.quote(title(run))} --data TEXT --out {folder}"
    again += "" if "--resume" in again.split() else " --resume"
    return {
        "overview": again,
        "training": again,
        "attention": f"sparselens report {folder}",
        "circuits": f"sparselens compare {dense} {folder} --tasks {task} --out {folder}/circuits",
        "traces": f"sparselens trace {folder} --transcoder TRANSCODER --prompt '{prompt}' --out {folder}/trace",
    }
