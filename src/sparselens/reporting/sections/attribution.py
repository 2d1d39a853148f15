"""Attribution, for the page: the trace.json files of a Run in one shape, with the features behind them where saved.

`sparselens trace --out` writes trace.json (target, clusters, cluster edges with the heads that carry them, predicted
and measured changes) and the Graph itself (graph.json, graph.safetensors). The page shows the clusters, and the kept
features of the Graph, the most influential first.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from ...attribution.rows import LinkShare, TraceRows
from ...runs.run import Run, about, read_json
from . import Section, finite, read_tensors, short

MOST_LINKS = 40  # of an edge's departure and arrival each
MOST_NODES, MOST_EDGES = 400, 3000
HEAD = ("layer", "head", "share")
NAMED = re.compile(r"feature (\d+) of layer (\d+)")  # as Graph.label says it
MOST_SINGLES = 40  # edges between single nodes, with their checks
KINDS = ("feature", "error", "token", "position", "bias", "logit")
# What is shown as it was written.
TOLD = (
    "prompt", "tokens", "n_layers", "n_heads", "model", "completeness_error", "scores", "agreement", "agreement_direct",
)  # fmt: skip


class ShownCluster(TypedDict):
    name: str
    kind: str
    layers: list[int]
    positions: list[int]
    size: int
    label: str | None  # what most of its features are called


class ShownEdge(TypedDict):  # as in trace.json, ends as places among the clusters; None where nothing was written
    source: int
    target: int
    flow: float  # how much influence passes: comparable between edges, as weights are in units of their targets
    weight: float | None
    single_hop: float | None
    multi_hop: float | None
    direct: float | None
    predicted: float | None
    measured: float | None
    predicted_direct: float | None
    predicted_path: float | None
    measured_direct: float | None
    departure: list[LinkShare]
    arrival: list[LinkShare]
    heads: list[dict[str, float | None]]  # HEAD


class ShownMain(TypedDict):  # the edge looked at closely, and what closing its links did
    edge: int | None
    n_links: int | None
    predicted: float | None
    measured: float | None
    heads_share: float | None  # what cutting its heads did, of what cutting the edge did


def trace_files(folder: Path) -> list[Path]:
    """Where `sparselens trace --out` may have left its rows."""
    return sorted({*folder.glob("trace.json"), *folder.glob("trace*/**/trace.json")})


def traced_prompts(folder: Path) -> list[str]:
    """The prompts of these traces: the page shows their attention too."""
    return list(dict.fromkeys(str(read_trace(path).get("prompt", "")) for path in trace_files(folder)))


def read_trace(path: Path) -> TraceRows:
    """trace.json as `trace` writes it. From outside: what is missing in it shows when it is read."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected an object; trace the prompt again or remove it")
    return cast(TraceRows, found)


def traces(run: Run) -> list[dict[str, object]]:
    """Every traced prompt found in the Run; a trace made --against another model counts as two."""
    found = []
    for path in trace_files(run.path):
        value = read_trace(path)
        name = path.parent.name if path.parent != run.path else "trace"
        found.append(one_trace(value, name) | {"graph": features(path.parent)})
        if isinstance(second := value.get("against"), dict):
            found.append(one_trace(second, f"{name}, against") | {"graph": features(path.parent / "against")})
    return found


def one_trace(value: Mapping[str, Any], name: str) -> dict[str, object]:
    """trace.json with names made indices, lists cut to what fits, and nothing missing that the page needs."""
    clusters = [_cluster(cluster) for cluster in value.get("clusters", [])]
    place = {cluster["name"]: i for i, cluster in enumerate(clusters)}
    rows = [_edge(edge, place) for edge in value.get("edges") or []]
    edges = sorted((edge for edge in rows if edge), key=lambda edge: -edge["flow"])
    return finite({key: value.get(key) for key in TOLD}) | {
        "name": name, "role": "sparse" if value.get("gated") else "dense",
        "target": ", ".join(str(target.get("label", "")) for target in value.get("target") or []),
        "clusters": clusters, "edges": edges, "main": _main(value.get("main"), edges, place),
        "looks": [_look(look) for look in value.get("looks") or []],
        "singles": short(((value.get("interventions") or {}).get("rows") or [])[:MOST_SINGLES], 6),
        "cut": short(value.get("cut"), 5), "labels": _labels(value),
    }  # fmt: skip


def _labels(value: Mapping[str, Any]) -> dict[str, str]:
    """Labels of the features that texts of the page name; the kept ones have cards."""
    labels, texts = value.get("labels") or {}, json.dumps([value.get("interventions"), value.get("looks")])
    named = {f"{layer}/{feature}" for feature, layer in NAMED.findall(texts)}
    return {name: str(labels[name]) for name in sorted(named & labels.keys())}


