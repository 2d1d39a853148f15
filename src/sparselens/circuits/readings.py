"""Attention edges of one model on one task, read in several ways (rows.py names them), as rows for results.json.

Per prompt (scope "prompt"): edges are ranked on the very prompt they are measured on. For every ranking:
1. Rank the edges of every prompt; sizes evenly spaced in log; the metric with the best n edges of each prompt.
2. Bisect, prompt by prompt, where the effect crosses 80, 90, 95 and 98 %.
3. The ranking that needs fewest edges (geometric mean over prompts) counts, at each threshold.

Per task (scope "task"): edges are ranked by their mean |score| on half of the prompts, and one circuit is measured on
the other half.

Several processes share the prompts.

Of a sparse model also which (head, query, key) its gates leave open on these prompts, whatever the task makes of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Search
from ..gating import allowed_pairs
from ..models.architectures import base_model, dimensions, parts
from ..models.decoder import Decoder
from ..runs import distributed
from ..tasks.prompts import Prompts, of_common_length
from .attention_edges import AttentionEdges, Others, Some
from .faithfulness import THRESHOLDS, Curve, log_sizes, refined_curve
from .prompt_curves import PromptCurves, geometric_mean, interval, measure_curves, n_columns
from .rankings import GRADIENT, OF_HEADS, RANKINGS, Learnt, Ranking, Ranks, by_score, learn_masks, rank, runs
from .rows import TASK, Alternatives, Leading, OpenEdges, Reading

MOST = 3000  # edges of an example to list, best first
RANDOM_POINTS = 8
LEARNT_AT = 0.9  # the one effect that masks are learnt for
EDGE = ["layer", "head", "query", "key", "score", "weight"]
HEAD = ["layer", "head", "score"]
Progress = Callable[[int], None]


@dataclass
class EdgeReader:
    """One model and prompts of one length that it gets right."""

    decoder: Decoder
    prompts: Prompts
    settings: Search
    progress: Progress = lambda n: None

    def read(self, name: str) -> dict[str, tuple[Reading, Curve | None]]:
        """One of config.Ask: by name of the reading, its row and, for scope task, its curve."""
        if name == "share":
            return {name: (self.share(), None)}
        if name == "learnt":
            return {name: (self.learnt(), None)}
        if name == "heads":
            ways: dict[str, Others] = {"heads": "removed", "heads-corrupted": "corrupted"}
            return {reading: (self.per_prompt(others, OF_HEADS), None) for reading, others in ways.items()}
        others = cast(Others, name)
        found: dict[str, tuple[Reading, Curve | None]] = {}
        if self.settings.scope != "task":
            found[name] = self.per_prompt(others, RANKINGS[others]), None
        if self.settings.scope != "prompt":
            found[name + TASK] = self.per_task(others, RANKINGS[others])
        return found

    # ---- prompt by prompt ----

    def leading(self) -> Leading:
        """Every edge that carries something and leads to the answer; that these are enough is checked."""
        edges = self.edges("removed")
        counted = np.zeros(len(self.prompts))
        for at, some in self.own(edges):
            edges.check(some)
            counted[at] = edges.leading(some).flatten(1).sum(1).cpu().numpy()
            self.progress(5)
        counts = _shared(counted).astype(int)
        return {
            "n_prompts": len(counts), "length": edges.shape[-1], "n_possible": edges.n_possible,
            "edges": geometric_mean(counts), "per_prompt": [int(n) for n in counts],
        }  # fmt: skip

    def per_prompt(self, others: Others, rankings: Sequence[Ranking]) -> Reading:
        """Explained effect over edges (or heads) kept, each prompt with its own."""
        edges, of_heads = self.edges(others), rankings == OF_HEADS
        n_possible = edges.shape[0] * edges.shape[1] if of_heads else edges.n_possible
        tried = [*rankings, *(["random"] if self.settings.random_control and not of_heads else [])]
        curves: dict[str, list[tuple[np.ndarray, PromptCurves]]] = {name: [] for name in tried}
        listed: dict[str, list[list[float]]] = {}
        for at, some in self.own(edges):
            for name in tried:
                ranks = rank(edges, some, cast(Ranking, name), self.settings.seed)
                self.progress(runs(cast(Ranking, name), n_possible))
                curves[name].append((at, self._curves(edges, some, ranks, n_possible, name == "random")))
                if at[0] == 0 and name != "random":
                    listed[name] = _listed(edges, some, ranks)
        n_prompts, columns = len(self.prompts), n_columns(self.settings.points)
        whole = {name: _gathered(parts, n_prompts, columns) for name, parts in curves.items() if name != "random"}
        row = self._row(edges, whole, listed, n_possible)
        row["columns"] = HEAD if of_heads else EDGE
        if "random" in curves:
            random = _gathered(curves["random"], n_prompts, n_columns(RANDOM_POINTS, ()))
            row["random"] = random.mean_row(self.settings.seed)
        return row

    def _curves(self, edges: AttentionEdges, some: Some, ranks: Ranks, n_possible: int, random: bool) -> PromptCurves:
        @torch.no_grad()
        def run(sizes: np.ndarray) -> np.ndarray:
            self.progress(1)
            mask = ranks.kept(torch.from_numpy(np.asarray(sizes)), some.embedding)
            return edges.metric(mask, some).cpu().numpy()

        n = len(some.prompts)
        whole, nothing = run(np.full(n, n_possible)), run(np.zeros(n, int))
        points, thresholds = (RANDOM_POINTS, ()) if random else (self.settings.points, THRESHOLDS)
        return measure_curves(run, ranks.alive.cpu().numpy(), n_possible, points, whole, nothing, thresholds)

    def _row(
        self, edges: AttentionEdges, curves: dict[str, PromptCurves], listed: dict[str, list[list[float]]], n: int
    ) -> Reading:
        """The row of a reading prompt by prompt: at every threshold the ranking that needs fewest edges."""
        found = {str(t): {name: curve.edges_at(t) for name, curve in curves.items()} for t in THRESHOLDS}
        means = {t: {name: geometric_mean(counts) for name, counts in tried.items()} for t, tried in found.items()}
        best = {t: min(tried, key=tried.__getitem__) for t, tried in means.items()}
        counts = {t: found[t][name] for t, name in best.items()}
        shown = best["0.9"]
        row = self._about(edges, curves[shown].m_model, curves[shown].m_nothing, counts, listed.get(shown, []))
        return row | {
            "n_edges": n, "curve": curves[shown].mean_row(self.settings.seed),
            "example_curve": curves[shown].one_row(0), "ranking": best,
            "example_at": {str(t): int(curves[shown].edges_at(t)[0]) for t in THRESHOLDS},
            "rankings": {name: {t: means[t][name] for t in means} for name in curves},
        }  # fmt: skip

    def _about(
        self, edges: AttentionEdges, m_model: np.ndarray, m_nothing: np.ndarray, counts: dict[str, np.ndarray],
        circuit: list[list[float]],
    ) -> Reading:  # fmt: skip
        """What every row of scope prompt says. counts: by threshold, edges of every prompt."""
        some, seed = self.prompts.take(slice(0, len(m_model))), self.settings.seed
        return {
            "scope": "prompt", "n_prompts": len(m_model), "length": edges.shape[-1], "n_edges": edges.n_possible,
            "m_model": float(m_model.mean()), "m_nothing": float(m_nothing.mean()),
            "example": some.pairs[0].clean, "tokens": [some.piece(int(token)) for token in some.clean[0]],
            "edges_at": {t: geometric_mean(values) for t, values in counts.items()},
            "edges_at_interval": {t: interval(values, seed) for t, values in counts.items()},
            "edges_per_prompt": {t: values.astype(int).tolist() for t, values in counts.items()}, "circuit": circuit,
        }  # fmt: skip

    def share(self) -> Reading:
        """The fewest edges that hold a share of all |attribution|, clean against corrupted; no intervention."""
        edges, n = self.edges("corrupted"), len(self.prompts)
        columns = 2 + self.settings.points + len(THRESHOLDS)
        sizes, shares, listed = np.zeros((n, columns)), np.zeros((n, columns)), []
        whole, nothing = np.zeros(n), np.zeros(n)
        for at, some in self.own(edges):
            scores = edges.integrated(some)
            with torch.no_grad():
                whole[at] = edges.metric(edges.all(some), some).cpu()
                nothing[at] = edges.metric(edges.all(some, 0.0), some).cpu()
            self.progress(runs("integrated", edges.n_possible) + 2)
            if at[0] == 0:
                listed = _listed(edges, some, by_score(scores))
            sums = scores.abs().double().flatten(1).sort(1, descending=True).values.cumsum(1)
            for i, row in zip(at, (sums / sums[:, -1:]).cpu().numpy(), strict=True):
                spaced = log_sizes(edges.n_possible, self.settings.points)
                exact = [int((row < t - 1e-12).sum()) + 1 for t in THRESHOLDS]
                some_sizes = np.concatenate([[0], spaced, exact, [edges.n_possible]]).astype(int)
                kept = np.append(0.0, row)[some_sizes]
                pad = columns - len(some_sizes)
                sizes[i], shares[i] = np.pad(some_sizes, (0, pad), "edge"), np.pad(kept, (0, pad), "edge")
        curves = PromptCurves(_shared(sizes).astype(int), _shared(shares), np.ones(n), np.zeros(n))
        counts = {str(t): curves.edges_at(t) for t in THRESHOLDS}
        return self._about(edges, _shared(whole), _shared(nothing), counts, listed) | {
            "columns": EDGE, "curve": curves.mean_row(self.settings.seed),
            "example_curve": curves.one_row(0), "ranking": dict.fromkeys(counts, "integrated"),
            "example_at": {t: int(values[0]) for t, values in counts.items()},
        }  # fmt: skip

    def learnt(self) -> Reading:
        """The fewest edges a learnt mask needs; with settings.alternatives, also the next circuits, and the next."""
        edges = self.edges("removed", self.prompts.take(slice(0, self.settings.learnt_prompts)))
        n, searches = len(edges.prompts), 1 + self.settings.alternatives
        counts, reached, overlaps = np.zeros((searches, n)), np.zeros((searches, n)), np.zeros((searches, n))
        whole, nothing = np.zeros(n), np.zeros(n)
        for at, some in self.own(edges):
            with torch.no_grad():
                whole[at] = edges.metric(edges.all(some), some).cpu()
                nothing[at] = edges.metric(edges.all(some, 0.0), some).cpu()
            earlier: list[Tensor] = []
            for i in range(searches):
                taken = torch.stack(earlier).any(0) if earlier else None
                found: Learnt = learn_masks(
                    edges, some, LEARNT_AT, taken=taken, progress=lambda: self.progress(GRADIENT)
                )
                counts[i, at], reached[i, at] = found.edges.cpu(), found.reached.cpu()
                overlaps[i, at] = _jaccard(found.masks, earlier)
                earlier.append(found.masks)
        counts, overlaps = _shared(counts), _shared(overlaps)
        key = str(LEARNT_AT)
        row = self._about(edges, _shared(whole), _shared(nothing), {key: counts[0]}, [])
        row["ranking"] = {key: "learnt"}
        if self.settings.alternatives:
            row["alternatives"] = _alternatives(counts, _shared(reached) > 0, overlaps)
        return row

    # ---- one circuit for all prompts ----

    def per_task(self, others: Others, rankings: Sequence[Ranking]) -> tuple[Reading, Curve]:
        """Ranked on the first half of the prompts, measured on the second."""
        half = len(self.prompts) // 2
        scoring = self.edges(others, self.prompts.take(slice(0, half)))
        heldout = self.edges(others, self.prompts.take(slice(half, None)))
        ranked = {name: self._rank_for_all(scoring, name) for name in rankings}
        curves = {name: self._curve_for_all(heldout, ranks) for name, ranks in ranked.items()}
        best = min(curves, key=lambda name: curves[name].edges_at(0.9))
        curve, ranks = curves[best], ranked[best]
        weights = self._weights(heldout)
        row = curve.reading(heldout.n_possible, _places_listed(ranks, weights), self.settings.seed)
        row |= {
            "n_alive": int(ranks.alive[0]),
            "length": heldout.shape[-1], "example": heldout.prompts.pairs[0].clean,
            "tokens": [heldout.prompts.piece(int(token)) for token in heldout.prompts.clean[0]],
            "ranking": {str(t): best for t in THRESHOLDS},
            "rankings": {name: one.at_thresholds() for name, one in curves.items()},
            # Best first: a point of the curve is the first so many of them.
            "columns": EDGE,
        }  # fmt: skip
        return row, curve

    def _rank_for_all(self, edges: AttentionEdges, ranking: Ranking) -> Ranks:
        def scored(mask: Tensor | None) -> Tensor:
            total = torch.zeros(1, *edges.shape, dtype=torch.float64)
            for _, some in self.own(edges):
                if ranking == "integrated":
                    found = edges.integrated(some)
                else:
                    found = edges.gradient(edges.all(some) if mask is None else mask.to(some.embedding), some)
                total += found.abs().double().sum(0, keepdim=True).cpu()
                self.progress(GRADIENT)
            return distributed.total(total)

        return by_score(scored(None), scored if ranking == "rescored" else None)

    def _curve_for_all(self, edges: AttentionEdges, ranks: Ranks) -> Curve:
        n = len(edges.prompts)

        @torch.no_grad()
        def run(sizes: list[int]) -> np.ndarray:
            out = np.zeros((len(sizes), n))
            for at, some in self.own(edges):
                for i, size in enumerate(sizes):
                    mask = ranks.kept(torch.tensor([size]), some.embedding).to(some.embedding)
                    out[i, at] = edges.metric(mask, some).cpu()
                    self.progress(1)
            return _shared(out)

        whole, nothing = run([edges.n_possible, 0])
        alive = int(ranks.alive[0])
        sizes = log_sizes(alive, self.settings.points).tolist() if alive else []
        return refined_curve(sizes, run, whole, nothing, edges.n_possible)

    def _weights(self, edges: AttentionEdges) -> Tensor:
        """[layer, head, query, key]: what every edge weighs on these prompts, on average."""
        total = torch.zeros(edges.shape, dtype=torch.float64)
        for _, some in self.own(edges):
            total += torch.stack([weights.double().sum(0).cpu() for weights, _ in edges.seen(some.embedding)])
        return distributed.total(total) / len(edges.prompts)

    # ---- prompts ----

    def edges(self, others: Others, prompts: Prompts | None = None) -> AttentionEdges:
        return AttentionEdges(
            self.decoder, self.prompts if prompts is None else prompts, others, self.settings.memory_mb
        )

    def own(self, edges: AttentionEdges) -> Iterator[tuple[np.ndarray, Some]]:
        """This process' share of the prompts: (which ones, those made ready), as many as memory allows."""
        mine = np.arange(len(edges.prompts))[distributed.rank() :: distributed.world()]
        for first in range(0, len(mine), edges.at_once):
            at = mine[first : first + edges.at_once]
            yield at, edges.some(edges.prompts.take(torch.from_numpy(at)))


