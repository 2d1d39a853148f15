"""Curves of explained effect over the number of edges kept: thresholds, intervals, areas, multipliers. Numbers only.

    f(C) = (m(C) - m(nothing)) / (m(model) - m(nothing))      m averaged over prompts; never clipped

Intervals are 95 % percentile intervals of a bootstrap over prompts; m(C), m(model) and m(nothing) are all drawn again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from .rows import MEAN, Areas, CurveRow, MultiplierRow, Reading

THRESHOLDS = (0.8, 0.9, 0.95, 0.98)
LEVELS = tuple(level / 100 for level in range(50, 100, 5))  # 0.5 to 0.95, for the mean multiplier
MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DRAWS = 1000
ROUNDS = 3  # of refinement where the curve crosses a threshold


class NoEffect(ValueError):
    """Model and nothing hardly differ, or there is nothing to tell by: no effect to explain."""


@dataclass
class Curve:
    """What circuits of growing size do on the same prompts. Sorted by size; the last one is the whole model."""

    edges: np.ndarray  # [circuits] edges (or heads) really in, dead ends removed
    metrics: np.ndarray  # [circuits, prompts]
    m_model: np.ndarray  # [prompts]
    m_nothing: np.ndarray  # [prompts]

    def __post_init__(self) -> None:
        order = np.argsort(self.edges, kind="stable")
        _, first = np.unique(self.edges[order], return_index=True)
        self.edges, self.metrics = self.edges[order][first], self.metrics[order][first]

    def effects(self, draw: np.ndarray | None = None) -> np.ndarray:
        """Explained effect per circuit, [circuits]; with prompt indices [draws, prompts]: [draws, circuits]."""
        if draw is None:
            draw = np.arange(len(self.m_model))[None]
            return np.asarray(self.effects(draw)[0])
        nothing = self.m_nothing[draw].mean(1)[:, None]
        whole = self.m_model[draw].mean(1)[:, None] - nothing
        # A draw in which model and nothing coincide says nothing about circuits.
        whole = np.where(np.abs(whole) < 1e-12, np.nan, whole)
        return np.asarray((self.metrics.T[draw].mean(1) - nothing) / whole)

    def draws(self, seed: int = 0) -> np.ndarray:
        n = len(self.m_model)
        return np.random.default_rng(seed).integers(0, n, (DRAWS, n))

    def band(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """95 % interval of the effect at every size."""
        low, high = np.nanpercentile(self.effects(self.draws(seed)), [2.5, 97.5], axis=0)
        return low, high

    @overload
    def edges_at(self, threshold: float) -> int: ...

    @overload
    def edges_at(self, threshold: float, draw: np.ndarray) -> np.ndarray: ...

    def edges_at(self, threshold: float, draw: np.ndarray | None = None) -> int | np.ndarray:
        """The smallest measured size that reaches the threshold and from which no larger one falls below it."""
        found = self._sizes_at(np.atleast_2d(self.effects(draw)), threshold)
        return int(found[0]) if draw is None else found

    def mean_log_edges(self, draw: np.ndarray | None = None) -> np.ndarray:
        """The logarithm of edges_at, averaged over LEVELS: [1], or [draws]."""
        effects = np.atleast_2d(self.effects(draw))
        return np.asarray(np.mean([np.log(np.maximum(self._sizes_at(effects, level), 1)) for level in LEVELS], axis=0))

    def _sizes_at(self, effects: np.ndarray, threshold: float) -> np.ndarray:
        stays = np.logical_and.accumulate((effects >= threshold - 1e-9)[:, ::-1], axis=1)[:, ::-1]
        stays[:, -1] = True  # the whole model
        return np.asarray(self.edges[stays.argmax(1)])

    def area_log(self) -> float:
        """Mean explained effect over log(edges), from one edge to all of them."""
        x, f = np.log(np.maximum(self.edges, 1)), self.effects()
        if x[0] > 0:
            x, f = np.insert(x, 0, 0.0), np.insert(f, 0, 0.0)
        return float(np.trapezoid(f, x) / x[-1]) if x[-1] > 0 else float(f[-1])

    def row(self, seed: int = 0) -> CurveRow:
        low, high = (limit.tolist() for limit in self.band(seed))
        return {"edges": self.edges.tolist(), "effect": self.effects().tolist(), "low": low, "high": high}

    def at_thresholds(self) -> dict[str, float]:
        return {str(t): self.edges_at(t) for t in THRESHOLDS}

    def reading(self, n_edges: int, circuit: Sequence[Sequence[str | float]], seed: int = 0) -> Reading:
        """What a row of scope task says of its curve. n_edges: possible ones; circuit: the best ones."""
        intervals = {t: np.percentile(self.edges_at(t, self.draws(seed)), [2.5, 97.5]).tolist() for t in THRESHOLDS}
        return {
            "scope": "task", "n_prompts": len(self.m_model), "n_edges": n_edges, "m_model": float(self.m_model.mean()),
            "m_nothing": float(self.m_nothing.mean()), "curve": self.row(seed), "edges_at": self.at_thresholds(),
            "edges_at_interval": {str(t): interval for t, interval in intervals.items()}, "circuit": circuit,
        }  # fmt: skip


def refined_curve(
    sizes: list[int], run: Callable[[list[int]], np.ndarray], m_model: np.ndarray, m_nothing: np.ndarray, n_all: int
) -> Curve:
    """Measure these sizes, then ROUNDS times between those where the curve crosses a threshold.

    run: sizes -> metrics [sizes, prompts]. n_all: the size of the whole model; beside it, none above max(sizes) is run.
    """
    measured = {0: m_nothing, n_all: m_model}
    largest, wanted = max(sizes, default=0), sizes
    for _ in range(ROUNDS + 1):
        new = [n for n in dict.fromkeys(wanted) if n not in measured and n <= largest]
        if new:
            measured |= dict(zip(new, run(new), strict=True))
        keys = sorted(measured)
        curve = Curve(np.array(keys), np.stack([measured[n] for n in keys]), m_model, m_nothing)
        wanted = refine(curve.edges, curve.effects())
    return curve


def multipliers(dense: Curve, sparse: Curve, seed: int = 0) -> dict[str, MultiplierRow]:
    """The multiplier at every threshold, and their mean."""
    rows = {str(threshold): multiplier(dense, sparse, threshold, seed) for threshold in THRESHOLDS}
    return rows | {MEAN: multiplier(dense, sparse, None, seed)}


def multiplier(dense: Curve, sparse: Curve, threshold: float | None, seed: int = 0) -> MultiplierRow:
    """Edges the dense model needs over edges the sparse one needs, with an interval from the same draws of prompts.

    threshold=None: the geometric mean over LEVELS, how far apart the curves are, not where one crosses a threshold.
    """
    if len(dense.m_model) != len(sparse.m_model):
        raise ValueError(f"curves over different prompts: {len(dense.m_model)} and {len(sparse.m_model)}")
    draw = dense.draws(seed)
    if threshold is None:
        low, high = np.exp(np.percentile(dense.mean_log_edges(draw) - sparse.mean_log_edges(draw), [2.5, 97.5]))
        ours, theirs = (float(np.exp(curve.mean_log_edges()[0])) for curve in (dense, sparse))
    else:
        ratio = dense.edges_at(threshold, draw) / np.maximum(sparse.edges_at(threshold, draw), 1)
        low, high = np.percentile(ratio, [2.5, 97.5])
        ours, theirs = dense.edges_at(threshold), sparse.edges_at(threshold)
    return {
        "dense_edges": ours, "sparse_edges": theirs, "multiplier": ours / max(theirs, 1),
        "low": float(low), "high": float(high), "n_prompts": len(dense.m_model),
    }  # fmt: skip


def mib_areas(effects: np.ndarray) -> Areas:
    """MIB's CPR (area under f, linear in the share of edges) and CMD (area between f and 1), f at MIB_FRACTIONS."""
    k = np.array(MIB_FRACTIONS)
    return {"cpr": float(np.trapezoid(effects, k)), "cmd": float(np.trapezoid(np.abs(1 - effects), k))}


