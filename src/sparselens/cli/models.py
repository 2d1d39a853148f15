"""Making sparse models and measuring them: demo, sparsify, plan, evaluate, export, bench."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes, Positional

from ..config import Ask, Search, Sparsify, Text


@dataclasses.dataclass(frozen=True)
class Demo:
    """Train a small addition model, make it sparse and draw figure 1 (a few minutes on two cores)."""

    out: Path = Path("runs/demo")
    """Folder of the Run. A demo that was interrupted goes on where it stopped."""
    seed: int = 0
    """Seed of everything."""

    def __call__(self) -> None:
        from ..demo.walk import demo

        demo(self.out, self.seed)


@dataclasses.dataclass(frozen=True)
class SparsifyCommand:
    """Make the attention of a pretrained model sparse, at the loss it had."""

    model: Positional[str]
    """Hugging Face name, model folder, Run or .gguf file."""
    data: tuple[str, ...]
    """Text: files or globs (.txt, .jsonl, .parquet, plain or .gz/.xz/.zst) or a Hugging Face dataset name."""
    out: Path
    """Folder of the Run; must not exist yet, unless with --resume."""
    resume: bool = False
    """Go on where an interrupted run stopped (same settings)."""
    settings: OmitArgPrefixes[Sparsify] = dataclasses.field(default_factory=Sparsify)
    text: OmitArgPrefixes[Text] = dataclasses.field(default_factory=Text)

    def __call__(self) -> None:
        from ..training.sparsify import sparsify

        sparsify(self.model, list(self.data), self.out, settings=self.settings, text=self.text, resume=self.resume)


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Memory, time and disk that `sparsify` with the same settings will need, or `compare` on some tasks (--tasks);
    refuses what cannot fit."""

    model: Positional[str]
    """Hugging Face name, model folder, config.json or .gguf file; only the configuration is read."""
    gpus: int | None = None
    """GPUs to plan for; 0 for a CPU. Default: those of this machine."""
    gpu_memory: float | None = None
    """GiB of each. Default: this machine's, or 80."""
    sharded: bool = False
    """Weights, gradients and optimiser state divided among the GPUs (FSDP2) instead of copied to each (DDP)."""
    tokens_per_second: float | None = None
    """Speed of one GPU, if known. Default: measured here, or worked out for an H200 where there is no GPU."""
    out: Path = Path()
    """Where the Run will be: its disk must have room."""
    tasks: tuple[str, ...] = ()
    """Plan for `compare` on these tasks instead: dense, control and sparse model, attention edges and heads."""
    prompts: int = 64
    """With --tasks: prompts of each task."""
    readings: tuple[Ask, ...] = Search.readings
    """With --tasks: which questions are asked (`sparselens compare --help`)."""
    settings: OmitArgPrefixes[Sparsify] = dataclasses.field(default_factory=Sparsify)
    text: OmitArgPrefixes[Text] = dataclasses.field(default_factory=Text)

    def __call__(self) -> None:
        options = dict(vars(self))
        names, search = options.pop("tasks"), Search(prompts=options.pop("prompts"), readings=options.pop("readings"))
        from ..circuits.estimate import Need, plan_task
        from ..training.plan import Plan, plan

        ways: list[Callable[[], Need | Plan]] = [
            partial(plan_task, self.model, t, search, gpus=self.gpus) for t in names
        ]
        for way in ways or [partial(plan, **options)]:
            print(found := way())
            if found.problem():
                raise ValueError(found.problem())


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Base, control and sparse model of a Run side by side: held-out loss, KL, density; benchmarks; what they say."""

    models: Positional[tuple[str, ...]]
    """Runs made by sparsify, or models by name (Hugging Face name, folder, .gguf file)."""
    data: tuple[str, ...] = ()
    """Other text to evaluate on. Default: the Run's own held-out text."""
    sequences: int = 64
    """At most this many held-out sequences."""
    benchmarks: tuple[str, ...] = ()
    """Also ask these benchmarks' questions, through lm-eval: piqa,openbookqa,arc_easy or any other it knows."""
    questions: Path | None = None
    """Folder with the benchmarks' questions as files (NAME/SPLIT.jsonl). Default: the Hugging Face hub."""
    limit: int | None = None
    """Only the first so many questions of each benchmark, for a trial."""
    behaviour: Path | None = None
    """Also put what the models say side by side: behaviour.json and behaviour.md in this folder."""
    prompts: Path | None = None
    """For --behaviour: a file with one prompt per line. Default: fifty ordinary ones."""
    tasks: tuple[str, ...] = ()
    """For --behaviour: tasks, by name or as .jsonl files, to count right answers on."""
    json: Path | None = None
    """Also write the rows to this file."""

    def __call__(self) -> None:
        from ..evaluation.side_by_side import evaluate

        names = [name for group in self.benchmarks for name in group.split(",") if name]
        evaluate(**vars(self) | {"models": list(self.models), "benchmarks": names})


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the sparse model of a Run as a Hugging Face folder with a model card, ready for the hub."""

    run: Positional[Path]
    """A finished Run of `sparsify`."""
    out: Path
    """The folder to write; must not exist yet."""
    adapter: bool = False
    """Keep a LoRA adapter as an adapter (small, needs its base) instead of merging it into the weights."""

    def __call__(self) -> None:
        from ..evaluation.export import export

        print(f"model and README.md are in {export(self.run, self.out, merge=not self.adapter)}")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure this machine: the fused kernels against PyTorch's dense attention, as ratios from one run."""

    what: Positional[Literal["kernels"]]
    """What to measure."""
    quick: bool = False
    """Three shapes and the reference, under two minutes."""
    json: Path | None = None
    """Also write the rows to this file."""

    def __call__(self) -> None:
        from ..evaluation.kernel_timing import bench_kernels

        bench_kernels(self.quick, self.json)
