"""What `discover` and `compare` write, in one shape for everybody who reads it. No torch.

A reading is one question asked of one model: which edges have to stay, and what do the others carry meanwhile?

    removed           attention edges (layer, head, query, key) of one prompt; the others carry nothing
    share             the same edges, no intervention: the fewest that hold 90 % of all attribution
    corrupted         the same edges; the others carry what they carry on the corrupted prompt
    mean              the same edges; the others carry their mean over prompts of the task, at the same positions
    learnt            as removed, edges found by gradient descent on a mask: how little would do
    heads             whole heads, the others removed; heads-corrupted: the others as on the corrupted prompt
    components        edges between heads, MLPs, input and output; the others as on the corrupted prompt (EAP-IG)

These rank and measure on the same prompt, one prompt at a time (scope "prompt"); components, and removed-task,
corrupted-task and mean-task, rank on half of the prompts and measure on the other half (scope "task").

    results["readings"][reading]                        of one model: its curve, the edges needed, a circuit
    row["multipliers"][reading][baseline][threshold]    of a pair: how many times fewer edges the sparse one needs
    row["open_edges"]                                   of a pair: all edges that lead to the answer; no search in it

baseline: dense or control. threshold: 0.8, 0.9, 0.95, 0.98; for scope "task" also mean, the geometric mean over 50 to
95 % of the effect. Readers go through what is there, so a new reading needs nothing but a name in WORDING.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from typing_extensions import NotRequired

MEAN = "mean"  # among the thresholds
TASK = "-task"  # ends the name of an attention edge reading with the scope of a task
Scope = Literal["prompt", "task"]


class CurveRow(TypedDict):
    """Explained effect of circuits of growing size, with 95 % intervals over prompts."""

    edges: list[int]
    effect: list[float]
    low: list[float]
    high: list[float]


class Ratio(TypedDict):
    """How many times fewer edges, with its 95 % interval over prompts."""

    multiplier: float
    low: float
    high: float


class MultiplierRow(Ratio):
    """Edges a dense model needs over edges the sparse one needs, on the same prompts."""

    dense_edges: float
    sparse_edges: float
    n_prompts: int
    ranking: NotRequired[dict[str, str]]  # by dense and sparse: the ranking that needs fewest edges


Multipliers = dict[str, dict[str, dict[str, MultiplierRow]]]  # reading -> baseline -> threshold


class Alternatives(TypedDict):
    """Searched again and again with the edges already found made dear: how many other circuits would do?

    Lists are over searches, the first one included.
    """

    n_prompts: int
    reached: list[float]  # share of prompts on which the search reached 90 % of the effect
    edges: list[float | None]  # geometric mean over those prompts
    within_twice: list[float]  # share of prompts with at most twice the edges of the first circuit
    overlap: list[float | None]  # mean Jaccard index with the circuits found before


class Areas(TypedDict):
    """MIB's two numbers of a curve."""

    cpr: float
    cmd: float


class Reading(TypedDict):
    """One model's circuits by one reading. `circuit` is best first: [edge, score], or values of `columns`."""

    scope: Scope
    n_prompts: int
    n_edges: int  # possible ones (or heads)
    m_model: float
    m_nothing: float
    edges_at: dict[str, float]  # scope prompt: geometric mean over prompts
    edges_at_interval: dict[str, list[float]]
    circuit: Sequence[Sequence[str | float]]
    curve: NotRequired[CurveRow]  # scope prompt: the mean over prompts; a learnt mask has none
    random: NotRequired[CurveRow]
    checks: NotRequired[dict[str, float]]
    # of the component graph
    n_edges_scored: NotRequired[int]
    n_edges_zero: NotRequired[int]
    area_log: NotRequired[float]
    cpr: NotRequired[float]
    cmd: NotRequired[float]
    # of attention edges and heads: prompts of one length, one of them as an example (scope prompt: the circuit's own)
    length: NotRequired[int]
    example: NotRequired[str]
    tokens: NotRequired[list[str]]
    columns: NotRequired[list[str]]
    n_alive: NotRequired[int]
    # of scope prompt
    example_curve: NotRequired[CurveRow]  # of the example alone: a point is the first so many edges of `circuit`
    example_at: NotRequired[dict[str, int]]
    edges_per_prompt: NotRequired[dict[str, list[int]]]
    ranking: NotRequired[dict[str, str]]  # by threshold: the ranking that needs fewest edges
    rankings: NotRequired[dict[str, dict[str, float]]]  # every one tried: edges by threshold
    alternatives: NotRequired[Alternatives]


class Leading(TypedDict):
    """Edges that carry something and lead to the answer. With these alone f = 1, checked on every prompt."""

    n_prompts: int
    length: int
    n_possible: int
    edges: float  # geometric mean over prompts
    per_prompt: list[int]


