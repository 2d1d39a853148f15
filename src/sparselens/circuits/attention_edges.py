"""Circuits of single attention edges: which (layer, head, query, key) a task needs, in dense and sparse models alike.

An edge carries softmax * gate * value from one token to another. Edges outside a circuit carry what they carry on the
corrupted prompt; embeddings, MLPs and norms are always live, so m(nothing) is the clean prompt with every edge
corrupted, as for whole heads. Positions must mean the same in all prompts: those of the most common length are taken.

Scores: a circuit is a mask over edges, and masks may be fractional. The gradient of the metric with respect to the
mask, averaged over masks that are 10 %, 30 % ... 90 % everywhere, says what each edge contributes; over all edges it
sums to m(model) - m(nothing), up to the number of points.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gating import allowed_pairs
from ..models.decoder import Decoder
from ..runs import distributed
from ..tasks.prompts import Prompts, of_common_length
from .faithfulness import Curve, NoEffect, log_sizes, refined_curve
from .rows import Reading

Attended = tuple[Tensor, Tensor]  # weights and values of a layer
POINTS = 5  # masks at which gradients are taken
MOST = 2000  # edges to list, best first


def keep_in(kept: list[Attended]) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Plain attention that leaves every layer's (weights, values) in `kept`."""

    def mix(layer: int, weights: Tensor, values: Tensor) -> Tensor:
        kept.append((weights, values))
        return weights @ values

    return mix


class AttentionPatcher:
    """Prompts made ready for running circuits of attention edges on them."""

    def __init__(self, decoder: Decoder, prompts: Prompts, memory_mb: float = 768):
        d = decoder.dims
        self.decoder, self.prompts = decoder, prompts.to(next(decoder.model.parameters()).device)
        tokens = self.prompts.clean.shape[1]
        self.shape = (d.n_layers, d.n_heads, tokens, tokens)
        pairs = [allowed_pairs(tokens, tokens, window=part.window)[0] for part in decoder.parts]
        self.possible = torch.stack(pairs).expand(self.shape).numpy()
        # Patterns of every layer, several copies of each in the backward pass; logits in fp64, likewise.
        patterns = 40 * d.n_layers * d.n_heads * tokens**2 + 4e5
        logits = 60 * self.prompts.position.shape[1] * decoder.vocabulary
        self.at_once = max(1, int(memory_mb * 2**20 / (patterns + logits)))

    def run(self, masks: np.ndarray | Tensor, progress: Callable[[int], None] = lambda n: None) -> Tensor:
        """The metric of every circuit on every prompt: masks [circuits, layer, head, query, key] -> [circuits, n].

        Several processes share the circuits; and the prompts, for the scores.
        """
        masks = torch.as_tensor(masks).float()
        out = torch.zeros(len(masks), len(self.prompts), dtype=torch.float64)
        with torch.no_grad():
            for some, part, clean, corrupted in self._parts(self.prompts):
                for i, mask in distributed.mine(list(enumerate(masks))):
                    out[i, some] = self._metric(mask.to(clean), part, clean, corrupted).cpu()
                    if some.stop >= len(self.prompts):
                        progress(distributed.world())
        return distributed.total(out)

    def scores(self) -> np.ndarray:
        """[layer, head, query, key] fp64, averaged over prompts: positive where the edge raises the metric."""
        total = torch.zeros(self.shape, dtype=torch.float64)
        own = self.prompts.take(slice(distributed.rank(), None, distributed.world()))
        for _, part, clean, corrupted in self._parts(own):
            for i in range(POINTS):
                mask = torch.full(self.shape, (i + 0.5) / POINTS, dtype=clean.dtype, device=clean.device)
                mask.requires_grad_()
                with torch.enable_grad():
                    metric = self._metric(mask, part, clean, corrupted).sum()
                    (gradient,) = torch.autograd.grad(metric, mask)
                total += gradient.double().cpu()
        found: np.ndarray = (distributed.total(total) / len(self.prompts) / POINTS).numpy()
        return np.where(self.possible, found, 0.0)

    @torch.no_grad()
    def weights(self) -> np.ndarray:
        """[layer, head, query, key]: what every edge weighs (softmax * gate) on the clean prompts, on average."""
        total = torch.zeros(self.shape, dtype=torch.float64)
        for _, _, clean, _ in self._parts(self.prompts):
            kept: list[Attended] = []
            self.decoder.run(clean, keep_in(kept))
            total += torch.stack([weights.double().sum(0).cpu() for weights, _ in kept])
        return (total / len(self.prompts)).numpy()

    def _parts(self, prompts: Prompts) -> Iterator[tuple[slice, Prompts, Tensor, list[Attended]]]:
        """Prompts, their embeddings, and what the corrupted run attends to in every layer."""
        for first in range(0, len(prompts), self.at_once):
            some = slice(first, first + self.at_once)
            part = prompts.take(some)
            clean, other = (self.decoder.begin(ids) for ids in (part.clean, part.corrupted))
            corrupted: list[Attended] = []
            with torch.no_grad():
                self.decoder.run(other, keep_in(corrupted))
            yield some, part, clean, corrupted

    def _metric(self, mask: Tensor, part: Prompts, x: Tensor, corrupted: list[Attended]) -> Tensor:
        def mix(layer: int, weights: Tensor, values: Tensor) -> Tensor:
            old_weights, old_values = corrupted[layer]
            return (mask[layer] * weights) @ values + ((1 - mask[layer]) * old_weights) @ old_values

        return part.score(self.decoder.unembed(part.at_reads(self.decoder.run(x, mix))).double())


