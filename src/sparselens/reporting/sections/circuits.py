"""Circuits, for the page: curves as they were measured, and the edges behind every point of them.

A point of the curve is a circuit that was run: the best n edges, dead ends removed. The page draws that very circuit:
1. Order all scored edges as the search did. They come from circuit-TASK-ROLE.json, or from the 90 % circuit alone.
2. Keep what survives pruning of the first MOST. Pruning a prefix of what is left gives what pruning a prefix of
   everything gives: an edge on a path from input to logits stays on it when more edges come.
3. For every measured size find the prefix that has exactly this many live edges (their number only grows).
"""

import shlex
from bisect import bisect_left, bisect_right
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
from typing_extensions import NotRequired

from ...circuits.circuit import Circuit
from ...circuits.rows import (
    TASK,
    ComparisonRows,
    Multipliers,
    OpenRow,
    Overlap,
    Reading,
    Results,
    Scope,
    TaskRow,
    comparison,
    wording,
)
from ...models.component_graph import Components
from ...runs.run import Run, about, read_json
from ..readings import ordered, question, scope_of
from . import Section, finite, short

MOST, FEWER = 3000, 1000  # edges to draw per model; of attention edges beyond the headline reading
ROLES = ("dense", "control", "sparse")
ON_TOKENS = {"layer", "head", "query", "key", "score"}  # columns of circuits that can be drawn on tokens
# Of a reading: what is told otherwise, and what the page does not show.
DRAWN = ("circuit", "columns", "length", "edges_per_prompt", "rankings", "alternatives", "checks")


class GraphColumns(TypedDict("Columns", {"from": list[int], "to": list[int]})):
    """Edges of the component graph, best first."""

    nodes: list[str]
    through: str  # q, k, v or -, a letter per edge
    score: list[float]


TokenColumns = dict[str, list[str | float]]  # of a circuit on tokens: its columns, by name


class Drawn(TypedDict):
    """What is drawn of a reading in one model, beside all that its row says but for DRAWN."""

    n_layers: int
    n_heads: int
    edges: NotRequired[GraphColumns | TokenColumns]
    prefix: NotRequired[list[int | None]]  # of a graph: by measured size, how many of `edges` it is made of


class ShownReading(TypedDict):
    name: str
    title: str
    label: str
    short: str
    edges: str  # what is counted
    scope: Scope | None
    question: str
    picture: str | None  # graph, tokens
    models: dict[str, dict[str, object]]  # by role: rows.Reading without DRAWN, with Drawn


class ShownTask(TypedDict):
    name: str
    metric: str | None
    overlap: Overlap | None
    models: dict[str, dict[str, object]]  # by role: rows.Results without what is told elsewhere
    readings: list[ShownReading]
    multipliers: Multipliers
    open_edges: OpenRow | None


class ShownCircuits(TypedDict):
    tasks: list[ShownTask]
    names: dict[str, str]
    problems: list[str]


def circuits(run: Run) -> ShownCircuits | None:
    """Every task's comparison found in the Run; None where there is none."""
    tasks, names = dict[str, ShownTask](), dict[str, str]()
    found, problems = comparisons(run.path)
    for path, rows in found:
        names |= rows.get("names", {})
        tasks |= {name: _task(name, row, path) for name, row in rows["tasks"].items() if name not in tasks}
    return {"tasks": list(tasks.values()), "names": names, "problems": problems} if tasks or problems else None


def comparisons(folder: Path) -> tuple[list[tuple[Path, ComparisonRows]], list[str]]:
    """(file and comparison, wherever one may lie; what was looked for and not found).

    Files: the demo's circuits.json, results.json of compare and discover.
    """
    fixed = [folder / "circuits.json", folder / "circuits" / "results.json"]
    found, problems = [], []
    for path in filter(Path.is_file, [*fixed, *sorted((folder / "circuits").glob("*/results.json"))]):
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError(f"{path} is damaged: expected an object; run the comparison again or remove it")
        rows = comparison(value, path)
        if rows is not None:
            found.append((path, rows))
        elif "error" in value:
            problems.append(str(value["error"]))
    return found, problems


def _task(name: str, row: TaskRow, path: Path) -> ShownTask:
    models = {role: row["models"][role] for role in ROLES if role in row["models"]}
    readings = ordered(reading for model in models.values() for reading in model["readings"])
    return {
        "name": name, "metric": next(iter(models.values())).get("metric"), "overlap": row.get("overlap"),
        "models": {role: _model(model) for role, model in models.items()},
        "readings": [
            _reading(reading, name, models, path, MOST if i == 0 else FEWER) for i, reading in enumerate(readings)
        ],
        "multipliers": finite(row.get("multipliers", {})), "open_edges": finite(row.get("open_edges")),
    }  # fmt: skip


def _model(results: Results) -> dict[str, object]:
    """What belongs to the model, whatever the reading."""
    told = ("task", "metric", "model", "readings", "seconds")
    found = {name: value for name, value in results.items() if name not in told}
    found["leading"] = {k: v for k, v in results.get("leading", {}).items() if k != "per_prompt"}
    if "open_edges" in results:
        found["open_edges"] = {k: v for k, v in results["open_edges"].items() if k not in ("open", "columns")}
    return finite(found)


