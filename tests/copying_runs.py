"""A task that a tiny model learns in a few dozen steps, and quick runs on it."""

import os
import signal

import torch

import sparselens as sl
from sparselens.runs.run import Metrics
from sparselens.training import loop as training

TIMES = ("tokens_per_second",)


class Copying:
    """Sequences whose second half repeats the first: learnable by a tiny model in a few dozen steps."""

    length, n_heldout = 16, 32

    def _make(self, numbers, offset):
        rows = [torch.randint(2, 64, (8,), generator=torch.Generator().manual_seed(offset + i)) for i in numbers]
        ids = torch.stack([torch.cat([row, row]) for row in rows])
        labels = torch.cat([ids[:, 1:], torch.full((len(rows), 1), -100)], 1)
        return {"input_ids": ids, "labels": labels}

    def train(self, start, count):
        return self._make(range(start, start + count), 0)

    def heldout(self, start, count):
        return self._make((i % self.n_heldout for i in range(start, start + count)), 10**9)

    def describe(self):
        return {"task": "copying"}


QUICK = dict(
    steps=12, batch=4, evaluate_every=4, evaluate_sequences=4, checkpoint_every=5, lr=1e-3, bias_lr=0.05, slack=1.0,
    loss="cross-entropy", density=0.01,
)  # fmt: skip


def sparsify(base, out, **options):
    said = []
    run = sl.sparsify(base, Copying(), out, say=said.append, **(QUICK | {"show_progress": False} | options))
    return run, said


def lines(run):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in Metrics.read(run)]


def stop_after(monkeypatch, step):
    """As if Ctrl-C came during that step."""
    original = training.Stage.describe
    calls = []

    def describe(*args):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(training.Stage, "describe", describe)
