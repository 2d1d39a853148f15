"""Run folders made of rows alone, in milliseconds: what a report needs, without any model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from reading_rows import THRESHOLDS, multipliers, task_row
from safetensors.numpy import save_file

from sparselens.circuits.circuit import Circuit
from sparselens.models.component_graph import Components
from sparselens.runs.run import write_json

HOSTILE = "</script><img src=x onerror=alert(1)>"
READINGS = ("removed", "share", "corrupted", "learnt", "heads", "heads-corrupted", "components")
LONE = "a\ud800b"  # half a character: JSON can hold it, UTF-8 cannot


def make_run(
    path: Path,
    *,
    n_layers: int = 3,
    n_heads: int = 4,
    tokens: list[str] | None = None,
    n_edges: int = 60,
    parts: tuple[str, ...] = ("training", "attention", "circuits", "trace"),
    readings: tuple[str, ...] = READINGS,
    model: str = "tiny-model",
    seed: int = 0,
) -> Path:
    """A finished sparsify Run with the parts asked for."""
    rng = np.random.default_rng(seed)
    tokens = tokens or ["The", " opposite", " of", ' "', "large", '"', " is", ' "']
    config = {
        "model": model, "loss": "kl", "target": "base", "tolerance": 0.05, "slack": 0.4, "slack_until": 0.6,
        "control": True, "training": {"steps": 200, "batch": 8, "lr": 1e-4, "evaluate_every": 20, "seed": seed},
    }  # fmt: skip
    provenance = {"versions": {"sparselens": "0.1.0"}, "python": "3.11", "commit": "0" * 40, "command": "sparselens x"}
    write_json(path / "run.json", {"kind": "sparsify", "config": config, "provenance": provenance})
    per_head = np.clip(rng.exponential(0.03, (n_layers, n_heads)), 0, 1).tolist()
    rows = [_row("base", 1.70, 0.0, 1.0), _row("control", 1.69, 0.01, 1.0), _row("sparse", 1.72, 0.03, 0.03)]
    rows[-1] |= {"density_per_head": per_head, "density_per_layer": np.mean(per_head, 1).tolist()}
    write_json(path / "evaluation.json", rows)
    write_json(path / "summary.json", {"target": 0.05, "met": True, "best_step": 180, "report_sequences": 57})
    if "training" in parts:
        write_metrics(path, rng, n_layers)
    if "attention" in parts:
        write_attention(path / "attention", rng, n_layers, n_heads, tokens)
    if "circuits" in parts:
        write_circuits(path / "circuits", rng, n_layers, n_heads, n_edges, tokens=tokens, readings=readings)
    if "trace" in parts:
        write_trace(path / "trace", rng, n_layers, n_heads, tokens)
    return path


def _row(kind: str, loss: float, kl: float, density: float) -> dict[str, Any]:
    return {
        "name": kind, "kind": kind, "loss": loss, "sequences": 57, "loss_standard_error": 0.04, "kl_to_base": kl,
        "exact": 0.0, "density": density, "density_per_layer": None, "density_per_head": None,
        "edges_per_query": None if density == 1 else 0.6,
    }  # fmt: skip


def write_metrics(path: Path, rng: np.random.Generator, n_layers: int) -> None:
    lines, control = [], []
    for step in range(1, 201):
        density = 0.03 + 0.5 * np.exp(-step / 30)
        line = {"step": step, "loss": 0.05 + 0.3 * np.exp(-step / 40) + 0.01 * rng.random(), "density": density}
        line |= {"lambda": float(np.exp(np.sin(step / 25))), "tokens_per_second": int(9000 + 500 * rng.random())}
        check = {"step": step, "loss": 1.7, "tokens_per_second": 11000}
        if step % 20 == 0:
            line |= {"heldout_loss": 0.045, "heldout_density": density * 0.8}
            line["heldout_density_per_layer"] = (density * rng.uniform(0.2, 1.5, n_layers)).tolist()
            check["heldout_loss"] = 0.01
        lines.append(json.dumps(line))
        control.append(json.dumps(check))
    (path / "control").mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "control" / "metrics.jsonl").write_text("\n".join(control) + "\n")


def write_attention(
    folder: Path, rng: np.random.Generator, n_layers: int, n_heads: int, tokens: list[str], texts: tuple[str, ...] = ()
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    n = len(tokens)
    prompts = []
    for i, text in enumerate(texts or ("".join(tokens), "the same tokens again")):
        logits = np.where(np.tri(n, dtype=bool), 2 * rng.standard_normal((n_layers, n_heads, n, n)), -np.inf)
        dense = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        margin = logits - 2.5
        tensors = {
            "dense.weights": dense.astype(np.float16),
            "control.weights": dense.astype(np.float16),
            "sparse.weights": (dense * (margin > 0)).astype(np.float16),
            "sparse.margin": margin.astype(np.float32),
        }
        save_file(tensors, folder / f"prompt-{i}.safetensors")
        answer = {"says": tokens, "probability": [0.5] * n}
        models = {role: dict(answer) for role in ("dense", "control", "sparse")}
        prompts.append(
            {"text": text, "tokens": tokens, "cut": False, "models": models, "file": f"prompt-{i}.safetensors"}
        )
    shape = {"n_layers": n_layers, "n_heads": n_heads}
    # Not write_json: it writes UTF-8, which has no lone surrogates.
    rows = {"shape": shape, "prompts": prompts, "notes": []}
    (folder / "attention.json").write_text(json.dumps(rows))


def write_circuits(
    folder: Path,
    rng: np.random.Generator,
    n_layers: int,
    n_heads: int,
    n_edges: int,
    task: str = "ioi",
    tokens: list[str] | None = None,
    readings: tuple[str, ...] = READINGS,
) -> None:
    """results.json of `compare` with these readings, and the component graphs' own files."""
    c = Components(n_layers, n_heads)
    folder.mkdir(parents=True, exist_ok=True)
    others = tuple(name for name in readings if name != "components")
    style = {"tokens": tokens or list("36+28="), "shape": (n_layers, n_heads), "n_prompts": 16}
    row = task_row(rng, others, **style, task=task, model="tiny-model")
    if not others:
        del row["open_edges"]
    if "components" in readings:
        for role, model in row["models"].items():
            model["settings"] = {"selection": "top"}
            model["readings"]["components"] = _components(c, rng, folder, task, role, n_edges)
        row["multipliers"]["components"] = multipliers(row["models"], "components")
    rows = {"settings": {}, "names": {"dense": "dense", "sparse": "sparse"}, "tasks": {task: row}}
    (folder / "results.json").write_text(json.dumps(rows))  # tokens may hold half a character


