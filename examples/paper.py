"""All of the paper's figures from a model's own weights, with one command that goes on where it stopped.

    python examples/paper.py gpt2 --data text/*.jsonl.zst --out runs/gpt2
    python examples/paper.py allenai/OLMo-7B-hf --data text/*.jsonl.zst --out runs/olmo --lora 64 --per-layer

1. plan        what every stage will need; what cannot fit is refused before anything starts
2. sparsify    the sparse model and its matched dense control
3. compare     figures 2 and 3: Greater Than, IOI, Docstring, IOI Long in base, control and sparse model
4. transcode   features of the dense and of the sparse model's MLPs
5. trace       figure 4: The opposite of "large" is "
6. report      the page and all figures

Every stage leaves its results in the folder; started again, the command does what is missing. Under `accelerate launch`
the trainings use all GPUs; the other stages then take a second, plain start.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sparselens as sl
from sparselens.circuits.estimate import plan_task
from sparselens.reporting.figures.attribution import draw_trace_all
from sparselens.runs.run import Run, write_json
from sparselens.serving.publish import figures

TASKS = ("greater-than", "ioi", "docstring", "ioi-long")
PROMPT, TARGET = 'The opposite of "large" is "', "small"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--density", type=float, default=0.004)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters to train instead of all weights")
    parser.add_argument("--prompts", type=int, default=100, help="per task; IOI Long takes 0.4 of them")
    parser.add_argument("--features", type=int, default=8192)
    parser.add_argument("--feature-steps", type=int, default=4000)
    parser.add_argument("--feature-batch", type=int, default=16)
    parser.add_argument(
        "--per-layer", action="store_true", help="features that write to their own layer alone: smaller"
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--no-plan", action="store_true")
    a = parser.parse_args(arguments)
    training = {"density": a.density, "steps": a.steps, "batch": a.batch, "length": a.length, "lora": a.lora}
    searches = {
        task: sl.Search(prompts=max(4, round(a.prompts * (0.4 if task == "ioi-long" else 1)))) for task in a.tasks
    }
    if not a.no_plan and not (a.out / "run.json").is_file():
        check(a.model, training, searches)
    if not (a.out / "summary.json").is_file():
        sl.sparsify(a.model, a.data, a.out, control=True, resume=(a.out / "run.json").is_file(), **training)
    compare(a.model, a.out, searches)
    features = {"features": a.features, "cross_layer": not a.per_layer, "steps": a.feature_steps, "length": a.length}
    coders = transcode(a.model, a.out, a.data, features | {"batch": a.feature_batch})
    if not (a.out / "trace" / "trace.json").is_file():
        sparse, dense = (a.out, coders["sparse"]), (a.model, coders["dense"])
        graph = sl.trace(*sparse, a.prompt, a.target, against=dense, out=a.out / "trace", names=("sparse", "dense"))
        assert graph.rows is not None
        draw_trace_all(graph.rows, a.out / "trace")
    print(sl.report(a.out))
    for path in figures(a.out, "png"):
        print(path)


def check(model: str, training: dict[str, Any], searches: dict[str, sl.Search]) -> None:
    """What it will need, said first; ValueError where it cannot fit."""
    needs: list[Any] = [sl.plan(model, control=True, **training)]
    for task, settings in searches.items():
        try:
            needs.append(plan_task(model, task, settings))
        except ValueError as error:
            print(f"{task} will be left out: {error}")
    for found in needs:
        print(found)
        if found.problem():
            raise ValueError(found.problem())


def compare(model: str, out: Path, searches: dict[str, sl.Search]) -> None:
    """Every task by itself, then all of them as one comparison. A task that a model cannot do is left out."""
    names, left_out = (Path(model).name, f"Sparse {Path(model).name}"), {}
    for task, settings in searches.items():
        part = out / "tasks" / Path(task).stem
        if not (part / "results.json").is_file():
            try:
                sl.compare(model, out, [task], settings=settings, names=names, out=part, show_progress=True)
            except ValueError as error:
                print(f"{task} is left out: {error}")
                left_out[task] = str(error)
    whole: dict[str, Any] = {"tasks": {}, "left_out": left_out}
    for task in searches:
        part = out / "tasks" / Path(task).stem
        if (part / "results.json").is_file():
            found = json.loads((part / "results.json").read_text())
            whole |= {key: found[key] for key in ("names", "settings", "provenance")}
            whole["tasks"] |= found["tasks"]
            for circuit in part.glob("circuit-*.json"):
                (out / "circuits").mkdir(exist_ok=True)
                shutil.copyfile(circuit, out / "circuits" / circuit.name)
    if whole["tasks"]:
        write_json(out / "circuits" / "results.json", whole)


def transcode(model: str, out: Path, data: list[str], settings: dict[str, Any]) -> dict[str, Path]:
    """A transcoder for each of the two models."""
    places = {kind: out / "transcoders" / kind for kind in ("dense", "sparse")}
    for kind, place in places.items():
        if not (place / "results.json").is_file():
            source = model if kind == "dense" else Run(out)
            sl.transcode(source, data=data, out=place, resume=(place / "run.json").is_file(), **settings)
    return places


if __name__ == "__main__":
    main()
