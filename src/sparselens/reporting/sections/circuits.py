"""Circuits, for the page: curves as they were measured, and the edges behind every point of them.

A point of the curve is a circuit that was run: the best n edges, dead ends removed. The page draws that very circuit:
1. Order all scored edges as the search did. They come from circuit-TASK-ROLE.json, or from the 90 % circuit alone.
2. Keep what survives pruning of the first MOST. Pruning a prefix of what is left gives what pruning a prefix of
   everything gives: an edge on a path from input to logits stays on it when more edges come.
3. For every measured size find the prefix that has exactly this many live edges (their number only grows).
"""

from pathlib import Path
from typing import Any

import numpy as np

from ...circuits.circuit import Circuit
from ...models.component_graph import Components
from ...runs.run import Run, read_json
from ..packing import finite, short

MOST = 3000  # edges to draw per model
ROLES = ("dense", "control", "sparse")


def circuits(run: Run) -> dict[str, Any] | None:
    """Every task's comparison found in the Run, as {"tasks": [...], "names": {...}}; None where there is none."""
    tasks: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    problems: list[str] = []
    for path, found in comparisons(run.path):
        if "error" in found:
            problems.append(found["error"])
            continue
        names |= found.get("names", {})
        known = {task["name"] for task in tasks}
        tasks += [_task(name, row, path) for name, row in found["tasks"].items() if name not in known]
    if not tasks and not problems:
        return None
    return {"tasks": tasks, "names": names, "problems": problems}