def _components(c: Components, rng: np.random.Generator, folder: Path, task: str, role: str, n_edges: int) -> dict:
    """Random scores, and the curve a search over them would have: sizes are of pruned prefixes."""
    scores = np.where(c.possible, rng.standard_normal(c.possible.shape) ** 3, 0.0)
    circuit = Circuit(c, scores, c.possible)
    order = circuit.order()
    asked = np.unique(np.geomspace(4, min(4 * n_edges, c.n_edges), 14).astype(int))
    sizes = sorted({int(c.prune(c.mask(order[:n])).sum()) for n in asked} | {c.n_edges})
    effect = (1 - np.exp(-np.arange(1, len(sizes) + 1) / 3)).tolist()
    effect[-1] = 1.0
    at = {t: next(size for size, f in zip(sizes, effect, strict=True) if f >= float(t)) for t in THRESHOLDS}
    circuit.save(folder / f"circuit-{task}-{role}.json")
    band = {"low": [f - 0.05 for f in effect], "high": [f + 0.04 for f in effect]}
    return {
        "scope": "task", "n_prompts": 16, "n_edges": c.n_edges, "n_edges_scored": c.n_edges, "m_model": 4.9,
        "m_nothing": 0.1, "checks": {"full": 1e-6, "empty": 1e-6}, "curve": {"edges": sizes, "effect": effect, **band},
        "edges_at": at, "edges_at_interval": {t: [n, n] for t, n in at.items()}, "circuit": [],
        "random": {"edges": [8, c.n_edges], "effect": [0.0, 1.0], "low": [0, 1], "high": [0, 1]},
    }  # fmt: skip


