"""Which heads carry an edge: exact shares by (layer, head, query, key).

An edge s -> t sums over all paths from s's position c_s to t's position c_t, through residual streams and heads. One
link (layer, head, query, key) passes on  P[q, k] <W_O^T g[q], W_V norm(r[k])>, r the signal arriving there and g the
gradient waiting there. Added over all links, a path through two heads counts twice. So:

1. Between different positions every path leaves c_s once and reaches c_t once, for good (attention looks back only).
   departure: links out of c_s (key = c_s, query > c_s), r restricted to paths that have stayed at c_s so far.
   arrival:   links into c_t (query = c_t, key < c_t), g restricted to paths that stay at c_t from then on.
   Each sums to the edge. Both restrictions at once, key = c_s and query = c_t: paths that change position once
   (single hop); the rest of the edge is multi-hop.
2. At the same position paths never leave: they go along the residual stream and through heads that look at their own
   position. direct: no head at all. departure: by the first head on the way, arrival: by the last. direct + departure
   and direct + arrival sum to the edge. single hop: exactly one head.
3. Everything is linear in the edge: the shares of a group of edges (between clusters) are sums of theirs.

Sources are pushed forward and targets pulled back once each, in batches; shares of a target's whole row of sources are
one matrix product per layer. No loop over edges.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .graph import Graph
from .linear_model import Link, Reads, exact
from .rows import CarriedRow, HeadShare, LinkShare
from .sources import Replacement

BY = ("arrival", "departure")
T = TypeVar("T")


@dataclass
class Carried:
    """How an edge, or a group of edges, is carried. Shares have the unit of the edge's weight and its sign."""

    weight: float
    departure: list[LinkShare]  # largest |share| first
    arrival: list[LinkShare]
    departure_rest: float  # sum of the links that are not listed
    arrival_rest: float
    departure_heads: Tensor  # [n_layers, n_heads]: all links of a head together
    arrival_heads: Tensor
    single_heads: Tensor  # [n_layers, n_heads]: what travels through this head and no other change of position
    direct: float  # along the residual stream alone, through no head; 0 between different positions

    @property
    def single_hop(self) -> float:
        return float(self.single_heads.sum())

    @property
    def multi_hop(self) -> float:
        return self.weight - self.direct - self.single_hop

    def heads_for(self, share: float = 0.8, by: str = "arrival") -> list[tuple[int, int]]:
        """The smallest set of (layer, head), by |share|, whose signed sum reaches this share of what heads bring.

        What heads bring is the weight without its direct part. by: "arrival", the heads that bring it to the target, or
        "departure", those that take it from the source.
        """
        heads = self._by("heads_for", share, by, self.arrival_heads, self.departure_heads).to(torch.float64)
        order = heads.abs().flatten().argsort(descending=True, stable=True)
        ranked = heads.flatten()[order]
        total = ranked.sum()
        if total == 0:
            return []
        # The sum of all is 1 of the total, but not to the last bit.
        enough = int((ranked.cumsum(0) / total >= share - 1e-9).nonzero()[0, 0]) + 1
        return [(int(i) // heads.shape[1], int(i) % heads.shape[1]) for i in order[:enough]]

    def links_for(self, share: float = 0.8, by: str = "arrival") -> list[Link]:
        """The same for single links (layer, head, query, key): gates to close. Among the listed ones."""
        total, found = self.weight - self.direct, 0.0
        chosen: list[Link] = []
        for link in self._by("links_for", share, by, self.arrival, self.departure):
            if total and found / total >= share - 1e-9:
                break
            chosen.append((link["layer"], link["head"], link["query"], link["key"]))
            found += link["share"]
        return chosen

    @staticmethod
    def _by(method: str, share: float, by: str, arrival: T, departure: T) -> T:
        if by not in BY or not 0 < share <= 1:
            raise ValueError(f"{method}({share}, by={by!r}): expected a share up to 1 and one of {BY}")
        return arrival if by == "arrival" else departure

    def as_row(self) -> CarriedRow:
        """The part of an edge's row that is about heads."""
        named: list[HeadShare] = [
            {"layer": layer, "head": head, "share": float(self.arrival_heads[layer, head])}
            for layer, head in self.heads_for(0.8)
        ]
        return {
            "weight": self.weight, "departure": self.departure, "arrival": self.arrival,
            "departure_rest": self.departure_rest, "arrival_rest": self.arrival_rest, "direct": self.direct,
            "single_hop": self.single_hop, "multi_hop": self.multi_hop, "heads_for_80": named,
        }  # fmt: skip


@exact
def carry(
    graph: Graph, edges: Sequence[tuple[int, int]], groups: Sequence[int] | None = None, top: int | None = 64,
    memory_mb: float = 1024,
) -> list[Carried]:  # fmt: skip
    """Who carries these edges (source id, target id), one Carried per group.

    groups: for every edge the number of the group it adds to, 0 .. G - 1; None: every edge by itself. top: links listed
    per group, None: all that are not zero. Sources of any kind but biases; targets are features and logits, with or
    without a row in the graph.
    """
    replacement = graph.replacement()
    device = replacement.error.device
    if not len(edges):
        return []
    pairs = torch.as_tensor(list(edges), dtype=torch.int64, device=device)
    group = torch.arange(len(pairs), device=device) if groups is None else torch.as_tensor(groups, device=device)
    if pairs.shape != (len(group), 2) or int(group.min()) < 0:
        raise ValueError(f"{len(pairs)} edges but {len(group)} group numbers: expected one for each, from 0 on")
    found = [nothing(graph)] * (int(group.max()) + 1)
    for part in _chunks(replacement, pairs, group, memory_mb):
        for number, carried in _Shares(replacement, pairs[part], group[part]).fill(memory_mb).results(top):
            found[number] = carried
    return found


def nothing(graph: Graph) -> Carried:
    """How no edge at all is carried."""
    empty = torch.zeros(graph.n_layers, graph.n_heads)
    return Carried(0.0, [], [], 0.0, 0.0, empty, empty, empty, 0.0)


def _chunks(replacement: Replacement, pairs: Tensor, group: Tensor, memory_mb: float) -> Iterator[Tensor]:
    """Indices of edges, whole groups together, whose shares fit into memory at once; groups ordered by target."""
    dims, n = replacement.frozen.dims, int(group.max()) + 1
    slots = torch.zeros(n, dtype=torch.int64)
    for at in (replacement.places(pairs[:, 0]), replacement.places(pairs[:, 1])):
        slots += torch.unique(torch.stack([group, at]), dim=1)[0].cpu().bincount(minlength=n)
    each = slots * dims.n_layers * dims.n_heads * replacement.n_tokens * replacement.error.element_size()
    # Beside its shares, an edge needs its source's and its target's signals at every layer, up to six times.
    each += group.cpu().bincount(minlength=n) * 6 * dims.n_layers * dims.d_model * replacement.error.element_size()
    first_target = torch.full((n,), replacement.n_sources * 2, device=group.device)
    first_target = first_target.scatter_reduce(0, group, pairs[:, 1], "amin")
    budget, held, number = memory_mb * 2**20 / 2, 0.0, 0
    chunk_of = torch.zeros(n, dtype=torch.int64)
    for g in first_target.argsort(stable=True).tolist():
        if held and held + float(each[g]) > budget:
            held, number = 0.0, number + 1
        chunk_of[g] = number
        held += float(each[g])
    member = chunk_of.to(group.device)[group]
    for i in range(number + 1):
        yield (member == i).nonzero()[:, 0]


class _Staying(NamedTuple):
    """Signals or gradients that keep to their position: through heads that look at themselves, or through none."""

    stay: Tensor  # [L, n, H, e] in the values (sources) or value mixes (targets)
    alone: Tensor


class _Shares:
    """Shares of one chunk of edges. A slot: all links of one group out of one source position (or into a target's)."""

    def __init__(self, replacement: Replacement, pairs: Tensor, group: Tensor):
        self.replacement, self.frozen = replacement, replacement.frozen
        self.sources, self.s = torch.unique(pairs[:, 0], return_inverse=True)  # s [E]: which source an edge has
        self.targets, self.t = torch.unique(pairs[:, 1], return_inverse=True)
        self.source_at, self.target_at = replacement.places(self.sources), replacement.places(self.targets)
        self.c_s, self.c_t = self.source_at[self.s], self.target_at[self.t]  # [E]
        self.same = self.c_s == self.c_t
        self.group = group
        (self.departure_slot, self.departure_in), (self.arrival_slot, self.arrival_in) = (
            torch.unique(torch.stack([group, at]), dim=1, return_inverse=True) for at in (self.c_s, self.c_t)
        )
        dims, like = self.frozen.dims, replacement.error
        shape = (dims.n_layers, dims.n_heads, replacement.n_tokens)
        self.departure = like.new_zeros(self.departure_slot.shape[1], *shape)  # last index: query
        self.arrival = like.new_zeros(self.arrival_slot.shape[1], *shape)  # last index: key
        self.single = like.new_zeros(len(pairs), dims.n_layers, dims.n_heads)
        self.direct, self.weight = like.new_zeros(len(pairs)), like.new_zeros(len(pairs))
        self.writes = replacement.writes(self.sources)  # [n, L + 1, D]
        self.reads: Reads = replacement.reads(self.targets)

    def fill(self, memory_mb: float) -> "_Shares":
        sources, targets = self._stay_sources(), self._stay_targets()
        moving = (~self.same).nonzero()[:, 0]
        self.by_target = [moving[self.t[moving] == i] for i in range(len(self.targets))]
        self.by_source = [moving[self.s[moving] == i] for i in range(len(self.sources))]
        at_once = self.replacement.at_once(memory_mb / 4)
        for first in range(0, len(self.targets), at_once):
            self._depart(first, min(first + at_once, len(self.targets)), sources.stay)
        for first in range(0, len(self.sources), at_once):
            self._arrive(first, min(first + at_once, len(self.sources)), targets.stay)
        self._hop_once(sources, targets)
        return self

    # ---- staying at one position ----

    def _stay_sources(self) -> _Staying:
        frozen, at = self.frozen, self.source_at
        stay = alone = frozen.write(0, self.writes[:, 0], at)
        values: list[tuple[Tensor, Tensor]] = []
        for layer in range(frozen.dims.n_layers):
            v = frozen.to_values(layer, stay, at)
            values.append((frozen.by_head(v), frozen.by_head(frozen.to_values(layer, alone, at))))
            written = frozen.write(layer + 1, self.writes[:, layer + 1], at)
            stay = stay + frozen.from_mix(layer, v * frozen.own(layer, at), at) + written
            alone = alone + written
        return _Staying(*(torch.stack(list(part)) for part in zip(*values, strict=True)))

    def _stay_targets(self) -> _Staying:
        """As for sources, downwards; on the way the direct part of edges, which meets every place it is written at."""
        frozen, at, reads = self.frozen, self.target_at, self.reads

        def vector(stage: int) -> Tensor:
            return torch.where((reads.stage == stage)[:, None], reads.vector, 0.0)

        n_layers = frozen.dims.n_layers
        stay = alone = vector(2 * n_layers)
        mixes: list[tuple[Tensor, Tensor]] = []
        for layer in range(n_layers - 1, -1, -1):
            self._meet(layer + 1, alone)
            if not frozen.parallel:
                stay, alone = stay + vector(2 * layer + 1), alone + vector(2 * layer + 1)
            mix = frozen.to_mix(layer, stay, at)
            mixes.append((frozen.by_head(mix), frozen.by_head(frozen.to_mix(layer, alone, at))))
            stay = stay + frozen.from_values(layer, mix * frozen.own(layer, at), at)
            if frozen.parallel:
                stay, alone = stay + vector(2 * layer + 1), alone + vector(2 * layer + 1)
        self._meet(0, alone)
        return _Staying(*(torch.stack(list(part)[::-1]) for part in zip(*mixes, strict=True)))

    def _meet(self, place: int, gradient: Tensor) -> None:
        written = self.frozen.write(place, self.writes[:, place], self.source_at)
        self.direct += torch.where(self.same, (written[self.s] * gradient[self.t]).sum(-1), 0.0)

    # ---- leaving and arriving ----

    def _depart(self, first: int, last: int, values: Tensor) -> None:
        """Departure shares of all edges into targets first .. last - 1, and these edges' weights."""
        inside = ((self.t >= first) & (self.t < last)).nonzero()[:, 0]
        for pulled in self.frozen.pull(self.reads[first:last]):
            layer = pulled.layer
            waiting = pulled.place[self.t[inside] - first, self.c_s[inside]]
            self.weight[inside] += (self.writes[self.s[inside], layer + 1] * waiting).sum(-1)
            if layer < 0:
                break
            assert pulled.mix is not None
            for heads, pattern in self.frozen.head_chunks(layer):
                for row, mix in zip(self.by_target[first:last], pulled.mix[:, :, heads], strict=True):
                    # [sources, heads, e] x [heads, e, queries]: a whole row of sources at once
                    flow = torch.einsum("she,qhe->shq", values[layer, self.s[row], heads], mix)
                    flow = flow * _strictly(pattern, self.c_s[row], "after")
                    self.departure[:, layer, heads].index_add_(0, self.departure_in[row], flow)

    def _arrive(self, first: int, last: int, mixes: Tensor) -> None:
        """Arrival shares of all edges out of sources first .. last - 1."""
        writes = self.writes[first:last]
        for layer, _, values in self.frozen.push(lambda place: writes[:, place], self.source_at[first:last]):
            if layer == self.frozen.dims.n_layers:
                break
            for heads, pattern in self.frozen.head_chunks(layer):
                for row, value in zip(self.by_source[first:last], values[:, :, heads], strict=True):
                    flow = torch.einsum("the,khe->thk", mixes[layer, self.t[row], heads], value)
                    flow = flow * _strictly(pattern, self.c_t[row], "before")
                    self.arrival[:, layer, heads].index_add_(0, self.arrival_in[row], flow)

    def _hop_once(self, sources: _Staying, targets: _Staying) -> None:
        """Single hops of all edges; first and last heads of those that stay at their position."""
        same = self.same.nonzero()[:, 0]
        at = self.c_s[same]
        for layer in range(self.frozen.dims.n_layers):
            pattern = torch.cat([p[:, self.c_t, self.c_s] for _, p in self.frozen.head_chunks(layer)]).T  # [E, H]
            v = torch.where(self.same[:, None, None], sources.alone[layer, self.s], sources.stay[layer, self.s])
            u = torch.where(self.same[:, None, None], targets.alone[layer, self.t], targets.stay[layer, self.t])
            self.single[:, layer] = pattern * (u * v).sum(-1)
            by_first = pattern[same] * (targets.stay[layer, self.t[same]] * v[same]).sum(-1)
            by_last = pattern[same] * (u[same] * sources.stay[layer, self.s[same]]).sum(-1)
            both = (self.departure, self.departure_in, by_first), (self.arrival, self.arrival_in, by_last)
            for shares, slot, flow in both:
                shares[:, layer].transpose(1, 2).index_put_((slot[same], at), flow, accumulate=True)

    # ---- results ----

    def results(self, top: int | None) -> Iterator[tuple[int, Carried]]:
        """(group number, Carried) of every group of the chunk."""
        numbers, inside = torch.unique(self.group, return_inverse=True)
        sums = (
            t.new_zeros(len(numbers), *t.shape[1:]).index_add_(0, inside, t).cpu()
            for t in (self.weight, self.direct, self.single)
        )
        both = (self.departure, self.departure_slot, "key"), (self.arrival, self.arrival_slot, "query")
        for number, weight, direct, single in zip(numbers.tolist(), *sums, strict=True):
            sides = []
            for shares, slot, fixed in both:
                here = (slot[0] == number).nonzero()[:, 0]
                sides.append((*_links(shares[here], slot[1, here], fixed, top), shares[here].sum((0, 3)).cpu()))
            (departure, d_rest, d_heads), (arrival, a_rest, a_heads) = sides
            links = (departure, arrival, d_rest, a_rest, d_heads, a_heads)
            yield number, Carried(float(weight), *links, single, float(direct))


def _strictly(pattern: Tensor, at: Tensor, side: str) -> Tensor:
    """The pattern out of keys `at` to later queries ("after"), or into queries `at` from earlier keys: [n, heads, T]"""
    every = torch.arange(pattern.shape[-1], device=at.device)
    if side == "after":
        return pattern[:, :, at].permute(2, 0, 1) * (every > at[:, None])[:, None]
    return pattern[:, at].transpose(0, 1) * (every < at[:, None])[:, None]


def _links(shares: Tensor, at: Tensor, fixed: str, top: int | None) -> tuple[list[LinkShare], float]:
    """The largest links of shares [slots, L, H, T], and the sum of the others. fixed: which end `at` is."""
    flat = shares.flatten()
    n = int((flat != 0).sum())
    order = flat.abs().topk(n if top is None else min(top, n)).indices
    slot, layer, head, position = (t.tolist() for t in torch.unravel_index(order, shares.shape))
    places = at.tolist()
    links: list[LinkShare] = []
    for i, share in enumerate(flat[order].tolist()):
        ends = (position[i], places[slot[i]]) if fixed == "key" else (places[slot[i]], position[i])
        links.append({"layer": layer[i], "head": head[i], "query": ends[0], "key": ends[1], "share": share})
    listed = flat[order].sum(dtype=torch.float64)
    return links, 0.0 if len(order) == n else float(flat.sum(dtype=torch.float64) - listed)


@exact
def carry_heads(graph: Graph, edges: Sequence[tuple[int, int]], memory_mb: float = 1024) -> tuple[Tensor, Tensor]:
    """(direct part [n], arrival share of every head [n, n_layers, n_heads]) of n edges: `carry` without its lists."""
    replacement = graph.replacement()
    heads = replacement.error.new_zeros(len(edges), graph.n_layers, graph.n_heads)
    direct = heads.new_zeros(len(edges))
    if len(edges):
        pairs = torch.as_tensor(list(edges), dtype=torch.int64, device=heads.device)
        group = torch.arange(len(pairs), device=heads.device)
        for part in _chunks(replacement, pairs, group, memory_mb):
            shares = _Shares(replacement, pairs[part], group[part]).fill(memory_mb)
            direct[part] = shares.direct
            heads[part] = shares.arrival.sum(-1)[shares.arrival_in]  # an edge that is its own group has its own slot
    return direct.cpu(), heads.cpu()