def comparisons(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """(file, comparison) wherever one may lie: the demo's circuits.json, results.json of compare and discover."""
    fixed = [folder / "circuits.json", folder / "circuits" / "results.json"]
    read = []
    for path in [*fixed, *sorted((folder / "circuits").glob("*/results.json"))]:
        if not path.is_file():
            continue
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError(f"{path} is damaged: expected an object; run the comparison again or remove it")
        if "tasks" not in found and "curve" in found:
            found = alone(found)
        if "tasks" in found or "error" in found:
            read.append((path, found))
    return read


def alone(results: dict[str, Any]) -> dict[str, Any]:
    """A result of `discover` as a comparison with one model."""
    role = "sparse" if results.get("sparse") else "dense"
    return {"names": {role: results.get("model", role)}, "tasks": {results["task"]: {"models": {role: results}}}}


def _task(name: str, row: dict[str, Any], path: Path) -> dict[str, Any]:
    models = {role: _model(row["models"][role], path, name, role) for role in ROLES if role in row["models"]}
    return finite(
        {
            "name": name,
            "metric": next(iter(row["models"].values())).get("metric"),
            "thresholds": row.get("thresholds", {}),
            "thresholds_control": row.get("thresholds_control", {}),
            "mean_multiplier": row.get("mean_multiplier", {}),
            "overlap": row.get("overlap"),
            "models": models,
            "attention": _attention_edges(row),
        }
    )


def _attention_edges(row: dict[str, Any]) -> dict[str, Any] | None:
    """The same curves over single attention edges (layer, head, query, key), where they were measured."""
    models = {
        role: _token_model(row["models"][role]["attention_edges"], row["models"][role]["n_layers"])
        for role in ROLES
        if role in row["models"] and row["models"][role].get("attention_edges")
    }
    if not models:
        return None
    thresholds = {
        "thresholds": row.get("attention_edges", {}),
        "thresholds_control": row.get("attention_edges_control", {}),
    }
    return thresholds | {"models": models}


def _token_model(found: dict[str, Any], n_layers: int) -> dict[str, Any]:
    """One model's curve, and the edges behind it, best first, as columns: the first n are the circuit of size n."""
    kept = ("curve", "edges_at", "edges_at_interval", "n_edges", "n_alive", "n_prompts", "example")
    places = [found["columns"].index(name) for name in ("layer", "head", "query", "key", "score")]
    layer, head, query, key, score = ([edge[at] for edge in found["circuit"]] for at in places)
    # Runs of earlier versions have no weights and no tokens; positions stand in for those.
    weight = [edge[5] if len(edge) > 5 else None for edge in found["circuit"]]
    edges = {
        "layer": layer,
        "head": head,
        "query": query,
        "key": key,
        "score": short(score, 6),
        "weight": short(weight, 4),
    }
    tokens = found.get("tokens") or [str(i) for i in range(found["length"])]
    return {name: found[name] for name in kept} | {"n_layers": n_layers, "tokens": tokens, "edges": edges}


def _model(results: dict[str, Any], path: Path, task: str, role: str) -> dict[str, Any]:
    kept = (
        "curve", "random", "edges_at", "edges_at_interval", "heads_at", "heads", "heads_curve", "n_layers", "n_heads",
        "n_edges", "n_prompts", "n_prompts_scoring", "m_model", "m_nothing", "checks", "area_log",
        "cpr", "cmd", "sparse",
    )  # fmt: skip
    found = {name: results[name] for name in kept if name in results}
    tokens = results.get("token_edges")
    if tokens:
        found["token_edges"] = {key: value for key, value in tokens.items() if key not in ("open", "columns")}
    edges, prefixes = drawable(results, _whole(path.parent, task, role))
    return found | {"edges": edges, "prefix": prefixes, "settings": results.get("settings", {})}


def _whole(folder: Path, task: str, role: str) -> Circuit | None:
    for name in (f"circuit-{task}-{role}.json", "circuit.json"):
        if (folder / name).is_file():
            return Circuit.load(folder / name)
    return None


def drawable(results: dict[str, Any], whole: Circuit | None, most: int = MOST) -> tuple[dict, list[int | None]]:
    """(edges, best first, as columns from, to, through, score; per measured size the prefix that is it, or None)."""
    parallel = whole.components.parallel if whole else False
    c = whole.components if whole else Components(int(results["n_layers"]), int(results["n_heads"]), parallel)
    settings = results.get("settings", {})
    signed = bool(settings.get("signed", False))
    if whole is not None:
        order = whole.order(settings.get("selection", "top"), not signed)
        scores = whole.scores.ravel()
    else:
        listed = sorted(results.get("circuit", []), key=lambda edge: -(edge[1] if signed else abs(edge[1])))
        places = [c.edge(name) for name, _ in listed]
        order = np.array([reader * c.n_writers + writer for reader, writer in places], dtype=int)
        scores = np.zeros(c.n_readers * c.n_writers)
        scores[order] = [score for _, score in listed]
    order = _live(c, order, most)
    sizes = [int(n) for n in results["curve"]["edges"]]
    prefixes = [_prefix(c, order, size) for size in sizes]
    readers, writers = np.divmod(order, c.n_writers)
    targets = [c.readers[r] for r in readers]
    nodes = ["input", *c.writers[1:], "logits"]
    place = {node: i for i, node in enumerate(nodes)}
    columns = {
        "nodes": nodes,
        "from": [place[c.writers[w]] for w in writers],
        "to": [place[target.partition("<")[0]] for target in targets],
        "through": "".join(target.partition("<")[2][:1] or "-" for target in targets),
        "score": short(scores[order].tolist(), 6),
    }
    return columns, prefixes


def _live(c: Components, order: np.ndarray, most: int) -> np.ndarray:
    """The first edges of the order that lie on a path among themselves, at most `most` of them."""
    if not len(order):
        return order
    low, high = 0, len(order)
    while low < high:  # the longest prefix with no more than `most` live edges
        middle = (low + high + 1) // 2
        low, high = (middle, high) if c.prune(c.mask(order[:middle])).sum() <= most else (low, middle - 1)
    mask = c.prune(c.mask(order[:low])).ravel()
    return order[:low][mask[order[:low]]]


def _prefix(c: Components, order: np.ndarray, size: int) -> int | None:
    """The shortest prefix with exactly `size` live edges, or None."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if c.prune(c.mask(order[:middle])).sum() >= size else (middle + 1, high)
    return low if int(c.prune(c.mask(order[:low])).sum()) == size else None
