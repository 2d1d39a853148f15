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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from .. import tasks
from ..config import Search
from ..models.architectures import base_model, dimensions, mlp_width
from ..models.decoder import Decoder
from ..models.loading import is_gated, name_of, resolve
from ..runs import distributed
from ..runs.run import check_folder, check_writable, provenance, write_json
from ..tasks.prompts import Prompts, build
from .attention_edges import attention_curve
from .circuit import Circuit
from .faithfulness import (
    MIB_FRACTIONS,
    ROUNDS,
    THRESHOLDS,
    Curve,
    NoEffect,
    check_spread,
    log_sizes,
    mib_areas,
    refine,
    refined_curve,
)
from .heads import HeadPatcher, open_edges
from .rows import CurveRow, Reading, Results
from .run import Patcher
from .scores import MOST_EXACT, eap, estimate_memory, exact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.loading import Source

FEWEST = 4  # prompts the model must get right
MOST_LISTED = 5000  # edges of a circuit in its row; circuit.json has all of them


def discover(
    source: "Source",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    task: "str | Path | tasks.Task" = "ioi",
    method: str | None = None,
    *,
    settings: Search | None = None,
    out: str | Path | None = None,
    json: str | Path | None = None,
    show_progress: bool = False,
    say: Callable[[str], None] = print,
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
    models: list[nn.Module],
    tokenizer: "PreTrainedTokenizerBase",
    task: tasks.Task,
    settings: Search,
    say: Callable[[str], None],
) -> Prompts:
    """Checked pairs that all the models get right, at most twice `settings.prompts`."""
    for model in models:
        check_size(model, settings)
    config = base_model(models[0]).config
    wanted = 2 * settings.prompts
    prompts = build(task, tokenizer, wanted + wanted // 4, settings.seed, dimensions(config).max_tokens, say)
    if int(torch.stack([prompts.clean.max(), prompts.corrupted.max()]).max()) >= config.vocab_size:
        raise ValueError("the tokenizer has tokens this model does not know; load both from the same place")
    modes = [model.training for model in models]
    try:
        right = torch.stack([answered(model.eval(), prompts) for model in models]).all(0)
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)
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
    kept = prompts.take(right)
    return kept.take(slice(0, wanted))


def check_size(model: nn.Module, settings: Search) -> None:
    """Refuse exact patching of a big graph before anything is computed."""
    if settings.method == "exact":
        n_edges = Decoder(model).components.n_edges
        if n_edges > MOST_EXACT:
            raise ValueError(
                f"exact patching would need {n_edges:,} forward passes over all prompts (at most {MOST_EXACT:,}); "
                "use --method eap-ig"
            )


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
    model: nn.Module,
    name: str,
    scoring: Prompts,
    heldout: Prompts,
    settings: Search,
    *,
    show_progress: bool = False,
    say: Callable[[str], None] = print,
) -> Circuit:
    """Score, select and measure on prompts that are already chosen."""
    was_training = model.training
    model.eval()
    try:
        return _discover(model, name, scoring, heldout, settings, show_progress, say)
    finally:
        model.train(was_training)


