"""Why a head looks from one position at another: its attention logit, taken apart.

1. The query of a head at a position is linear in the sources of the frozen model, and so is the key: pulled back from
   all d_head components at once, each source's part of the query and of the key is a vector.
2. S = scale * <query, key> is then a sum over pairs of sources: features, errors, tokens, positions and biases of the
   query side times those of the key side. Rotation is applied to every part; norms of queries and keys are held.
3. In a sparse model the gate is open where S + b > 0. Leaving a feature out removes all pairs it is in: would the gate
   close? `measure_look` asks the real model, everything downstream of the feature computed anew.

Where logits are capped (Gemma 2) the terms sum to the logit before the cap; margins are computed after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from ..models.architectures import softcapped
from .graph import KINDS, Graph
from .interventions import intervene
from .linear_model import exact
from .sources import Replacement

MEMORY_MB = 1024  # for gradients
CANDIDATES = 2048  # sources per side among which the largest terms are looked for, the longest vectors first


class Term(TypedDict):  # one summand of a logit
    query_source: int  # node ids
    key_source: int
    term: float


@dataclass
class Look:
    """One attention logit as a sum of (query source, key source) terms."""

    layer: int
    head: int
    query: int
    key: int
    logit: float  # S, before a cap
    margin: float | None  # S + b, after a cap: the gate is open where it is positive; None in a dense model
    terms: list[Term]  # largest |term| first
    rest: float  # sum of all other terms
    kinds: Tensor  # [5, 5]: sums of terms by kind of query source and key source (KINDS without logits)
    by_query: Tensor  # [n_sources]: all terms of a source on the query side
    by_key: Tensor  # [n_sources]
    certain: bool  # whether `terms` are provably the largest: false where sources left out could have larger ones
    _q: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))  # [n_sources, d_head], scale included
    _k: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))
    _bias: float | None = field(repr=False, default=None)
    _cap: float | None = field(repr=False, default=None)

    def without(self, nodes: Sequence[int] | int) -> float:
        """The margin (dense model: the logit) when these sources are left out of query and key."""
        gone = torch.tensor([nodes] if isinstance(nodes, int) else list(nodes), device=self._q.device)
        q, k = self._q.sum(0) - self._q[gone].sum(0), self._k.sum(0) - self._k[gone].sum(0)
        return self._to_margin(q @ k)

    def closing(self) -> list[int]:
        """Sources without which, each by itself, the gate would close; those that hold it open most first."""
        if self.margin is None or self.margin <= 0:
            return []
        both = (self._q * self._k).sum(-1).cpu()  # subtracted twice
        without = softcapped(self.logit - self.by_query - self.by_key + both, self._cap)
        order = without.argsort()
        return [int(i) for i in order[: int((without + (self._bias or 0) <= 0).sum())]]

    def _to_margin(self, logit: Tensor) -> float:
        return float(softcapped(logit, self._cap)) + (self._bias or 0.0)


@exact
def explain_look(graph: Graph, layer: int, head: int, query: int, key: int, top: int = 20) -> Look:
    """The logit of (layer, head, query, key) as exact terms between sources, the `top` largest of them listed."""
    r = graph.replacement()
    frozen = r.frozen
    if not (0 <= layer < graph.n_layers and 0 <= head < graph.n_heads and 0 <= key <= query < frozen.n_tokens):
        raise ValueError(
            f"no look (layer {layer}, head {head}, query {query}, key {key}): there are {graph.n_layers} layers of "
            f"{graph.n_heads} heads, and 0 <= key <= query < {frozen.n_tokens}"
        )
    parts = frozen.decoder.parts[layer]
    q, k = _sides(r, layer, head, query, key)
    q = q * parts.scale
    gates = frozen.decoder.gates
    bias = None if gates is None else float(gates[layer][head])
    total_q, total_k = q.sum(0), k.sum(0)
    by_kind = [torch.stack([side[c].sum(0) for c in r.columns]) for side in (q, k)]
    look = Look(
        layer, head, query, key, float(total_q @ total_k), None, [], 0.0, (by_kind[0] @ by_kind[1].T).cpu(),
        (q @ total_k).cpu(), (k @ total_q).cpu(), True, q, k, bias, parts.softcap,
    )  # fmt: skip
    look.margin = None if bias is None else look._to_margin(total_q @ total_k)
    _largest_terms(look, top)
    look.rest = look.logit - sum(t["term"] for t in look.terms)
    return look


def _sides(r: Replacement, layer: int, head: int, query: int, key: int) -> tuple[Tensor, Tensor]:
    """Every source's part of the query and of the key as compared, [n_sources, d_head] each."""
    frozen = r.frozen
    parts, decoder = frozen.decoder.parts[layer], frozen.decoder
    block = frozen.blocks[layer]
    norm, read = block.attention_norm, block.residual
    read = read if norm is None else norm.push(read) + norm.bias
    raw = [decoder.project(layer, through, read[None])[0] for through in "qk"]  # [H, T, e]
    clipped = raw if parts.clip is None else [t.clamp(-parts.clip, parts.clip) for t in raw]
    factors = frozen.aim_scales(layer, *clipped)
    sides = []
    for through, position, one, held, factor in zip("qk", (query, key), raw, clipped, factors, strict=True):
        weight, bias = parts.weights[through]
        own = head if through == "q" else head // decoder.group
        constant = weight.new_zeros(weight.shape[-1]) if bias is None else bias[own]
        every = torch.full((weight.shape[-1],), position, device=weight.device)
        reads = frozen.reads(2 * layer, norm, every, weight[own].T, constant)
        step = r.at_once(MEMORY_MB)
        rows = torch.cat([r.rows(reads[i : i + step]) for i in range(0, len(reads), step)]).T.clone()  # [n_sources, e]
        fixed = one[head, position] != held[head, position]  # clipped components depend on nothing any more
        rows[:, fixed] = 0
        rows[-1, fixed] = held[head, position, fixed]
        rows = rows if isinstance(factor, float) else rows * factor[head, position]
        at = torch.full((len(rows),), position, device=rows.device)
        sides.append(frozen.rotate(layer, rows[None], rows[None], at)[0][0])
    return sides[0], sides[1]


