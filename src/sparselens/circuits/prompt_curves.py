"""Curves of single prompts: each has a circuit of its own, a curve of its own and edges of its own. Numbers only.

    f(C) = (m(C) - m(nothing)) / (m(model) - m(nothing))      per prompt, never clipped
    edges for t: the smallest measured size from which f stays at or above t
    multiplier: dense / sparse for every prompt; geometric mean, 95 % interval of a bootstrap over prompts

(faithfulness.py has the other kind: one circuit for all prompts, effects of mean metrics.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .faithfulness import DRAWS, THRESHOLDS, NoEffect
from .rows import CurveRow, MultiplierRow

ROUNDS = 5  # of bisection at every threshold
GRID = 40  # sizes of the mean curve
SMALLEST = 0.02  # of the median effect: a prompt on which attention changes less has no effect to explain


@dataclass
class PromptCurves:
    """What circuits of growing size do on each prompt. Columns in any order; sizes may repeat."""

    sizes: np.ndarray  # [prompts, k] int
    metrics: np.ndarray  # [prompts, k]
    m_model: np.ndarray  # [prompts]
    m_nothing: np.ndarray  # [prompts]

    def __post_init__(self) -> None:
        order = np.argsort(self.sizes, axis=1, kind="stable")
        self.sizes = np.take_along_axis(self.sizes, order, 1)
        self.metrics = np.take_along_axis(self.metrics, order, 1)

    @property
    def effects(self) -> np.ndarray:
        """[prompts, k], by size."""
        nothing = self.m_nothing[:, None]
        return np.asarray((self.metrics - nothing) / (self.m_model[:, None] - nothing))

    def brackets(self, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """([prompts] the largest size below the threshold, 0 where none is; [prompts] the next larger one)."""
        below = self.effects < threshold - 1e-9
        k = below.shape[1]
        last = np.where(below.any(1), k - 1 - below[:, ::-1].argmax(1), -1)
        rows, high = np.arange(len(below)), np.minimum(last + 1, k - 1)
        low = np.where(last >= 0, self.sizes[rows, np.maximum(last, 0)], 0)
        return low, self.sizes[rows, high]

    def edges_at(self, threshold: float) -> np.ndarray:
        """[prompts] the smallest measured size from which the effect stays at or above the threshold."""
        return self.brackets(threshold)[1]

    def mean_row(self, seed: int = 0) -> CurveRow:
        """The mean effect over prompts at common sizes, between measured ones linear in log size, and its interval."""
        grid = np.unique(np.concatenate([[0], np.geomspace(1, self.sizes.max(), GRID).round().astype(int)]))
        rows = zip(self.sizes, self.effects, strict=True)
        effects = np.array([np.interp(np.log1p(grid), np.log1p(n), f) for n, f in rows])
        low, high = np.percentile(effects[_draws(len(effects), seed)].mean(1), [2.5, 97.5], axis=0)
        return {
            "edges": grid.tolist(), "effect": effects.mean(0).tolist(), "low": low.tolist(), "high": high.tolist(),
        }  # fmt: skip

    def one_row(self, prompt: int) -> CurveRow:
        """The curve of one prompt, which has no interval."""
        sizes, first = np.unique(self.sizes[prompt], return_index=True)
        effect = self.effects[prompt][first].tolist()
        return {"edges": sizes.tolist(), "effect": effect, "low": effect, "high": effect}


def measure_curves(
    run: Callable[[np.ndarray], np.ndarray], alive: np.ndarray, n_possible: int, points: int,
    m_model: np.ndarray, m_nothing: np.ndarray, thresholds: tuple[float, ...] = THRESHOLDS,
) -> PromptCurves:  # fmt: skip
    """Sizes evenly spaced in log up to the edges that do something, then bisection at every threshold.

    run: a size for every prompt -> the metric of every prompt. n_possible: the size of the whole model.
    """
    n, largest = len(alive), np.maximum(alive, 1)
    spaced = np.stack([np.geomspace(1, top, points).round().astype(int) for top in largest])
    sizes = [np.zeros(n, int), np.full(n, n_possible), *spaced.T]
    metrics = [m_nothing, m_model, *(run(column) for column in spaced.T)]
    for _ in range(ROUNDS):
        for threshold in thresholds:
            found = PromptCurves(np.stack(sizes, 1), np.stack(metrics, 1), m_model, m_nothing)
            low, high = found.brackets(threshold)
            middle = np.sqrt(np.maximum(low, 1) * high.astype(float)).round().astype(int)
            middle = np.clip(middle, np.minimum(low + 1, high), high)
            sizes.append(middle)
            # All sizes were measured before: ask for none of them again, but keep the shape.
            known = [found.sizes[i] == size for i, size in enumerate(middle)]
            if all(row.any() for row in known):
                metrics.append(np.array([found.metrics[i][row][0] for i, row in enumerate(known)]))
            else:
                metrics.append(run(middle))
    return PromptCurves(np.stack(sizes, 1), np.stack(metrics, 1), m_model, m_nothing)


def n_columns(points: int, thresholds: tuple[float, ...] = THRESHOLDS) -> int:
    """How many sizes measure_curves returns for every prompt."""
    return 2 + points + ROUNDS * len(thresholds)


def usable(m_model: np.ndarray, m_nothing: np.ndarray, what: str) -> np.ndarray:
    """[prompts] bool: attention raises the metric there; NoEffect where it does so on fewer than half."""
    raised = m_model - m_nothing
    found = np.asarray(raised > SMALLEST * np.median(np.abs(raised)))
    if found.mean() < 0.5:
        raise NoEffect(
            f"{what}: the metric is {np.mean(m_model):.4g} in the model and {np.mean(m_nothing):.4g} without these "
            f"edges, and higher in the model on {found.sum()} of {len(found)} prompts only: no effect to explain"
        )
    return found


def geometric_mean(values: np.ndarray) -> float:
    return float(np.exp(np.log(np.maximum(values, 1)).mean()))


def interval(values: np.ndarray, seed: int = 0) -> list[float]:
    """95 % interval of the geometric mean."""
    logs = np.log(np.maximum(values, 1))
    low, high = np.exp(np.percentile(logs[_draws(len(logs), seed)].mean(1), [2.5, 97.5]))
    return [float(low), float(high)]


def ratio(dense: np.ndarray, sparse: np.ndarray, seed: int = 0) -> MultiplierRow:
    """How many times fewer edges, prompt by prompt."""
    if len(dense) != len(sparse):
        raise ValueError(f"edges on different prompts: {len(dense)} and {len(sparse)}")
    logs = np.log(np.maximum(dense, 1)) - np.log(np.maximum(sparse, 1))
    low, high = np.exp(np.percentile(logs[_draws(len(logs), seed)].mean(1), [2.5, 97.5]))
    return {
        "dense_edges": geometric_mean(dense), "sparse_edges": geometric_mean(sparse),
        "multiplier": float(np.exp(logs.mean())), "low": float(low), "high": float(high), "n_prompts": len(logs),
    }  # fmt: skip


def _draws(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, (DRAWS, n))
