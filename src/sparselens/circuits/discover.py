"""From a model and a task to the circuits that do it.

1. Prompts: generated, checked, those the model gets wrong dropped. Attention edges: prompts of one length.
2. Attention edges and heads, in the ways `readings` names (readings.py); all edges that lead to the answer.
3. Component graph, if asked for: every edge scored on half of the prompts, explained effect of the best n edges on the
   other half, more points where the curve crosses a threshold.
4. Sparse models: which (head, query, key) the gates leave open on these prompts, and which are proven absent.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .. import tasks
from ..config import Search, changed
from ..models.architectures import architecture, base_model, dimensions, mlp_width
from ..models.decoder import Decoder
from ..models.loading import Source, check_source, is_gated, name_of, resolve
from ..runs import distributed
from ..runs.run import check_folder, check_writable, provenance, write_json
from ..tasks.prompts import Prompts, build, of_common_length
from .attention_edges import AttentionEdges, Others
from .circuit import Circuit
from .estimate import check_memory, measured, total_runs
from .faithfulness import MIB_FRACTIONS, Curve, NoEffect, check_spread, log_sizes, mib_areas, refined_curve
from .prompt_curves import usable
from .readings import EdgeReader, open_edges
from .rows import Areas, CurveRow, Reading, Results, wording
from .run import Patcher
from .scores import GimDecoder, check_exact, eap, estimate_memory, exact

Say = Callable[[str], None]
FEWEST = 4  # prompts the model must get right
MOST_LISTED = 5000  # edges of a circuit in its row; circuit.json has all of them


class Chosen(NamedTuple):
    """The prompts of a task that all models at hand get right."""

    mixed: Prompts | None  # of any length, for the component graph: half for scoring, half held out
    common: Prompts | None  # of one length, for attention edges


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
    """The circuits with which a model does a task: what was measured about them is in `.results`.

    source: a name, a path, a Run, a model (then with its tokenizer) or (model, tokenizer). task: a registered name, a
    Task, or the path of a .jsonl file. Settings are those of config.Search; single ones may be given by name:
    discover("gpt2", task="ioi", prompts=32). The circuit returned is the smallest one of the component graph that
    explains 90 % of the effect and stays above (empty where `components` is not among the readings). out: a folder for
    circuit.json and results.json; json: a file for the results alone. Several processes, each with the whole model,
    share the work.
    """
    settings = changed(settings or Search(), changes | ({} if method is None else {"method": method}))
    check_source(source)
    folder, file = (Path(path) if path is not None else None for path in (out, json))
    found = tasks.find(task)  # what can be refused is refused before a model is loaded
    check_folder(folder)
    check_writable(file)
    distributed.start()
    say, show_progress = distributed.quiet(say), show_progress and distributed.is_main()
    model, tokenizer = resolve(source, tokenizer, say)
    if tokenizer is None:
        raise ValueError("discover needs a tokenizer beside a loaded model: discover(model, tokenizer)")
    prompts = prepare([model], tokenizer, found, settings, say)
    say(f"{found.name} in {name_of(source)}; {distributed.in_words()}")
    circuit = discover_on(model, found.name, prompts, settings, show_progress=show_progress, say=say)
    circuit.results["model"] = name_of(source)
    if distributed.is_main():
        rows = circuit.results | {"provenance": provenance()}
        if file is not None:
            write_json(file, rows)
        if folder is not None:
            write_json(folder / "results.json", rows)
            if "components" in circuit.results["readings"]:
                circuit.save(folder / "circuit.json")
    return circuit


def table(results: Results) -> str:
    """What `discover` found, in a few lines."""
    lines = []
    if "leading" in results:
        whole = results["leading"]
        lines.append(
            f"{whole['edges']:,.0f} of {whole['n_possible']:,} attention edges lead to the answer: with these alone it "
            f"is the model's own (n = {whole['n_prompts']} prompts of {whole['length']} tokens)"
        )
    for name, found in results["readings"].items():
        words = wording(name)
        lines.append(f"{name} ({'per prompt' if found['scope'] == 'prompt' else 'per task'}): {words.others}")
        for threshold, edges in found["edges_at"].items():
            low, high = found["edges_at_interval"][threshold]
            count = f"{edges:,.0f} of {found['n_edges']:,} {words.edges} ({low:,.0f} to {high:,.0f})"
            by = f", by {found['ranking'][threshold]}" if "ranking" in found else ""
            lines.append(f"  {float(threshold):.0%} of the effect: {count}{by}")
        lines[-1] += f"; n = {found['n_prompts']} prompts"
        if "alternatives" in found:
            lines += alternatives_table(found)
    if "open_edges" in results:
        gates = results["open_edges"]
        lines.append(
            f"gates open {gates['n_open']:,} of {gates['n_possible']:,} (head, query, key) edges on "
            f"{gates['n_prompts']} prompts of {gates['length']} tokens; {gates['n_proven_absent']:,} are proven absent"
        )
    return "\n".join(lines)


def alternatives_table(found: Reading) -> list[str]:
    """One line per search with the edges already found made dear."""
    row, lines = found["alternatives"], []
    for i, (reached, edges) in enumerate(zip(row["reached"], row["edges"], strict=True)):
        overlap = row["overlap"][i]
        text = f"  circuit {i + 1}: reaches 90 % on {reached:.0%} of the prompts"
        text += "" if edges is None else f", with {edges:,.0f} edges"
        lines.append(text + ("" if overlap is None else f"; overlap with those before {overlap:.2f} (Jaccard)"))
    return lines


def prepare(
    models: list[nn.Module], tokenizer: PreTrainedTokenizerBase, task: tasks.Task, settings: Search, say: Say
) -> Chosen:
    """Checked pairs that all the models get right. What cannot be done is refused here, before any work."""
    for model in models:
        architecture(base_model(model).config)
    components, edges = "components" in settings.readings, set(settings.readings) != {"components"}
    for model in models if components and settings.method == "exact" else ():
        check_exact(Decoder(model).components.n_edges)
    config = base_model(models[0]).config
    limits = settings.seed, dimensions(config).max_tokens
    wanted, mixed, common = 2 * settings.prompts, None, None
    with _evaluating(*models):
        if components:
            mixed = build(task, tokenizer, wanted + wanted // 4, *limits, say)
            mixed = _right(models, mixed, task.name, say).take(slice(0, wanted))
        if edges:
            quiet: Say = (lambda text: None) if components else say
            (common,) = of_common_length(build(task, tokenizer, 8 * settings.prompts, *limits, quiet))
            _check_common(common, task.name)
            common = _right(models, common.take(slice(0, wanted)), task.name, say)
            try:
                common = _with_effect(models, common, settings, task.name).take(slice(0, settings.prompts))
            except NoEffect as error:
                if not components:
                    raise
                say(f"{task.name}: no attention edges: {error}")
                common = None
    return Chosen(mixed, common)


def _check_common(prompts: Prompts, name: str) -> None:
    if len(prompts) < FEWEST:
        raise ValueError(
            f"task {name!r}: attention edges are counted on prompts of one length, and of the most common one "
            f"({prompts.clean.shape[1]} tokens) there are {len(prompts)}; at least {FEWEST} are needed. Give more "
            "prompts of one length, or ask for --readings components"
        )


def _right(models: list[nn.Module], prompts: Prompts, name: str, say: Say) -> Prompts:
    """Those that every model answers rightly."""
    if (
        int(torch.stack([prompts.clean.max(), prompts.corrupted.max()]).max())
        >= base_model(models[0]).config.vocab_size
    ):
        raise ValueError("the tokenizer has tokens this model does not know; load both from the same place")
    right = _agreed(torch.stack([answered(model, prompts) for model in models]).all(0))
    n_right = int(right.sum())
    if len(prompts) < FEWEST:
        raise ValueError(f"task {name!r}: only {len(prompts)} usable prompts; at least {FEWEST} are needed")
    if n_right < FEWEST or n_right < len(prompts) / 4:
        raise ValueError(
            f"task {name!r}: right on only {n_right} of {len(prompts)} prompts; a circuit needs a model that can "
            "do the task"
        )
    say(f"{name}: right on {n_right} of {len(prompts)} prompts; the others are left out")
    if n_right < len(prompts) / 2:
        few = f"warning: {name} is done rightly on {n_right} of {len(prompts)} prompts, fewer than half"
        say(f"{few}; the circuit describes those few, and some may be right by chance")
    return prompts.take(right)


def _with_effect(models: list[nn.Module], prompts: Prompts, settings: Search, name: str) -> Prompts:
    """Those on which attention raises the metric, in every model and for every way of taking edges out."""
    needed: dict[Others, set[str]] = {"removed": set(), "corrupted": {"corrupted", "heads"}, "mean": {"mean"}}
    ways = [others for others, by in needed.items() if others == "removed" or by & set(settings.readings)]
    kept = np.ones(len(prompts), bool)
    for decoder in map(Decoder, models):
        check_memory(decoder, prompts, name)
        for others in ways:
            edges = AttentionEdges(decoder, prompts, others, settings.memory_mb)
            with torch.no_grad():
                both = [
                    torch.stack([edges.metric(edges.all(some, share), some) for share in (1.0, 0.0)])
                    for some in edges.parts()
                ]
            whole, nothing = torch.cat(both, 1).cpu().numpy()
            kept &= usable(whole, nothing, f"{name}, {others}")
    chosen = prompts.take(_agreed(torch.from_numpy(kept)))
    if len(chosen) < FEWEST:
        raise NoEffect(f"attention matters on {len(chosen)} of {len(prompts)} prompts; at least {FEWEST} are needed")
    return chosen


def _agreed(flags: torch.Tensor) -> torch.Tensor:
    """What is true in every process: the same prompts everywhere."""
    return distributed.total(flags.int()) == distributed.world()


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
    model: nn.Module, name: str, prompts: Chosen, settings: Search, *, show_progress: bool = False, say: Say = print
) -> Circuit:
    """Everything that was asked for, on prompts that are already chosen."""
    with _evaluating(model):
        return _Discovery(model, name, prompts, settings, show_progress, say).circuit()


@dataclasses.dataclass
class _Discovery:
    """One model on one task, step by step."""

    model: nn.Module
    name: str
    prompts: Chosen
    settings: Search
    show_progress: bool
    say: Say

    def circuit(self) -> Circuit:
        decoder, config = Decoder(self.model), base_model(self.model).config
        c = decoder.components
        circuit = Circuit(c, np.zeros(c.possible.shape), np.zeros_like(c.possible), decoder.dims.d_model)
        shown = self.prompts.common or self.prompts.mixed
        assert shown is not None
        circuit.results = {
            "task": self.name, "metric": shown.metric, "model": str(config._name_or_path or config.model_type),
            "sparse": is_gated(base_model(self.model)), "settings": dataclasses.asdict(self.settings),
            "n_layers": c.n_layers, "n_heads": c.n_heads, "readings": {}, "seconds": {},
        }  # fmt: skip
        if self.prompts.common is not None:
            self.attention_edges(decoder, circuit, self.prompts.common)
        if self.prompts.mixed is not None:
            try:
                self.component_graph(decoder, circuit, *split(self.prompts.mixed))
            except NoEffect as error:
                if not circuit.results["readings"]:
                    raise
                self.say(f"{self.name}: no component graph: {error}")
        if circuit.results["sparse"]:
            circuit.results["open_edges"] = open_edges(self.model, shown)
        return circuit

    def attention_edges(self, decoder: Decoder, circuit: Circuit, prompts: Prompts) -> None:
        """All readings but the component graph, in the order in which they are asked for."""
        need, results = measured(self.name, [decoder], prompts, self.settings), circuit.results
        self.say(str(need))
        at_once = min(len(prompts), AttentionEdges(decoder, prompts, "removed", self.settings.memory_mb).at_once)
        total = round(total_runs(self.settings, need.n_edges, len(prompts), at_once) / distributed.world())
        with self.bar("attention edges", "run", total) as bar:
            reader = EdgeReader(decoder, prompts, self.settings, bar.update)
            results["leading"] = reader.leading()
            asked = dict.fromkeys([*self.settings.readings, *(["learnt"] if self.settings.alternatives else [])])
            for reading in asked:
                if reading == "components":
                    continue
                began = time.perf_counter()
                for name, (row, curve) in reader.read(reading).items():
                    results["readings"][name] = row
                    if curve is not None:
                        circuit.curves[name] = curve
                results["seconds"][reading] = round(time.perf_counter() - began, 1)

    def component_graph(self, decoder: Decoder, circuit: Circuit, scoring: Prompts, heldout: Prompts) -> None:
        """Score every edge between components on half of the prompts, measure the best ones on the other half."""
        began, settings, c = time.perf_counter(), self.settings, decoder.components
        patcher = Patcher(decoder, heldout, settings.ablation, settings.memory_mb)
        check_spread(patcher.m_model.numpy(), patcher.m_nothing.numpy(), self.name)
        circuit.scores, circuit.mask = self.scores(decoder, scoring), c.possible
        order = circuit.order(settings.selection, not settings.signed)
        curve, areas, asked = self.curve(patcher, order)
        circuit.curves["components"], circuit.mask = curve, c.prune(c.mask(order[: asked[curve.edges_at(0.9)]]))
        circuit.results["readings"]["components"] = self.components(patcher, circuit, areas)
        circuit.results["n_prompts_scoring"] = len(scoring)
        circuit.results["seconds"]["components"] = round(time.perf_counter() - began, 1)

    def bar(self, what: str, unit: str = "circuit", total: int | None = None) -> Any:
        return tqdm(total=total, desc=what, unit=unit, disable=not self.show_progress)

    def scores(self, decoder: Decoder, prompts: Prompts) -> np.ndarray:
        settings, n_edges = self.settings, decoder.components.n_edges
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

    def curve(self, patcher: Patcher, order: np.ndarray) -> tuple[Curve, Areas, dict[int, int]]:
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

    def components(self, patcher: Patcher, circuit: Circuit, areas: Areas) -> Reading:
        """The row of the component graph."""
        c, curve = circuit.components, circuit.curves["components"]
        scores = circuit.scores[c.possible]
        row = curve.reading(c.n_edges, [[*edge] for edge in circuit.edges[:MOST_LISTED]], self.settings.seed)
        row |= {
            "cpr": areas["cpr"], "cmd": areas["cmd"], "area_log": curve.area_log(), "checks": patcher.checks,
            "n_edges_scored": int(np.isfinite(scores).sum()), "n_edges_zero": int((scores == 0).sum()),
        }  # fmt: skip
        if self.settings.random_control:
            row["random"] = self.random(patcher, curve)
        return row

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
