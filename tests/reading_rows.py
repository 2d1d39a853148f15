"""Rows of readings exactly as circuits/rows.py says, without any model: curves, circuits, multipliers, open edges."""

from typing import Any

import numpy as np

THRESHOLDS = ("0.8", "0.9", "0.95", "0.98")
COLUMNS = ["layer", "head", "query", "key", "score", "weight"]
TOKENS = ["<s>", "The", " war", " lasted", " from", " the", " year", " 17", "32", " to", " the", " year", " 17"]
STEEP = {"dense": 1.1, "control": 1.0, "sparse": 1.4}  # how fast a curve rises
# Edges for 90 % of the effect: dense, control, sparse; and of how many that lead to the answer.
NEEDED = {"removed": (9300, 7900, 548), "share": (2066, 1800, 46), "corrupted": (24, 30, 41), "mean": (900, 800, 210)}
LEADING = {"dense": 0.97, "control": 0.96, "sparse": 0.0174}  # of all edges
HEADS = {"heads": (130, 120, 61), "heads-corrupted": (30, 28, 15)}
ALL = ("removed", "removed-task", "share", "corrupted", "mean", "learnt", *HEADS)


def curve(needed: float, n_edges: int, steep: float, most: float, band: float = 0.03, points: int = 40) -> dict:
    """Explained effect over sizes: 0.9 at `needed`, exactly 1 from `most` on."""
    sizes = np.unique(np.geomspace(1, n_edges, points).round().astype(int))
    effect = np.where(sizes >= most, 1.0, 1 / (1 + (needed / sizes) ** steep / 9))
    width = band * np.sqrt(effect * (1.02 - effect)) * 4
    rows = {"edges": sizes, "effect": effect, "low": effect - width, "high": effect + 0.8 * width}
    return {name: values.tolist() for name, values in rows.items()}


def needs(found: dict) -> dict[str, int]:
    """The smallest measured size from which the effect stays at or above a threshold."""
    size, effect = found["edges"], found["effect"]
    last = {t: max([i for i, f in enumerate(effect) if f < float(t)], default=-1) + 1 for t in THRESHOLDS}
    return {t: size[min(i, len(size) - 1)] for t, i in last.items()}


def reading(
    rng: np.random.Generator, role: str, needed: float, shape: tuple[int, int], tokens: list[str], *,
    scope: str = "prompt", heads: bool = False, n_prompts: int = 100, listed: int = 3000,
) -> dict[str, Any]:  # fmt: skip
    """One model's row of one reading."""
    n_layers, n_heads = shape
    n = len(tokens)
    if heads:
        places = np.argwhere(np.ones(shape))
    else:
        places = np.argwhere(np.broadcast_to(np.tri(n, dtype=bool), (n_layers, n_heads, n, n)))
    n_edges = len(places)
    needed = min(needed, 0.6 * n_edges)
    most = n_edges if heads else max(LEADING[role] * n_edges, needed * 1.3)
    mean = curve(needed, n_edges, STEEP[role], most)
    at = {t: float(size) if scope == "prompt" else size for t, size in needs(mean).items()}
    order = rng.permutation(n_edges)[: min(listed, int(most))]
    if not heads and role == "sparse":  # late tokens read a few others, most often the one before
        near = places[:, 2] - places[:, 3]
        order = np.argsort(rng.random(n_edges) * (1 + 3 * (near > 1)) * (1 + 2 * (places[:, 2] < n - 4)))[: len(order)]
    scores = -np.sort(-(rng.exponential(1.0, len(order)) ** 2)) * rng.choice([1, 1, -1], len(order))
    columns = ["layer", "head", "score"] if heads else COLUMNS
    circuit = [
        [*map(int, places[i]), float(s), *([] if heads else [float(rng.random())])]
        for i, s in zip(order, scores, strict=True)
    ]
    found = {
        "scope": scope, "n_prompts": n_prompts, "n_edges": n_edges, "m_model": 4.9, "m_nothing": 0.1, "edges_at": at,
        "edges_at_interval": {t: [0.9 * x, 1.1 * x] for t, x in at.items()}, "circuit": circuit, "curve": mean,
        "random": curve(0.9 * n_edges, n_edges, 2.5, n_edges), "checks": {"full": 1e-6, "empty": 1e-6}, "length": n,
        "example": "".join(tokens), "tokens": tokens, "columns": columns, "n_alive": int(most),
    }  # fmt: skip
    if scope == "prompt":
        own = curve(0.94 * needed, n_edges, STEEP[role], most, band=0.0)
        found |= {
            "example_curve": own, "example_at": needs(own),
            "edges_per_prompt": {t: [round(x)] * n_prompts for t, x in at.items()},
            "ranking": dict.fromkeys(THRESHOLDS, "gradient"), "rankings": {"gradient": at},
        }  # fmt: skip
    return found


