"""From a model and a task to the circuit that does it.

1. Prompts: generated, checked, those the model gets wrong dropped; half for scoring, half held out.
2. Scores: every edge of the component graph, on the scoring half.
3. Curve: explained effect of the best n edges on the held-out half, more points where it crosses a threshold.
4. Heads: the same with whole heads kept or corrupted.
5. Tokens: the same with single attention edges (head, query, key) kept or corrupted.
6. Sparse models: which (head, query, key) the gates leave open on these prompts, and which are proven absent.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .. import tasks
from ..config import Search
from ..models.architectures import base_model, dimensions, mlp_width
from ..models.decoder import Decoder
from ..models.loading import Source, is_gated, name_of, resolve
from ..runs import distributed
from ..runs.run import check_folder, check_writable, provenance, write_json
from ..tasks.prompts import Prompts, build
from .attention_edges import attention_curve
from .circuit import Circuit
from .faithfulness import MIB_FRACTIONS, Curve, NoEffect, check_spread, log_sizes, mib_areas, refined_curve
from .heads import HeadPatcher, open_edges
from .rows import CurveRow, Reading, Results
from .run import Patcher
from .scores import GimDecoder, check_exact, eap, estimate_memory, exact

Say = Callable[[str], None]
FEWEST = 4  # prompts the model must get right
MOST_LISTED = 5000  # edges of a circuit in its row; circuit.json has all of them


def discover(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None = None,
    task: str | Path | tasks.Task = "ioi",
    method: str | None = None,
    *,
    settings: Search | None = None,
    out: str | Path | None = None,
    json: str | Path | None = None,
    show_progress: bool = False,
    say: Say = print,
    **changes: Any,
) -> Circuit:
    """The circuit with which a model does a task, with everything measured about it in `.results`.

    source: a name, a path, a Run, a model (then with its tokenizer) or (model, tokenizer). task: a registered name, a
    Task, or the path of a .jsonl file. Settings are those of config.Search; single ones may be given by name:
    discover("gpt2", task="ioi", prompts=32). The circuit returned is the smallest one that explains 90 % of the effect
    and stays above. out: a folder for circuit.json and results.json; json: a file for the results alone. Several
    processes, each with the whole model, share the work.
    """
    settings = dataclasses.replace(settings or Search(), **changes | ({} if method is None else {"method": method}))
    folder, file = (Path(path) if path is not None else None for path in (out, json))
    found = tasks.find(task)  # what can be refused is refused before a model is loaded
    check_folder(folder)
    check_writable(file)
    distributed.start()
    say, show_progress = distributed.quiet(say), show_progress and distributed.is_main()
    model, tokenizer = resolve(source, tokenizer)
    if tokenizer is None:
        raise ValueError("discover needs a tokenizer beside a loaded model: discover(model, tokenizer)")
    prompts = prepare([model], tokenizer, found, settings, say)
    circuit = discover_on(model, found.name, *split(prompts), settings, show_progress=show_progress, say=say)
    circuit.results["model"] = name_of(source)
    if distributed.is_main():
        rows = circuit.results | {"provenance": provenance()}
        if file is not None:
            write_json(file, rows)
        if folder is not None:
            write_json(folder / "results.json", rows)
            circuit.save(folder / "circuit.json")
    return circuit


def table(results: Results) -> str:
    """What `discover` found, in a few lines."""
    found = results["readings"]["components"]
    lines = [
        f"metric: {found['m_model']:.3f} on the prompts, {found['m_nothing']:.3f} on the corrupted ones "
        f"(n = {found['n_prompts']} held-out prompts)"
    ]
    for threshold, edges in found["edges_at"].items():
        low, high = found["edges_at_interval"][threshold]
        heads = f", {results['heads_at'][threshold]} heads" if "heads_at" in results else ""
        count = f"{edges:,} of {found['n_edges']:,} edges ({low:,.0f} to {high:,.0f})"
        lines.append(f"{float(threshold):.0%} of the effect: {count}{heads}")
    if "open_edges" in results:
        gates = results["open_edges"]
        lines.append(
            f"gates open {gates['n_open']:,} of {gates['n_possible']:,} (head, query, key) edges on "
            f"{gates['n_prompts']} prompts of {gates['length']} tokens; {gates['n_proven_absent']:,} are proven absent"
        )
    return "\n".join(lines)


def prepare(
    models: list[nn.Module], tokenizer: PreTrainedTokenizerBase, task: tasks.Task, settings: Search, say: Say
) -> Prompts:
    """Checked pairs that all the models get right, at most twice `settings.prompts`."""
    for model in models if settings.method == "exact" else ():
        check_exact(Decoder(model).components.n_edges)  # before anything is computed
    config = base_model(models[0]).config
    wanted = 2 * settings.prompts
    prompts = build(task, tokenizer, wanted + wanted // 4, settings.seed, dimensions(config).max_tokens, say)
    if int(torch.stack([prompts.clean.max(), prompts.corrupted.max()]).max()) >= config.vocab_size:
        raise ValueError("the tokenizer has tokens this model does not know; load both from the same place")
    with _evaluating(*models):
        right = torch.stack([answered(model, prompts) for model in models]).all(0)
    right = distributed.total(right.int()) == distributed.world()  # the same prompts everywhere
    n_right = int(right.sum())
    if len(prompts) < FEWEST:
        raise ValueError(f"task {task.name!r}: only {len(prompts)} usable prompts; at least {FEWEST} are needed")
    if n_right < FEWEST or n_right < len(prompts) / 4:
        raise ValueError(
            f"task {task.name!r}: right on only {n_right} of {len(prompts)} prompts; a circuit needs a model that can "
            "do the task"
        )
    say(f"{task.name}: right on {n_right} of {len(prompts)} prompts; the others are left out")
    return prompts.take(right).take(slice(0, wanted))


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    """Models in evaluation mode, afterwards as they were."""
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


def split(prompts: Prompts) -> tuple[Prompts, Prompts]:
    """(for scoring, held out): the two halves."""
    half = len(prompts) // 2
    return prompts.take(slice(0, half)), prompts.take(slice(half, None))


def answered(model: nn.Module, prompts: Prompts, at_once: int = 32) -> torch.Tensor:
    """[n] bool: which clean prompts the model gets right."""
    device = next(model.parameters()).device
    right = []
    for first in range(0, len(prompts), at_once):
        part = prompts.take(slice(first, first + at_once)).to(device)
        logits = part.ask(model, part.clean)
        right.append(part.correct(part.score(logits), logits).cpu())
    return torch.cat(right)


def discover_on(
    model: nn.Module, name: str, scoring: Prompts, heldout: Prompts, settings: Search, *,
    show_progress: bool = False, say: Say = print,
) -> Circuit:  # fmt: skip
    """Score, select and measure on prompts that are already chosen."""
    with _evaluating(model):
        return _Discovery(model, name, scoring, heldout, settings, show_progress, say).circuit()


@dataclasses.dataclass
class _Discovery:
    """One model on one task, step by step."""

    model: nn.Module
    name: str
    scoring: Prompts
    heldout: Prompts
    settings: Search
    show_progress: bool
    say: Say

    def circuit(self) -> Circuit:
        began = time.perf_counter()
        settings, decoder = self.settings, Decoder(self.model)
        patcher = Patcher(decoder, self.heldout, settings.ablation, settings.memory_mb)
        check_spread(patcher.m_model.numpy(), patcher.m_nothing.numpy(), self.name)
        scores = self.scores(decoder)
        scored = time.perf_counter()

        c = decoder.components
        circuit = Circuit(c, scores, c.possible, decoder.dims.d_model)
        order = circuit.order(settings.selection, not settings.signed)
        curve, areas, asked = self.curve(patcher, order)
        circuit.curves["components"], circuit.mask = curve, c.prune(c.mask(order[: asked[curve.edges_at(0.9)]]))
        drawn = time.perf_counter()

        config = base_model(self.model).config
        found: Results = {
            "task": self.name, "metric": self.heldout.metric, "model": str(config._name_or_path or config.model_type),
            "sparse": is_gated(base_model(self.model)), "settings": dataclasses.asdict(settings),
            "n_prompts_scoring": len(self.scoring), "n_layers": c.n_layers, "n_heads": c.n_heads,
            "readings": {"components": self.components(patcher, circuit, areas)}, "seconds": {},
        }  # fmt: skip
        if settings.heads:
            self.heads(circuit, found)
        if settings.tokens:
            self.tokens(decoder, circuit, found)
        if found["sparse"]:
            found["open_edges"] = open_edges(self.model, self.heldout)
        times = {"scoring": scored - began, "curve": drawn - scored, "rest": time.perf_counter() - drawn}
        found["seconds"] = {part: round(seconds, 1) for part, seconds in times.items()}
        circuit.results = found
        return circuit

    def bar(self, what: str, unit: str = "circuit", total: int | None = None) -> Any:
        return tqdm(total=total, desc=what, unit=unit, disable=not self.show_progress)

    def scores(self, decoder: Decoder) -> np.ndarray:
        settings, prompts, n_edges = self.settings, self.scoring, decoder.components.n_edges
        if settings.method == "exact":
            patcher = Patcher(decoder, prompts, settings.ablation, settings.memory_mb)
            with self.bar("patching", "edge", n_edges) as bar:
                return exact(patcher, bar.update)
        decoder = GimDecoder(decoder.model) if settings.method == "gim" else decoder
        steps = settings.steps if settings.method == "eap-ig" else 0
        n, tokens = prompts.clean.shape
        shape = tokens, prompts.position.shape[1], decoder.config.vocab_size, decoder.gates is not None
        one = estimate_memory(decoder.dims, mlp_width(decoder.config), 1, *shape)
        at_once = max(1, min(n, int(settings.memory_mb * 2**20 / one.total)))
        need = estimate_memory(decoder.dims, mlp_width(decoder.config), at_once, *shape)
        self.say(f"scoring {n_edges:,} edges on {n} prompts needs about {need}")
        with self.bar("scoring", "prompt", n * max(steps, 1)) as bar:
            return eap(decoder, prompts, steps, at_once, bar.update, settings.path, settings.ablation)

    def curve(self, patcher: Patcher, order: np.ndarray) -> tuple[Curve, dict[str, float], dict[int, int]]:
        """(curve, MIB's areas, edges really in -> edges asked for)."""
        c, n_edges, points = patcher.decoder.components, len(order), self.settings.points
        # Dead ends make a circuit smaller than what was asked for: look for the sizes that come out evenly spaced.
        true = {int(n): int(c.prune(c.mask(order[:n])).sum()) for n in log_sizes(n_edges, 10 * points)}
        asked = [min(true, key=lambda n: abs(np.log((true[n] + 0.1) / size))) for size in log_sizes(n_edges, points)]
        mib = [max(1, round(share * n_edges)) for share in MIB_FRACTIONS]
        m_model, m_nothing = patcher.m_model.numpy(), patcher.m_nothing.numpy()
        sizes: dict[int, int] = {n_edges: n_edges}  # edges asked for -> edges really in
        with self.bar("curve") as bar:

            def run(new: list[int]) -> np.ndarray:
                masks = [c.prune(c.mask(order[:n])) for n in new]
                sizes.update((n, int(mask.sum())) for n, mask in zip(new, masks, strict=True))
                return patcher.run(np.stack(masks), bar.update).numpy()

            by_asked = refined_curve([*asked, *mib], run, m_model, m_nothing, n_edges)
        measured = dict(zip(by_asked.edges.tolist()[1:], by_asked.metrics[1:], strict=True))  # but for no edge at all
        nothing, model = patcher.m_nothing.mean().item(), patcher.m_model.mean().item()
        effects = np.array([(measured[n].mean() - nothing) / (model - nothing) for n in mib])
        curve = Curve(np.array([sizes[n] for n in measured]), by_asked.metrics[1:], m_model, m_nothing)
        return curve, mib_areas(effects), {sizes[n]: n for n in sorted(measured, reverse=True)}

    def components(self, patcher: Patcher, circuit: Circuit, areas: dict[str, float]) -> Reading:
        """The row of the component graph."""
        c, curve = circuit.components, circuit.curves["components"]
        scores = circuit.scores[c.possible]
        row = curve.reading(self.settings.seed) | areas | {
            "n_edges": c.n_edges, "n_edges_scored": int(np.isfinite(scores).sum()),
            "n_edges_zero": int((scores == 0).sum()), "checks": patcher.checks, "area_log": curve.area_log(),
            "circuit": [[edge, score] for edge, score in circuit.edges[:MOST_LISTED]],
        }  # fmt: skip
        if self.settings.random_control:
            row["random"] = self.random(patcher, curve)
        return cast(Reading, row)

    def random(self, patcher: Patcher, curve: Curve) -> CurveRow:
        """Random circuits (made of whole paths) at up to six sizes of the curve: slow, as they reach every part."""
        c, rng = patcher.decoder.components, np.random.default_rng(self.settings.seed)
        sizes = curve.edges[curve.edges > 0][:-1]
        sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, 6).round().astype(int))]
        masks = [c.random_circuit(int(n), rng) for n in sizes]
        with self.bar("random", total=len(masks)) as bar:
            values = patcher.run(np.stack(masks), bar.update).numpy()
        edges = np.array([int(mask.sum()) for mask in masks] + [c.n_edges])
        metrics = np.concatenate([values, curve.m_model[None]])
        return Curve(edges, metrics, curve.m_model, curve.m_nothing).row(self.settings.seed)

    def heads(self, circuit: Circuit, found: Results) -> None:
        """The best heads, and the explained effect of keeping n of them."""
        ranking = circuit.components.rank_heads(circuit.scores)
        patcher = HeadPatcher(self.model, self.heldout)
        m_model, m_nothing = patcher.run([ranking, []]).numpy()
        try:
            check_spread(m_model, m_nothing, "heads")
        except NoEffect as error:
            return self.say(f"{self.name}: no heads: {error}")
        sizes = log_sizes(len(ranking), min(self.settings.points, 10)).tolist()
        with self.bar("heads", "set") as bar:

            def run(new: list[int]) -> np.ndarray:
                return patcher.run([ranking[:n] for n in new], bar.update).numpy()

            curve = refined_curve(sizes, run, m_model, m_nothing, len(ranking))
        found["heads_at"] = curve.at_thresholds()
        found["heads"] = [f"a{layer}.h{head}" for layer, head in ranking[: curve.edges_at(0.9)]]
        found["heads_curve"] = curve.row(self.settings.seed)

    def tokens(self, decoder: Decoder, circuit: Circuit, found: Results) -> None:
        """The circuit of single attention edges."""
        sizes = self.settings.points, self.settings.memory_mb
        try:
            with self.bar("tokens") as bar:
                curve, row = attention_curve(decoder, self.scoring, self.heldout, *sizes, bar.update)
            check_spread(curve.m_model, curve.m_nothing, "by token")
        except NoEffect as error:
            return self.say(f"{self.name}: no circuit by token: {error}")
        circuit.curves["corrupted"], found["readings"]["corrupted"] = curve, row
