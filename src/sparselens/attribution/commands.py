"""`sparselens trace`: check, load, trace, write, draw, say. Also the traced sum of the demo."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Trace
from ..models.architectures import base_model, dimensions
from ..models.loading import load
from ..reporting.figures.attribution import draw_trace_all
from ..runs import distributed
from ..runs.run import check_folder, check_writable, provenance, write_json
from ..transcoders.transcoder import Transcoder
from .cluster_rules import read_rules, rules_of
from .clusters import Cluster, find_clusters
from .neuronpedia import write_graph
from .summary import summarise, tell
from .trace import prompt_ids, trace

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from .graph import Graph


@dataclass
class Traced:
    """One model to trace: named, or already in memory."""

    model: "str | tuple[nn.Module, PreTrainedTokenizerBase]"
    transcoder: str | Path | Transcoder
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name and isinstance(self.model, str):
            path = Path(self.model)
            # A Run's folder says more than the "model" inside it.
            self.name = self.model if not path.exists() else path.parent.name if path.name == "model" else path.name


def trace_command(
    models: Sequence[Traced],
    prompt: str,
    target: str | None,
    settings: Trace,
    *,
    clusters: Path | None = None,
    edge: str | None = None,
    out: Path | None = None,
    json: Path | None = None,
) -> None:
    """One prompt in one or two models: rows to --json, everything to --out, a summary to the terminal."""
    check_folder(out)
    check_writable(json)
    rules = None if clusters is None else read_rules(clusters)
    rows = trace_prompt(models, prompt, target, settings, rules=rules, edge=edge, out=out, say=print)
    if json is not None:
        write_json(json, rows)


def trace_prompt(
    models: Sequence[Traced],
    prompt: str,
    target: Any = None,
    settings: Trace | None = None,
    *,
    rules: dict[str, Any] | None = None,
    edge: str | None = None,
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The rows of a prompt in a model, the second model's under `against`; with `out`, all files of `trace --out`.

    target: as `sl.trace`; None: the token the first model finds likeliest. Both models explain the same target and the
    same cluster edge: the first model's.
    """
    settings = settings or Trace()
    _check_prompt(prompt)
    if not 1 <= len(models) <= 2:
        raise ValueError(f"{len(models)} models: expected one, or two to compare")
    if isinstance(target, list):
        raise ValueError(f"target={target!r}: the command explains one target; use sparselens.trace for several")
    device = distributed.device()
    # Both transcoders before any model: a missing file should not cost the loading of a model.
    coders = [t.transcoder if isinstance(t.transcoder, Transcoder) else Transcoder.load(t.transcoder) for t in models]
    results: list[dict[str, Any]] = []
    made: list[tuple[Graph, list[Cluster], Path, str]] = []
    ids: list[int] | None = None
    for number, (one, transcoder) in enumerate(zip(models, coders, strict=True)):
        model, tokenizer = load(one.model, device=device) if isinstance(one.model, str) else one.model
        _check_width(one, model, transcoder)
        found = prompt_ids(model, tokenizer, prompt).tolist()
        if ids is not None and found != ids:
            raise ValueError(
                f"{one.name} reads the prompt as other tokens than {models[0].name}; compare related models"
            )
        ids = found
        transcoder = transcoder.to(next(model.parameters()).device)
        graph = trace(
            model, tokenizer, transcoder, ids, target, position=settings.position, budget=settings.budget,
            most_targets=1, nodes=settings.nodes, edges=settings.edges, memory_mb=settings.memory_mb,
        )  # fmt: skip
        graph.prompt = prompt
        named = find_clusters(graph, rules, settings.layer_share)
        name = one.name
        if [m.name for m in models].count(name) > 1:  # a Run is often called like the model it began with
            name = f"{name}, {'sparse' if graph.settings['gated'] else 'dense'}"
        row = summarise(graph, named, settings, model=name, edge=edge, strict=number == 0)
        say(tell(row))
        if number == 0:
            if target is None:
                target = graph.targets[0]["token"]
            edge = edge or f"{row['main']['source']}->{row['main']['target']}"
        if out is not None:
            made.append((graph, named, Path(out) / ("" if number == 0 else "against"), name))
        results.append(row)
    for graph, named, folder, name in made:  # not before all of them are traced: all files or none
        _write(graph, named, rules, settings, folder, name)
    rows = results[0] | {"provenance": provenance()}
    if len(results) == 2:
        rows["against"] = results[1]
    if out is not None:
        write_json(Path(out) / "trace.json", rows)
        draw_trace_all(rows, out)
        say(f"trace.json, figure 4, the graph and clusters.json are in {out}")
    return rows


def _write(graph: "Graph", clusters: list[Cluster], rules: Any, settings: Trace, folder: Path, name: str) -> None:
    graph.save(folder)
    write_json(folder / "clusters.json", rules or rules_of(graph))
    write_graph(graph, clusters, folder, slug=f"{name} {graph.prompt}", scan=name or "model", heads=settings.heads)


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token of text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid text at character {error.start} ({error.reason})") from None


def _check_width(one: Traced, model: "nn.Module", transcoder: Transcoder) -> None:
    d = dimensions(base_model(model).config)
    if (transcoder.n_layers, transcoder.d_model) != (d.n_layers, d.d_model):
        raise ValueError(
            f"the transcoder of {one.name} has {transcoder.n_layers} layers of width {transcoder.d_model}, the model "
            f"{d.n_layers} of width {d.d_model}: it was made for another model"
        )


# ---- demo ------------------------------------------------------------------------------------------------------------


def trace_demo(
    dense: "tuple[nn.Module, PreTrainedTokenizerBase]",
    sparse: "tuple[nn.Module, PreTrainedTokenizerBase]",
    dense_transcoder: Transcoder,
    sparse_transcoder: Transcoder,
    out: str | Path,
    example: tuple[int, int] = (36, 28),
    settings: Trace | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One sum in the dense and in the sparse addition model: who brings the tens digit its digits. Draws figure 4.

    The sparse model comes first in the rows, so its strongest edge is the one both are asked about.
    """
    from ..demo.addition import ANSWER, POSITIONS

    a, b = example
    prompt = f"{a:02}+{b:02}={'?' * ANSWER}"
    tens = POSITIONS - 2
    digit = f"{a + b:05}"[-2]
    settings = settings or Trace(position=tens, checks=10)
    models = [
        Traced(sparse, sparse_transcoder, "Sparse addition model"),
        Traced(dense, dense_transcoder, "Addition model"),
    ]
    return trace_prompt(models, prompt, digit, settings, out=out, say=say)