def multipliers(models: dict[str, dict], name: str) -> dict[str, Any]:
    """{baseline: {threshold: row}} of a reading."""
    sparse = models["sparse"]["readings"][name]["edges_at"]
    found: dict[str, Any] = {}
    for baseline in ("dense", "control"):
        at = models[baseline]["readings"][name]["edges_at"] if baseline in models else {}
        for t in sparse.keys() & at.keys():
            ratio = at[t] / sparse[t]
            row = {"dense_edges": at[t], "sparse_edges": sparse[t], "multiplier": ratio, "low": 0.85 * ratio}
            row |= {"high": 1.2 * ratio, "n_prompts": models["sparse"]["readings"][name]["n_prompts"]}
            row["ranking"] = {"dense": "rescored", "sparse": "gradient"}
            found.setdefault(baseline, {})[t] = row
    return found


def task_row(
    rng: np.random.Generator, readings: tuple[str, ...] = ALL, *, tokens: list[str] | None = None,
    shape: tuple[int, int] = (30, 9), scale: float = 1.0, task: str = "greater-than", n_prompts: int = 100,
    listed: int = 3000, roles: tuple[str, ...] = ("dense", "control", "sparse"), model: str = "SmolLM2-135M",
) -> dict[str, Any]:  # fmt: skip
    """rows.TaskRow of three models, without the component graph."""
    tokens = tokens or TOKENS
    n_edges = shape[0] * shape[1] * len(tokens) * (len(tokens) + 1) // 2
    models = {}
    for i, role in enumerate(("dense", "control", "sparse")):
        found = {}
        for name in readings:
            heads = name in HEADS
            needed = (HEADS[name] if heads else NEEDED.get(name.removesuffix("-task"), NEEDED["removed"]))[i]
            needed *= shape[0] * shape[1] / 270 if heads else scale * n_edges / 51300
            scope = "task" if name.endswith("-task") else "prompt"
            style = {"scope": scope, "heads": heads, "n_prompts": n_prompts, "listed": listed}
            found[name] = reading(rng, role, max(needed, 2.0), shape, tokens, **style)
            if name == "learnt":
                found[name] = {k: v for k, v in found[name].items() if k not in ("curve", "random", "example_curve")}
                found[name] |= {"edges_at": {"0.9": max(0.12 * needed, 1.5)}, "n_prompts": 20}
        leads = LEADING[role] * n_edges
        models[role] = {
            "task": task, "metric": "logit", "model": model, "sparse": role == "sparse", "settings": {},
            "n_prompts_scoring": n_prompts, "n_layers": shape[0], "n_heads": shape[1], "readings": found, "seconds": {},
            "leading": {
                "n_prompts": n_prompts, "length": len(tokens), "n_possible": n_edges, "edges": leads,
                "per_prompt": [round(leads)] * n_prompts,
            },
        }  # fmt: skip
    models = {role: models[role] for role in roles}
    row: dict[str, Any] = {"models": models, "overlap": None}
    if {"dense", "sparse"} <= models.keys():
        row["multipliers"] = {name: multipliers(models, name) for name in readings}
        dense, sparse = (models[role]["leading"]["edges"] for role in ("dense", "sparse"))
        ratio = {"multiplier": dense / sparse, "low": 0.9 * dense / sparse, "high": 1.1 * dense / sparse}
        row["open_edges"] = {"dense": dense, "sparse": sparse, "n_prompts": n_prompts, "possible_edges": n_edges}
        row["open_edges"] |= ratio | {"control": 0.96 * n_edges, "against_control": ratio}
    return row


def comparison(n_tasks: int = 1, readings: tuple[str, ...] = ALL, **style: Any) -> dict[str, Any]:
    """rows.ComparisonRows of up to four tasks."""
    rng = np.random.default_rng(0)
    longer = [f" word{i}" for i in range(30)]
    kinds = {
        "greater-than": {}, "ioi": {"tokens": [*TOKENS[:11], " Mary"]}, "docstring": {"tokens": longer, "scale": 0.7},
        "ioi-long": {"tokens": longer + longer[:10], "scale": 0.5, "n_prompts": 40},
    }  # fmt: skip
    tasks = {name: task_row(rng, readings, **(kind | style), task=name) for name, kind in list(kinds.items())[:n_tasks]}
    return {"names": {"dense": "HuggingFaceTB/SmolLM2-135M", "sparse": "sparse"}, "tasks": tasks, "settings": {}}