def _shared(values: np.ndarray) -> np.ndarray:
    """Of every process its own prompts, zero elsewhere -> of all."""
    return distributed.total(torch.from_numpy(values)).numpy()


def _gathered(parts: list[tuple[np.ndarray, PromptCurves]], n: int, columns: int) -> PromptCurves:
    """Curves of all prompts, from the parts of all processes."""
    sizes, metrics, whole, nothing = (np.zeros(shape) for shape in ((n, columns), (n, columns), (n,), (n,)))
    for at, curves in parts:
        sizes[at], metrics[at] = curves.sizes, curves.metrics
        whole[at], nothing[at] = curves.m_model, curves.m_nothing
    return PromptCurves(_shared(sizes).astype(int), _shared(metrics), _shared(whole), _shared(nothing))


def _listed(edges: AttentionEdges, some: Some, ranks: Ranks) -> list[list[float]]:
    """The best edges (or heads) of the first of these prompts, as rows of EDGE or HEAD."""
    if ranks.places.shape[-1] == 1 != edges.shape[-1]:
        order = ranks.places[0].flatten().argsort().tolist()
        scores, n_heads = ranks.scores[0].flatten().tolist(), edges.shape[1]
        return [[at // n_heads, at % n_heads, scores[at]] for at in order]
    first = edges.some(some.prompts.take(slice(0, 1)))
    return _places_listed(ranks, torch.stack([weights[0] for weights, _ in edges.seen(first.embedding)]))


def _places_listed(ranks: Ranks, weights: Tensor) -> list[list[float]]:
    """[layer, head, query, key, score, weight] of the best edges of the first prompt."""
    places, scores = ranks.places[0].cpu(), ranks.scores[0].cpu()
    most = min(MOST, int(ranks.alive[0]))
    flat = (places.flatten() < most).nonzero()[:, 0]
    flat = flat[places.flatten()[flat].argsort()]
    at = torch.stack(torch.unravel_index(flat, places.shape), 1)
    values = zip(at.tolist(), scores.flatten()[flat].tolist(), weights.cpu().flatten()[flat].tolist(), strict=True)
    return [[*place, score, weight] for place, score, weight in values]


def _jaccard(masks: Tensor, earlier: list[Tensor]) -> np.ndarray:
    """[n] shared edges over the union with each of the earlier ones, on average."""
    found = [(masks & other).flatten(1).sum(1) / (masks | other).flatten(1).sum(1).clamp(min=1) for other in earlier]
    return np.asarray(torch.stack(found).mean(0).cpu()) if found else np.zeros(len(masks))


def _alternatives(counts: np.ndarray, reached: np.ndarray, overlaps: np.ndarray) -> Alternatives:
    """[searches, prompts] each: edges, whether the effect was reached, overlap with the circuits before."""
    rows = [(row[ok], overlap[ok]) for row, ok, overlap in zip(counts, reached, overlaps, strict=True)]
    return {
        "n_prompts": counts.shape[1], "reached": reached.mean(1).tolist(),
        "edges": [geometric_mean(row) if len(row) else None for row, _ in rows],
        "within_twice": (reached & (counts <= 2 * counts[0])).mean(1).tolist(),
        "overlap": [None if i == 0 or not len(row) else float(row.mean()) for i, (_, row) in enumerate(rows)],
    }  # fmt: skip


# ---- what the gates leave open ----


@torch.no_grad()
def open_edges(model: nn.Module, prompts: Prompts, at_once: int = 16, most: int = 2000) -> OpenEdges:
    """Which (layer, head, query, key) a sparse model's gates leave open on these prompts, for the most common length.

    Every other pair is closed on all of them: nothing flows there, whatever the weights. Positions count from 0.
    """
    (chosen,) = of_common_length(prompts.to(next(model.parameters()).device))
    length = chosen.clean.shape[1]
    dims = dimensions(base_model(model).config)
    share = torch.zeros(dims.n_layers, dims.n_heads, length, length, dtype=torch.float64)
    weight = torch.zeros_like(share)
    for first in range(0, len(chosen), at_once):
        ids = chosen.clean[first : first + at_once]
        output = model(input_ids=ids, use_cache=False, output_attentions=True, gate_output="pattern", logits_to_keep=1)
        pattern = torch.stack(output.attentions).double().cpu()  # [layers, batch, heads, queries, keys]
        share += (pattern > 0).double().sum(1)
        weight += pattern.sum(1)
    n = len(chosen)
    windows = [parts(model, layer).window for layer in range(dims.n_layers)]
    n_possible = dims.n_heads * sum(int(allowed_pairs(length, length, window=window).sum()) for window in windows)
    opened = share.nonzero()
    order = weight[tuple(opened.T)].argsort(descending=True)[:most]
    listed = map(tuple, opened[order].tolist())
    return {
        "n_prompts": n, "length": length, "example": chosen.pairs[0].clean, "n_possible": n_possible,
        "n_open": len(opened), "n_proven_absent": n_possible - len(opened), "open_per_prompt": float(share.sum() / n),
        "columns": ["layer", "head", "query", "key", "share_of_prompts", "mean_weight"],
        "open": [[*at, round(float(share[at] / n), 4), round(float(weight[at] / n), 5)] for at in listed],
    }  # fmt: skip