def _discover(
    model: nn.Module,
    name: str,
    scoring: Prompts,
    heldout: Prompts,
    settings: Search,
    show_progress: bool,
    say: Callable[[str], None],
) -> Circuit:
    began = time.perf_counter()
    decoder = Decoder(model)
    patcher = Patcher(decoder, heldout, settings.ablation, settings.memory_mb)
    check_spread(patcher.m_model.numpy(), patcher.m_nothing.numpy(), name)
    scores = _scores(decoder, scoring, settings, show_progress, say)
    scored = time.perf_counter()

    c = decoder.components
    circuit = Circuit(c, scores, c.possible, decoder.dims.d_model)
    order = circuit.order(settings.selection, not settings.signed)
    curve, areas, asked = _curve(patcher, order, settings, show_progress)
    circuit.curves["components"], circuit.mask = curve, c.prune(c.mask(order[: asked[curve.edges_at(0.9)]]))
    drawn = time.perf_counter()

    config = base_model(model).config
    readings = {"components": _components(patcher, circuit, areas, settings, show_progress)}
    found: Results = {
        "task": name, "metric": heldout.metric, "model": str(config._name_or_path or config.model_type),
        "sparse": is_gated(base_model(model)), "settings": dataclasses.asdict(settings),
        "n_prompts_scoring": len(scoring), "n_layers": c.n_layers, "n_heads": c.n_heads, "readings": readings,
        "seconds": {},
    }  # fmt: skip
    if settings.heads:
        try:
            ranking, heads = _heads(model, circuit, heldout, settings, show_progress)
            found["heads_at"] = {str(t): heads.edges_at(t) for t in THRESHOLDS}
            found["heads"] = ranking[: heads.edges_at(0.9)]
            found["heads_curve"] = heads.row(settings.seed)
        except NoEffect as error:
            say(f"{name}: no heads: {error}")
    if settings.tokens:
        with tqdm(desc="tokens", unit="circuit", disable=not show_progress) as bar:
            sizes = (settings.points, settings.memory_mb)
            try:
                by_token, row = attention_curve(decoder, scoring, heldout, *sizes, bar.update)
                check_spread(by_token.m_model, by_token.m_nothing, "by token")
                circuit.curves["corrupted"], readings["corrupted"] = by_token, row
            except NoEffect as error:
                say(f"{name}: no circuit by token: {error}")
    if found["sparse"]:
        found["open_edges"] = open_edges(model, heldout)
    found["seconds"] = {
        "scoring": round(scored - began, 1), "curve": round(drawn - scored, 1),
        "rest": round(time.perf_counter() - drawn, 1),
    }  # fmt: skip
    circuit.results = found
    return circuit


def _components(
    patcher: Patcher, circuit: Circuit, areas: dict[str, float], settings: Search, show_progress: bool
) -> Reading:
    """The row of the component graph."""
    c, curve = circuit.components, circuit.curves["components"]
    scores = circuit.scores[c.possible]
    row: dict[str, Any] = {
        "n_prompts": len(patcher.m_model),
        "n_edges": c.n_edges,
        "n_edges_scored": int(np.isfinite(scores).sum()),
        "n_edges_zero": int((scores == 0).sum()),
        "m_model": float(patcher.m_model.numpy().mean()),
        "m_nothing": float(patcher.m_nothing.numpy().mean()),
        "checks": patcher.checks,
        "curve": curve.row(settings.seed),
        "edges_at": {str(t): curve.edges_at(t) for t in THRESHOLDS},
        "edges_at_interval": {str(t): list(curve.edges_interval(t, settings.seed)) for t in THRESHOLDS},
        "area_log": curve.area_log(),
        **areas,
        "circuit": [[edge, score] for edge, score in circuit.edges[:MOST_LISTED]],
    }
    if settings.random_control:
        row["random"] = _random(patcher, curve, settings, show_progress)
    return cast(Reading, row)


def _scores(
    decoder: Decoder, prompts: Prompts, settings: Search, show_progress: bool, say: Callable[[str], None]
) -> np.ndarray:
    if settings.method == "exact":
        patcher = Patcher(decoder, prompts, settings.ablation, settings.memory_mb)
        with tqdm(total=decoder.components.n_edges, desc="patching", unit="edge", disable=not show_progress) as bar:
            return exact(patcher, bar.update)
    steps = settings.steps if settings.method == "eap-ig" else 0
    n, tokens = prompts.clean.shape
    shape = tokens, prompts.position.shape[1], decoder.config.vocab_size, decoder.gates is not None
    one = estimate_memory(decoder.dims, mlp_width(decoder.config), 1, *shape)
    at_once = max(1, min(n, int(settings.memory_mb * 2**20 / one.total)))
    need = estimate_memory(decoder.dims, mlp_width(decoder.config), at_once, *shape)
    say(f"scoring {decoder.components.n_edges:,} edges on {n} prompts needs about {need}")
    with tqdm(total=n * max(steps, 1), desc="scoring", unit="prompt", disable=not show_progress) as bar:
        return eap(decoder, prompts, steps, at_once, bar.update, settings.path, settings.ablation)


