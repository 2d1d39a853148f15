"""Named groups of a graph's nodes: the words of the prompt, its marks, what pushes the answer, and the answer.

The grouping must not depend on which number a feature happened to get, or a second transcoder would tell another story.
So it asks where a node stands and what it does:

1. Every position belongs to a word, named by its token. Marks are merged over positions: quotes, brackets, whitespace,
   and equal punctuation. A word that occurs twice is two clusters, "John @4" and "John @10".
2. Features at the position of the answer that act on the targets mostly by themselves (half or more of their influence
   is their own edge, not a path through other features) push the answer: "say small".
3. All other kept nodes, features, errors, tokens and positions, belong to the cluster of their position.
4. Every target is a cluster of its own, named by its token: sums never mix two logits.
5. Layers: the shortest range that holds 90 % of the influence of the cluster's features.

The result of 1 and 2 is a small table of rules (clusters.json), which can be written, edited and read back. A rule
looks at where a node stands and what it does, never at a feature's number, so it holds for any transcoder:

    {"say small": {"positions": [8], "pushes": true}, "large": {"positions": [5], "layers": [0, 3]},
     "quotes": {"positions": [4, 6, 8]}, "mine": ["3_1021_5", "2_error_mlp_5"]}

positions, layers (lowest, highest), kinds (feature, error, token, position) and pushes (features that act on the
targets mostly by themselves) must all fit. A list names single nodes, of one transcoder and one prompt.

A cluster edge is the sum of all stored edges from nodes of one cluster to nodes of another, so weights and head shares
add up exactly.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runs.run import read_json, reading
from .graph import BIAS, FEATURE, KINDS, LOGIT, Graph, node_name
from .head_shares import Carried, carry, nothing
from .rows import Rule, Rules

START = re.compile(r"<[^<>]*>( @0)?")  # <s>, <|endoftext|>, <bos>
PUSHES = 0.5  # share of a feature's influence that is its own edge to a target
LAYER_SHARE = 0.9
QUOTES = frozenset("\"'`“”‘’„‚«»‹›″′")
BRACKETS = frozenset("()[]{}<>⟨⟩（）［］｛｝「」『』【】")
RULE_KEYS = {"positions", "layers", "kinds", "pushes"}
_EXAMPLE = '{"large": {"positions": [5], "layers": [0, 3]}, "mine": ["3_1021_5", "2_error_mlp_5"]}'


@dataclass
class Cluster:
    """Nodes under one name."""

    name: str
    kind: str  # "word", "marks", "say", "output", or "chosen" (listed by hand)
    nodes: list[int]
    positions: list[int]
    layers: tuple[int, int]  # lowest and highest; n_layers for outputs
    influence: float


@dataclass
class ClusterEdge:
    """All stored edges from the nodes of one cluster to the nodes of another."""

    source: int  # number of the cluster
    target: int
    weight: float  # sum of the edges
    flow: float  # influence on the targets that passes here: comparable between edges of different targets
    sources: Tensor = field(repr=False, compare=False, default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [k]
    targets: Tensor = field(repr=False, compare=False, default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [k]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(source node, target node) of every edge in it."""
        return list(zip(self.sources.tolist(), self.targets.tolist(), strict=True))


# ---- names -----------------------------------------------------------------------------------------------------------


def mark_of(token: str) -> str | None:
    """The common name of marks: quotes, brackets, whitespace, or the punctuation itself; None for words."""
    mark = token.strip()
    if not mark:
        return "whitespace"
    if any(c.isalnum() for c in mark):
        return None
    if any(c in QUOTES for c in mark):
        return "quotes"
    if any(c in BRACKETS for c in mark):
        return "brackets"
    return mark if all(unicodedata.category(c).startswith("P") for c in mark) else None