def attention_curve(
    decoder: Decoder, scoring: Prompts, heldout: Prompts, points: int, memory_mb: float,
    progress: Callable[[int], None] = lambda n: None,
) -> tuple[Curve, Reading]:  # fmt: skip
    """Explained effect of the best n attention edges on held-out prompts, and the row for `discover --json`.

    NoEffect where the halves share too few prompts of one length.
    """
    scoring, heldout = of_common_length(scoring, heldout)
    if min(len(scoring), len(heldout)) < 2:
        raise NoEffect(
            f"of the most common length there are {len(scoring)} prompts for scoring and {len(heldout)} held out; "
            "take more prompts"
        )
    scores = AttentionPatcher(decoder, scoring, memory_mb).scores()
    patcher = AttentionPatcher(decoder, heldout, memory_mb)
    order = np.argsort(-np.abs(scores), axis=None, kind="stable")
    # Closed gates and tokens nobody reads score exactly nothing: those edges are not there.
    alive = int((scores != 0).sum())
    order, n_edges = order[:alive], int(patcher.possible.sum())

    def run(sizes: list[int]) -> np.ndarray:
        masks = np.zeros((len(sizes), scores.size), bool)
        for mask, n in zip(masks, sizes, strict=True):
            mask[order[:n]] = True
        return patcher.run(masks.reshape(-1, *scores.shape), progress).numpy()

    whole, nothing = patcher.run(np.stack([patcher.possible, np.zeros_like(patcher.possible)]), progress).numpy()
    found = refined_curve(log_sizes(alive, points).tolist() if alive else [], run, whole, nothing, n_edges)
    weights = patcher.weights()
    places = [np.unravel_index(at, scores.shape) for at in order[:MOST]]
    row: Any = {
        **found.reading(), "n_edges": n_edges, "n_alive": alive,
        "length": heldout.clean.shape[1], "example": heldout.pairs[0].clean,
        "tokens": [heldout.piece(int(token)) for token in heldout.clean[0]],
        # Best first: a point of the curve is the first so many of them.
        "columns": ["layer", "head", "query", "key", "score", "weight"],
        "circuit": [[*map(int, at), float(scores[at]), float(weights[at])] for at in places],
    }  # fmt: skip
    return found, row