def _main(main: dict[str, Any] | None, edges: list[ShownEdge], place: dict[str, int]) -> ShownMain | None:
    """Which edge the tracing looked at closely, and what closing its links did."""
    if not main:
        return None
    ends = (place.get(main.get("source", "")), place.get(main.get("target", "")))
    at = next((i for i, edge in enumerate(edges) if (edge["source"], edge["target"]) == ends), None)
    closed = main.get("closed") or {}
    n_links, predicted, measured = (finite(closed.get(name)) for name in ("n_links", "predicted", "measured"))
    share = finite((main.get("heads_cut") or {}).get("share"))
    return {"edge": at, "n_links": n_links, "predicted": predicted, "measured": measured, "heads_share": share}


def _look(look: dict[str, Any]) -> dict[str, object]:
    """Why a head looks there. `closing` in words: which source the gate could not do without."""
    closing = [f"{one['source']} (margin {one['margin_without']:.2f})" for one in look.get("closing") or []]
    return dict(short(look | {"closing": closing}, 6))


def _cluster(cluster: dict[str, Any]) -> ShownCluster:
    return {
        "name": str(cluster.get("name", "?")), "kind": cluster.get("kind", "feature"),
        "layers": cluster.get("layers") or [0, 0], "positions": cluster.get("positions") or [],
        "size": cluster.get("n_features", len(cluster.get("nodes") or [])), "label": cluster.get("label"),
    }  # fmt: skip


def _edge(edge: dict[str, Any], place: dict[str, int]) -> ShownEdge | None:
    source, target = place.get(edge["source"]), place.get(edge["target"])
    if not isinstance(edge["source"], str) or not isinstance(edge["target"], str):
        raise TypeError(f"an edge from {edge['source']!r} to {edge['target']!r}")
    if source is None or target is None:
        return None

    def number(name: str) -> float | None:
        return finite(edge.get(name))

    return {
        "source": source, "target": target, "flow": finite(abs(edge.get("flow", edge["weight"]))),
        "weight": number("weight"), "single_hop": number("single_hop"), "multi_hop": number("multi_hop"),
        "direct": number("direct"), "predicted": number("predicted"), "measured": number("measured"),
        "predicted_direct": number("predicted_direct"), "predicted_path": number("predicted_path"),
        "measured_direct": number("measured_direct"),
        "departure": short((edge.get("departure") or [])[:MOST_LINKS], 6),
        "arrival": short((edge.get("arrival") or [])[:MOST_LINKS], 6),
        "heads": [{key: head.get(key) for key in HEAD} for head in edge.get("heads_for_80") or []],
    }  # fmt: skip


def features(folder: Path) -> dict[str, object] | None:
    """The kept nodes and edges of a saved Graph as columns, most influential first; None where none was saved."""
    if not (folder / "graph.safetensors").is_file():
        return None
    table = read_tensors(folder / "graph.safetensors", "trace the prompt again")
    kept = np.flatnonzero(table["node_kept"])
    kept = kept[np.argsort(-table["influence"][kept], kind="stable")]
    ends = np.isin(table["kind"][kept], [KINDS.index("token"), KINDS.index("logit")])
    kept = np.concatenate([kept[ends], kept[~ends][: max(MOST_NODES - int(ends.sum()), 0)]])
    place = np.full(len(table["kind"]), -1)
    place[kept] = np.arange(len(kept))
    target = np.repeat(table["row_target"], np.diff(table["first"]))
    edges = np.flatnonzero(table["edge_kept"].astype(bool) & (place[table["source"]] >= 0) & (place[target] >= 0))
    edges = edges[np.argsort(-np.abs(table["weight"][edges]), kind="stable")][:MOST_EDGES]
    columns = ("kind", "layer", "position", "index", "value", "influence")
    found: dict[str, object] = {
        "kinds": KINDS, **{name: table[name][kept].tolist() for name in columns},
        "from": place[table["source"][edges]].tolist(), "to": place[target[edges]].tolist(),
        "weight": table["weight"][edges].tolist(),
        "total_nodes": int(table["node_kept"].sum()), "total_edges": int(table["edge_kept"].sum()),
    }  # fmt: skip
    return short(found)


def _command(run: Run) -> str:
    folder = shlex.quote(str(run.path))
    prompt = shlex.quote([*about(run).prompts, 'The opposite of "large" is "'][0])
    return f"sparselens trace {folder} --transcoder TRANSCODER --prompt {prompt} --out {folder}/trace"


SECTION = Section("attribution", "Attribution", lambda shown: traces(shown.run), _command, place=50)
