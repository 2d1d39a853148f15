"""What a run of `sparsify` will need: memory per GPU, time, disk. Known before it starts, without the weights.

Memory   = weights (of the model in training and of the base it is compared with), gradients, Adam's moments, and what
           one micro-batch keeps: counted, not guessed (dry_run.py). `sharded` (FSDP2) divides all but the last by the
           GPUs and adds what is gathered while it computes. On a CPU the best state so far comes on top.
Time     = tokens / (tokens per second and GPU * GPUs), or communication where that takes longer. The rate is given,
           measured on this machine, or, for an H200 and for GPUs that are not here, worked out from counted work.
Disk     = checkpoints, the best state, models, tokenised text.
"""

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ..config import Sparsify, Text
from ..models.access import SAFE, access, refusing
from ..models.architectures import base_model, dimensions
from ..models.loading import Source, check_source, name_of
from ..runs import distributed
from ..runs.run import Run, free_disk
from .compilation import COMPILE_FROM
from .dry_run import count_step, time_step
from .sparsify import STEERING_SHARE, disk, fitting, overridden, source_name

GIB = 2**30
PROCESS = 0.7 * GIB  # Python, PyTorch, what its allocator keeps; on a GPU the CUDA context and workspaces
# An H200 as this code uses it: operations per second in matrix products, and bytes per second over all operations,
# counted one by one (caches serve part of them). The host needs time per operation, which decides for small models.
GPU_FLOPS, GPU_BYTES, GPU_LAUNCH = 650e12, 6.5e12, 6e-6
# Compiled blocks: what they keep, how many of the counted bytes they move, how much faster a measured step gets.
COMPILED_KEEPS, COMPILED_MOVES, COMPILED_SPEED = 0.62, 0.36, 1.4
GPU_START, COMPILING = 25.0, 30.0  # seconds until the first step, and more where blocks are compiled
DISK_BYTES = 1e9  # of checkpoints per second and process, checksums included: assumed
SLOW_FLOPS = 2e12  # a shallow step with more work than this is not timed on a CPU, but worked out
CPU_SHARE = 0.5  # of a large matrix product's speed that a step reaches on a CPU
NVLINK, NETWORK = 300e9, 40e9  # bytes per second and GPU, in a node of eight and between nodes (400 Gbit/s each)
NODE = 8


@dataclass(frozen=True)
class Plan:
    """What is to be expected. Bytes and seconds; memory is that of one GPU (or of the machine, without one)."""

    model: str
    gpus: int  # 0: a CPU
    parameters: int
    trained: int
    memory: dict[str, float]
    available: float
    micro: int  # sequences at once
    length: int  # tokens of each
    disk: dict[str, float]
    free: float
    advice: str = ""  # what would fit, where this does not; then nothing is known of the rest
    tokens_per_second: float = 0.0  # per GPU, while it computes
    how: str = ""  # where that number comes from
    compute: float = 0.0  # seconds per step
    communication: float = 0.0  # seconds per step, beside computing
    steps: int = 0  # of all stages together
    times: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of each part of the run

    @property
    def seconds(self) -> float:
        """The whole run."""
        return sum(self.times.values())

    @property
    def total_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def total_disk(self) -> float:
        return sum(self.disk.values())

    def problem(self) -> str:
        """Why it cannot run, in one sentence; empty where it can."""
        where = "each GPU has" if self.gpus else "this machine has"
        if self.total_memory > self.available:
            need = f"{self.total_memory / GIB:.1f} GiB of memory" + (" per GPU" if self.gpus else "")
            return f"this run needs about {need}, {where} {self.available / GIB:.1f}{self.advice}"
        if self.total_disk > self.free:
            return f"this run needs about {self.total_disk / 1e9:.1f} GB of disk, {self.free / 1e9:.1f} GB are free"
        return ""

    def __str__(self) -> str:
        where = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else "CPU"
        trained = "all trained" if self.trained >= self.parameters else f"{self.trained / 1e6:,.1f}M trained"
        memory = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.memory.items() if size > 0.05 * GIB)
        disk = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.disk.items() if size > 0.05e9)
        rate = f"{self.tokens_per_second:,.0f} tokens/s" + (" per GPU" if self.gpus > 1 else "")
        lines = [
            f"{self.model}: {self.parameters / 1e6:,.1f}M parameters, {trained}; {where}",
            f"memory  {self.total_memory / GIB:.1f} GiB of {self.available / GIB:.1f}{' per GPU' if self.gpus else ''}"
            f" ({memory}), {self.micro} sequences of {self.length:,} tokens at once",
            f"disk    {self.total_disk / 1e9:.1f} GB of {self.free / 1e9:.1f} free ({disk})",
        ]
        if self.seconds:
            share = f", beside {self.communication:.2f} s of communication" if self.communication else ""
            step = f"{max(self.compute, self.communication):.2f} s per step{share}"
            parts = ", ".join(f"{name} {in_words(part)}" for name, part in self.times.items() if part)
            lines.insert(2, f"time    {in_words(self.seconds)} ({parts})")
            lines.insert(3, f"        {self.steps:,} steps, {step}, {rate} ({self.how})")
        return "\n".join(lines)