def name_positions(tokens: Sequence[str]) -> list[str]:
    """The cluster of every position. Depends on the prompt alone."""
    marks = [mark_of(token) for token in tokens]
    words = [_printable(token.strip()) for token in tokens]
    count = Counter(word for word, mark in zip(words, marks, strict=True) if mark is None)
    taken = {mark for mark in marks if mark is not None}
    return [
        _printable(mark) if mark is not None else word if count[word] == 1 and word not in taken else f"{word} @{i}"
        for i, (word, mark) in enumerate(zip(words, marks, strict=True))
    ]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# ---- rules -----------------------------------------------------------------------------------------------------------


def rules_of(graph: Graph) -> dict[str, Rule | list[str]]:
    """The automatic rules of a graph, as clusters.json has them: the first rule that fits a node takes it."""
    names = name_positions(graph.tokens)
    answer = int(graph.position[-1])
    say: Rule = {"positions": [answer], "pushes": True}
    words: dict[str, Rule] = {}
    for position, name in enumerate(names):
        words.setdefault(name, {"positions": []})["positions"].append(position)
    return {free_name(f"say {label_of(graph, 0)}", names): say, **words}


def label_of(graph: Graph, target: int) -> str:
    """What a target is called."""
    return _printable(str(graph.targets[target]["label"]).strip()) or repr(graph.targets[target]["label"])


def free_name(name: str, taken: Container[str]) -> str:
    """The name, or one like it that is not taken."""
    while name in taken:
        name += " (output)"
    return name


