"""Making sparse models and measuring them: demo, sparsify, plan, evaluate, export, bench."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..config import Ask, Search, Sparsify, Text
from .common import File, Folder, Model, Name, Names, Number, OnDevice, RunFolder


@dataclasses.dataclass(frozen=True)
class Demo(OnDevice):
    """Train a small addition model, make it sparse and draw figure 1 (a few minutes on two cores)."""

    out: Path = Path("runs/demo")
    """Folder of the Run. A demo that was interrupted goes on where it stopped."""
    seed: int = 0
    """Seed of everything."""

    def __call__(self) -> None:
        from ..demo.walk import demo

        demo(self.out, self.seed)


@dataclasses.dataclass(frozen=True)
class SparsifyCommand(OnDevice):
    """Make the attention of a pretrained model sparse, at the loss it had."""

    model: Model
    """Hugging Face name, model folder, Run or .gguf file."""
    data: Annotated[tuple[str, ...], arg(metavar="TEXT ...")]
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

    model: Model
    """Hugging Face name, model folder, config.json or .gguf file; only the configuration is read."""
    gpus: Number = None
    """GPUs to plan for; 0 for a CPU. Default: those of this machine."""
    gpu_memory: Annotated[float | None, arg(metavar="GIB", help_behavior_hint="")] = None
    """GiB of each. Default: this machine's, or 80."""
    sharded: bool = False
    """Weights, gradients and optimiser state divided among the GPUs (FSDP2) instead of copied to each (DDP)."""
    tokens_per_second: Annotated[float | None, arg(metavar="N", help_behavior_hint="")] = None
    """Speed of one GPU, if known. Default: measured here, or worked out for an H200 where there is no GPU."""
    out: Path = Path()
    """Where the Run will be: its disk must have room."""
    tasks: Names = ()
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
class Evaluate(OnDevice):
    """Base, control and sparse model of a Run side by side: held-out loss, KL, density; benchmarks; what they say."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN|MODEL ...", help_behavior_hint="")]
    """Runs made by sparsify, or models by name (Hugging Face name, folder, .gguf file)."""
    data: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    """Other text to evaluate on. Default: the Run's own held-out text."""
    sequences: int = 64
    """At most this many held-out sequences."""
    benchmarks: Names = ()
    """Also ask these benchmarks' questions, through lm-eval: piqa,openbookqa,arc_easy or any other it knows."""
    questions: Folder = None
    """Folder with the benchmarks' questions as files (NAME/SPLIT.jsonl). Default: the Hugging Face hub."""
    limit: Number = None
    """Only the first so many questions of each benchmark, for a trial."""
    behaviour: Folder = None
    """Also put what the models say side by side: behaviour.json and behaviour.md in this folder."""
    prompts: File = None
    """For --behaviour: a file with one prompt per line. Default: fifty ordinary ones."""
    tasks: Names = ()
    """For --behaviour: tasks, by name or as .jsonl files, to count right answers on."""
    json: File = None
    """Also write the rows to this file."""

    def asks_more(self) -> bool:
        """Whether anything is asked that a model without a Run could answer, or details of such a question."""
        given = (self.data, self.benchmarks, self.questions, self.limit, self.behaviour, self.prompts, self.tasks)
        return any(given)

    def __call__(self) -> None:
        from ..evaluation.side_by_side import evaluate

        names = [name for group in self.benchmarks for name in group.split(",") if name]
        evaluate(**self.options() | {"models": list(self.models), "benchmarks": names})


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the sparse model of a Run as a Hugging Face folder with a model card, ready for the hub."""

    run: RunFolder
    """A finished Run of `sparsify`."""
    out: Folder = None
    """The folder to write; must not exist yet."""
    push: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Publish it on the hub instead, under this name (me/sparse-gpt2). Log in first: `hf auth login`."""
    private: bool = False
    """With --push: only for those you let in."""
    license: Name = None
    """Its name on the hub (mit, apache-2.0, ...). Default: the base model's, where that can be found."""
    adapter: bool = False
    """Keep a LoRA adapter as an adapter (small, needs its base) instead of merging it into the weights."""
    delta: Annotated[Literal[8, 4] | None, arg(help_behavior_hint="")] = None
    """Write the difference to the base in so many bits: small, needs its base, and says what the rounding costs."""

    def __call__(self) -> None:
        from ..serving.export import export, push

        if (self.out is None) == (self.push is None):
            raise ValueError("export writes a folder (--out) or publishes on the hub (--push); give one of them")
        options: dict[str, Any] = {"merge": not self.adapter, "license": self.license}
        if self.delta is not None:
            if self.push is not None or self.adapter:
                raise ValueError("--delta writes a folder (--out), of merged weights; leave out --push and --adapter")
            options["delta"] = self.delta
        if self.push is not None:
            print(f"published: {push(self.run, self.push, self.private, **options)}")
        if self.out is not None:
            print(f"the model is in {export(self.run, self.out, **options)}")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure this machine: the fused kernels against PyTorch's dense attention, as ratios from one run."""

    what: Positional[Literal["kernels"]]
    """What to measure."""
    quick: bool = False
    """Three shapes and the reference, under two minutes."""
    json: File = None
    """Also write the rows to this file."""

    def __call__(self) -> None:
        from ..evaluation.kernel_timing import bench_kernels

        bench_kernels(self.quick, self.json)


@dataclasses.dataclass(frozen=True)
class TextCommand(OnDevice):
    """Write a small, free corpus to try things with: stories of the package, or text sampled from a model itself."""

    out: Annotated[Path, arg(metavar="FOLDER")]
    """Folder for the text."""
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """Sample from this model instead: what it knows best, so that training on it changes least."""
    tokens: int = 100_000
    """With --model: how much to sample."""
    length: int = 256
    """With --model: most tokens per document."""
    seed: int = 0
    """With --model: seed of the samples."""

    def __call__(self) -> None:
        from ..data.sample import write_text

        write_text(**self.options())


@dataclasses.dataclass(frozen=True)
class Parity:
    """Every supported family against transformers: the largest difference of any logit, dense, with open gates, with a
    cache, with padding. Exit code 2 where there is one."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="[FAMILY|MODEL ...]", help_behavior_hint="")] = ()
    """Families (small random models of them), or dense models by name. Default: all families."""
    json: File = None
    """Also write the rows to this file."""

    def __call__(self) -> None:
        from ..evaluation.parity import parity

        parity(self.models, json=self.json)