def _reading(reading: str, task: str, models: dict[str, Results], path: Path, most: int) -> ShownReading:
    """One reading of a task, in words and for every model it was measured in, the headline's first.

    picture: how its circuits are drawn: as a graph of components, on tokens, or not at all.
    """
    words, shown = wording(reading), dict[str, dict[str, object]]()
    rows = {role: results["readings"][reading] for role, results in models.items() if reading in results["readings"]}
    picture = _picture(reading, list(rows.values()))
    for role, found in rows.items():
        results = models[role]
        drawn: Drawn = {"n_layers": int(results["n_layers"]), "n_heads": int(results["n_heads"])}
        if picture == "tokens":
            drawn["edges"] = _on_tokens(found, most)
        elif picture == "graph":
            drawn["edges"], drawn["prefix"] = drawable(results, _whole(path.parent, task, role))
        kept: dict[str, object] = {name: value for name, value in found.items() if name not in DRAWN}
        shown[role] = {**finite(kept), **drawn}
    scope = scope_of(rows.values())
    return {
        "name": reading, "title": task, "label": words.label, "short": _short(reading), "edges": words.edges,
        "scope": scope, "question": question(reading, scope), "picture": picture, "models": shown,
    }  # fmt: skip


def _short(reading: str) -> str:
    """Its own name, as on the command line, in a row of others."""
    base = reading.removesuffix(TASK)
    return base.replace("-", ", ") + ("" if base == reading else ", per task")


def _picture(reading: str, rows: list[Reading]) -> str | None:
    if not all("curve" in found for found in rows):
        return None
    if all(set(found.get("columns", ())) >= ON_TOKENS and found.get("tokens") for found in rows):
        return "tokens"
    return "graph" if reading == "components" else None


def _on_tokens(found: Reading, most: int) -> TokenColumns:
    """The attention edges behind a curve, best first, as columns: the first n are the circuit of size n."""
    names, rows = found["columns"], found["circuit"][:most]
    return {name: short([row[i] for row in rows], 4 if name == "weight" else 6) for i, name in enumerate(names)}


def _whole(folder: Path, task: str, role: str) -> Circuit | None:
    for name in (f"circuit-{task}-{role}.json", "circuit.json"):
        if (folder / name).is_file():
            return Circuit.load(folder / name)
    return None


def drawable(results: Results, whole: Circuit | None, most: int = MOST) -> tuple[GraphColumns, list[int | None]]:
    """(edges, best first, as columns from, to, through, score; per measured size the prefix that is it, or None)."""
    found = results["readings"]["components"]
    settings = results.get("settings", {})
    signed = bool(settings.get("signed", False))
    if whole is not None:
        c, order, scores = (
            whole.components,
            whole.order(str(settings.get("selection", "top")), not signed),
            whole.scores,
        )
    else:
        c = Components(int(results["n_layers"]), int(results["n_heads"]))
        named = [(str(name), float(score)) for name, score in found.get("circuit", [])]
        listed = sorted(named, key=lambda edge: -(edge[1] if signed else abs(edge[1])))
        places = [c.edge(name) for name, _ in listed]
        order = np.array([reader * c.n_writers + writer for reader, writer in places], dtype=int)
        scores = np.zeros((c.n_readers, c.n_writers))
        scores.ravel()[order] = [score for _, score in listed]
    order = _live(c, order, most)
    prefixes = [_prefix(c, order, int(size)) for size in found["curve"]["edges"]]
    readers, writers = np.divmod(order, c.n_writers)
    targets = [c.readers[r] for r in readers]
    nodes = ["input", *c.writers[1:], "logits"]
    place = {node: i for i, node in enumerate(nodes)}
    columns: GraphColumns = {
        "nodes": nodes, "from": [place[c.writers[w]] for w in writers],
        "to": [place[target.partition("<")[0]] for target in targets],
        "through": "".join(target.partition("<")[2][:1] or "-" for target in targets),
        "score": short(scores.ravel()[order].tolist(), 6),
    }  # fmt: skip
    return columns, prefixes


def _live(c: Components, order: np.ndarray, most: int) -> np.ndarray:
    """The first edges of the order that lie on a path among themselves, at most `most` of them."""
    # The longest prefix with no more than `most` live edges: their number only grows.
    order = order[: bisect_right(range(len(order) + 1), most, key=partial(_n_live, c, order)) - 1]
    return np.asarray(order[c.prune(c.mask(order)).ravel()[order]])


def _prefix(c: Components, order: np.ndarray, size: int) -> int | None:
    """The shortest prefix with exactly `size` live edges, or None."""
    n = bisect_left(range(len(order)), size, key=partial(_n_live, c, order))
    return n if _n_live(c, order, n) == size else None


def _n_live(c: Components, order: np.ndarray, n: int) -> int:
    """How many of the first n edges lie on a path among themselves."""
    return int(c.prune(c.mask(order[:n])).sum())


def _command(run: Run) -> str:
    folder, own = shlex.quote(str(run.path)), (run.path / "base" / "model").is_dir()
    dense = f"{folder}/base/model" if own else shlex.quote(str(run.record.get("config", {}).get("model", "MODEL")))
    task = shlex.quote(about(run).task or "ioi")
    return f"sparselens compare {dense} {folder} --tasks {task} --out {folder}/circuits"


SECTION = Section("circuits", "Circuits", lambda shown: circuits(shown.run), _command, place=40)
