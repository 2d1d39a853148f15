"""Do the scores rank edges as exact patching does, and what does each method give? On the models of a finished demo:

python benchmarks/addition_circuits.py runs/demo --out results/addition-circuits.json
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from sparselens import load
from sparselens.circuits.discover import Chosen, discover_on, prepare, split
from sparselens.circuits.faithfulness import THRESHOLDS, multiplier
from sparselens.circuits.run import Patcher
from sparselens.circuits.scores import eap, exact
from sparselens.config import Search
from sparselens.models.decoder import Decoder
from sparselens.runs.run import provenance, write_json
from sparselens.tasks import find

SCORES: dict = {
    "eap": (0, "own"),
    "eap-ig own": (5, "own"),
    "eap-ig whole": (5, "whole"),
    "eap-ig whole 20": (20, "whole"),
}
METHODS: dict = {
    "eap-ig own": {}, "eap-ig whole": {"path": "whole"}, "eap": {"method": "eap"}, "exact": {"method": "exact"},
}  # fmt: skip
MODELS = {"dense": "base/model", "control": "control/model", "sparse": "model"}


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Of absolute scores, as edges are ranked by them; ties share their mean rank."""

    def ranks(x: np.ndarray) -> np.ndarray:
        _, place, count = np.unique(np.abs(x), return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def agreement(models: dict, scoring) -> dict[str, dict]:
    """Spearman correlation of each score with exact patching, per model and treatment of gates."""
    rows = {}
    for name, model in models.items():
        for straight in (True, False) if name == "sparse" else (True,):
            decoder = Decoder(model, straight_through=straight)
            edges = np.flatnonzero(decoder.components.possible)
            wanted = exact(Patcher(decoder, scoring)).ravel()[edges]
            row = {"edges": len(edges), "edges_with_effect": int((wanted != 0).sum())}
            for label, (steps, path) in SCORES.items():
                found = eap(decoder, scoring, steps, len(scoring), path=path).ravel()[edges]
                found = np.where(np.abs(found) > 1e-6 * np.abs(found).max(), found, 0.0)
                row[label] = round(spearman(wanted, found), 3)
                row[f"{label}, edges with effect"] = round(spearman(wanted[wanted != 0], found[wanted != 0]), 3)
            label = name if name != "sparse" else f"sparse, gates {'straight-through' if straight else 'constant'}"
            rows[label] = row
            print(label, row, flush=True)
    return rows


def multipliers(models: dict, prompts: Chosen, n_prompts: int) -> dict[str, dict]:
    """Edges the dense model and the control need over edges the sparse model needs, per method and threshold.

    (Attention edges: `sparselens compare`.)
    """
    rows = {}
    for label, changes in METHODS.items():
        settings = Search(prompts=n_prompts, random_control=False, readings=("components",), **changes)
        found = {
            name: discover_on(model, "addition", prompts, settings, say=lambda text: None)
            for name, model in models.items()
        }
        rows[label] = _against({name: circuit.curves["components"] for name, circuit in found.items()})
        print(label, {other: row["0.9"] for other, row in rows[label].items()}, flush=True)
    return rows


def _against(curves: dict) -> dict[str, dict]:
    thresholds = (*THRESHOLDS, 0.99)
    return {
        other: {str(t): multiplier(curves[other], curves["sparse"], t) for t in thresholds}
        for other in ("dense", "control")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/addition-circuits.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {}
    for run in arguments.runs:
        loaded = {name: load(run / folder) for name, folder in MODELS.items()}
        models = {name: model for name, (model, _) in loaded.items()}
        settings = Search(prompts=arguments.prompts, readings=("components",))
        prompts = prepare(list(models.values()), loaded["dense"][1], find("addition"), settings, print)
        scoring, _ = split(prompts.mixed)
        found[run.name] = {
            "spearman_with_exact_patching": agreement(models, scoring),
            "multipliers": multipliers(models, prompts, arguments.prompts),
        }
    command = f"python benchmarks/addition_circuits.py {' '.join(f'runs/{run.name}' for run in arguments.runs)}"
    write_json(arguments.out, {"command": command, "versions": provenance()["versions"], "runs": found})


if __name__ == "__main__":
    main()