def write_trace(folder: Path, rng: np.random.Generator, n_layers: int, n_heads: int, tokens: list[str]) -> None:
    """A dense and a sparse trace of the same prompt, with clusters, carriers, looks and a check of every edge."""
    last = len(tokens) - 1
    clusters = [
        {"name": "opposite", "layers": [0, 1], "positions": [1], "nodes": [1, 2, 3]},
        {"name": "large", "layers": [0, n_layers - 1], "positions": [min(4, last)], "nodes": [4, 5]},
        {"name": "quotes", "layers": [0, n_layers - 1], "positions": [last], "nodes": [6]},
        {"name": "small", "layers": [n_layers, n_layers], "positions": [last], "nodes": [7], "kind": "output"},
    ]
    for role, n_carriers in (("dense", 5), ("sparse", 2)):
        edges = []
        for source, target, weight in ((1, 3, 2.0), (0, 3, 0.7), (2, 3, -0.5), (1, 2, 0.3)):
            key, query = (clusters[end]["positions"][0] for end in (source, target))
            links = [
                {"layer": i % n_layers, "head": i % n_heads, "query": query, "key": key, "share": weight / n_carriers}
                for i in range(n_carriers)
            ]
            edges.append(
                {
                    "source": clusters[source]["name"], "target": clusters[target]["name"], "weight": weight,
                    "departure": links, "arrival": links, "single_hop": 0.9 * weight, "multi_hop": 0.1 * weight,
                    "direct": 0.0, "flow": abs(weight), "predicted": -weight, "predicted_direct": -weight,
                    "measured": -weight * (0.8 + 0.1 * rng.random()), "measured_direct": -0.95 * weight,
                    "heads_for_80": [{k: link[k] for k in ("layer", "head", "share")} for link in links],
                }
            )  # fmt: skip
        link = edges[0]["arrival"][0]
        look = {key: link[key] for key in ("layer", "head", "query", "key")} | {
            "logit": 5.0,
            "margin": 2.5,
            "rest": 0.4,
        }
        look["terms"] = [{"query_source": HOSTILE, "key_source": "feature 5 of layer 0 at 4", "term": 3.0}]
        look["terms"].append({"query_source": "position 7", "key_source": "token 4", "term": -0.5})
        look["closing"] = [{"source": "feature 5 of layer 0 at 4", "margin_without": -0.31}]
        trace = {
            "prompt": "".join(tokens), "tokens": tokens, "n_layers": n_layers, "n_heads": n_heads,
            "gated": role == "sparse", "target": [{"label": "small"}], "clusters": clusters, "edges": edges,
            "completeness_error": 2e-6, "scores": {"replacement": 0.7, "completeness": 0.8},
            "agreement": {"pearson": 0.98, "spearman": 0.9, "n": 4}, "looks": [look],
        }  # fmt: skip
        trace["cut"] = _cut(rng, bad=role == "dense")
        trace["labels"] = {f"{layer}/{n}": f"the word “{HOSTILE}”" for layer in range(n_layers) for n in range(12)}
        single = {"source": "feature 5 of layer 0 at 4 'x'", "target": "small", "weight": 2.0, "before": 1.0}
        single |= {"predicted": -2.0, "measured": -1.5, "predicted_direct": -2.0, "measured_direct": -1.0}
        trace["interventions"] = {"rows": [single]}
        (folder / role).mkdir(parents=True, exist_ok=True)
        (folder / role / "trace.json").write_text(json.dumps(trace))
        names = [(layer, n) for layer in range(n_layers) for n in range(12)]
        (folder / role / "cards.json").write_text(json.dumps({f"{a}/{b}": a_card(a, b) for a, b in names}))
        save_file(_graph_tables(rng, n_layers, last + 1), folder / role / "graph.safetensors")


