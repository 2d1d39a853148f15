"""Change something and see what happens: predicted in the frozen model, measured in the real one.

What can be changed: features held at a value or scaled, errors, tokens and positions scaled, gates closed (layer, head,
query, key), heads silenced.

measured (frozen=False): the model is run again. A held feature writes the difference between the value it is held at
and what it would be now, through its decoder, on top of what the real MLPs write; attention patterns, gates, norms and
MLPs are computed anew. A closed gate takes its weight out of the pattern (out of the softmax where gates renormalise).
With `hold_mlps` the MLPs write what they wrote before, so that only attention and norms react: what an edge is about.
predicted along the cut (hold_mlps, hold_patterns): norms react, the rest is held. What is left is what patterns do.
predicted (frozen=True): patterns, norm denominators and errors held. Features active on the prompt follow what reaches
them (slope 1), inactive ones stay silent; `respond=False` holds all features that are not changed, which leaves direct
edges alone. The prediction is linear in feature changes and exact for gates and heads of the frozen model.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from ..models.hooks import check_site
from .graph import FEATURE, LOGIT, Graph
from .linear_model import Block, Frozen, Link, Rewrite, exact
from .rows import Agreement, ChangeRow
from .sources import Replacement

FEATURES_AT_ONCE = 4096  # while decoding
Feature = tuple[int, int, int]  # layer, position, index: a feature that need not be active


@dataclass
class Outcome:
    """Targets before and after a change."""

    nodes: list[int]
    before: Tensor  # [n] pre-activations of features, values of logits
    after: Tensor  # [n]
    run: Frozen | None  # the changed run of the real model; None for a prediction

    @property
    def change(self) -> dict[int, float]:
        return dict(zip(self.nodes, (self.after - self.before).tolist(), strict=True))


class Change(TypedDict, total=False):  # what `intervene` changes
    scale: Mapping[int, float]
    set: Mapping[int | Feature, float]
    close: Sequence[Link]
    ablate: Sequence[str]


class Check(ChangeRow):  # what scaling sources does to a weighted sum of targets
    sources: list[int]
    targets: list[int]


class EdgeCheck(Check):  # the same of one edge
    weight: float


class Edit(Rewrite):
    """Changes to one prompt's run, resolved against its graph."""

    def __init__(
        self, replacement: Replacement, scale: Mapping[int, float], set: Mapping[int | Feature, float],
        close: Sequence[Link], ablate: Sequence[str], hold_mlps: bool = False, hold_patterns: bool = False,
        less: Mapping[int, Tensor] | None = None,
    ):  # fmt: skip
        self.replacement, self.hold_mlps, self.hold_patterns = replacement, hold_mlps, hold_patterns
        self.less = less or {}
        frozen = replacement.frozen
        self.held: dict[int, dict[tuple[int, int], float]] = {}  # layer -> (position, index) -> value
        self.added = frozen.final.new_zeros(replacement.n_layers + 1, *frozen.final.shape)  # [place, T, D]
        self._hold(scale, set)
        self.closed: dict[int, list[tuple[int, int, int]]] = {}
        for layer, head, query, key in close:
            if not (0 <= layer < frozen.dims.n_layers and 0 <= head < frozen.dims.n_heads):
                raise ValueError(f"no head {head} in layer {layer}: gates are named (layer, head, query, key)")
            if not 0 <= key <= query < frozen.n_tokens:
                asked = f"no gate from query {query} to key {key}"
                raise ValueError(f"{asked}: expected 0 <= key <= query < {frozen.n_tokens}")
            self.closed.setdefault(layer, []).append((head, query, key))
        self.silent: dict[int, list[int]] = {}
        for name in ablate:
            site = check_site(frozen.decoder.model, name)
            if site.kind != "a":
                raise ValueError(f"ablate={name!r}: expected heads, such as a3.h1, or a3 for all heads of a layer")
            heads = list(range(frozen.dims.n_heads)) if site.head is None else [site.head]
            self.silent.setdefault(site.layer, []).extend(heads)

    def _hold(self, scale: Mapping[int, float], set: Mapping[int | Feature, float]) -> None:
        r = self.replacement
        for node, factor in scale.items():
            kind = int(r.kind_of(torch.tensor([node])))
            if kind == FEATURE:
                self._hold_one(*r.feature(node), factor * float(r.activation[node]))
            elif kind == LOGIT:
                raise ValueError(f"node {node} is a logit: only sources can be scaled")
            else:
                ids = torch.tensor([node], device=r.error.device)
                self.added[:, int(r.places(ids))] += (factor - 1) * r.writes(ids)[0]
        for name, value in set.items():
            if isinstance(name, tuple):
                self._hold_one(*name, value)
            elif int(name) < len(r.layer):
                self._hold_one(*r.feature(int(name)), value)
            else:
                raise ValueError(f"node {name} is no feature: only features can be set; scale it instead")

    def _hold_one(self, layer: int, position: int, index: int, value: float) -> None:
        r = self.replacement
        if not (0 <= layer < r.n_layers and 0 <= position < r.n_tokens and 0 <= index < r.transcoder.n_features):
            raise ValueError(
                f"no feature {index} in layer {layer} at position {position}: there are {r.n_layers} layers of "
                f"{r.transcoder.n_features} features, {r.n_tokens} tokens"
            )
        self.held.setdefault(layer, {})[position, index] = value

    def held_at(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(positions [n], indices [n], values [n]) of the held features of a layer."""
        device, held = self.added.device, self.held.get(layer, {})
        where = torch.tensor(list(held), dtype=torch.int64, device=device).view(-1, 2)
        return where[:, 0], where[:, 1], torch.tensor(list(held.values()), dtype=self.added.dtype, device=device)

    def decode(self, layer: int, at: Tensor, index: Tensor, change: Tensor, into: Tensor) -> None:
        """Add what a change of activations [n] writes to all places, into [L + 1, T, D]."""
        for some in torch.split(torch.arange(len(index), device=index.device), FEATURES_AT_ONCE):
            rows = self.replacement.transcoder.W_dec[layer][index[some]].to(into) * change[some, None, None]
            into[layer + 1 : layer + 1 + rows.shape[1]].index_add_(1, at[some], rows.transpose(0, 1))

    # ---- the real model's run (Rewrite) ----

    def begin(self) -> "Edit":
        self.written = self.added.clone()  # grows while the run goes up
        return self

    def embedding(self, x: Tensor) -> Tensor:
        return x + self.written[0]

    def mix(self, layer: int, z: Tensor) -> Tensor:
        if layer in self.less:
            z = z - self.less[layer]
        if layer not in self.silent:
            return z
        d_head = self.replacement.frozen.dims.d_head
        z = torch.unflatten(z, -1, (-1, d_head)).clone()
        z[..., self.silent[layer], :] = 0
        return z.flatten(-2)

    def mlp(self, layer: int, block: Block) -> Tensor:
        r = self.replacement
        before = r.frozen.blocks[layer]
        if layer in self.held:
            at, index, value = self.held_at(layer)
            current = before if self.hold_mlps else block
            now = r.encode(layer, current.mlp_in if r.transcoder.input_hook == "mlp-input" else current.mlp_read)
            self.decode(layer, at, index, value - now[at, index], self.written)
        return (before if self.hold_mlps else block).mlp_out + self.written[layer + 1]

    def pattern(self, layer: int, heads: slice, weights: Tensor, renormalise: bool) -> Tensor:
        first = heads.start or 0
        if self.hold_patterns:
            weights = self.replacement.frozen.pattern(layer, heads)
        inside = [(h - first, q, k) for h, q, k in self.closed.get(layer, []) if 0 <= h - first < len(weights)]
        if not inside:
            return weights
        weights = weights.clone()
        weights[tuple(torch.tensor(inside, device=weights.device).T)] = 0
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return weights


@exact
def intervene(
    graph: Graph, *, scale: Mapping[int, float] | None = None, set: Mapping[Any, float] | None = None,
    close: Sequence[Link] = (), ablate: Sequence[str] = (), frozen: bool = False, respond: bool = True,
    hold_mlps: bool = False, hold_patterns: bool = False, less: Mapping[int, Tensor] | None = None,
    watch: Sequence[int] | None = None,
) -> Outcome:  # fmt: skip
    """What targets become when something is changed.

    scale: node id -> factor of what it writes (0 removes it); features, errors, tokens, positions.
    set: feature, as node id or (layer, position, index), -> activation.
    close: gates as (layer, head, query, key). ablate: heads as "a3.h1", or "a3" for a whole layer.
    frozen: the linear prediction instead of the real model; respond: whether features react in it.
    hold_mlps: whether the real model's MLPs keep what they wrote (see the top of this file); hold_patterns: whether its
    heads look where they looked, so that norms alone react.
    less: layer -> [T, n_heads * d_head], taken out of what the real model's heads mix.
    watch: targets to report, features or logits; None: the graph's logits.
    """
    if graph.pause is not None:
        graph.pause()
    replacement = graph.replacement()
    edit = Edit(replacement, scale or {}, set or {}, close, ablate, hold_mlps, hold_patterns, less)
    logits = range(graph.n_nodes - len(graph.targets), graph.n_nodes)
    nodes = list(logits if watch is None else watch)
    ids = torch.tensor(nodes, dtype=torch.int64, device=replacement.error.device)
    before = replacement.values(ids)
    if frozen:
        return Outcome(nodes, before, before + _predict(replacement, edit, ids, respond), None)
    run = copy.copy(replacement.frozen).run(edit.begin())
    return Outcome(nodes, before, replacement.values(ids, run), run)


def _predict(replacement: Replacement, edit: Edit, ids: Tensor, respond: bool) -> Tensor:
    """Change of targets [n] in the frozen model: differences to the traced run, sent forward block by block."""
    frozen = replacement.frozen
    written = edit.added.clone()
    x = written[0]
    reads, change = replacement.reads(ids), written.new_zeros(len(ids))

    def read(stage: int, x: Tensor) -> None:
        here = reads.stage == stage
        change[here] = (x[reads.position[here]] * reads.vector[here]).sum(-1)

    for layer in range(frozen.dims.n_layers):
        values = frozen.blocks[layer].values[None]
        z = edit.mix(layer, frozen.mix(layer, frozen.to_values(layer, x[None]), rewrite=edit))
        if layer in edit.closed or layer in edit.silent:
            z = z + edit.mix(layer, frozen.mix(layer, values, rewrite=edit)) - frozen.mix(layer, values)
        after = x + frozen.from_mix(layer, z)[0]
        received = x if frozen.parallel else after
        read(2 * layer + 1, received)
        _respond(replacement, edit, layer, received, written, respond)
        x = after + frozen.write(layer + 1, written[layer + 1])
    read(2 * frozen.dims.n_layers, x)
    return change


def _respond(r: Replacement, edit: Edit, layer: int, x: Tensor, written: Tensor, respond: bool) -> None:
    """What the features of a layer write when the residual stream they read changes by x [T, D]."""
    at, index, value = edit.held_at(layer)
    own = (r.layer == layer).nonzero()[:, 0]
    n = r.transcoder.n_features
    name, held = r.position[own] * n + r.index[own], at * n + index  # one number for (position, feature)
    traced = value.new_zeros(len(held))
    same = held[:, None] == name[None]
    traced[same.any(1)] = r.activation[own[same.nonzero()[:, 1]]]
    edit.decode(layer, at, index, value - traced, written)
    free = own[~torch.isin(name, held)]
    if respond and len(free):
        reads = r.reads(free)
        edit.decode(layer, r.position[free], r.index[free], (x[reads.position] * reads.vector).sum(-1), written)


# ---- predicted against measured ----


WAYS: dict[str, Callable[..., Outcome]] = {
    "predicted_direct": partial(intervene, frozen=True, respond=False),
    "predicted_path": partial(intervene, hold_mlps=True, hold_patterns=True),
    "measured_direct": partial(intervene, hold_mlps=True),
    "predicted": partial(intervene, frozen=True),
    "measured": intervene,
}


def check_changes(graph: Graph, changes: Sequence[Change], watch: Sequence[Mapping[int, float]]) -> list[ChangeRow]:
    """Per change (arguments of `intervene`) and weighted sum of targets: value before, predicted and measured change.

    predicted_direct and measured_direct: the same without detours through other features, which is what edges alone
    say. Predicted with all other features held, measured with all MLPs held. predicted_path: the gradient averaged from
    the edge in to the edge out instead of at the uncut model, with the norms moving on the way. Patterns and MLPs held,
    that average is the difference of two runs, so it is exact: no points to choose.
    """
    rows: list[ChangeRow] = []
    seen: dict[str, dict[str, Outcome]] = {}
    for change, targets in zip(changes, watch, strict=True):
        nodes = sorted(targets)
        name = repr((sorted((k, repr(v)) for k, v in change.items()), nodes))
        if name not in seen:
            seen[name] = {label: way(graph, **change, watch=nodes) for label, way in WAYS.items()}
        weight = torch.tensor([float(targets[n]) for n in nodes], dtype=torch.float64)
        before = float(weight @ seen[name]["measured"].before.double().cpu())
        sums = {label: float(weight @ (o.after - o.before).double().cpu()) for label, o in seen[name].items()}
        rows.append(cast(ChangeRow, {"before": before, **sums}))
    return rows


def check_edges(
    graph: Graph, pairs: Sequence[tuple[Sequence[int], Mapping[int, float] | Sequence[int]]], factor: float = 0.0
) -> list[Check]:
    """Per (sources, targets): what scaling the sources by `factor` does to the (weighted) sum of the targets.

    An edge is ([source], [target]); a cluster edge lists all sources and all targets.
    """
    targets = [dict(t) if isinstance(t, Mapping) else {int(n): 1.0 for n in t} for _, t in pairs]
    changes: list[Change] = [{"scale": {int(s): factor for s in sources}} for sources, _ in pairs]
    rows = check_changes(graph, changes, targets)
    return [
        {"sources": [int(s) for s in sources], "targets": sorted(t), **row}
        for (sources, _), t, row in zip(pairs, targets, rows, strict=True)
    ]


def check_top(graph: Graph, n: int = 50, factor: float = 0.0) -> list[EdgeCheck]:
    """`check_edges` for the n largest kept edges between features or from features to logits, largest first."""
    source, target, weight = graph.edges()
    usable = graph.kind[source] == FEATURE
    source, target, weight = source[usable], target[usable], weight[usable]
    order = weight.abs().argsort(descending=True)[:n]
    rows = check_edges(graph, [([int(source[i])], [int(target[i])]) for i in order], factor)
    return [{**row, "weight": float(weight[i])} for i, row in zip(order, rows, strict=True)]


def agreement(rows: Sequence[Mapping[str, Any]], predicted: str = "predicted", measured: str = "measured") -> Agreement:
    """Pearson and Spearman correlation of predicted and measured changes; None where they do not vary."""
    a, b = (torch.tensor([r[name] for r in rows], dtype=torch.float64) for name in (predicted, measured))
    return {"pearson": _correlation(a, b), "spearman": _correlation(_ranks(a), _ranks(b)), "n": len(rows)}


def _ranks(x: Tensor) -> Tensor:
    """Ranks with ties averaged."""
    return ((x[:, None] > x).sum(1) + 0.5 * (x[:, None] == x).sum(1)).to(torch.float64)


def _correlation(a: Tensor, b: Tensor) -> float | None:
    if len(a) < 2:
        return None
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else None
