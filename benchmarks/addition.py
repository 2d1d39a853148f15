"""The demo over several seeds: python benchmarks/addition.py --seeds 0 1 2 --out results/addition.json"""

import argparse
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from sparselens.demo.walk import demo
from sparselens.runs.run import provenance, write_json

KEYS = (
    "dense_exact", "sparse_exact", "density", "edges_open", "edges_total", "edges_per_layer", "multiplier", "seconds",
    "met",
)  # fmt: skip


def one(seed: int) -> dict:
    torch.set_num_threads(1)
    folder = Path("runs") / f"addition-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    summary = demo(folder, seed, show_progress=False, say=lambda text: None).read("summary.json")
    return {"seed": seed} | {key: summary[key] for key in KEYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time; each uses one thread")
    parser.add_argument("--out", type=Path, default=Path("results/addition.json"))
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        seeds = list(pool.map(one, arguments.seeds))
    mean = {
        key: sum(row[key] for row in seeds) / len(seeds)
        for key in ("dense_exact", "sparse_exact", "density", "edges_open")
    }
    command = "python benchmarks/addition.py --seeds " + " ".join(map(str, arguments.seeds))
    about = provenance()
    write_json(arguments.out, {"command": command, "versions": about["versions"], "mean": mean, "seeds": seeds})
    print(json.dumps({"mean": mean, "seeds": seeds}, indent=1))


if __name__ == "__main__":
    main()
