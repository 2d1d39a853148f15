"""Attribution, for the page: the trace.json files of a Run in one shape, with the features behind them where saved.

`sparselens trace --out` writes trace.json (target, clusters, cluster edges with the heads that carry them, predicted
and measured changes) and the Graph itself (graph.json, graph.safetensors). The page shows the clusters, and the kept
features of the Graph, the most influential first.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...attribution.rows import TraceRows
from ...runs.run import Run, about, read_json
from . import Section, finite, read_tensors, short

MOST_LINKS = 40  # of an edge's departure and arrival each
MOST_NODES, MOST_EDGES = 400, 3000
MOST_SINGLES = 40  # edges between single nodes, with their checks
KINDS = ("feature", "error", "token", "position", "bias", "logit")
# What is shown as it was written: of a trace, and of an edge.
TOLD = (
    "prompt", "tokens", "n_layers", "n_heads", "model", "completeness_error", "scores", "agreement", "agreement_direct",
)  # fmt: skip
NUMBERS = (
    "weight", "single_hop", "multi_hop", "direct", "predicted", "measured", "predicted_direct", "measured_direct",
)  # fmt: skip


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
    }  # fmt: skip


def _main(main: dict[str, Any] | None, edges: list[dict[str, Any]], place: dict[str, int]) -> dict[str, object] | None:
    """Which edge the tracing looked at closely, and what closing its links did."""
    if not main:
        return None
    ends = (place.get(main.get("source", "")), place.get(main.get("target", "")))
    at = next((i for i, edge in enumerate(edges) if (edge["source"], edge["target"]) == ends), None)
    closed = main.get("closed") or {}
    return {"edge": at, **finite({name: closed.get(name) for name in ("n_links", "predicted", "measured")})}


def _look(look: dict[str, Any]) -> dict[str, object]:
    """Why a head looks there. `closing` in words: which source the gate could not do without."""
    closing = [f"{one['source']} (margin {one['margin_without']:.2f})" for one in look.get("closing") or []]
    return dict(short(look | {"closing": closing}, 6))


def _cluster(cluster: dict[str, Any]) -> dict[str, Any]:
    found = {"name": str(cluster.get("name", "?")), "kind": cluster.get("kind", "feature")}
    places = {"layers": cluster.get("layers") or [0, 0], "positions": cluster.get("positions") or []}
    return found | places | {"size": cluster.get("n_features", len(cluster.get("nodes") or []))}


def _edge(edge: dict[str, Any], place: dict[str, int]) -> dict[str, Any] | None:
    ends = {end: place.get(edge[end]) for end in ("source", "target")}
    if not isinstance(edge["source"], str) or not isinstance(edge["target"], str):
        raise TypeError(f"an edge from {edge['source']!r} to {edge['target']!r}")
    if None in ends.values():
        return None
    # How much influence passes is comparable between edges; weights are in units of their targets.
    numbers = {name: edge.get(name) for name in NUMBERS} | {"flow": abs(edge.get("flow", edge["weight"]))}
    links = {name: short((edge.get(name) or [])[:MOST_LINKS], 6) for name in ("departure", "arrival")}
    heads = [{key: head.get(key) for key in ("layer", "head", "share")} for head in edge.get("heads_for_80") or []]
    return finite(numbers) | links | ends | {"heads": heads}


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