class OpenRow(Ratio):
    """All of it: every edge that leads to the answer, dense against sparse; no ranking, no threshold, no search."""

    dense: float
    sparse: float
    n_prompts: int
    possible_edges: int
    control: NotRequired[float]
    against_control: NotRequired[Ratio]


class OpenEdges(TypedDict):
    """What a sparse model's gates leave open on these prompts; every other pair is proven absent."""

    n_prompts: int
    length: int
    example: str
    n_possible: int
    n_open: int  # on one prompt at least
    n_proven_absent: int
    open_per_prompt: float
    columns: list[str]
    open: list[list[float]]  # largest mean weight first


class Results(TypedDict):
    """What `discover` measures of one model."""

    task: str
    metric: str
    model: str
    sparse: bool
    settings: Mapping[str, object]  # config.Search
    n_prompts_scoring: NotRequired[int]
    n_layers: int
    n_heads: int
    readings: dict[str, Reading]
    seconds: dict[str, float]
    leading: NotRequired[Leading]
    open_edges: NotRequired[OpenEdges]


class Overlap(TypedDict):
    """Shared edges of two circuits of the same graph: number, over the union, over the smaller one."""

    shared: int
    jaccard: float
    of_smaller: float


class TaskRow(TypedDict):
    """One task in two or three models, by role: dense, sparse, control."""

    models: dict[str, Results]
    multipliers: NotRequired[Multipliers]
    open_edges: NotRequired[OpenRow]
    overlap: NotRequired[Overlap | None]


class ComparisonRows(TypedDict):
    """results.json of `compare`."""

    names: dict[str, str]
    tasks: dict[str, TaskRow]
    settings: NotRequired[Mapping[str, object]]
    left_out: NotRequired[dict[str, str]]


class PublishedRow(MultiplierRow):
    """One multiplier in `compare --json`."""

    possible_edges: int


class ControlledRow(PublishedRow):
    """The same, where there is a control."""

    control_edges: float
    against_control: Ratio


class Published(TypedDict):
    """`compare --json`: the multipliers alone."""

    readings: dict[str, dict[str, dict[str, PublishedRow]]]  # reading -> task -> threshold
    open_edges: dict[str, OpenRow]  # by task
    names: dict[str, str]
    settings: NotRequired[Mapping[str, object]]
    left_out: NotRequired[dict[str, str]]


class Wording(NamedTuple):
    """How a reading is called wherever it is shown."""

    label: str  # a verdict's: "... of TASK"
    short: str  # beside a task's name
    edges: str  # what is counted
    axis: str  # the same below a printed curve
    others: str  # what the rest does meanwhile, one sentence
    file: str  # after figure2


_EDGES, _KEPT = "attention edges", "Number of Edges Kept"
WORDING = {
    "removed": Wording("Attention edges", "", _EDGES, _KEPT, "All other attention edges are removed.", ""),
    "share": Wording(
        "Share of attribution", "share", _EDGES, "Edges, Largest First",
        "Nothing is removed: how few edges hold how much of the attribution.", "-share",
    ),
    "corrupted": Wording(
        "Attention edges, corrupted", "corrupted", _EDGES, _KEPT,
        "All other attention edges carry what they carry on the corrupted prompt.", "-corrupted",
    ),
    "mean": Wording(
        "Attention edges, mean", "mean", _EDGES, _KEPT,
        "All other attention edges carry their mean over prompts of the task.", "-mean",
    ),
    "learnt": Wording(
        "Attention edges, learnt", "learnt", _EDGES, _KEPT,
        "All other attention edges are removed; which ones stay was learnt: how little would do.", "-learnt",
    ),
    "heads": Wording("Heads", "heads", "heads", "Number of Heads Kept", "All other heads are removed.", "-heads"),
    "heads-corrupted": Wording(
        "Heads, corrupted", "heads, corrupted", "heads", "Number of Heads Kept",
        "All other heads write what they write on the corrupted prompt.", "-heads-corrupted",
    ),
    "components": Wording(
        "Component graph", "components", "edges between components", "Number of Component Edges Kept",
        "All other edges between heads, MLPs, input and output carry the corrupted prompt's values.", "-components",
    ),
}  # fmt: skip
SCOPES: dict[Scope, str] = {
    "prompt": "ranked and measured on the same prompt, one prompt at a time",
    "task": "ranked on half of the prompts, measured on the other half",
}


def wording(reading: str) -> Wording:
    """How to call a reading, also one that this version does not know."""
    base = WORDING.get(reading.removesuffix(TASK))
    if base is None:
        unknown = f"Circuit ({reading})", reading, f"edges ({reading})", f"Edges Kept ({reading})", "", f"-{reading}"
        return Wording(*unknown)
    if not reading.endswith(TASK):
        return base
    return base._replace(
        label=f"{base.label}, one circuit for all prompts", short=f"{base.short} per task".strip(),
        file=f"{base.file}{TASK}",
    )  # fmt: skip


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
