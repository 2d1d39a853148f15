"""trace.json and clusters.json, key by key: what `trace` writes, figure 4 draws and the report shows. No torch."""

from collections.abc import Mapping
from typing import TypedDict

from typing_extensions import NotRequired

from ..runs.rows import Provenance


class TargetRow(TypedDict):  # one thing that is explained
    label: str
    token: int | None  # vocabulary id; None for a difference or a direction
    probability: float | None
    weight: float  # of several targets; they sum to 1


class PlacedTarget(TargetRow):  # the same, and where in the prompt
    position: int


class Head(TypedDict):
    layer: int
    head: int


class HeadShare(Head):  # what one head brings of an edge, in the unit of its weight
    share: float


class LinkShare(HeadShare):  # what passes through one head from one key to one query
    query: int
    key: int


class MapRow(Head):  # the attention map of one head
    cells: list[tuple[int, int, float]]  # query, key, weight; faint cells are left out


class ChangeRow(TypedDict):  # a target when something is removed: its value before, and the change
    before: float
    predicted: float
    measured: float
    predicted_direct: float  # all other features held: the tangent at the uncut model
    predicted_path: float  # the same along the cut: norms move, attention patterns and MLPs held
    measured_direct: float  # all MLPs held


class CarriedRow(TypedDict):  # an edge by the heads that carry it (head_shares.py)
    weight: float
    departure: list[LinkShare]
    arrival: list[LinkShare]
    departure_rest: float
    arrival_rest: float
    direct: float  # through no head
    single_hop: float
    multi_hop: float
    heads_for_80: list[HeadShare]


class EdgeRow(CarriedRow, ChangeRow):  # an edge between clusters; the change: its target without the source cluster
    source: str
    target: str
    flow: float
    n_heads_for_80: int


class ClosedRow(ChangeRow):  # what closing the links that carry 80 % of an edge does
    n_links: int
    links: list[list[int]]  # layer, head, query, key


class HeadsCutRow(TypedDict):  # what the source sends through heads, taken out where it arrives; MLPs held
    n_heads: int  # the listed ones
    listed: float  # change of the target without what they bring
    every: float  # without what any head brings: the whole edge
    share: float | None  # listed / every; None where no head brings anything


class MainRow(EdgeRow):  # the edge that was looked at closely
    keys: list[int]  # positions of its source
    queries: list[int]  # and of its target
    attention: list[MapRow]
    closed: ClosedRow
    heads_cut: HeadsCutRow


class FeatureRow(TypedDict):  # a feature of a cluster
    id: str
    layer: int
    position: int
    feature: int
    activation: float
    influence: float
    label: NotRequired[str]  # where the transcoder's features have faces


class ClusterRow(TypedDict):  # a named group of nodes
    name: str
    kind: str  # word, marks, say, output or chosen
    positions: list[int]
    layers: list[int]  # lowest, highest
    influence: float
    n_features: int
    nodes: list[str]
    top_features: list[FeatureRow]
    sums: dict[str, float]  # value = clusters + within + outside + biases
    label: NotRequired[str | None]  # what most of its features are called


class TermRow(TypedDict):  # one pair of sources in an attention logit
    query_source: str
    key_source: str
    term: float


class ClosingRow(TypedDict):  # a source without which a gate would close
    source: str
    margin_without: float


class LookRow(Head):  # why a head looks from a query at a key
    query: int
    key: int
    logit: float
    margin: float | None  # None: no gate
    rest: float
    certain: bool
    terms: list[TermRow]
    closing: list[ClosingRow]


class Agreement(TypedDict):  # correlations of predicted and measured changes; None where they do not vary
    pearson: float | None
    spearman: float | None
    n: int


class CutFigures(TypedDict):  # predictions of cuts against what cutting did, MLPs held
    n: int
    pearson_tangent: float | None
    spearman_tangent: float | None
    pearson_path: float | None
    spearman_path: float | None
    sign_agreement: float | None  # of edges whose effect is above a tenth of the largest: share predicted with its sign
    n_signs: int
    norms: float | None  # sum of |path - tangent| over the sum of |measured|: what norms do
    patterns: float | None  # sum of |measured - path| over the sum of |measured|: what attention patterns do


class CutRow(TypedDict):  # tangent, path and measured change of each edge
    source: str
    target: str
    tangent: float
    path: float
    measured: float


class CutRows(CutFigures):  # both kinds of edges together, and each
    clusters: CutFigures  # between different positions, cut where they arrive
    features: CutFigures  # random ones; within a position, the feature removed
    within: CutFigures  # cluster edges that share a position, the source removed; not in the figures of both
    cluster_rows: list[CutRow]
    feature_rows: list[CutRow]


class SingleRow(ChangeRow):  # an edge between two nodes, its source removed
    source: str
    target: str
    weight: float


class SinglesRow(TypedDict):  # the strongest edges between single nodes, and how well they predict
    rows: list[SingleRow]
    agreement: Agreement
    agreement_direct: Agreement


class Rule(TypedDict, total=False):  # who belongs to a cluster: all that is said must fit
    positions: list[int]
    layers: list[int]  # lowest, highest
    kinds: list[str]
    pushes: bool


Rules = Mapping[str, Rule | list[str]]  # clusters.json: name -> rule, or names of nodes


class ModelRows(TypedDict):  # one prompt in one model
    model: str
    gated: bool
    prompt: str
    tokens: list[str]
    n_layers: int
    n_heads: int
    target: list[PlacedTarget]
    completeness_error: float
    scores: dict[str, float]  # replacement, completeness
    n_nodes: int
    n_edges: int
    settings: dict[str, str | float]
    clusters: list[ClusterRow]
    edges: list[EdgeRow]
    n_cluster_edges: int
    main: MainRow
    looks: list[LookRow]
    agreement: Agreement
    agreement_direct: Agreement
    interventions: SinglesRow
    cut: CutRows
    labels: NotRequired[dict[str, str]]  # of its features, by "layer/feature"


class TraceRows(ModelRows):  # trace.json
    provenance: Provenance
    against: NotRequired[ModelRows]  # the second model
