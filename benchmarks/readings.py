"""How few attention edges of a prompt do it, dense against sparse: first readings for figure 2, prompt by prompt.

    python benchmarks/readings.py DENSE SPARSE --control CONTROL --tasks ioi greater-than --prompts 100 --json FILE

An edge (layer, head, query, key) carries softmax * gate * value from one token to another. A circuit is a set of
edges of one prompt; embeddings, MLPs and norms are always live.

    removed   the other edges carry nothing: what is enough by itself
    heads     the same with whole heads
    learnt    the same, edges found by gradient descent on a mask: how little would do, whatever the model uses
    share     no intervention: how few edges hold a share of all attribution, integrated from corrupted to clean
    open      no ranking: every edge that carries something and leads to the answer; with these alone f = 1, checked

Edges are ranked on the very prompt they are measured on, by |d metric / d edge| at the whole model (`gradient`) or by
that taken again whenever half of them have gone (`rescored`); of the two the better for each model counts.

    f(C) = (m(C) - m(no attention)) / (m(model) - m(no attention)), per prompt, never clipped
    edges for t: the smallest measured size from which f stays at or above t
    multiplier: dense / sparse for every prompt; geometric mean, 95 % interval of a bootstrap over prompts
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import sparselens as sl
from sparselens import tasks
from sparselens.circuits.discover import answered
from sparselens.circuits.faithfulness import DRAWS, log_sizes
from sparselens.gating import allowed_pairs
from sparselens.models.decoder import Decoder
from sparselens.models.hooks import patch
from sparselens.runs import distributed
from sparselens.runs.run import provenance, write_json
from sparselens.tasks.prompts import Prompts, build, of_common_length

Others = Literal["removed", "corrupted", "mean"]
Ranking = Literal["gradient", "rescored", "heads"]
STEPS = 5  # points of the integration between corrupted and clean
TOLERANCE = 1e-4  # of the largest logit, or metric
Layers = list[tuple[Tensor, Tensor]]  # per layer: weights [n, heads, queries, keys], values [n, heads, keys, d_head]


@dataclass
class Some:
    """Some of the prompts, on the device, with what their edges may be replaced by."""

    prompts: Prompts
    embedding: Tensor  # [n, tokens, d_model]
    rest: Layers  # what the other edges carry: empty where that is nothing
    clean: Layers  # what all edges carry on the clean prompt


class PromptEdges:
    """Prompts of one length, ready to be run with some of their attention edges."""

    def __init__(self, decoder: Decoder, prompts: Prompts, others: Others = "removed", memory_mb: float = 1024):
        if prompts.lengths.unique().numel() != 1:
            raise ValueError("attention edges are counted on prompts of one length; choose them with of_common_length")
        device = next(decoder.model.parameters()).device
        self.decoder, self.prompts, self.others = decoder, prompts.to(device), others
        tokens, d = prompts.clean.shape[1], decoder.dims
        self.shape = (d.n_layers, d.n_heads, tokens, tokens)
        pairs = [allowed_pairs(tokens, tokens, window=part.window)[0] for part in decoder.parts]
        self.possible = torch.stack(pairs).expand(self.shape).to(device)
        self.n_possible = int(self.possible.sum())
        self.at_once = max(1, int(memory_mb * 2**20 / self.bytes_per_prompt(decoder, prompts)))

    @staticmethod
    def bytes_per_prompt(decoder: Decoder, prompts: Prompts) -> float:
        """Masks, ranks, patterns and their gradients of all layers; logits at the reads in several forms."""
        d, tokens = decoder.dims, prompts.clean.shape[1]
        patterns = 44.0 * d.n_layers * d.n_heads * tokens**2
        streams = 80.0 * d.n_layers * d.d_model * tokens
        return patterns + streams + 60.0 * prompts.position.shape[1] * decoder.vocabulary

    # ---- running ----------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[slice, Some]]:
        """As many prompts at a time as memory allows."""
        mean = self._mean() if self.others == "mean" else []
        for first in range(0, len(self.prompts), self.at_once):
            some = slice(first, first + self.at_once)
            yield some, self._some(self.prompts.take(some), mean)

    @torch.no_grad()
    def _some(self, prompts: Prompts, mean: Layers) -> Some:
        rest = self._seen(self.decoder.begin(prompts.corrupted)) if self.others == "corrupted" else mean
        embedding = self.decoder.begin(prompts.clean)
        return Some(prompts, embedding, rest, self._seen(embedding))

    def _seen(self, embedding: Tensor) -> Layers:
        seen: Layers = []

        def mix(layer: int, weights: Tensor, values: Tensor) -> Tensor:
            seen.append((weights, values))
            return weights @ values

        self.decoder.run(embedding, mix)
        return seen

    @torch.no_grad()
    def _mean(self) -> Layers:
        """What every edge carries on average over all prompts: (1, [1, heads, queries, keys, d_head])."""
        total: list[Tensor] = []
        for first in range(0, len(self.prompts), self.at_once):
            some = self.prompts.take(slice(first, first + self.at_once))
            for layer, (weights, values) in enumerate(self._seen(self.decoder.begin(some.clean))):
                carried = torch.einsum("nhqk,nhke->hqke", weights, values)
                if layer < len(total):
                    total[layer] += carried
                else:
                    total.append(carried)
        return [(torch.ones(1), carried[None] / len(self.prompts)) for carried in total]

    def metric(self, mask: Tensor, some: Some) -> Tensor:
        """The metric of every prompt [n] with these edges; mask [n or 1, layer, head, query, key], maybe fractional."""

        def mix(layer: int, weights: Tensor, values: Tensor) -> Tensor:
            kept = (mask[:, layer] * weights) @ values
            if self.others == "removed":
                return kept
            old_weights, old_values = some.rest[layer]
            if self.others == "mean":
                return kept + torch.einsum("nhqk,mhqke->nhqe", 1 - mask[:, layer], old_values)
            return kept + ((1 - mask[:, layer]) * old_weights) @ old_values

        final = self.decoder.run(some.embedding, mix)
        return some.prompts.score(self.decoder.unembed(some.prompts.at_reads(final)).double())

    # ---- scores and ranks: [n, layer, head, query, key] ----

    def gradient(self, mask: Tensor, some: Some) -> Tensor:
        """d metric / d edge of every prompt, with these edges in."""
        mask = mask.expand(len(some.prompts), *self.shape).detach().clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.metric(mask, some).sum(), mask)
        return gradient

    def integrated(self, some: Some) -> Tensor:
        """Integrated gradients over the mask, from none of the edges to all: what each contributes."""
        total = torch.zeros(len(some.prompts), *self.shape, device=some.embedding.device)
        for i in range(STEPS):
            total += self.gradient(some.embedding.new_full((1, *self.shape), (i + 0.5) / STEPS), some)
        return total / STEPS

    def ranks(self, some: Some, ranking: Ranking) -> tuple[Tensor, Tensor]:
        """(place of every edge, the best 0; how many have one [n]). Edges that change nothing have no place.

        rescored: the worse half of the edges left goes, and the gradient is taken again without it, and so on.
        heads: places of whole heads [n, layer, head, 1, 1], by the gradient of all their edges together.
        """
        gradient = self.gradient(some.embedding.new_ones(1, *self.shape), some)
        if ranking == "heads":
            scores = gradient.sum((-1, -2), keepdim=True).abs()
            return _places(scores), torch.full((len(scores),), scores[0].numel(), device=scores.device)
        scores = gradient.abs() * self.possible
        n_alive = (scores > 0).flatten(1).sum(1)
        ranks, n = _places(scores), n_alive // 2
        while ranking == "rescored" and int(n.max()) >= 1:
            kept = ranks < _each(n)
            again = self.gradient(kept.to(scores.dtype), some).abs()
            # Whatever has left stays behind all that is kept; among the kept the new scores decide.
            ranks = torch.where(kept, _places(torch.where(kept, again, -1.0)), ranks)
            n = n // 2
        return ranks, n_alive

    def leading(self, some: Some) -> Tensor:
        """bool: the edge carries something, and what it changes can reach a position that is read.

        A closed edge carries nothing, but its key still counts in its query's softmax: what leads to that key leads on.
        """
        reads = torch.nn.functional.one_hot(some.prompts.position, self.shape[-1]) * some.prompts.used[..., None]
        needed = reads.any(1)  # [n, tokens]
        layers = []
        for layer in reversed(range(self.shape[0])):
            layers.append((some.clean[layer][0] > 0) & needed[:, None, :, None])
            needed = needed | (self.possible[layer, 0] & needed[..., None]).any(1)
        return torch.stack(layers[::-1], 1)

    @torch.no_grad()
    def check(self) -> dict[str, float]:
        """Relative errors: all edges are the model, none its silent attention, the leading ones are enough."""
        _, some = next(self.parts())
        model, prompts = self.decoder.model, some.prompts
        ones, zeros = some.embedding.new_ones(1, *self.shape), some.embedding.new_zeros(1, *self.shape)
        silent = {f"a{layer}": 0.0 for layer in range(self.shape[0])}
        own = prompts.score(prompts.ask(model, prompts.clean).double())
        found = {"all": _error(self.metric(ones, some), own)}
        if self.others == "removed":
            with patch(model, silent):
                found["none"] = _error(
                    self.metric(zeros, some), prompts.score(prompts.ask(model, prompts.clean).double())
                )
            leading = self.metric(self.leading(some).to(ones.dtype), some)
            found["leading"] = _error(leading, self.metric(ones, some))
        for name, error in found.items():
            if not error <= TOLERANCE:
                raise ValueError(f"self-check failed: {name} edges give a metric that is off by {error:.1e}")
        return found


def _each(sizes: Tensor) -> Tensor:
    return sizes.view(-1, 1, 1, 1, 1)


def _places(scores: Tensor) -> Tensor:
    """Place of every edge by score, largest first, [n, ...] int32."""
    flat = scores.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    steps = torch.arange(flat.shape[1], dtype=torch.int32, device=flat.device).expand_as(places)
    return places.scatter_(1, order, steps).view_as(scores)


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-9))


def learn_masks(edges: PromptEdges, some: Some, threshold: float, steps: int = 300, rate: float = 0.05) -> Tensor:
    """[n] the fewest edges that gradient descent finds to reach the threshold: how little would do.

    One number per edge, open where it is positive, straight-through gradient. The price of an edge rises while the
    effect is reached and falls while it is not; the smallest set seen that reaches it counts. What is found need not
    be what the model uses.
    """
    ones = some.embedding.new_ones(1, *edges.shape)
    scores = edges.gradient(ones, some).abs() * edges.possible
    alive = scores > 0
    best = alive.flatten(1).sum(1)
    with torch.no_grad():
        whole, nothing = edges.metric(ones, some), edges.metric(torch.zeros_like(ones), some)
    # Important edges begin further from closing.
    logs = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
    flat = torch.where(alive, logs, torch.nan).flatten(1)
    mean = flat.nanmean(1)
    spread = (flat - mean[:, None]).square().nanmean(1).sqrt().clamp(min=1e-6)
    theta = torch.where(alive, 1 + 0.5 * (logs - _each(mean)) / _each(spread), -10.0).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=rate)
    price = torch.full_like(mean, 1e-4)
    for _ in range(steps):
        soft = theta.sigmoid() * alive
        mask = ((theta > 0) & alive).to(soft.dtype)
        with torch.enable_grad():
            effect = (edges.metric(mask + soft - soft.detach(), some) - nothing) / (whole - nothing)
            loss = (price * soft.flatten(1).sum(1)).sum() - effect.clamp(max=threshold + 0.02).sum()
        (theta.grad,) = torch.autograd.grad(loss, theta)
        reached = effect.detach() >= threshold
        count = mask.flatten(1).sum(1).to(best.dtype)
        best = torch.where(reached & (count < best), count, best)
        price = price * torch.where(reached, 1.05, 0.9).to(price.dtype)
        optimizer.step()
    return best


THRESHOLDS = (0.8, 0.9, 0.95, 0.98)
ROUNDS = 5  # of bisection at every threshold


@dataclass
class PromptCurves:
    """What circuits of growing size do on each prompt; the last size of a prompt is all that lead to the answer."""

    m_model: np.ndarray  # [prompts]
    m_nothing: np.ndarray  # [prompts]
    measured: list[dict[int, float]] = field(default_factory=list)  # per prompt: size -> metric

    def __add__(self, other: "PromptCurves") -> "PromptCurves":
        """These prompts and those."""
        return PromptCurves(
            np.concatenate([self.m_model, other.m_model]), np.concatenate([self.m_nothing, other.m_nothing]),
            [*self.measured, *other.measured],
        )  # fmt: skip

    def effects(self, prompt: int) -> tuple[np.ndarray, np.ndarray]:
        """(sizes, explained effect) of one prompt, by size."""
        sizes = np.array(sorted(self.measured[prompt]))
        metric = np.array([self.measured[prompt][int(n)] for n in sizes])
        nothing = self.m_nothing[prompt]
        return sizes, (metric - nothing) / (self.m_model[prompt] - nothing)

    def edges_at(self, threshold: float) -> np.ndarray:
        """[prompts] the smallest size from which the effect stays at or above the threshold."""
        return np.array([self._bracket(i, threshold)[1] for i in range(len(self.measured))])

    def _bracket(self, prompt: int, threshold: float) -> tuple[int, int]:
        """(the largest measured size below the threshold, the next larger one)."""
        sizes, effect = self.effects(prompt)
        below = np.flatnonzero(effect < threshold - 1e-9)
        at = int(below[-1]) + 1 if len(below) else 0
        at = min(at, len(sizes) - 1)
        return (int(sizes[at - 1]) if at else 0), int(sizes[at])

    def next_size(self, prompt: int, threshold: float) -> int:
        """Where to measure next for this threshold: in the middle, in log, of what brackets it."""
        low, high = self._bracket(prompt, threshold)
        return min(max(round((max(low, 1) * high) ** 0.5), low + 1), high)

    def mean_effect(self, grid: np.ndarray) -> np.ndarray:
        """[prompts, grid] effects at common sizes: between two measured ones, linear in log size."""
        rows = []
        for prompt in range(len(self.measured)):
            sizes, effect = self.effects(prompt)
            rows.append(np.interp(np.log1p(grid), np.log1p(sizes), effect))
        return np.array(rows)


def trace_curves(
    run: Callable[[np.ndarray], np.ndarray], alive: np.ndarray, m_model: np.ndarray, m_nothing: np.ndarray, points: int
) -> PromptCurves:
    """Measure sizes evenly spaced in log, then bisect at every threshold. run: a size per prompt -> their metrics.

    alive: how many edges of each prompt do anything: with all of them the model is whole.
    """
    curves = PromptCurves(m_model, m_nothing, [{0: float(m_nothing[i])} for i in range(len(alive))])
    for prompt, n in enumerate(alive):
        curves.measured[prompt][int(n)] = float(m_model[prompt])

    def measure(sizes: np.ndarray) -> None:
        sizes = np.minimum(sizes, alive)
        if all(int(n) in curves.measured[i] for i, n in enumerate(sizes)):
            return
        for prompt, (n, value) in enumerate(zip(sizes, run(sizes), strict=True)):
            curves.measured[prompt].setdefault(int(n), float(value))

    for n in log_sizes(int(alive.max()), points):
        measure(np.full(len(alive), n))
    for _ in range(ROUNDS):
        for threshold in THRESHOLDS:
            measure(np.array([curves.next_size(i, threshold) for i in range(len(alive))]))
    return curves


def geometric(dense: np.ndarray, sparse: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Multiplier dense / sparse over prompts: geometric mean and its 95 % interval."""
    ratio = np.log(np.maximum(dense, 1)) - np.log(np.maximum(sparse, 1))
    draws = np.random.default_rng(seed).integers(0, len(ratio), (DRAWS, len(ratio)))
    low, high = np.percentile(ratio[draws].mean(1), [2.5, 97.5])
    return {"multiplier": float(np.exp(ratio.mean())), "low": float(np.exp(low)), "high": float(np.exp(high))}


