"""`sparselens trace`: one prompt in one model or two, taken apart; its rows, its graph, its files.

1. Everything that can be wrong is checked, and both transcoders are read, before any model is loaded.
2. Each model's attribution graph (growth.py). Both explain the same tokens and the same target: the first model's.
3. Where files, rows or words were asked for: clusters, who carries the edges between them, and interventions
   (summary.py). The second model's rows are those of the same edge.
4. Files are written when all of that has worked: all of them or none.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import Trace
from ..models.loading import Source, name_of, resolve
from ..runs.run import Run, check_folder, check_writable, provenance, write_json
from ..transcoders.transcoder import Transcoder
from .cluster_rules import read_rules, rules_of
from .clusters import Cluster, find_clusters
from .graph import Graph
from .growth import attribution_graph, prompt_ids
from .neuronpedia import write_graph
from .rows import ModelRows, TraceRows
from .summary import summarise, tell

Prompt = str | Sequence[int] | Tensor
Features = str | Path | Run | Transcoder
Verb = TypeVar("Verb", bound=Callable[..., Graph])


def _or_two_arguments(verb: Verb) -> Verb:
    """Lets (model, tokenizer) also be given as two arguments."""

    @functools.wraps(verb)
    def call(source: Any, *others: Any, **options: Any) -> Graph:
        if others and isinstance(others[0], PreTrainedTokenizerBase):
            source, others = (source, others[0]), others[1:]
        return verb(source, *others, **options)

    return cast(Verb, call)


@_or_two_arguments
def trace(
    source: Source, transcoder: Features, prompt: Prompt, target: Any = None, *, settings: Trace | None = None,
    against: tuple[Source, Features] | None = None, names: Sequence[str] = (),
    clusters: str | Path | Mapping[str, Any] | None = None, edge: str | None = None,
    out: str | Path | None = None, json: str | Path | None = None, mass: float = 0.95, most_targets: int = 10,
    edges_per_row: int = 4096, show_progress: bool = False, say: Callable[[str], None] | None = None,
    **overrides: Any,
) -> Graph:  # fmt: skip
    """The attribution graph of a prompt: who feeds whom, and how much, with every row adding up exactly.

    source: a name, a path, a Run, or (model, tokenizer). transcoder: its Run, its folder, or the Transcoder itself.
    prompt: text, or token ids.
    target: None, the likeliest next tokens until their probabilities reach `mass` (at most `most_targets`); "small" or
    a token id, one token (a list: several); ("small", "large") or "small - large", a difference of two; a direction
    [d_model] that reads the normed end of the residual stream. Single tokens are read as logit minus the mean logit of
    the vocabulary, differences as they are; before a softcap, where the model has one (Gemma 2).
    settings: all of `Trace`; overrides: some of its fields by name, e.g. position=9, budget=100.

    out: a folder for trace.json, the graph, clusters.json and the graph in Neuronpedia's format. json: a file for the
    rows. against: a second model and its transcoder, put beside the first. say: hears the rows in words. With any of
    these, one target is explained, and the rows are the graph's `rows`. names: what to call the models there.
    clusters: rules, or a file of them (clusters.json); edge: "source->target", the one between clusters to look at
    closely.
    """
    settings = _with(settings or Trace(), overrides)
    summed_up = any(asked is not None for asked in (out, json, against, say))
    _check(prompt, target, one_target=summed_up)
    check_folder(None if out is None else Path(out))
    check_writable(None if json is None else Path(json))
    rules = read_rules(clusters) if isinstance(clusters, str | Path) else clusters
    # Both transcoders before any model: a missing file should not cost the loading of a model.
    models = [(source, _coder(transcoder)), *([] if against is None else [(against[0], _coder(against[1]))])]
    growth = {name: getattr(settings, name) for name in ("position", "budget", "nodes", "edges", "memory_mb")} | {
        "mass": mass, "most_targets": 1 if summed_up else most_targets, "edges_per_row": edges_per_row,
        "show_progress": show_progress,
    }  # fmt: skip
    if not summed_up:
        return _graph(*models[0], prompt, target, growth)
    called = [*names[: len(models)], *(name_of(model) for model, _ in models[len(names) :])]
    parts = _sum_up(models, called, prompt, target, growth, settings, rules, edge, say or (lambda text: None))
    rows = cast(TraceRows, {**parts[0].rows, "provenance": provenance()})
    if against is not None:
        rows["against"] = parts[1].rows
    if out is not None:
        for part, folder in zip(parts, (Path(out), Path(out) / "against"), strict=False):
            _write(part, rules, settings, folder)
        write_json(Path(out) / "trace.json", rows)
    if json is not None:
        write_json(Path(json), rows)
    parts[0].graph.rows = rows
    return parts[0].graph


def _with(settings: Trace, overrides: Mapping[str, Any]) -> Trace:
    unknown = overrides.keys() - {field.name for field in fields(settings)}
    if unknown:
        raise ValueError(f"unknown setting {min(unknown)!r}; see sparselens trace --help for all of them")
    return replace(settings, **overrides)


def _check(prompt: Any, target: Any, one_target: bool) -> None:
    if one_target and isinstance(target, list):
        raise ValueError(f"target={target!r}: rows and files explain one target; leave out `out`, `json` and `against`")
    if not isinstance(prompt, str):
        return
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token of text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid text at character {error.start} ({error.reason})") from None


def _coder(transcoder: Features) -> Transcoder:
    if isinstance(transcoder, Transcoder):
        return transcoder
    return Transcoder.load(transcoder.path if isinstance(transcoder, Run) else transcoder)


def _graph(
    source: Source, coder: Transcoder, prompt: Prompt, target: Any, growth: dict[str, Any], beside: Graph | None = None
) -> Graph:
    model, tokenizer = resolve(source)
    if tokenizer is None:
        raise ValueError("no tokenizer to read the prompt with: give (model, tokenizer) instead of the model alone")
    ids = prompt_ids(model, tokenizer, prompt).tolist()
    if beside is not None and beside.replacement().frozen.ids.tolist() != ids:
        raise ValueError("the second model reads the prompt as other tokens than the first; compare related models")
    coder = coder.to(next(model.parameters()).device)
    return attribution_graph(model, tokenizer, coder, prompt, target, **growth)


class _Part(NamedTuple):  # what one of the models gives
    name: str
    graph: Graph
    clusters: list[Cluster]
    rows: ModelRows


def _sum_up(
    models: Sequence[tuple[Source, Transcoder]], names: Sequence[str], prompt: Prompt, target: Any,
    growth: dict[str, Any], settings: Trace, rules: Mapping[str, Any] | None, edge: str | None,
    say: Callable[[str], None],
) -> list[_Part]:  # fmt: skip
    """Graph and rows of each model; what was left open (target, edge) is the first one's choice."""
    parts: list[_Part] = []
    for (source, coder), name in zip(models, names, strict=True):
        graph = _graph(source, coder, prompt, target, growth, beside=parts[0].graph if parts else None)
        if names.count(name) > 1:  # a Run is often called like the model it began with
            name = f"{name}, {'sparse' if graph.settings['gated'] else 'dense'}"
        clusters = find_clusters(graph, rules, settings.layer_share)
        rows = summarise(graph, clusters, settings, model=name, edge=edge, strict=not parts)
        say(tell(rows))
        parts.append(_Part(name, graph, clusters, rows))
        target = graph.targets[0]["token"] if target is None else target
        edge = edge or f"{rows['main']['source']}->{rows['main']['target']}"
    return parts


def _write(part: _Part, rules: Mapping[str, Any] | None, settings: Trace, folder: Path) -> None:
    part.graph.save(folder)
    write_json(folder / "clusters.json", rules or rules_of(part.graph))
    slug = f"{part.name} {part.graph.prompt}"
    write_graph(part.graph, part.clusters, folder, slug=slug, scan=part.name or "model", heads=settings.heads)
