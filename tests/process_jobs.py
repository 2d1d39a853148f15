"""What test_processes.py does in one process and in two: python process_jobs.py FOLDER JOB ... under a launcher."""

import json
import math
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import sparselens as sl
from sparselens.runs import distributed
from sparselens.training import engine, loop as training

QUICK = dict(
    steps=20, batch=8, length=16, evaluate_every=5, evaluate_sequences=4, checkpoint_every=8, lr=1e-3, bias_lr=0.05,
    loss="cross-entropy", density=0.01, heldout_tokens=300, show_progress=False, say=lambda text: None,
)  # fmt: skip
TRACKER = "tensorboard" if find_spec("tensorboard") else "none"
ALL_AT_ONCE = dict(lora=2, loss="kl", weight_decay=0.01, control=True, gradient_checkpointing=True, tracker=TRACKER)


def sparsify(folder: Path, out: str, **options):
    text = [str(folder / "text.txt")]
    return sl.sparsify(folder / "base", text, folder / out, cache=folder / "cache", **(QUICK | options))


def transcode(folder: Path, out: str):
    sl.transcode(
        str(folder / "base"), data=[str(folder / "text.txt")], out=folder / out, cache=folder / "cache", features=32,
        steps=12, batch=4, length=16, evaluate_every=6, evaluate_sequences=3, checkpoint_every=8, dead_after=200, k=4,
        heldout_tokens=300, show_progress=False, say=lambda text: None,
    )  # fmt: skip


def discover(folder: Path, out: str):
    model, tokenizer = sl.load(folder / "base")
    settings = dict(prompts=10, points=6, steps=3, say=lambda text: None)
    circuit = sl.discover(model, tokenizer, str(folder / "task.jsonl"), **settings)
    if distributed.is_main():
        found = {key: value for key, value in circuit.results.items() if key != "seconds"}
        found["scores"] = circuit.scores.tolist()
        (folder / out).write_text(json.dumps(found))


def in_process(rank: int, step: int, action):
    """Let one process (the only one, if there is one) do something when it has done so many steps."""
    original, calls = training.Stage.describe, []

    def describe(*args):
        calls.append(1)
        if len(calls) == step and distributed.rank() == min(rank, distributed.world() - 1):
            action()
        return original(*args)

    training.Stage.describe = describe
    return lambda: setattr(training.Stage, "describe", original)


def interrupted(folder: Path, out: str):
    """Only one process hears of it."""
    undo = in_process(1, 7, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        sparsify(folder, out)
    except engine.Interrupted:
        undo()


def not_a_number(folder: Path, out: str):
    """In one process, at the third step."""
    original, calls = training.loss_and_density, []

    def bad(stage, *args):
        loss, density = original(stage, *args)
        calls.append(1)
        return loss * (math.nan if len(calls) == 3 and distributed.rank() == 1 else 1), density

    training.loss_and_density = bad
    sparsify(folder, out, steps=6)
    training.loss_and_density = original


def existing(folder: Path, out: str):
    """A folder that holds a run already: the main process says so, the others stop."""
    try:
        sparsify(folder, out)
    except (ValueError, SystemExit) as error:
        (folder / f"existing-{distributed.rank()}").write_text(repr(error))


def crash(folder: Path, out: str):
    """One process dies without a word to the others."""
    in_process(1, 3, lambda: os._exit(3))
    sparsify(folder, out)


JOBS = {
    "plain": sparsify,
    # Densities are averaged over rounds of forward passes: two processes make one round of two passes.
    "all": lambda folder, out: sparsify(folder, out, micro_batch=4 // distributed.world(), **ALL_AT_ONCE),
    "muon": lambda folder, out: sparsify(folder, out, optimizer="muon"),
    "resume": lambda folder, out: sparsify(folder, out, resume=True),
    "transcode": transcode,
    "discover": discover,
    "interrupted": interrupted,
    "not_a_number": not_a_number,
    "existing": existing,
    "crash": crash,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in sys.argv[2:]:
        name, _, out = job.partition("=")
        JOBS[name](Path(sys.argv[1]), out)
    threads = Path("/proc/self/task")  # of the process groups too
    before = len(list(threads.iterdir()))
    distributed.stop()
    # A thread that outlives Python, which it needs to let go of a tensor, aborts the process now and then.
    assert len(list(threads.iterdir())) < before