Reading = Literal["removed", "corrupted", "mean", "heads", "share", "learnt"]
RANKINGS: tuple[Ranking, ...] = ("gradient", "rescored")
GRID = 40  # sizes of the mean curve


def edge_curves(
    decoder: Decoder, prompts: Prompts, others: Others, ranking: Ranking, points: int, memory_mb: float
) -> PromptCurves:
    """Explained effect over edges (or heads) kept, prompt by prompt."""
    edges = PromptEdges(decoder, prompts, others, memory_mb)
    edges.check()
    found: PromptCurves | None = None
    for _, some in edges.parts():
        ranks, alive = edges.ranks(some, ranking)

        @torch.no_grad()
        def run(sizes: np.ndarray, ranks=ranks, some=some) -> np.ndarray:
            kept = ranks < torch.as_tensor(sizes, device=ranks.device).view(-1, 1, 1, 1, 1)
            return edges.metric(kept.to(some.embedding.dtype), some).cpu().numpy()

        whole, nothing = run(np.full(len(ranks), ranks[0].numel() + 1)), run(np.zeros(len(ranks)))
        part = trace_curves(run, alive.cpu().numpy(), whole, nothing, points)
        found = part if found is None else found + part
    assert found is not None
    return found


def share_counts(decoder: Decoder, prompts: Prompts, memory_mb: float) -> dict[float, np.ndarray]:
    """threshold -> [prompts] the fewest edges that hold that share of all |attribution|, clean against corrupted."""
    edges = PromptEdges(decoder, prompts, "corrupted", memory_mb)
    rows: dict[float, list[np.ndarray]] = {t: [] for t in THRESHOLDS}
    for _, some in edges.parts():
        scores = (edges.integrated(some).abs() * edges.possible).flatten(1).double()
        sums = scores.sort(dim=1, descending=True).values.cumsum(1)
        for t in THRESHOLDS:
            rows[t].append(((sums < t * sums[:, -1:]).sum(1) + 1).cpu().numpy())
    return {t: np.concatenate(found) for t, found in rows.items()}


