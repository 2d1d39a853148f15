"""`sparselens trace`: one prompt in one model or two, taken apart; its rows, its graph, its files.

1. Everything that can be wrong is checked, and both transcoders are read, before any model is loaded.
2. Each model's attribution graph (growth.py). Both explain the same tokens and the same target: the first model's.
3. Where files, rows or words were asked for: everything that figure 4 and the report show, as one JSON object
   (rows.py lists its keys). The second model's rows are those of the same edge.
   - clusters and the edges between them, those through which most influence passes first
   - per edge: exact head shares, and what happens when the source cluster is removed, predicted and measured
   - the main edge: attention maps of the heads that carry 80 % of it, why they look there, the gates closed for real
   - single features: the strongest edges, predicted against measured
4. Files are written when all of that has worked: all of them or none.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import Trace, changed
from ..faces.store import FOLDER as FACES, Faces
from ..models.loading import Source, check_source, name_of, resolve
from ..runs.run import Run, check_folder, check_writable, provenance, write_json
from ..transcoders.transcoder import Transcoder
from .captions import check_faces, cluster_label, labels_of, write_cards
from .clusters import (
    Cluster,
    ClusterEdge,
    balance,
    carry_clusters,
    choose_edge,
    cluster_edges,
    find_clusters,
    read_rules,
    rules_of,
)  # fmt: skip
from .cuts import cuts, heads_cut
from .graph import LOGIT, Graph, node_name
from .growth import attribution_graph, prompt_ids
from .head_shares import Carried
from .interventions import Change, EdgeCheck, agreement, check_changes, check_top
from .neuronpedia import slug_of, write_graph
from .qk_terms import explain_look
from .rows import ChangeRow, ClusterRow, EdgeRow, LookRow, MainRow, MapRow, ModelRows, Rules, SinglesRow, TraceRows
from .tell import tell

FEATURES_LISTED = 8  # per cluster
LOOKS = 3  # heads of the main edge whose logit is taken apart
TERMS = 12
FAINT = 0.005  # attention weights below this are not kept for maps
Prompt = str | Sequence[int] | Tensor
Features = str | Path | Run | Transcoder
Grow = Callable[..., Graph]  # `attribution_graph`, its settings chosen
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
    clusters: str | Path | Rules | None = None, edge: str | None = None, faces: str | Path | Faces | None = None,
    out: str | Path | None = None, json: str | Path | None = None, mass: float = 0.95, most_targets: int = 10,
    edges_per_row: int = 4096, show_progress: bool = False, say: Callable[[str], None] | None = None,
    step: Callable[[int, int], None] | None = None,
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
    rows. against: a second model and its transcoder, put beside the first. say: hears the rows in words. step: hears
    (rows done, of how many) while a graph grows and before each intervention, and may raise to stop it. With any of
    these, one target is explained, and the rows are the graph's `rows`. names: what to call the models there.
    clusters: rules, or a file of them (clusters.json); edge: "source->target", the one between clusters to look at
    closely. faces: what `sparselens features` left for the transcoder; None: what lies beside it, if anything.
    """
    settings = changed(settings or Trace(), overrides)
    for model in (source,) if against is None else (source, against[0]):
        check_source(model)
    summed_up = any(asked is not None for asked in (out, json, against, say))
    _check(prompt, target, one_target=summed_up)
    check_folder(None if out is None else Path(out))
    check_writable(None if json is None else Path(json))
    rules = read_rules(clusters) if isinstance(clusters, str | Path) else clusters
    # Both transcoders before any model: a missing file should not cost the loading of a model.
    given = [(source, transcoder, faces), *([] if against is None else [(*against, None)])]
    models = [_Asked(one, _coder(features), _faces(features, known)) for one, features, known in given]
    grow = functools.partial(
        attribution_graph, position=settings.position, budget=settings.budget, nodes=settings.nodes,
        edges=settings.edges, memory_mb=settings.memory_mb, mass=mass, most_targets=1 if summed_up else most_targets,
        edges_per_row=edges_per_row, show_progress=show_progress, step=step,
    )  # fmt: skip
    if not summed_up:
        return _graph(models[0], prompt, target, grow)
    called = [*names[: len(models)], *(name_of(model.source) for model in models[len(names) :])]
    parts = _sum_up(models, called, prompt, target, grow, settings, rules, edge, say or (lambda text: None))
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