def _curve(
    patcher: Patcher, order: np.ndarray, settings: Search, show_progress: bool
) -> tuple[Curve, dict[str, float], dict[int, int]]:
    """(curve, MIB's areas, edges really in -> edges asked for)."""
    c = patcher.decoder.components
    n_edges = len(order)
    # Dead ends make a circuit smaller than what was asked for: look for the sizes that come out evenly spaced.
    true = {int(n): int(c.prune(c.mask(order[:n])).sum()) for n in log_sizes(n_edges, 10 * settings.points)}
    asked = []
    for size in log_sizes(n_edges, settings.points):
        distance = {n: abs(np.log((count + 0.1) / size)) for n, count in true.items()}
        asked.append(min(distance, key=distance.__getitem__))
    mib = [max(1, round(share * n_edges)) for share in MIB_FRACTIONS]
    m_model, m_nothing = patcher.m_model.numpy(), patcher.m_nothing.numpy()
    measured: dict[int, np.ndarray] = {n_edges: m_model}  # edges asked for -> metric per prompt
    sizes: dict[int, int] = {n_edges: n_edges}  # -> edges really in

    def curve(edges: Callable[[int], int]) -> Curve:
        keys = sorted(measured)
        return Curve(np.array([edges(n) for n in keys]), np.stack([measured[n] for n in keys]), m_model, m_nothing)

    with tqdm(desc="curve", unit="circuit", disable=not show_progress) as bar:
        wanted = [*asked, *mib]
        for _ in range(ROUNDS + 1):
            new = [n for n in dict.fromkeys(wanted) if n not in measured]
            masks = [c.prune(c.mask(order[:n])) for n in new]
            values: Any = patcher.run(np.stack(masks), bar.update) if new else []
            for n, mask, value in zip(new, masks, values, strict=True):
                measured[n], sizes[n] = value.numpy(), int(mask.sum())
            by_asked = curve(int)
            wanted = refine(by_asked.edges, by_asked.effects())
    nothing, model = patcher.m_nothing.mean().item(), patcher.m_model.mean().item()
    effects = np.array([(measured[n].mean() - nothing) / (model - nothing) for n in mib])
    fewest = {sizes[n]: n for n in sorted(measured, reverse=True)}
    return curve(sizes.__getitem__), mib_areas(effects), fewest


def _random(patcher: Patcher, curve: Curve, settings: Search, show_progress: bool) -> CurveRow:
    """Random circuits (made of whole paths) at up to six sizes of the curve: slow, as they reach every part."""
    c, rng = patcher.decoder.components, np.random.default_rng(settings.seed)
    sizes = curve.edges[curve.edges > 0][:-1]
    sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, 6).round().astype(int))]
    masks = [c.random_circuit(int(n), rng) for n in sizes]
    with tqdm(total=len(masks), desc="random", unit="circuit", disable=not show_progress) as bar:
        values = patcher.run(np.stack(masks), bar.update).numpy()
    edges = np.array([int(mask.sum()) for mask in masks] + [c.n_edges])
    metrics = np.concatenate([values, patcher.m_model.numpy()[None]])
    return Curve(edges, metrics, patcher.m_model.numpy(), patcher.m_nothing.numpy()).row(settings.seed)


def _heads(
    model: nn.Module, circuit: Circuit, heldout: Prompts, settings: Search, show_progress: bool
) -> tuple[list[str], Curve]:
    """(heads, best first; the explained effect of keeping the best n of them)."""
    ranking = circuit.components.rank_heads(circuit.scores)
    patcher = HeadPatcher(model, heldout)
    m_model, m_nothing = patcher.run([ranking, []]).numpy()
    check_spread(m_model, m_nothing, "heads")
    sizes = log_sizes(len(ranking), min(settings.points, 10)).tolist()
    with tqdm(desc="heads", unit="set", disable=not show_progress) as bar:

        def run(new: list[int]) -> np.ndarray:
            return patcher.run([ranking[:n] for n in new], bar.update).numpy()

        curve = refined_curve(sizes, run, m_model, m_nothing, len(ranking))
    return [f"a{layer}.h{head}" for layer, head in ranking], curve
