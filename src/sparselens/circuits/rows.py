"""What `discover` and `compare` write, in one shape for everybody who reads it. No torch.

A reading is one way of taking a model apart and counting what has to stay:

    components   edges of the component graph; those left out carry what they carry on the corrupted prompt
    corrupted    single attention edges (head, query, key); the others as on the corrupted prompt

    results["readings"][reading]                        of one model: its curve, the edges needed, the circuit
    row["multipliers"][reading][baseline][threshold]    of a pair: how many times fewer edges the sparse one needs

baseline: dense or control. threshold: 0.8, 0.9, 0.95, or mean, the geometric mean over 50 to 95 % of the effect.
Readers go through what is there, so a new reading needs nothing but a name in WORDING.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

MEAN = "mean"  # among the thresholds


class CurveRow(TypedDict):
    """Explained effect of circuits of growing size, with 95 % intervals over prompts."""

    edges: list[int]
    effect: list[float]
    low: list[float]
    high: list[float]


class MultiplierRow(TypedDict):
    """Edges a dense model needs over edges the sparse one needs, on the same prompts."""

    dense_edges: float
    sparse_edges: float
    multiplier: float
    low: float
    high: float
    n_prompts: int


Multipliers = dict[str, dict[str, dict[str, MultiplierRow]]]  # reading -> baseline -> threshold


class Reading(TypedDict):
    """One model's circuits by one reading. `circuit` is best first: [edge, score], or values of `columns`."""

    n_prompts: int
    n_edges: int
    m_model: float
    m_nothing: float
    curve: CurveRow
    edges_at: dict[str, int]
    edges_at_interval: dict[str, list[float]]
    circuit: list[list[Any]]
    # of the component graph
    n_edges_scored: NotRequired[int]
    n_edges_zero: NotRequired[int]
    checks: NotRequired[dict[str, float]]
    area_log: NotRequired[float]
    cpr: NotRequired[float]
    cmd: NotRequired[float]
    random: NotRequired[CurveRow]
    # of single attention edges: prompts of one length, one of them as an example
    length: NotRequired[int]
    example: NotRequired[str]
    tokens: NotRequired[list[str]]
    n_alive: NotRequired[int]
    columns: NotRequired[list[str]]


class Results(TypedDict):
    """What `discover` measures of one model."""

    task: str
    metric: str
    model: str
    sparse: bool
    settings: dict[str, Any]
    n_prompts_scoring: int
    n_layers: int
    n_heads: int
    readings: dict[str, Reading]
    seconds: dict[str, float]
    heads_at: NotRequired[dict[str, int]]
    heads: NotRequired[list[str]]
    heads_curve: NotRequired[CurveRow]
    open_edges: NotRequired[dict[str, Any]]  # heads.open_edges


class TaskRow(TypedDict):
    """One task in two or three models, by role: dense, sparse, control."""

    models: dict[str, Results]
    multipliers: NotRequired[Multipliers]
    overlap: NotRequired[dict[str, float] | None]  # circuit.overlap


class ComparisonRows(TypedDict):
    """results.json of `compare`."""

    names: dict[str, str]
    tasks: dict[str, TaskRow]
    settings: NotRequired[dict[str, Any]]
    left_out: NotRequired[dict[str, str]]


class Wording(NamedTuple):
    """How a reading is called wherever it is shown."""

    label: str  # a verdict's: "... of TASK"
    short: str  # beside a task's name
    edges: str  # what is counted
    axis: str  # the same below a printed curve
    file: str  # after figure2


ONE = "(head, query, key)"
WORDING = {
    "components": Wording("Circuit", "", "edges", "Number of Edges Kept", ""),
    "corrupted": Wording(
        "Attention edges", "by token", f"attention edges {ONE}", f"Attention Edges Kept\n{ONE}", "-tokens"
    ),
}


def wording(reading: str) -> Wording:
    """How to call a reading, also one that this version does not know."""
    unknown = f"Circuit ({reading})", reading, f"edges ({reading})", f"Edges Kept ({reading})", f"-{reading}"
    return WORDING.get(reading) or Wording(*unknown)


def alone(results: Results) -> ComparisonRows:
    """A result of `discover` as a comparison with one model."""
    role = "sparse" if results.get("sparse") else "dense"
    return {"names": {role: results.get("model", role)}, "tasks": {results["task"]: {"models": {role: results}}}}


def comparison(found: Mapping[str, Any], path: Path) -> ComparisonRows | None:
    """What a results.json holds, of `compare` or of `discover`; None where it is of neither."""
    if "readings" in found:
        return alone(found)  # type: ignore[arg-type]  # from a file: `reading` says what is missing
    if "tasks" not in found and "curve" not in found:
        return None
    rows = found.get("tasks", {}).values()
    if "curve" in found or any("readings" not in model for row in rows for model in row["models"].values()):
        raise ValueError(
            f"{path} was written by an earlier version: its curves are not under `readings`; run `sparselens compare` "
            "or `sparselens discover` again, or remove it"
        )
    return found  # type: ignore[return-value]
