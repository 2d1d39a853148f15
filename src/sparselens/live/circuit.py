"""The circuit of two sentences typed by hand: the fewest attention edges that alone keep 90 % of its effect."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..circuits.attention_edges import AttentionEdges, Some
from ..tasks.prompts import Rejected, collate, tokenize
from ..tasks.registry import Pair
from .models import Models

KEPT = 0.9
MOST_EDGES = 400  # in an answer
Step = Callable[[int, int], None]  # (done, of): says how far it is, and may raise to stop


def circuit(models: Models, role: str, pair: Pair, step: Step) -> dict[str, Any]:
    """1. The answer with all edges (f = 1) and with none (f = 0).
    2. Integrated gradients over the mask rank the edges that lead to the answer.
    3. Bisection: the smallest number of them, best first, whose f is at least 0.9, the others removed.
    """
    member = models.member(role)
    try:
        item = tokenize(pair, member.words)
    except Rejected as reason:
        raise ValueError(f"these two sentences cannot be compared: {reason}") from None
    for text in (pair.clean, pair.corrupted):
        models.ids(role, text)
    prompts = collate([item], "logit" if pair.wrong else "log-probability")
    edges = AttentionEdges(member.decoder, prompts, "removed")
    some = edges.some(edges.prompts)
    with torch.no_grad():
        whole, nothing = (edges.metric(edges.all(some, share), some).item() for share in (1.0, 0.0))
        turned = AttentionEdges(member.decoder, prompts, "corrupted")
        other = turned.some(turned.prompts)
        corrupted = turned.metric(turned.all(other, 0.0), other).item()
    if whole <= nothing:
        raise ValueError(f"attention does not help the {role} model with that answer; try another pair")
    step(1, 16)
    score = torch.where(edges.leading(some), edges.integrated(some), 0.0)[0].detach()
    order = score.flatten().argsort(descending=True)
    step(4, 16)
    n, effect, curve = _fewest(edges, some, order, int((score > 0).sum()), whole, nothing, step)
    flat = score.flatten()
    where = torch.stack(torch.unravel_index(order[: min(n, MOST_EDGES)], score.shape), 1).tolist()
    return {
        "role": role, "clean": pair.clean, "corrupted": pair.corrupted, "answer": pair.answer, "wrong": pair.wrong,
        "tokens": member.pieces(item.clean), "n_edges": n, "n_leading": int((score != 0).sum()),
        "n_possible": edges.n_possible, "effect": effect, "curve": curve,
        "whole": whole, "nothing": nothing, "metric_corrupted": corrupted,
        "edges": [[*at, flat[i].item()] for at, i in zip(where, order[: len(where)].tolist(), strict=True)],
    }  # fmt: skip


def _fewest(
    edges: AttentionEdges, some: Some, order: Tensor, most: int, whole: float, nothing: float, step: Step
) -> tuple[int, float, list[list[float]]]:
    """(the number of edges, their effect, every (number, effect) measured on the way)."""

    @torch.no_grad()
    def effect(n: int) -> float:
        mask = torch.zeros(edges.shape, device=some.embedding.device).flatten()
        mask[order[:n]] = 1
        return (edges.metric(mask.view(1, *edges.shape), some).item() - nothing) / (whole - nothing)

    low, high, curve = 0, most, [[float(most), effect(most)]]
    if curve[0][1] < KEPT:  # edges that hinder are needed as well, or the ranking is poor: all that lead there
        return most, curve[0][1], curve
    while high - low > max(1, high // 50):  # the curve rises, but for its noise
        step(min(15, 4 + len(curve)), 16)
        middle = (low + high) // 2
        curve.append([float(middle), effect(middle)])
        low, high = (low, middle) if curve[-1][1] >= KEPT else (middle, high)
    return high, next(f for n, f in curve if n == high), sorted(curve)