def _largest_terms(look: Look, top: int) -> None:
    q, k = look._q, look._k
    size_q, size_k = q.norm(dim=1), k.norm(dim=1)
    some_q, some_k = (size.topk(min(CANDIDATES, len(size))).indices for size in (size_q, size_k))
    terms = q[some_q] @ k[some_k].T
    order = terms.flatten().abs().topk(min(top, terms.numel())).indices
    for i in order.tolist():
        a, b = int(some_q[i // len(some_k)]), int(some_k[i % len(some_k)])
        look.terms.append({"query_source": a, "key_source": b, "term": float(terms.flatten()[i])})
    if len(some_q) < len(q) and look.terms:
        # No term of a source left out exceeds its own length times the longest vector of the other side.
        left_q, left_k = size_q.clone(), size_k.clone()
        left_q[some_q], left_k[some_k] = 0, 0
        bound = torch.maximum(left_q.max() * size_k.max(), left_k.max() * size_q.max())
        look.certain = bool(abs(look.terms[-1]["term"]) >= bound)


def measure_look(graph: Graph, look: Look, nodes: Sequence[int]) -> dict[str, float]:
    """Predicted and measured margin (dense: logit before a cap) of a look when sources are removed from the real model.

    Predicted: their terms left out. Measured: the model run again without what they write (interventions.py).
    """
    run = intervene(graph, scale=dict.fromkeys(nodes, 0.0)).run
    assert run is not None
    block, parts = run.blocks[look.layer], run.decoder.parts[look.layer]
    logit = block.q[look.head, look.query] @ block.k[look.head, look.key] * parts.scale
    before = look.logit if look.margin is None else look.margin
    after = float(logit) if look.margin is None else look._to_margin(logit)
    predicted = look.without(nodes)
    result = {"before": before, "predicted": predicted, "measured": after}
    if look.margin is not None:
        result |= {"open_before": before > 0, "open_predicted": predicted > 0, "open_measured": after > 0}
    return result


def describe(graph: Graph, look: Look) -> str:
    """A look in words: the logit, its largest terms, and sums by kind."""
    gate = "" if look.margin is None else f", margin {look.margin:+.3f} ({'open' if look.margin > 0 else 'closed'})"
    lines = [f"L{look.layer}.H{look.head} from {look.query} to {look.key}: logit {look.logit:+.3f}{gate}"]
    for t in look.terms:
        lines.append(f"{t['term']:+9.4f}  {graph.label(t['query_source'])}  x  {graph.label(t['key_source'])}")
    lines.append(f"{look.rest:+9.4f}  all other pairs")
    for a, b in look.kinds.nonzero().tolist():
        lines.append(f"{look.kinds[a, b]:+9.4f}  {KINDS[a]} x {KINDS[b]}")
    return "\n".join(lines)