def _cut(rng: np.random.Generator, bad: bool = False) -> dict:
    """What cutting edges gave; bad: predictions that did not come true."""
    rows = [{"source": "a", "target": "b", "tangent": 3 * x, "path": -x if bad else x, "measured": x}
            for x in rng.standard_normal(12).tolist()]  # fmt: skip
    figures = {
        "n": 12, "pearson_tangent": 0.7, "spearman_tangent": 0.6, "pearson_path": -1.0 if bad else 0.99,
        "spearman_path": -1.0 if bad else 0.95, "sign_agreement": 0.0 if bad else 1.0, "n_signs": 5, "norms": 2.1,
        "patterns": 0.1,
    }  # fmt: skip
    return {**figures, "clusters": figures, "features": figures, "within": figures, "cluster_rows": rows[:6],
            "feature_rows": rows[6:]}  # fmt: skip


def a_card(layer: int, feature: int) -> dict:
    """A feature's card as `sparselens features` writes it, with words that try to be markup."""
    excerpt = {"text": ["The", " box", HOSTILE, "\n"], "activations": [0, 40, 255, 0], "at": 2, "value": 3.2,
               "place": [4, 17]}  # fmt: skip
    return {
        "layer": layer, "feature": feature, "label": f"the word “word{feature}” {HOSTILE}", "fits": 18, "fires": 320,
        "share": 0.0032 * (1 + feature), "mean": 1.1, "largest": 3.2 + layer, "histogram": [3, 90, 200, 27],
        "lowest": 0.7, "promoted": [[" small", 9.1], [HOSTILE, 4.0]], "suppressed": [[" large", -6.0]],
        "nearest": [[0, 1, 0.71, "the word “word1”"]], "top": [excerpt] * 3, "lower": [{**excerpt, "value": 0.9}],
    }  # fmt: skip


def _graph_tables(rng: np.random.Generator, n_layers: int, n_tokens: int) -> dict[str, np.ndarray]:
    """What Graph.save writes: features, tokens and one logit; every row reads everything below it."""
    n_features = 12
    kind = np.array([0] * n_features + [2] * n_tokens + [5], np.int8)
    layer = np.r_[np.sort(rng.integers(0, n_layers, n_features)), [-1] * n_tokens, n_layers].astype(np.int32)
    position = np.r_[rng.integers(0, n_tokens, n_features), np.arange(n_tokens), n_tokens - 1].astype(np.int32)
    targets = [len(kind) - 1, *range(n_features)]
    sources = [np.flatnonzero((layer < layer[t]) & (position <= position[t])) for t in targets]
    source = np.concatenate(sources).astype(np.int64)
    return {
        "kind": kind, "layer": layer, "position": position, "index": np.arange(len(kind), dtype=np.int32),
        "value": rng.random(len(kind)).astype(np.float32), "influence": rng.random(len(kind)).astype(np.float32),
        "row_target": np.array(targets, np.int64), "first": np.cumsum([0, *map(len, sources)]).astype(np.int64),
        "source": source, "weight": rng.standard_normal(len(source)).astype(np.float32),
        "node_kept": np.ones(len(kind), bool), "edge_kept": rng.random(len(source)) < 0.8,
    }  # fmt: skip


def real_trace() -> dict:
    """What `sparselens trace --json` writes, of a tiny gated model."""
    from tracing_setup import traced

    from sparselens.attribution.clusters import find_clusters
    from sparselens.attribution.trace import summarise
    from sparselens.config import Trace

    graph = traced(gated=True)
    return json.loads(json.dumps(summarise(graph, find_clusters(graph), Trace(checks=3), model="tiny")))


def rows_in(page: str) -> dict:
    """The data of a page, found as a browser would: up to the first </script>."""
    return json.loads(page.split('<script type="application/json" id="rows">')[1].split("</script")[0])
