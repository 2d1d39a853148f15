"""What the JSON files of a Run hold, for those who write them and those who read them. No torch."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from typing_extensions import NotRequired


class Provenance(TypedDict):  # so that a number can be made again
    versions: dict[str, str]
    python: str
    commit: str | None
    command: str


class SummaryRow(TypedDict):
    """Of an `EvaluationRow`, what the summary repeats."""

    loss: float
    kl_to_base: float | None
    density: float
    edges_per_query: float | None  # keys one head reads from one position, on average


class EvaluationRow(SummaryRow):
    """evaluation.json, `evaluate --json`: one model on held-out sequences. A dense model has density 1."""

    name: str
    kind: str  # base, control, sparse
    sequences: int
    loss_standard_error: float | None
    top1_agreement: float | None
    agreement_standard_error: float | None
    exact: float  # share of sequences without a fault
    density_per_layer: list[float] | None
    density_per_head: list[list[float]] | None
    benchmarks: NotRequired[dict[str, dict[str, float]]]  # benchmark -> metric -> value


def budget_in_words(config: Mapping[str, Any]) -> str | None:
    """How many edges a run of `sparsify` with these settings may keep; None where its loss alone decides."""
    if config.get("edges") is not None:
        return f"{config['edges']:g} edges per head and query"
    return None if config.get("density") is None else f"{config['density']:.2%} of the edges"


def open_in_words(row: SummaryRow, config: Mapping[str, Any]) -> str:
    """How many a model has, in the terms of the budget."""
    per_query = row["edges_per_query"]
    if config.get("edges") is not None and per_query is not None:
        return f"{per_query:.3g} edges per head and query"
    return f"{row['density']:.2%} of the edges"


def over_budget(row: SummaryRow, config: Mapping[str, Any]) -> bool:
    """Whether a model has more open edges than the settings allow."""
    if config.get("edges") is not None:
        return bool((row["edges_per_query"] or 0.0) > config["edges"])
    return config.get("density") is not None and bool(row["density"] > config["density"])


class Cost(TypedDict):
    tokens: int
    minutes: float
    tokens_per_second: float
    peak_gib: float | None  # of GPU memory


class Summary(TypedDict):
    """summary.json of `sparsify`, beside its `Cost`."""

    target: float
    target_of: Literal["KL to base", "held-out loss"]
    met: bool
    best_step: int
    report_sequences: int
    base: SummaryRow
    control: NotRequired[SummaryRow]
    sparse: SummaryRow


class FitRow(TypedDict):
    """How well a transcoder reconstructs."""

    fvu: float
    fvu_per_layer: list[float]
    fvu_per_layer_after_first: list[float]  # without each sequence's first token, whose outputs may dwarf all others
    l0: float  # active features per token
    l0_per_layer: list[float]
    used_share: float  # of features that were active at least once


class ReplacementRow(TypedDict):
    """The model's loss with its MLPs replaced, as it is, and with its MLPs silent."""

    replacement_loss: float
    model_loss: float
    zero_loss: float
    loss_standard_errors: dict[str, float | None]  # of model, replacement and zero; None for a single sequence
    loss_recovered: float
    replacement_exact: float
    model_exact: float


class Measured(FitRow, ReplacementRow):
    """A transcoder on held-out sequences."""


class TranscoderRow(Measured):
    """results.json of `transcode`."""

    dead_share: float
    heldout_sequences: int
    parameters: int
    tokens: int
    minutes: float
    tokens_per_second: float


class AnswerRow(TypedDict):  # what one model says at every position of a prompt
    says: list[str]
    probability: list[float]


class PromptRow(
    TypedDict
):  # a prompt whose attention is kept in `file`, by the roles of the models: dense, control, sparse
    text: str
    tokens: NotRequired[list[str]]  # once a model has read it
    cut: NotRequired[bool]
    models: dict[str, AnswerRow]
    file: str  # of the maps


class AttentionRows(TypedDict):  # attention/attention.json
    format: int
    shape: dict[str, int] | None  # n_layers, n_heads
    prompts: list[PromptRow]
    notes: list[str]


# A line of metrics.jsonl: step, loss, grad_norm and tokens_per_second in all of them. An evaluated transcoder adds all
# of `Measured` with heldout_ in front.
MetricsLine = TypedDict(
    "MetricsLine",
    {
        "step": int, "loss": float, "grad_norm": float, "tokens_per_second": int,
        "density": float, "edges_per_query": float, "lambda": float, "heldout_loss": float,
        "heldout_cross_entropy": float, "heldout_density": float | None, "heldout_edges_per_query": float | None,
        "heldout_density_per_layer": list[float],
        "fvu": float, "fvu_per_layer": list[float], "l0": float, "l0_per_layer": list[float],
        "dead_share": float, "sparsity": float,
    },
    total=False,
)  # fmt: skip
