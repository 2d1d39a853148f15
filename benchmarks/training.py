"""How fast a sparse model trains beside its dense control: whole steps, as `sparselens sparsify` makes them.

    python benchmarks/training.py --json results/training-h200.json      # one CUDA device, about five minutes

Weights are random, sizes are those of the model named; KL to a frozen copy, packed documents, AdamW, compiled blocks.
Time is wall time from step to step, the median; `--profile` adds where the device's milliseconds of a step went.
"""

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from sparselens.config import Gate, Training
from sparselens.models.loading import add_gates
from sparselens.runs.run import check_writable, write_json
from sparselens.training import engine
from sparselens.training.compilation import faster
from sparselens.training.controllers import Budget
from sparselens.training.copies import trainable
from sparselens.training.loop import Stage

MODELS: dict[str, Any] = {
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=100000.0,
    ),
    "gemma3-270m": lambda: Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
    ),
}  # fmt: skip
KINDS = (  # part of a kernel's name -> what it is for; the first that fits
    ("gated attention", ("forward_kernel", "backward_kernel", "rows_kernel", "finish_kernel", "document_bounds")),
    ("dense attention", ("fmha", "flash", "cudnn", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "wgmma", "splitKreduce")),
    ("optimiser", ("multi_tensor", "adam", "Adam")),
    ("copies", ("Memcpy", "Memset")),
    ("compiled loss", ("log_softmax", "_softmax_")),
    ("compiled blocks", ("triton_",)),
)


@dataclass
class RandomText:
    """Tokens without meaning, in documents of about a hundred."""

    length: int
    vocabulary: int
    n_heldout: int = 0

    def train(self, start: int, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(start)
        ids = torch.randint(1, self.vocabulary, (count, self.length + 1), generator=generator)
        begins = torch.rand(count, self.length, generator=generator) < 0.01
        position = torch.arange(self.length).expand(count, -1)
        first = torch.where(begins, position, 0).cummax(1).values
        return {
            "input_ids": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].contiguous(),
            "position_ids": position - first,
        }

    heldout = train

    def describe(self) -> dict[str, object]:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", type=int, help="sequences per step; default 128, Gemma 64")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    check_writable(arguments.json)
    rows = []
    for name in arguments.models:
        batch = arguments.batch or (64 if name.startswith("gemma") else 128)
        rows.append(pair(name, batch, arguments.length, arguments.steps, arguments.profile))
        print({key: value for key, value in rows[-1].items() if not key.endswith("_milliseconds")}, flush=True)
    versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    if arguments.json:
        write_json(arguments.json, {"environment": versions, "rows": rows})


def pair(name: str, batch: int, length: int, steps: int, profile: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "batch": batch, "tokens": length, "compiled": True}
    for kind in ("dense", "sparse"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds, where = train(name, kind, batch, length, steps, profile)
        row[f"{kind}_tokens_per_second"] = round(batch * length / seconds)
        row[f"{kind}_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if where:
            row[f"{kind}_milliseconds"] = where
            print(kind, where, flush=True)
        gc.collect()
    row["ratio"] = round(row["sparse_tokens_per_second"] / row["dense_tokens_per_second"], 3)
    return row


def train(
    name: str, kind: str, batch: int, length: int, steps: int, profile: bool
) -> tuple[float, dict[str, float] | None]:
    """(median seconds of a step, milliseconds of one step by what they are for)."""
    torch.manual_seed(0)
    config = MODELS[name]()
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    settings = Training(steps=1000, batch=batch, compile="yes", lr=1e-5)
    model = trainable(copy.deepcopy(base), settings)
    if kind == "sparse":
        add_gates(model, Gate(bias=0.0)).requires_grad_(True)
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(
            kind, model, RandomText(length, config.vocab_size), Path(folder), settings,  # type: ignore[arg-type]
            constraint=Budget(0.0, 0.01, 0.2) if kind == "sparse" else None, teacher=base.requires_grad_(False),
        )  # fmt: skip
        stage.prepare()
        with faster([model, base], settings, "cuda"):
            for _ in range(6):
                engine.update(stage)
            times = []
            for _ in range(steps):
                torch.cuda.synchronize()
                began = time.perf_counter()
                engine.update(stage)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            where = milliseconds(stage) if profile else None
    return statistics.median(times), where


def milliseconds(stage: Stage, steps: int = 3) -> dict[str, float]:
    """Device time of a step by what it is for, and the time in which the device had nothing to do."""
    from torch.profiler import ProfilerActivity, profile as profiler

    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        began = time.perf_counter()
        for _ in range(steps):
            engine.update(stage)
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    spent: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((kind for kind, parts in KINDS if any(part in event.name for part in parts)), "other")
            spent[kind] += event.device_time_total / 1e3 / steps
            names[event.name] += event.device_time_total / 1e3 / steps
    spent["nothing"] = wall * 1e3 / steps - sum(spent.values())
    for name, ms in names.most_common(25):
        print(f"  {ms:8.2f} ms  {name[:110]}", flush=True)
    return {kind: round(ms, 2) for kind, ms in spent.most_common()}


if __name__ == "__main__":
    main()