def leading_counts(decoder: Decoder, prompts: Prompts, memory_mb: float) -> np.ndarray:
    """[prompts] edges that carry something and lead to the answer; with these alone f = 1, checked."""
    edges = PromptEdges(decoder, prompts, "removed", memory_mb)
    edges.check()
    return np.concatenate([edges.leading(some).flatten(1).sum(1).cpu().numpy() for _, some in edges.parts()])


def needed(
    decoder: Decoder,
    prompts: Prompts,
    reading: Reading,
    *,
    rankings: Sequence[Ranking] = RANKINGS,
    points: int = 20,
    memory_mb: float = 1024,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """{"ranking", "edges": {threshold: [prompts]}, "curve"}: how many edges one model needs, by the best ranking."""
    if reading == "share":
        counts = share_counts(decoder, prompts, memory_mb)
        return {"ranking": {t: "integrated" for t in counts}, "edges": counts, "curve": None}
    if reading == "learnt":
        edges = PromptEdges(decoder, prompts, "removed", memory_mb)
        learnt = np.concatenate([learn_masks(edges, some, 0.9).cpu().numpy() for _, some in edges.parts()])
        return {"ranking": {0.9: "learnt"}, "edges": {0.9: learnt}, "curve": None}
    others: Others = "removed" if reading == "heads" else reading
    tried = ["heads"] if reading == "heads" else list(rankings)
    curves = {name: edge_curves(decoder, prompts, others, name, points, memory_mb) for name in tried}
    found_edges, best = {}, {}
    for t in THRESHOLDS:
        found = {name: curve.edges_at(t) for name, curve in curves.items()}
        best[t] = min(found, key=lambda name: np.log(np.maximum(found[name], 1)).mean())
        found_edges[t] = found[best[t]]
        say(f"{reading} {t}: " + ", ".join(f"{name} {_gm(values):.0f}" for name, values in found.items()))
    return {"ranking": best, "edges": found_edges, "curve": curves[best[0.9]]}


def _gm(values: np.ndarray) -> float:
    return float(np.exp(np.log(np.maximum(values, 1)).mean()))


def mean_curve(curves: PromptCurves) -> dict[str, list[float]]:
    """The mean over prompts at common sizes, with the 95 % interval of that mean."""
    grid = np.concatenate([[0], log_sizes(max(max(row) for row in curves.measured), GRID)])
    effects = curves.mean_effect(grid)
    draws = np.random.default_rng(0).integers(0, len(effects), (1000, len(effects)))
    low, high = np.percentile(effects[draws].mean(1), [2.5, 97.5], axis=0)
    return {"edges": grid.tolist(), "effect": effects.mean(0).tolist(), "low": low.tolist(), "high": high.tolist()}


def multiplier_row(found: dict[str, dict[str, Any]], threshold: float, possible: int) -> dict[str, Any]:
    """One threshold of one reading: edges of every model, dense against sparse, control against sparse."""
    edges = {role: one["edges"][threshold] for role, one in found.items()}
    row: dict[str, Any] = {f"{role}_edges": round(_gm(values), 1) for role, values in edges.items()}
    row |= geometric(edges["dense"], edges["sparse"])
    if "control" in edges:
        row["against_control"] = geometric(edges["control"], edges["sparse"])
    ranking = {role: one["ranking"][threshold] for role, one in found.items()}
    return row | {"n_prompts": len(edges["dense"]), "possible_edges": possible, "ranking": ranking}


def compare_task(models: dict[str, Any], tokenizer: Any, task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every reading of one task, on prompts of one length that all the models get right."""
    found = tasks.find(task)
    prompts = build(found, tokenizer, 4 * arguments.prompts, arguments.seed, 512, lambda text: None)
    right = torch.stack([answered(model, prompts) for model in models.values()]).all(0)
    prompts = of_common_length(prompts.take(right))[0].take(slice(0, arguments.prompts))
    decoders = {role: Decoder(model) for role, model in models.items()}
    possible = PromptEdges(decoders["dense"], prompts).n_possible
    print(f"{task}: {len(prompts)} prompts of {prompts.clean.shape[1]} tokens, {possible:,} edges each", flush=True)
    row: dict[str, Any] = {"length": prompts.clean.shape[1], "possible_edges": possible, "readings": {}, "curves": {}}
    leading = {role: leading_counts(decoder, prompts, arguments.memory) for role, decoder in decoders.items()}
    row["open_edges"] = {role: round(_gm(counts), 1) for role, counts in leading.items()}
    row["open_edges"] |= geometric(leading["dense"], leading["sparse"])
    for reading in arguments.readings:
        began = time.perf_counter()
        options: dict[str, Any] = {"points": arguments.points, "memory_mb": arguments.memory}
        models_found = {role: needed(decoder, prompts, reading, **options) for role, decoder in decoders.items()}
        row["readings"][reading] = {
            str(t): multiplier_row(models_found, t, possible) for t in models_found["dense"]["edges"]
        }
        row["curves"][reading] = {
            role: mean_curve(one["curve"]) for role, one in models_found.items() if one["curve"] is not None
        }
        at = row["readings"][reading]["0.9"]
        counts = ", ".join(f"{role} {at[f'{role}_edges']:,.0f}" for role in decoders)
        seconds = time.perf_counter() - began
        print(f"  {reading}: {counts}: {at['multiplier']:.1f}x ({at['low']:.1f} to {at['high']:.1f}), {seconds:.0f} s")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense")
    parser.add_argument("sparse")
    parser.add_argument("--control")
    parser.add_argument("--tasks", nargs="+", default=["ioi"])
    parser.add_argument("--readings", nargs="+", default=["removed", "share", "heads"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--memory", type=float, default=2048, help="MB for prompts side by side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sources = {"dense": arguments.dense, "sparse": arguments.sparse, "control": arguments.control}
    loaded = {role: sl.load(name, device=distributed.device()) for role, name in sources.items() if name}
    tokenizer = loaded["dense"][1]
    models = {role: model for role, (model, _) in loaded.items()}
    result: dict[str, Any] = {"models": sources, "seed": arguments.seed, "tasks": {}, "provenance": provenance()}
    for task in arguments.tasks:
        result["tasks"][task] = compare_task(models, tokenizer, task, arguments)
        if arguments.json:
            write_json(arguments.json, result)  # after every task: nothing is lost when a later one fails


if __name__ == "__main__":
    main()