def _check(prompt: Any, target: Any, one_target: bool) -> None:
    if one_target and isinstance(target, list):
        raise ValueError(f"target={target!r}: rows and files explain one target; leave out `out`, `json` and `against`")
    if not isinstance(prompt, str | Sequence | Tensor):
        raise ValueError(f"prompt={prompt!r}: expected text, or token ids")
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
    if not isinstance(transcoder, str | Path | Run):
        raise ValueError(
            f"expected a transcoder (its Run, its folder, or a Transcoder), got {type(transcoder).__name__}: "
            "trace(model, transcoder, prompt)"
        )
    return Transcoder.load(transcoder.path if isinstance(transcoder, Run) else transcoder)


class _Asked(NamedTuple):  # a model to explain
    source: Source
    coder: Transcoder
    faces: Faces | None


def _faces(transcoder: Features, given: str | Path | Faces | None) -> Faces | None:
    """The faces of a transcoder's features: those given, or those beside it."""
    if given is not None:
        return given if isinstance(given, Faces) else Faces(given)
    if isinstance(transcoder, Transcoder):
        return None
    folder = transcoder.path if isinstance(transcoder, Run) else Path(transcoder)
    return Faces(folder) if (folder / FACES / "faces.json").is_file() else None


def _graph(asked: _Asked, prompt: Prompt, target: Any, grow: Grow, beside: Graph | None = None) -> Graph:
    (model, tokenizer), coder = resolve(asked.source), asked.coder
    if tokenizer is None:
        raise ValueError("no tokenizer to read the prompt with: give (model, tokenizer) instead of the model alone")
    ids = prompt_ids(model, tokenizer, prompt).tolist()
    if beside is not None and beside.replacement().frozen.ids.tolist() != ids:
        raise ValueError("the second model reads the prompt as other tokens than the first; compare related models")
    coder = coder.to(next(model.parameters()).device)
    return grow(model, tokenizer, coder, prompt, target)


class _Part(NamedTuple):  # what one of the models gives
    name: str
    graph: Graph
    clusters: list[Cluster]
    rows: ModelRows
    faces: Faces | None


def _sum_up(
    models: Sequence[_Asked], names: Sequence[str], prompt: Prompt, target: Any,
    grow: Grow, settings: Trace, rules: Rules | None, edge: str | None,
    say: Callable[[str], None],
) -> list[_Part]:  # fmt: skip
    """Graph and rows of each model; what was left open (target, edge) is the first one's choice."""
    parts: list[_Part] = []
    for asked, name in zip(models, names, strict=True):
        if asked.faces is not None:
            check_faces(asked.faces, asked.coder.n_layers, asked.coder.n_features)
        graph = _graph(asked, prompt, target, grow, beside=parts[0].graph if parts else None)
        if names.count(name) > 1:  # a Run is often called like the model it began with
            name = f"{name}, {'sparse' if graph.settings['gated'] else 'dense'}"
        clusters = find_clusters(graph, rules, settings.layer_share)
        rows = summarise(graph, clusters, settings, model=name, edge=edge, strict=not parts)
        if asked.faces is not None:
            _name(rows, graph, clusters, asked.faces)
        say(tell(rows))
        parts.append(_Part(name, graph, clusters, rows, asked.faces))
        target = graph.targets[0]["token"] if target is None else target
        edge = edge or f"{rows['main']['source']}->{rows['main']['target']}"
    return parts


