"""Graph: which parts of a model, on one prompt, feed which others, how much, and which of them matter.

A node is a source, a target, or both. An edge s -> t is s's exact share of t's value in the frozen model (trace.py).
Targets have rows: all edges into t, plus the biases, sum to t's value. Rows are stored sparsely:

1. Nodes are a table, kind by kind: features, errors, tokens, positions, biases, logits (KINDS). Every feature that is
   active on the prompt is in it, whether or not its row was computed.
2. Rows exist for the logits and for the most influential features (greedy growth). A row keeps its largest edges; what
   is dropped is kept as exact sums per kind (`rest`), so a row is always complete.
3. Influence: with |edges| of a row divided by their sum (biases left out), the share of all paths from the targets back
   to a node, paths of every length added up.
4. Pruning keeps the most influential nodes, then the edges between them, then removes dead ends. A mask, not a copy.

Replacement score: of the influence that reaches the ends of all paths, the share that ends at inputs (tokens and
positions), not at errors. Completeness score: the share of what enters each node that does not come from errors, nodes
weighted by influence. Both as circuit-tracer defines them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runs import pictures
from ..runs.run import as_readable_as_others, read_json, reading, write_json
from .rows import TargetRow, TraceRows

if TYPE_CHECKING:
    from .sources import Replacement

KINDS = ("feature", "error", "token", "position", "bias", "logit")
FEATURE, ERROR, TOKEN, POSITION, BIAS, LOGIT = range(6)
BIASES = ("attention", "decoder", "own")  # what the index of a bias node means
SMALLEST = 1e-3  # of the sum of |edges|: a value below this is measured against this, see `completeness_error`


@dataclass(frozen=True)
class Node:
    """One node, readable. `index`: feature number, vocabulary id of a token or logit, or which bias (BIASES)."""

    id: int  # row of the table
    kind: str  # one of KINDS
    layer: int  # -1: before the first layer (tokens, positions, own biases); n_layers: logits
    position: int  # -1: all positions at once (biases)
    index: int
    value: float  # activation of a feature, value of a logit target; 0 otherwise
    influence: float


@dataclass
class Graph:
    """An attribution graph. n nodes, R rows (targets), E stored edges; all tensors on the CPU."""

    prompt: str
    tokens: list[str]  # the prompt, token by token, as text
    targets: list[TargetRow]  # one per logit node
    n_layers: int
    n_heads: int
    settings: dict[str, str | float]  # how it was traced; cross_layer, input_hook, gated, budget, ...
    # nodes, in the order of KINDS
    kind: Tensor  # [n] int8, index into KINDS
    layer: Tensor  # [n] int32
    position: Tensor  # [n] int32
    index: Tensor  # [n] int32
    value: Tensor  # [n] activation or target value
    # rows: row r holds edges first[r] to first[r + 1]; logits first, then features in the order they were expanded
    row_target: Tensor  # [R] int64 node id
    first: Tensor  # [R + 1] int64
    source: Tensor  # [E] int64 node id; biases are always stored
    weight: Tensor  # [E] signed share of the target's value
    row_value: Tensor  # [R] what the row must sum to: the target's pre-activation (logit: its value)
    row_sum: Tensor  # [R] sum of ALL edges and biases, dropped ones included, fp64
    row_abs: Tensor  # [R] sum of |edges| without biases, dropped ones included
    rest: Tensor  # [R, 6] sum of the dropped edges, by kind
    rest_abs: Tensor  # [R, 6] the same of |edges|
    # what matters
    influence: Tensor = field(default_factory=lambda: torch.empty(0))  # [n]
    node_kept: Tensor = field(default_factory=lambda: torch.empty(0))  # [n] bool
    edge_kept: Tensor = field(default_factory=lambda: torch.empty(0))  # [E] bool
    live: "Replacement | None" = field(default=None, repr=False, compare=False)  # the model it came from; not saved
    rows: TraceRows | None = field(default=None, repr=False, compare=False)  # trace.json, where it was asked for
    pause: Callable[[], None] | None = field(default=None, repr=False, compare=False)  # called before interventions

    def __post_init__(self) -> None:
        if not len(self.influence):
            self.influence = self._influence(self.weight.abs() / self._per_edge(self.row_abs))
        if not len(self.node_kept):
            self.node_kept = torch.ones(len(self.kind), dtype=torch.bool)
        if not len(self.edge_kept):
            self.edge_kept = torch.ones(len(self.source), dtype=torch.bool)

    def __repr__(self) -> str:
        target = ", ".join(t["label"] for t in self.targets[:2]) + (", ..." if len(self.targets) > 2 else "")
        prompt = self.prompt if len(self.prompt) <= 40 else self.prompt[:39] + "…"
        kept = f"{int(self.node_kept.sum()):,} of {self.n_nodes:,} nodes, {int(self.edge_kept.sum()):,} edges"
        return f"Graph({prompt!r} -> {target}: {kept}, rows complete to {self.completeness_error:.1e})"

    def _repr_html_(self) -> str:
        """For notebooks: the strongest kept nodes over the prompt's words, layers upwards."""
        shown = sorted((n for n in self.nodes() if n.position >= 0), key=lambda n: -n.influence)[:120]
        place = {node.id: i for i, node in enumerate(shown)}
        most = max((n.influence for n in shown if n.kind != "logit"), default=1.0) or 1.0
        dots = [(n.position, n.layer, min(1.0, n.influence / most), self.label(n.id)) for n in shown]
        sources, targets, weights = (part.tolist() for part in self.edges())
        largest = max(map(abs, weights), default=1.0) or 1.0
        edges = [
            (place[s], place[t], w / largest)
            for s, t, w in zip(sources, targets, weights, strict=True)
            if s in place and t in place
        ]
        edges.sort(key=lambda edge: -abs(edge[2]))
        return pictures.page(repr(self), pictures.web(dots, edges[:300], self.tokens))

    # ---- reading ----

    @property
    def n_nodes(self) -> int:
        return len(self.kind)

    @property
    def completeness_error(self) -> float:
        """The largest relative residual of any row: |value - sum of the row| / |value|.

        A value that is less than a thousandth of what flows in and out (sum of |edges|) is measured against that
        thousandth: a logit difference of exactly zero has no relative error.
        """
        scale = torch.maximum(self.row_value.abs(), SMALLEST * self.row_abs).clamp(min=1e-30)
        return float(((self.row_value - self.row_sum).abs() / scale).max())

    def node(self, id: int) -> Node:
        i = int(id)
        numbers = (int(self.layer[i]), int(self.position[i]), int(self.index[i]))
        return Node(i, KINDS[int(self.kind[i])], *numbers, float(self.value[i]), float(self.influence[i]))

    def nodes(self, kept: bool = True, kind: str | None = None) -> list[Node]:
        """The nodes that pruning kept (or all), of one kind or of all."""
        chosen = self.node_kept.clone() if kept else torch.ones_like(self.node_kept)
        if kind is not None:
            chosen &= self.kind == KINDS.index(kind)
        return [self.node(int(i)) for i in chosen.nonzero().flatten()]

    def label(self, id: int) -> str:
        """A node in words."""
        node = self.node(id)
        where = f" at {node.position} {self.tokens[node.position]!r}" if node.position >= 0 else ""
        if node.kind == "logit":
            return self.targets[id - (self.n_nodes - len(self.targets))]["label"]
        if node.kind == "bias":
            return f"{BIASES[node.index]} bias" + (f" of layer {node.layer}" if node.layer >= 0 else "")
        if node.kind == "feature":
            return f"feature {node.index} of layer {node.layer}{where}"
        return f"{node.kind}{f' of layer {node.layer}' if node.kind == 'error' else ''}{where}"

    def find(self, kind: str, layer: int, position: int, index: int | None = None) -> int:
        """The id of a node; ValueError where there is none (a feature that is not active here, say)."""
        found = (self.kind == KINDS.index(kind)) & (self.layer == layer) & (self.position == position)
        if index is not None:
            found &= self.index == index
        ids = found.nonzero().flatten()
        if len(ids) != 1:
            raise ValueError(
                f"{len(ids)} nodes match kind={kind}, layer={layer}, position={position}, index={index}; expected one. "
                "Only features active on the prompt are nodes."
            )
        return int(ids[0])

    def row(self, target: int) -> tuple[Tensor, Tensor]:
        """(source ids, weights) of the stored edges into a target; ValueError when its row was not computed."""
        rows = (self.row_target == int(target)).nonzero().flatten()
        if not len(rows):
            raise ValueError(f"no row for {self.label(target)}: it was not expanded. Trace with a larger budget.")
        part = slice(int(self.first[rows[0]]), int(self.first[rows[0] + 1]))
        return self.source[part], self.weight[part]

    def edges(self, kept: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """(sources [k], targets [k], weights [k]) of the edges that pruning kept (or of all stored ones)."""
        target = self._per_edge(self.row_target)
        if not kept:
            return self.source, target, self.weight
        return self.source[self.edge_kept], target[self.edge_kept], self.weight[self.edge_kept]

    def replacement(self) -> "Replacement":
        """The model this graph came from, frozen; ValueError for a graph read from disk."""
        if self.live is None:
            raise ValueError("this graph was loaded from disk and has no model: trace the prompt again for head shares")
        return self.live

    # ---- what matters ----

    def prune(self, nodes: float = 0.8, edges: float = 0.98) -> "Graph":
        """Keep the nodes that hold this share of the influence and the edges that hold this share among them.

        Tokens and logits always stay. Features and errors without a kept outgoing edge and features without a kept
        incoming one go, until none is left. Biases are in every row but never kept as nodes.
        """
        for name, share in (("nodes", nodes), ("edges", edges)):
            if not 0 < share <= 1:
                raise ValueError(f"prune({name}={share}): expected a share above 0 and up to 1")
        always = (self.kind == TOKEN) | (self.kind == LOGIT)
        has_row = self._mask(self.row_target)
        able = (self.kind != BIAS) & ((self.kind != FEATURE) | has_row)
        scores = torch.where(able & ~always, self.influence, 0.0)
        keep = (able & _largest(scores, nodes)) | always

        target = self._per_edge(self.row_target)
        between = keep[self.source] & keep[target]
        weight = torch.where(between, self.weight.abs(), 0.0)
        weight = weight / self._per_edge(self._row_sums(weight).clamp(min=1e-30))
        through = self._influence(weight) + self._start()
        kept_edges = between & _largest(weight * through[target], edges)
        while True:
            leaves, enters = (self._mask(ids[kept_edges]) for ids in (self.source, target))
            after = always | (keep & leaves & (enters | (self.kind != FEATURE)))
            if bool((after == keep).all()):
                break
            keep = after
            kept_edges &= keep[self.source] & keep[target]
        self.node_kept, self.edge_kept = keep, kept_edges
        return self

    def scores(self) -> dict[str, float]:
        """Replacement and completeness score. Features without a row are no part of the graph, as in circuit-tracer."""
        has_row = self._mask(self.row_target)
        inside = (self.kind[self.source] != BIAS) & ((self.kind[self.source] != FEATURE) | has_row[self.source])
        weight = torch.where(inside, self.weight.abs(), 0.0)
        dropped = self.rest_abs[:, [ERROR, TOKEN, POSITION]]
        total = (self._row_sums(weight) + dropped.sum(1)).clamp(min=1e-30)
        weight = weight / self._per_edge(total)
        influence = self._influence(weight)
        through = (influence + self._start())[self.row_target]
        lost = through @ (dropped / total[:, None])  # influence on dropped errors, tokens, positions
        inputs = influence[(self.kind == TOKEN) | (self.kind == POSITION)].sum() + lost[1] + lost[2]
        errors = influence[self.kind == ERROR].sum() + lost[0]
        from_errors = self._row_sums(torch.where(self.kind[self.source] == ERROR, weight, 0.0)) + dropped[:, 0] / total
        # Inputs and errors have nothing entering them; they count as complete, as in circuit-tracer.
        everything = float((influence + self._start()).sum() + lost.sum())
        return {
            "replacement": float(inputs / (inputs + errors).clamp(min=1e-30)),
            "completeness": 1 - float(through @ from_errors) / max(everything, 1e-30),
        }

    def _influence(self, weight: Tensor) -> Tensor:
        """Influence [n] of every node on the targets, from normalised |edges| [E]: one step per length of path."""
        weight = torch.where(self.kind[self.source] == BIAS, 0.0, weight)
        target = self._per_edge(self.row_target)
        total = torch.zeros(self.n_nodes, dtype=weight.dtype)
        step = self._start()
        for _ in range(self.n_layers + 1):  # no path has more edges: every edge goes up at least one layer
            step = torch.zeros_like(total).index_add_(0, self.source, weight * step[target])
            total += step
        return total

    def _start(self) -> Tensor:
        start = torch.zeros(self.n_nodes, dtype=self.weight.dtype)
        start[-len(self.targets) :] = torch.tensor([float(t["weight"]) for t in self.targets], dtype=start.dtype)
        return start

    def _mask(self, ids: Tensor) -> Tensor:
        """[n] bool: the nodes of these ids."""
        mask = torch.zeros(self.n_nodes, dtype=torch.bool)
        mask[ids] = True
        return mask

    def _per_edge(self, per_row: Tensor) -> Tensor:
        return per_row.repeat_interleave(self.first.diff())

    def _row_sums(self, per_edge: Tensor) -> Tensor:
        rows = torch.arange(len(self.row_target)).repeat_interleave(self.first.diff())
        return torch.zeros(len(self.row_target), dtype=per_edge.dtype).index_add_(0, rows, per_edge)

    # ---- files ----

    def save(self, folder: str | Path) -> Path:
        """Write graph.json (words and settings) and graph.safetensors (tables)."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("live", "rows", "pause")}
        tensors = {name: value.contiguous() for name, value in parts.items() if isinstance(value, Tensor)}
        save_file(tensors, folder / "graph.safetensors")
        as_readable_as_others(folder / "graph.safetensors")
        write_json(folder / "graph.json", {n: v for n, v in parts.items() if n not in tensors} | {"format": 1})
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "Graph":
        """Read what `save` wrote. Without its model: everything but head shares, QK terms and interventions."""
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / "graph.json").is_file():
            raise ValueError(f"no graph at {folder}: expected graph.json and graph.safetensors, as Graph.save writes")
        words = read_json(folder / "graph.json")
        if not isinstance(words, dict) or words.pop("format", None) != 1:
            raise ValueError(f"{folder / 'graph.json'} is not a graph of format 1: trace the prompt again")
        with reading(folder):
            parts: dict[str, Any] = words | load_file(folder / "graph.safetensors")
            return cls(**parts)


def _largest(scores: Tensor, share: float) -> Tensor:
    """Which of these non-negative scores are needed, largest first, to hold this share of their sum."""
    ordered, order = scores.to(torch.float64).sort(descending=True)
    before = ordered.cumsum(0) - ordered  # sum of the larger ones
    wanted = (before < share * ordered.sum() * (1 - 1e-12)) & (ordered > 0)
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[order[wanted]] = True
    return mask


def node_name(graph: Graph, node: int) -> str:
    """A node's name that survives a new trace; also its id in exported graphs. Names of different nodes differ."""
    n = graph.node(node)
    if n.kind == "feature":
        return f"{n.layer}_{n.index}_{n.position}"
    if n.kind == "error":
        return f"{n.layer}_error_mlp_{n.position}"
    if n.kind in ("token", "position"):
        return f"{'E' if n.kind == 'token' else 'P'}_{n.index}_{n.position}"
    if n.kind == "bias":
        return f"{n.layer}_bias{n.index}"
    first = graph.n_nodes - len(graph.targets)
    # Differences and directions have no vocabulary id, and a token may be asked about twice.
    plain = n.index >= 0 and n.index not in graph.index[first:node].tolist()
    return f"{graph.n_layers + 1}_{n.index if plain else f'target{node - first}'}_{n.position}"