def plan(
    model: Source, *, settings: Sparsify | None = None, text: Text | None = None, gpus: int | None = None,
    gpu_memory: float | None = None, sharded: bool = False, tokens_per_second: float | None = None,
    out: str | Path = ".", **overrides: Any,
) -> Plan:  # fmt: skip
    """Memory, time and disk of `sparsify` with the same settings.

    model: hub name, folder, config.json, Run (the model it started from), .gguf, or a model in memory; only its
    configuration is read.
    gpus: 0 plans for a CPU; None: those of this machine. gpu_memory: GiB of each; None: this machine's, or 80.
    tokens_per_second: of one GPU, where it is known.
    """
    settings, text = overridden(settings or Sparsify(), text or Text(), overrides)
    config = read_config(model)
    here = torch.cuda.device_count()
    gpus = here if gpus is None else gpus
    if gpus < 0:
        raise ValueError(f"gpus={gpus}: expected a number of GPUs, or 0 for a CPU")
    if gpu_memory is not None and not gpu_memory > 0:
        raise ValueError(f"gpu_memory={gpu_memory}: expected a number of GiB above 0")
    if tokens_per_second is not None and not tokens_per_second > 0:
        raise ValueError(f"tokens_per_second={tokens_per_second}: expected a number above 0")
    text = fitting(config, "", text, lambda line: None)
    available = available_memory(gpus, gpu_memory)
    job = Job(config, settings, text.length, max(1, gpus), gpus > 0, sharded and gpus > 1)
    while gpus == 1 and settings.training.micro_batch is None and sum(job.memory().values()) > available:
        if job.micro % 2:
            break
        job = job.changed(micro_batch=job.micro // 2)  # as the run itself will do when memory runs out
    trained, parameters = job.step.trained, job.step.parameters
    tokens = settings.training.batch * text.length  # per step
    tokenised = (2 if config.vocab_size <= 1 << 16 else 4) * settings.training.steps * tokens
    space = disk(parameters, trained, settings) | {"tokenised text": tokenised}
    known = (
        source_name(model),
        gpus,
        int(parameters),
        int(trained),
        job.memory(),
        available,
        job.micro,
        text.length,
        space,
    )
    result = Plan(*known, free=free_disk(Path(out)))
    if result.total_memory > available:
        return dataclasses.replace(result, advice=job.advice(available))
    gradients, update, how = job.speed(here, tokens_per_second)
    compute = gradients * tokens / job.gpus + update
    communication = job.communication()
    per_step = max(compute, communication)
    # Of a training token's time: one pass of three (backward counts two), four with a teacher or a repetition.
    forward_share = 1 / (3 + (settings.loss == "kl") + settings.training.gradient_checkpointing)
    evaluation = forward_share * gradients * job.evaluated_tokens(text) / job.gpus
    stages = 2 if settings.trains_control else 1
    saving = settings.training.steps // settings.training.checkpoint_every * 16 * job.step.trained / DISK_BYTES
    start = job.gpu * (GPU_START + stages * job.compiled * COMPILING)
    steps = stages * settings.training.steps
    times = {
        "start": start, "training": steps * per_step, "checkpoints": stages * saving / job.gpus,
        "evaluation": evaluation,
    }  # fmt: skip
    rates: Any = {"compute": compute, "communication": communication, "steps": steps, "times": times}
    return dataclasses.replace(result, tokens_per_second=tokens / job.gpus / compute, how=how, **rates)


@dataclass
class Job:
    """One run on so many GPUs (or one CPU)."""

    config: Any
    settings: Sparsify
    length: int
    gpus: int
    gpu: bool
    sharded: bool

    def __post_init__(self) -> None:
        training = self.settings.training
        if training.batch % self.gpus:
            raise ValueError(f"batch={training.batch} cannot be shared by {self.gpus} GPUs: choose a multiple of that")
        self.micro = distributed.micro_batch(training.batch // self.gpus, training.micro_batch, self.length, self.gpu)
        counted = count_step(self.config, self.settings, self.length, self.micro, self.gpu, not self.sharded)
        self.step, self.layer = counted

    @property
    def passes(self) -> int:
        """Micro-batches per step and GPU."""
        return self.settings.training.batch // (self.micro * self.gpus)

    @property
    def compiled(self) -> bool:
        """Whether the run will compile its blocks (compilation.compiles)."""
        training = self.settings.training
        auto = training.compile == "auto" and training.steps >= COMPILE_FROM and not self.sharded
        return self.gpu and (training.compile == "yes" or auto)

    def memory(self) -> dict[str, float]:
        """Bytes at the worst moment, by what they are for."""
        share = self.gpus if self.sharded else 1
        step, layer = self.step, self.layer
        gradients = 4 * step.trained / share
        # With one pass per step, gradients come into being while what was kept goes away.
        peak = step.peak
        if self.compiled:
            peak -= (1 - COMPILED_KEEPS) * dimensions(self.config).n_layers * layer.kept
        activations = peak if self.passes > 1 else max(peak, gradients) - gradients
        gathered = 0.0
        if self.sharded:  # what is no block's stays whole; of blocks, one computes, one is on its way, one goes back
            root = step.parameters - dimensions(self.config).n_layers * layer.parameters
            gathered = 4 * root + 12 * layer.parameters
        weights = 4 * step.parameters / share
        best = 0.0 if self.gpu else 4 * step.trained  # always in the CPU's memory
        return {
            "weights": weights, "base": weights, "gradients": gradients, "Adam": 8 * step.trained / share,
            "activations": activations, "gathered": gathered, "best state": best, "process": PROCESS,
        }  # fmt: skip

    def changed(self, sharded: bool | None = None, **changes: Any) -> "Job":
        """The same with other settings of the training."""
        training = dataclasses.replace(self.settings.training, **changes)
        settings = dataclasses.replace(self.settings, training=training)
        return dataclasses.replace(self, settings=settings, sharded=self.sharded if sharded is None else sharded)

    def advice(self, available: float) -> str:
        """The first of a few changes with which it would fit, as the end of a sentence."""
        least = partial(self.changed, micro_batch=1, gradient_checkpointing=True)
        tries = {"--micro-batch 1": partial(self.changed, micro_batch=1)}
        tries["--micro-batch 1 --gradient-checkpointing"] = least
        if self.gpus > 1 and not self.sharded:
            tries["FSDP2 (--sharded) with --micro-batch 1 --gradient-checkpointing"] = partial(least, sharded=True)
        if not self.settings.training.lora:
            tries["--lora 16 --micro-batch 1 --gradient-checkpointing"] = partial(least, lora=16)
        for words, changed in tries.items():
            need = sum(changed().memory().values())
            if need <= available:
                return f"; {words} would need {need / GIB:.1f}"
        return "; no setting of this command makes it fit: use more or larger GPUs, or shorter sequences"

    def speed(self, here: int, tokens_per_second: float | None) -> tuple[float, float, str]:
        """(seconds per token for gradients, seconds per update, where they come from), on one GPU."""
        if tokens_per_second:
            return 1 / tokens_per_second, 0.0, "as given"
        tokens = self.micro * self.length
        if self.gpu and (not here or "H200" in torch.cuda.get_device_name()):
            moved = self.step.moved * (COMPILED_MOVES if self.compiled else 1)
            seconds = max(self.step.flops / GPU_FLOPS + moved / GPU_BYTES, self.step.operations * GPU_LAUNCH)
            return seconds / tokens, 28 * self.step.trained / GPU_BYTES, "worked out for an H200"
        if not self.gpu and self.step.flops / self.micro * 6 / dimensions(self.config).n_layers > SLOW_FLOPS:
            seconds = self.step.flops / (CPU_SHARE * matmul_flops())
            return seconds / tokens, 0.0, "worked out from the speed of matrix products on this machine"
        device = "cuda" if self.gpu else "cpu"
        gradients, update = time_step(self.config, self.settings, self.length, self.micro, device)
        return gradients / (COMPILED_SPEED if self.compiled else 1), update, "measured on this machine"

    def communication(self) -> float:
        """Seconds per step in which the GPUs exchange weights and gradients."""
        if self.gpus == 1:
            return 0.0
        whole, trained = 4 * self.step.parameters, 4 * self.step.trained
        if self.sharded:  # gather weights forwards and backwards (the teacher's forwards), scatter gradients
            sent = self.passes * (2 * whole + trained + (whole if self.settings.loss == "kl" else 0))
        else:  # all-reduce of the gradients, once per step
            sent = 2 * trained
        return sent * (1 - 1 / self.gpus) / (NVLINK if self.gpus <= NODE else NETWORK)

    def evaluated_tokens(self, text: Text) -> float:
        """Tokens of forward passes beside training: steering evaluations, and the report on base, control, sparse."""
        training = self.settings.training
        heldout = max(1, text.heldout_tokens // text.length)
        steering = max(1, heldout // STEERING_SHARE)
        stages = 2 if self.settings.trains_control else 1
        teacher = 2 if self.settings.loss == "kl" else 1
        each = min(training.evaluate_sequences, steering) * teacher
        steered = stages * (training.steps // training.evaluate_every) * each
        trained = self.settings.trains_control  # one that is not is the base, which is measured already
        report = (heldout - steering) * (3 + 2 * trained) + steering * (1 + trained)
        return (steered + report) * text.length


def in_words(seconds: float) -> str:
    """3,700 s -> 1.0 hours."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"


def matmul_flops() -> float:
    """Operations per second of a large fp32 matrix product on this CPU, in about a second."""
    a = torch.randn(1024, 1024)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < 1.0:
        a @ a
        count += 1
    return count * 2 * 1024**3 / (time.perf_counter() - began)


def available_memory(gpus: int, gpu_memory: float | None) -> float:
    if gpu_memory is not None:
        return gpu_memory * GIB
    if not gpus:
        return float(psutil.virtual_memory().total)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80.0 * GIB


def read_config(source: Source) -> Any:
    """A model's configuration, from wherever `load` would take the model; no weights are read."""
    from transformers import AutoConfig

    check_source(source)
    if not isinstance(source, str | Path | Run):
        config = base_model(source[0] if isinstance(source, tuple) else source).config
        if getattr(config, "sparselens", None) is not None:
            raise ValueError(f"{name_of(source)} is already sparse; start from a dense model")
        return config
    if isinstance(source, Run) or (Path(source) / "run.json").is_file():
        return read_config(Run(source).started_from)
    path = Path(source)
    gguf = path.suffix == ".gguf"
    found = access(str(source))
    options = SAFE | {"gguf_file": path.name} if gguf else found.options
    expected = "expected a Hugging Face name, a model folder, a config.json or a .gguf file"
    with refusing(f"no model found at {str(source)!r}: {expected} (", f"{found.trouble})"):
        config = AutoConfig.from_pretrained(str(path.parent if gguf else source), **options)
    if getattr(config, "sparselens", None) is not None:
        raise ValueError(f"{source} is already sparse; start from a dense model")
    return config