def _write(part: _Part, rules: Rules | None, settings: Trace, folder: Path) -> None:
    part.graph.save(folder)
    write_json(folder / "clusters.json", rules or rules_of(part.graph))
    slug, scan = f"{part.name} {part.graph.prompt}", slug_of(part.name or "model")
    labels = part.rows.get("labels")
    write_graph(part.graph, part.clusters, folder, slug=slug, scan=scan, heads=settings.heads, labels=labels)
    if part.faces is not None:
        write_cards(part.graph, part.faces, folder, scan)


def _name(rows: ModelRows, graph: Graph, clusters: Sequence[Cluster], faces: Faces) -> None:
    """Labels for every feature that the rows name, and for clusters whose features agree."""
    labels = rows["labels"] = labels_of(graph, faces)
    for row, cluster in zip(rows["clusters"], clusters, strict=True):
        row["label"] = cluster_label(graph, cluster, labels)
        for feature in row["top_features"]:
            feature["label"] = labels[f"{feature['layer']}/{feature['feature']}"]


# ---- rows ------------------------------------------------------------------------------------------------------------


def summarise(
    graph: Graph, clusters: Sequence[Cluster], settings: Trace, *, model: str = "", edge: str | None = None,
    strict: bool = True,
) -> ModelRows:  # fmt: skip
    """All rows of a traced prompt. Needs a live graph.

    edge: "source->target", the one to look at closely; strict: whether it must exist (see clusters.choose_edge).
    """
    every = cluster_edges(graph, clusters)
    main = choose_edge(clusters, every, edge, strict)
    edges = every[: settings.cluster_edges]
    if main not in edges:
        edges = [*edges[: settings.cluster_edges - 1], main]
    carried = carry_clusters(graph, edges, settings.links)
    changes = _removals(graph, clusters, edges)
    rows = [_edge(clusters, *parts) for parts in zip(edges, carried, changes, strict=True)]
    number = edges.index(main)
    singles = check_top(graph, settings.checks) if settings.checks else []
    return {
        "model": model, "gated": bool(graph.settings["gated"]), "prompt": graph.prompt, "tokens": graph.tokens,
        "n_layers": graph.n_layers, "n_heads": graph.n_heads,
        "target": [{**t, "position": int(graph.position[-1])} for t in graph.targets],
        "completeness_error": graph.completeness_error, "scores": graph.scores(),
        "n_nodes": int(graph.node_kept.sum()), "n_edges": int(graph.edge_kept.sum()), "settings": graph.settings,
        "clusters": [_cluster(graph, c, sums) for c, sums in zip(clusters, balance(graph, clusters), strict=True)],
        "edges": rows, "n_cluster_edges": len(every),
        "main": _main(graph, clusters, main, carried[number], rows[number]), "looks": looks(graph, carried[number]),
        "agreement": agreement(rows), "agreement_direct": agreement(rows, "predicted_direct", "measured_direct"),
        "interventions": _interventions(graph, singles),
        "cut": cuts(graph, clusters, edges, rows, settings.cuts),
    }  # fmt: skip


def _edge(clusters: Sequence[Cluster], edge: ClusterEdge, carried: Carried, change: ChangeRow) -> EdgeRow:
    row, source, target = carried.as_row(), clusters[edge.source].name, clusters[edge.target].name
    n = len(row["heads_for_80"])
    return {"source": source, "target": target, "flow": edge.flow, **row, "n_heads_for_80": n, **change}


def _removals(graph: Graph, clusters: Sequence[Cluster], edges: Sequence[ClusterEdge]) -> list[ChangeRow]:
    """What removing the source cluster does to the targets of each edge. One set of runs per source cluster."""
    read = [set(edge.targets.tolist()) for edge in edges]
    watched = sorted(set().union(*read)) if read else []
    sources = [[n for n in clusters[e.source].nodes if int(graph.kind[n]) != LOGIT] for e in edges]
    changes: list[Change] = [{"scale": dict.fromkeys(nodes, 0.0)} for nodes in sources]
    # Every edge watches all targets, its own with weight 1: equal questions are run once.
    return check_changes(graph, changes, [{t: float(t in own) for t in watched} for own in read])