def read_rules(path: str | Path) -> Rules:
    """Rules from a clusters.json; ValueError for anything that is not a name -> ids or rule table."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file {path}: expected clusters as JSON, name -> list of node ids or rule")
    try:
        rules: Rules = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error.__cause__}") from None
    with reading(path):
        check_rules(rules, str(path))
    return rules


def check_rules(rules: Any, where: str = "clusters") -> None:
    """ValueError for rules that no graph could follow."""
    if not isinstance(rules, dict) or not rules:
        raise ValueError(f"{where}: expected an object, name -> list of node ids or rule, such as {_EXAMPLE}")
    for name, rule in rules.items():
        problem = _wrong_ids(name, rule) if isinstance(rule, list) else _wrong_rule(name, rule)
        if problem:
            raise ValueError(f"{where}: {problem}")


def _wrong_ids(name: str, nodes: list[Any]) -> str | None:
    wrong = [node for node in nodes if not isinstance(node, str)]
    listed = f"{name!r} lists {wrong[:3] or 'nothing'}; expected node ids: {_EXAMPLE}"
    return listed if wrong or not nodes else None


def _wrong_rule(name: str, rule: Any) -> str | None:
    if not isinstance(rule, dict) or not rule or not set(rule) <= RULE_KEYS:
        return f"{name!r} is {rule!r}; expected node ids, or some of {sorted(RULE_KEYS)}"
    for key in ("positions", "layers"):
        value = rule.get(key, [0, 0])
        whole = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not whole or (key == "layers" and len(value) != 2):
            return f"{key} of {name!r} is {value!r}; expected whole numbers (layers: two)"
    kinds = rule.get("kinds", [])
    if not isinstance(kinds, list) or not set(kinds) <= set(KINDS[:BIAS]):
        return f"kinds of {name!r} is {kinds!r}; expected some of {list(KINDS[:BIAS])}"
    if not isinstance(rule.get("pushes", True), bool):
        return f"pushes of {name!r} is {rule['pushes']!r}; expected true or false"
    return None


# ---- clusters --------------------------------------------------------------------------------------------------------


def find_clusters(graph: Graph, rules: Rules | None = None, share: float = LAYER_SHARE) -> list[Cluster]:
    """The clusters of a graph, in the order of the prompt, outputs last; by its own rules unless others are given.

    Node ids are taken first, then rules in their order, from the nodes that pruning kept. Rules that fit nothing give
    no cluster. Nodes that nothing fits are in none; targets that are not listed are outputs by themselves.
    """
    rules = rules_of(graph) if rules is None else dict(rules)
    check_rules(rules)
    member = _members(graph, rules)
    pushes = _pushing(graph)
    eligible = graph.node_kept & (graph.kind != BIAS) & (graph.kind != LOGIT)
    for number, (name, rule) in enumerate(rules.items()):
        if isinstance(rule, dict):
            member[eligible & (member < 0) & _fits(graph, name, rule, pushes)] = number
    found = []
    for number, (name, rule) in enumerate(rules.items()):
        if nodes := (member == number).nonzero().flatten().tolist():
            found.append(_cluster(graph, name, _kind(graph, rule, nodes), nodes, share))
    found.sort(key=lambda c: (c.kind == "output", c.kind == "say", c.positions))
    taken = {c.name for c in found}
    first = graph.n_nodes - len(graph.targets)
    for i in range(len(graph.targets)):
        if int(member[first + i]) < 0:
            name = free_name(label_of(graph, i), taken)
            taken.add(name)
            found.append(_cluster(graph, name, "output", [first + i], share))
    return found


def _kind(graph: Graph, rule: Rule | list[str], nodes: list[int]) -> str:
    if bool((graph.kind[nodes] == LOGIT).all()):
        return "output"
    if isinstance(rule, dict) and rule.get("pushes"):
        return "say"
    if isinstance(rule, dict) and "positions" in rule:
        marks = {mark_of(graph.tokens[p]) for p in rule["positions"]}
        return "word" if marks == {None} else "marks" if None not in marks else "chosen"
    return "chosen"


def _members(graph: Graph, rules: Rules) -> Tensor:
    """[n] number of the cluster that lists a node by id, -1: none."""
    member = torch.full((graph.n_nodes,), -1)
    if not any(isinstance(rule, list) for rule in rules.values()):
        return member
    ids = {node_name(graph, i): i for i in (graph.kind != BIAS).nonzero().flatten().tolist()}
    names = list(rules)
    for number, (name, rule) in enumerate(rules.items()):
        for node in rule if isinstance(rule, list) else []:
            if node not in ids:
                raise ValueError(f"cluster {name!r}: no node {node!r} on this prompt{_nearby(graph, node)}")
            if int(member[ids[node]]) >= 0:
                other = names[int(member[ids[node]])]
                raise ValueError(f"node {node!r} is listed twice, in {other!r} and in {name!r}: keep one of them")
            member[ids[node]] = number
    return member


def _nearby(graph: Graph, node: str) -> str:
    """What the ids at the same place are, or what ids look like."""
    layer, position = node.split("_")[0], node.split("_")[-1]
    kept = [node_name(graph, n.id) for n in graph.nodes(kind="feature")]
    here = [name for name in kept if name.split("_")[-1] == position]
    same = [name for name in here if name.split("_")[0] == layer] or here or kept
    shown = ", ".join(same[:6]) or "none was kept"
    ids = f"Ids belong to one transcoder and one prompt (layer_feature_position); kept nearby: {shown}"
    return f'. {ids}. For several models use rules, such as {{"positions": [5]}}'


def _fits(graph: Graph, name: str, rule: Rule, pushes: Tensor) -> Tensor:
    fits = torch.ones(graph.n_nodes, dtype=torch.bool)
    if "positions" in rule:
        wrong = [p for p in rule["positions"] if not 0 <= p < len(graph.tokens)]
        if wrong:
            raise ValueError(f"cluster {name!r}: positions {wrong}, but the prompt has {len(graph.tokens)} tokens")
        fits &= torch.isin(graph.position, torch.tensor(rule["positions"], dtype=graph.position.dtype))
    if "layers" in rule:
        low, high = rule["layers"]
        layer = graph.layer.clamp(min=0)  # tokens and positions enter at layer 0
        fits &= (layer >= low) & (layer <= high)
    if "kinds" in rule:
        fits &= torch.isin(graph.kind, torch.tensor([KINDS.index(k) for k in rule["kinds"]], dtype=graph.kind.dtype))
    if "pushes" in rule:
        fits &= pushes == rule["pushes"]
    return fits


def _pushing(graph: Graph) -> Tensor:
    """[n] whether a feature's own edges to the targets are at least half of its influence on them."""
    target = graph._per_edge(graph.row_target)
    own = torch.where(graph.kind[target] == LOGIT, graph.weight.abs() / graph._per_edge(graph.row_abs), 0.0)
    own = torch.zeros_like(graph.influence).index_add_(0, graph.source, own * graph._start()[target])
    return (graph.kind == FEATURE) & (graph.influence > 0) & (own >= PUSHES * graph.influence)