def check_spread(m_model: np.ndarray, m_nothing: np.ndarray, what: str) -> None:
    """Refuse to divide by a difference that is hardly there."""
    difference = m_model - m_nothing
    error = difference.std(ddof=1) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
    if difference.mean() <= 2 * error or difference.mean() <= 1e-6:
        raise NoEffect(
            f"{what}: the metric is {m_model.mean():.4g} on the prompts and {m_nothing.mean():.4g} on the corrupted "
            f"ones (difference {difference.mean():.3g} +- {error:.2g}). There is no effect to explain: "
            "the corrupted prompts call for the same answer, or the model does not do this task; change one of them."
        )


def log_sizes(n: int, points: int) -> np.ndarray:
    """Up to `points` whole numbers from 1 to n, evenly spaced in their logarithm."""
    return np.unique(np.geomspace(1, n, points).round().astype(int))


def refine(sizes: np.ndarray, effects: np.ndarray, thresholds: tuple[float, ...] = THRESHOLDS) -> list[int]:
    """Sizes worth measuring next: between the last one below each threshold and the next larger one."""
    wanted = set()
    for threshold in thresholds:
        below = np.flatnonzero(effects < threshold - 1e-9)
        left = int(below[-1]) if len(below) else -1
        if left + 1 < len(sizes):
            a, b = (int(sizes[left]) if left >= 0 else 0), int(sizes[left + 1])
            middle = round((max(a, 1) * b) ** 0.5)
            if a < middle < b:
                wanted.add(middle)
    return sorted(wanted)