def _cluster(graph: Graph, cluster: Cluster, sums: dict[str, float]) -> ClusterRow:
    features = [node for node in map(graph.node, cluster.nodes) if node.kind == "feature"]
    features.sort(key=lambda node: -node.influence)
    return {
        "name": cluster.name, "kind": cluster.kind, "positions": cluster.positions, "layers": list(cluster.layers),
        "influence": cluster.influence, "n_features": len(features),
        "nodes": [node_name(graph, n) for n in cluster.nodes],
        "top_features": [
            {"id": node_name(graph, f.id), "layer": f.layer, "position": f.position, "feature": f.index,
             "activation": f.value, "influence": f.influence}
            for f in features[:FEATURES_LISTED]
        ],
        "sums": sums,
    }  # fmt: skip


def _main(graph: Graph, clusters: Sequence[Cluster], edge: ClusterEdge, carried: Carried, row: EdgeRow) -> MainRow:
    """What figure 4 shows of its edge: cells to mark, attention maps of its heads, and the causal test of them."""
    links = carried.links_for(0.8)
    targets = dict.fromkeys(edge.targets.tolist(), 1.0) or {graph.n_nodes - 1: 1.0}
    (closed,) = check_changes(graph, [{"close": links}], [targets])
    through = heads_cut(graph, clusters[edge.source].nodes, list(targets), carried.heads_for(0.8))
    return {
        **row,
        "keys": clusters[edge.source].positions,
        "queries": clusters[edge.target].positions,
        "attention": [_map(graph, layer, head) for layer, head in carried.heads_for(0.8)],
        "closed": {"n_links": len(links), "links": [list(link) for link in links], **closed},
        "heads_cut": through,
    }


def _map(graph: Graph, layer: int, head: int) -> MapRow:
    weights = graph.replacement().frozen.pattern(layer, slice(head, head + 1))[0].cpu()
    cells = [(q, k, round(float(weights[q, k]), 4)) for q, k in (weights >= FAINT).nonzero().tolist()]
    return {"layer": layer, "head": head, "cells": cells}


def looks(graph: Graph, carried: Carried) -> list[LookRow]:
    """Why the first heads of an edge look where they do: their largest links, as query x key terms."""
    found: list[LookRow] = []
    for layer, head in carried.heads_for(0.8)[:LOOKS]:
        link = next((a for a in carried.arrival if (a["layer"], a["head"]) == (layer, head)), None)
        if link is None:
            continue
        look = explain_look(graph, layer, head, link["query"], link["key"], top=TERMS)
        found.append(
            {
                "layer": layer, "head": head, "query": look.query, "key": look.key, "logit": look.logit,
                "margin": look.margin, "rest": look.rest, "certain": look.certain,
                "terms": [
                    {"query_source": graph.label(t["query_source"]), "key_source": graph.label(t["key_source"]),
                     "term": t["term"]}
                    for t in look.terms
                ],
                "closing": [
                    {"source": graph.label(n), "margin_without": look.without(n)} for n in look.closing()[:TERMS]
                ],
            }
        )  # fmt: skip
    return found


def _interventions(graph: Graph, checks: list[EdgeCheck]) -> SinglesRow:
    """The strongest edges between single nodes, removed one by one."""
    return {
        "rows": [
            {"source": graph.label(check["sources"][0]), "target": graph.label(check["targets"][0]),
             "weight": check["weight"], "before": check["before"], "predicted": check["predicted"],
             "measured": check["measured"], "predicted_direct": check["predicted_direct"],
             "predicted_path": check["predicted_path"], "measured_direct": check["measured_direct"]}
            for check in checks
        ],
        "agreement": agreement(checks), "agreement_direct": agreement(checks, "predicted_direct", "measured_direct"),
    }  # fmt: skip