def _cluster(graph: Graph, name: str, kind: str, nodes: list[int], share: float) -> Cluster:
    positions = sorted({int(p) for p in graph.position[nodes]})
    layers = _layers(graph, torch.tensor(nodes), share)
    return Cluster(name, kind, nodes, positions, layers, float(graph.influence[nodes].sum()))


def _layers(graph: Graph, nodes: Tensor, share: float) -> tuple[int, int]:
    """The shortest range of layers that holds this share of the features' influence; of other nodes where no feature
    is. The lowest one, where several are as short."""
    features = nodes[graph.kind[nodes] == FEATURE]
    nodes = features if len(features) and float(graph.influence[features].sum()) > 0 else nodes
    layer = graph.layer[nodes].clamp(min=0).long()
    held = torch.zeros(graph.n_layers + 1, dtype=torch.float64)
    held.index_add_(0, layer, graph.influence[nodes].double())
    if float(held.sum()) == 0:
        return int(layer.min()), int(layer.max())
    sums = torch.cat([held.new_zeros(1), held.cumsum(0)])
    for length in range(1, len(held) + 1):
        inside = sums[length:] - sums[:-length]
        enough = (inside >= share * held.sum() * (1 - 1e-12)).nonzero()
        if len(enough):
            return int(enough[0, 0]), int(enough[0, 0]) + length - 1
    raise AssertionError("all layers together hold everything")


# ---- edges between clusters ------------------------------------------------------------------------------------------


