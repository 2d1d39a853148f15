"""What the two examples of features share: train a pair of transcoders, give them faces, trace prompts, sum it up.

Not a command of its own: stories15m_features.py and smollm2_135m_features.py call `study`. Every stage goes on where it
stopped when the same command is given again, and `--only` runs one of them:

    dense, sparse    the model's transcoder
    faces            one pass over text for both (may also be given to another machine: it needs the transcoders alone)
    trace            the prompts through both models: features.json, and with --json the file for results/
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparselens as sl
from sparselens.config import Faces, Trace, Transcode
from sparselens.data.batches import Batches
from sparselens.reporting.figures.attribution import draw_trace
from sparselens.runs.run import provenance, write_json

STAGES = ["dense", "sparse", "faces", "trace"]
FITS = {"fvu": "fvu", "l0": "l0", "dead": "dead_share", "loss_replaced": "replacement_loss", "loss_model": "model_loss",
        "loss_silent": "zero_loss", "tokens": "tokens", "minutes": "minutes"}  # fmt: skip
CUT = ["n", "pearson_tangent", "pearson_path", "spearman_tangent", "spearman_path", "sign_agreement", "n_signs"]
CUT += ["norms", "patterns"]
Prompts = dict[str, tuple[str, str, str]]  # name -> kind, prompt, target


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=STAGES)
    parser.add_argument("--faces-tokens", type=int, default=20_000_000 if torch.cuda.is_available() else 1_000_000)
    parser.add_argument("--cuts", type=int, default=200, help="random feature edges to cut per prompt and model")
    parser.add_argument("--json", type=Path, help="also write the results here")


def study(
    sources: dict[str, str], text: Callable[..., Batches], settings: Transcode, prompts: Prompts, a: argparse.Namespace
) -> None:
    """All stages, or the one asked for. text(model, tokenizer, tokens): numbered sequences."""
    for role, source in sources.items():
        if a.only in (None, role) and not (a.out / role / "results.json").is_file():
            model, tokenizer = sl.load(source, device=device())
            tokens = settings.steps * settings.batch
            sl.transcode(
                model, tokenizer, data=text(model, tokenizer, tokens), out=a.out / role, settings=settings, name=source,
                resume=(a.out / role / "run.json").is_file(),
            )  # fmt: skip
    for role, source in sources.items():
        folder = a.out / role / "faces"
        if a.only in (None, "faces") and not (folder / "faces.json").is_file():
            model, tokenizer = sl.load(source, device=device())
            settings_of_faces = Faces(tokens=a.faces_tokens, batch=16 if device() == "cuda" else 8)
            sl.features(
                a.out / role, text(model, tokenizer, None), model=(model, tokenizer), settings=settings_of_faces,
                resume=(folder / "run.json").is_file(),
            )  # fmt: skip
    if a.only in (None, "trace"):
        found = summary(a.out, trace_all(sources, prompts, a))
        write_json(a.out / "features.json", found)
        if a.json is not None:
            write_json(a.json, found)
        print(json.dumps(found["heads_for_80"], indent=1))


def trace_all(sources: dict[str, str], prompts: Prompts, a: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """Every prompt through both models, with figure 4; {name: (kind, rows)}."""
    loaded = {role: sl.load(source, device=device()) for role, source in sources.items()}
    traces = {}
    for name, (kind, prompt, target) in prompts.items():
        path = a.out / f"trace-{name}" / "trace.json"
        if not path.is_file():
            print(f"\n== {prompt} -> {target}", flush=True)
            graph = sl.trace(
                loaded["sparse"], a.out / "sparse", prompt, target, against=(loaded["dense"], a.out / "dense"),
                names=("Sparse", "Dense"), settings=Trace(checks=10, cuts=a.cuts), out=path.parent, say=print,
            )  # fmt: skip
            draw_trace(graph.rows, path.with_name("figure4.png"))
        traces[name] = kind, json.loads(path.read_text())
    return traces


def summary(out: Path, traces: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """What goes to results/: fits, and per prompt and model the edge, its heads, and whether cuts come true."""
    fits = {role: json.loads((out / role / "results.json").read_text()) for role in ("dense", "sparse")}
    told: dict[str, Any] = {}
    heads: dict[str, list[int]] = {"dense": [], "sparse": []}
    for name, (kind, rows) in traces.items():
        told[name] = {"kind": kind, "prompt": rows["prompt"], "target": rows["target"][0]["label"]}
        for role, one in (("sparse", rows), ("dense", rows["against"])):
            main = one["main"]
            heads[role].append(main["n_heads_for_80"])
            cut = {part: {key: found[key] for key in CUT} for part in ("clusters", "features", "within")
                   if (found := one["cut"][part])}  # fmt: skip
            told[name][role] = {
                "edge": f"{main['source']} -> {main['target']}", "probability": one["target"][0]["probability"],
                "heads_for_80": main["n_heads_for_80"], "heads_cut": main["heads_cut"],
                "closed": main["closed"] | {"links": None},
                "completeness_error": one["completeness_error"], "scores": one["scores"], "agreement": one["agreement"],
                "agreement_direct": one["agreement_direct"], "cut": {key: one["cut"][key] for key in CUT} | cut,
            }  # fmt: skip
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "transcoders": {
            role: {key: row[name] for key, name in FITS.items()} | {"results": row} for role, row in fits.items()
        },
        "traces": told, "heads_for_80": {role: interval(counts) for role, counts in heads.items()}, "seeds": [0],
        "hardware": hardware, **provenance(),
    }  # fmt: skip


def interval(counts: list[int], seed: int = 0) -> dict[str, Any]:
    """Mean with a 95 % bootstrap interval over prompts."""
    values = np.array(counts, float)
    means = np.random.default_rng(seed).choice(values, (2000, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": values.mean(), "low": low, "high": high, "n": len(counts), "each": counts}
