"""In which order the attention edges of a prompt go: by gradient, scored again as they go, learnt, at random.

A rank is a place, 0 the best: the circuit of size n is what has a place below n. Every prompt has its own.

    gradient     |d metric / d edge| at the whole model; one backward pass
    rescored     the same, taken again without the worse half of what is left, and again, down to one edge
    integrated   |integrated gradients| from no edge to all of them
    net, gross   whole heads, by |sum of gradients| of their edges, or by the sum of |gradients|
    random       any order of the edges that do something

Learnt masks are another question: how little would do, whatever the model uses (`learn_masks`).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .attention_edges import INTEGRATION, AttentionEdges, Others, Some

Ranking = Literal["gradient", "rescored", "integrated", "net", "gross", "random"]
RANKINGS: dict[Others, tuple[Ranking, ...]] = {
    "removed": ("gradient", "rescored"),
    "corrupted": ("gradient", "integrated"),
    "mean": ("gradient", "integrated"),
}
OF_HEADS: tuple[Ranking, ...] = ("net", "gross")
Score = Callable[[Tensor], Tensor]  # a mask -> [n, layer, head, query, key]: what each edge does with these in
LEARNT_STEPS = 300
DEAR = 10.0  # times the price of other edges: one that an earlier circuit has


GRADIENT = 3  # runs of the model that one gradient is worth


def runs(ranking: Ranking, n_edges: int) -> int:
    """How many runs of the model a ranking takes, about."""
    gradients = {"rescored": 1 + int(math.log2(max(n_edges, 2))), "integrated": INTEGRATION}
    return GRADIENT * gradients.get(ranking, 1)


class Ranks(NamedTuple):
    places: Tensor  # [n, layer, head, query, key] int32, the best 0; [n, layer, head, 1, 1] for heads
    scores: Tensor  # the same shape: by which they were first ranked, with sign
    alive: Tensor  # [n]: how many have a place; the others change nothing

    def kept(self, sizes: Tensor, like: Tensor) -> Tensor:
        """The mask of the n best of every prompt."""
        return (self.places < _each(sizes.to(self.places.device))).to(like.dtype)


def rank(edges: AttentionEdges, some: Some, ranking: Ranking, seed: int = 0) -> Ranks:
    """The order of all edges (or heads) of every prompt."""
    scores = edges.integrated(some) if ranking == "integrated" else edges.gradient(edges.all(some), some)
    if ranking in OF_HEADS:
        scores = (scores if ranking == "net" else scores.abs()).sum((-1, -2), keepdim=True)
        return Ranks(_places(scores.abs()), scores, _count(torch.ones_like(scores)))
    if ranking == "random":
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(scores.shape, generator=generator).to(scores.device)
        return Ranks(_places(torch.where(scores != 0, drawn, -1.0)), scores, _count(scores != 0))
    again = (lambda mask: edges.gradient(mask, some)) if ranking == "rescored" else None
    return by_score(scores, again)


def by_score(scores: Tensor, again: Score | None = None) -> Ranks:
    """Ranks by |score|; again: what scores the edges that are left, whenever half of them have gone."""
    sizes = scores.abs()
    alive = _count(sizes > 0)
    places, n = _places(sizes), alive // 2
    while again is not None and int(n.max()) >= 1:
        kept = places < _each(n)
        new = again(kept.to(scores.dtype)).abs()
        # Whatever has left stays behind all that is kept; among the kept the new scores decide.
        places = torch.where(kept, _places(torch.where(kept, new, -1.0)), places)
        n = n // 2
    return Ranks(places, scores, alive)


class Learnt(NamedTuple):
    """The smallest sets of edges seen that reach the effect."""

    masks: Tensor  # [n, layer, head, query, key] bool
    edges: Tensor  # [n]
    reached: Tensor  # [n] bool: False where the effect was never reached with fewer than all edges


def learn_masks(
    edges: AttentionEdges, some: Some, threshold: float, steps: int = LEARNT_STEPS, rate: float = 0.05,
    taken: Tensor | None = None, progress: Callable[[], None] = lambda: None,
) -> Learnt:  # fmt: skip
    """The fewest edges that gradient descent finds to reach the threshold: how little would do.

    One number per edge, open where it is positive, straight-through gradient. The price of an edge rises while the
    effect is reached and falls while it is not; the smallest set seen that reaches it counts. What is found need not
    be what the model uses. taken [n, ...] bool: edges that cost DEAR times as much.
    """
    ones = edges.all(some)
    scores = edges.gradient(ones, some).abs()
    alive = scores > 0
    with torch.no_grad():
        whole, nothing = edges.metric(ones, some), edges.metric(edges.all(some, 0.0), some)
    cost = alive.to(scores.dtype)
    if taken is not None:
        cost = torch.where(taken, DEAR * cost, cost)
    # Important edges begin further from closing.
    logs = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
    flat = torch.where(alive, logs, torch.nan).flatten(1)
    mean = flat.nanmean(1)
    spread = (flat - mean[:, None]).square().nanmean(1).sqrt().clamp(min=1e-6)
    theta = torch.where(alive, 1 + 0.5 * (logs - _each(mean)) / _each(spread), -10.0).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=rate)
    price = torch.full_like(mean, 1e-4)
    best = Learnt(alive.clone(), _count(alive), torch.zeros_like(mean, dtype=torch.bool))
    cheapest = cost.flatten(1).sum(1)
    for _ in range(steps):
        open_ = (theta > 0) & alive
        with torch.enable_grad():
            soft = theta.sigmoid()
            mask = open_.to(soft.dtype) + soft * alive - (soft * alive).detach()
            effect = (edges.metric(mask, some) - nothing) / (whole - nothing)
            spent = (soft * cost).flatten(1).sum(1)
            loss = (price * spent).sum() - effect.clamp(max=threshold + 0.02).sum()
        (theta.grad,) = torch.autograd.grad(loss, theta)
        reached = effect.detach() >= threshold
        paid = (open_ * cost).flatten(1).sum(1)
        better = reached & (paid < cheapest)
        cheapest = torch.where(better, paid, cheapest)
        masks = torch.where(_each(better), open_, best.masks)
        best = Learnt(masks, torch.where(better, _count(open_), best.edges), best.reached | better)
        price = price * torch.where(reached, 1.05, 0.9).to(price.dtype)
        optimizer.step()
        progress()
    return best


def _each(sizes: Tensor) -> Tensor:
    return sizes.view(-1, 1, 1, 1, 1)


def _count(mask: Tensor) -> Tensor:
    return mask.flatten(1).sum(1).long()


def _places(scores: Tensor) -> Tensor:
    """Place of every edge by score, largest first, [n, ...] int32."""
    flat = scores.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    steps = torch.arange(flat.shape[1], dtype=torch.int32, device=flat.device).expand_as(places)
    return places.scatter_(1, order, steps).view_as(scores)