def cluster_edges(graph: Graph, clusters: Sequence[Cluster]) -> list[ClusterEdge]:
    """Edges between different clusters, those through which most influence passes first."""
    member = _numbers(graph, clusters)
    source, target, weight = graph.edges(kept=False)
    a, b = member[source], member[target]
    inside = ((a >= 0) & (b >= 0) & (a != b)).nonzero().flatten()
    through = graph.influence + graph._start()
    flow = weight.abs() / graph._per_edge(graph.row_abs).clamp(min=1e-30) * through[target]
    inside = inside[(a[inside] * len(clusters) + b[inside]).argsort(stable=True)]  # edges of one cluster edge together
    keys, counts = torch.unique_consecutive(a[inside] * len(clusters) + b[inside], return_counts=True)
    parts = [torch.split(t[inside], counts.tolist()) for t in (weight.double(), flow.double(), source, target)]
    edges = [
        ClusterEdge(int(key) // len(clusters), int(key) % len(clusters), float(w.sum()), float(f.sum()), s, t)
        for key, w, f, s, t in zip(keys, *parts, strict=True)
    ]
    return sorted(edges, key=lambda e: (-e.flow, e.source, e.target))


def _numbers(graph: Graph, clusters: Sequence[Cluster]) -> Tensor:
    member = torch.full((graph.n_nodes,), -1)
    for number, cluster in enumerate(clusters):
        member[cluster.nodes] = number
    return member


def carry_clusters(graph: Graph, edges: Sequence[ClusterEdge], top: int | None = 32) -> list[Carried]:
    """Which heads carry each cluster edge: exact sums over its node edges. Needs the model (a live graph)."""
    pairs = [pair for edge in edges for pair in edge.pairs]
    found: list[Carried] = carry(graph, pairs, [i for i, edge in enumerate(edges) for _ in edge.pairs], top=top)
    return found + [nothing(graph)] * (len(edges) - len(found))  # edges without pairs, at the end


def balance(graph: Graph, clusters: Sequence[Cluster]) -> list[dict[str, float]]:
    """Per cluster, what its rows add up to: value = clusters + within + outside + biases.

    clusters: what comes from other clusters; within: from its own nodes; outside: from nodes in no cluster, and from
    edges too small to be stored.
    """
    member = _numbers(graph, clusters)
    source, target, weight = graph.edges(kept=False)
    a, b = member[source], member[target]
    bias = graph.kind[source] == BIAS
    parts = {"clusters": (a >= 0) & (a != b), "within": (a == b) & ~bias, "outside": (a < 0) & ~bias, "biases": bias}
    rows = member[graph.row_target]
    rest = graph.rest.double().sum(1)

    def per_cluster(where: Tensor, values: Tensor) -> Tensor:
        inside = where >= 0
        return torch.zeros(len(clusters), dtype=torch.float64).index_add_(0, where[inside], values[inside].double())

    sums = {name: per_cluster(torch.where(mask, b, -1), weight) for name, mask in parts.items()}
    sums["outside"] = sums["outside"] + per_cluster(rows, rest)
    sums["value"] = per_cluster(rows, graph.row_value)
    return [{name: float(values[i]) for name, values in sums.items()} for i in range(len(clusters))]


def choose_edge(
    clusters: Sequence[Cluster], edges: Sequence[ClusterEdge], asked: str | None = None, strict: bool = True
) -> ClusterEdge:
    """The edge to look at: "source->target" by name, or the one from another position that matters most to the answer.

    That is: of all edges into the first output and into the features that push it, from clusters that do not stand at
    its position, the one that raises its target and through which most influence passes. (Weights into different
    targets have different units.) The token put before the text ("<s>") is left out.
    strict=False, for the second of two models: an edge that does not exist here is one of weight 0, and where one of
    its clusters does not exist, the edge that matters most is taken instead.
    """
    found = None if asked is None else _named_edge(clusters, edges, asked, strict)
    return found or _strongest_edge(clusters, edges)


def _named_edge(
    clusters: Sequence[Cluster], edges: Sequence[ClusterEdge], asked: str, strict: bool
) -> ClusterEdge | None:
    numbers = {c.name: i for i, c in enumerate(clusters)}
    source, arrow, target = (part.strip() for part in asked.partition("->"))
    if not arrow or source not in numbers or target not in numbers:
        if not strict:
            return None
        raise ValueError(f"edge {asked!r}: expected source->target, of these clusters: {', '.join(numbers)}")
    ends = (numbers[source], numbers[target])
    found = next((e for e in edges if (e.source, e.target) == ends), None)
    if found is None and strict:
        to = ", ".join(clusters[e.source].name for e in edges if e.target == ends[1])
        raise ValueError(f"nothing goes from {source!r} to {target!r}, which is fed by {to or 'no cluster'}")
    return found or ClusterEdge(*ends, 0.0, 0.0)


def _strongest_edge(clusters: Sequence[Cluster], edges: Sequence[ClusterEdge]) -> ClusterEdge:
    output = next(i for i, c in enumerate(clusters) if c.kind == "output")
    candidates = _into_answer(clusters, edges, output) or [e for e in edges if e.target == output]
    if not candidates:
        raise ValueError(f"no cluster feeds {clusters[output].name!r}: list more nodes, or trace with a larger budget")
    return max(candidates, key=lambda e: e.flow)


def _into_answer(clusters: Sequence[Cluster], edges: Sequence[ClusterEdge], output: int) -> list[ClusterEdge]:
    """Edges into the answer and what pushes it: those from other positions, and of them those that raise, if any."""
    answers = {output, *(i for i, c in enumerate(clusters) if c.kind == "say")}
    # What a model parks on the token before the text is no part of the story.
    idle = {i for i, c in enumerate(clusters) if c.positions == [0] and START.fullmatch(c.name)}
    into = [e for e in edges if e.target in answers and e.source not in answers | idle]
    at = clusters[output].positions[0]
    elsewhere = [e for e in into if at not in clusters[e.source].positions]
    return [e for e in elsewhere if e.weight > 0] or elsewhere or into
