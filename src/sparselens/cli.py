"""The command line: one function per command, its arguments and their comments are the help. Imports lazily."""

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from . import demo as demo  # registers its task and data, as a user's module would
from .config import Ask, Search, Sparsify, Text, Trace, Transcode
from .data.documents import find_files, is_local
from .runs import distributed
from .runs.run import Run, check_folder, check_writable, one_line, write_json
from .tasks import find as find_task


@dataclasses.dataclass(frozen=True)
class Demo:
    """Train a small addition model, make it sparse and draw figure 1 (a few minutes on two cores)."""

    out: Path = Path("runs/demo")
    """Folder of the Run. A demo that was interrupted goes on where it stopped."""
    seed: int = 0
    """Seed of everything."""

    def __call__(self) -> None:
        from .demo.walk import demo

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
        from .training.sparsify import sparsify

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
        from .circuits.estimate import Need, plan_task
        from .training.plan import Plan, plan

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
        from .evaluation.side_by_side import evaluate

        names = [name for group in self.benchmarks for name in group.split(",") if name]
        evaluate(**vars(self) | {"models": list(self.models), "benchmarks": names})


@dataclasses.dataclass(frozen=True)
class DiscoverCommand:
    """Find the circuits with which a model does a task: how few attention edges, heads or parts are enough."""

    model: Positional[str]
    """Hugging Face name, model folder, Run or .gguf file."""
    task: str = "ioi"
    """ioi, ioi-long, greater-than, docstring, antonym, induction, addition, or a .jsonl file of your own pairs."""
    out: Path | None = None
    """Folder for results.json, the figures and, with components, circuit.json (MIB's format)."""
    json: Path | None = None
    """Write the results to this file."""
    settings: OmitArgPrefixes[Search] = dataclasses.field(default_factory=Search)

    def __call__(self) -> None:
        from .circuits.discover import discover, table

        options = {name: value for name, value in vars(self).items() if name != "model"}
        circuit = discover(self.model, **options, show_progress=True)
        if not distributed.is_main():
            return
        print("\n" + table(circuit.results))
        if self.out is not None:
            from .circuits.rows import alone
            from .reporting.figures.circuits import draw_all

            draw_all(alone(circuit.results), self.out)
            print(f"circuit, results and figures are in {self.out}")


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """The same tasks in a dense and in a sparse model: how many times fewer edges does the sparse one need?"""

    dense: Positional[str]
    """The dense model: name, folder, Run or .gguf file."""
    sparse: Positional[str]
    """The sparse model; a Run brings its matched dense control along."""
    tasks: tuple[str, ...] = ("ioi",)
    """Tasks, by name or as .jsonl files."""
    control: str | None = None
    """A dense model that has had the same training as the sparse one."""
    out: Path | None = None
    """Folder for the circuits, results.json and figures 2 and 3."""
    json: Path | None = None
    """Write the multipliers to this file."""
    settings: OmitArgPrefixes[Search] = dataclasses.field(default_factory=Search)

    def __call__(self) -> None:
        from .circuits.compare import compare, table

        result = compare(**vars(self), show_progress=True)
        print("\n" + table(result))
        if self.out is not None:
            from .reporting.figures.circuits import draw_all

            draw_all(result, self.out)
            print(f"circuits, results and figures are in {self.out}")


@dataclasses.dataclass(frozen=True)
class TranscodeCommand:
    """Train sparse features that stand in for a model's MLPs (a cross-layer transcoder)."""

    model: Positional[str]
    """Hugging Face name, model folder, Run or .gguf file; dense or sparse."""
    data: tuple[str, ...]
    """Text: files or globs (.txt, .jsonl, .parquet, plain or .gz/.xz/.zst) or a Hugging Face dataset name."""
    out: Path
    """Folder of the Run; must not exist yet, unless with --resume."""
    resume: bool = False
    """Go on where an interrupted run stopped (same settings)."""
    json: Path | None = None
    """Also write the results to this file."""
    settings: OmitArgPrefixes[Transcode] = dataclasses.field(default_factory=Transcode)
    text: OmitArgPrefixes[Text] = dataclasses.field(default_factory=Text)

    def __call__(self) -> None:
        from .transcoders.transcode import transcode

        options = {name: value for name, value in vars(self).items() if name not in ("model", "data", "json")}
        transcode(self.model, data=list(self.data), **options)
        if self.json is not None and distributed.is_main():
            run = Run(self.out)
            write_json(self.json, run.read("results.json") | {"provenance": run.record["provenance"]})


@dataclasses.dataclass(frozen=True)
class TraceCommand:
    """Take one prompt apart: which features feed the answer, and which heads carry them (figure 4)."""

    model: Positional[str]
    """Hugging Face name, model folder, Run or .gguf file; dense or sparse."""
    transcoder: Path
    """The model's transcoder: a Run of `transcode`, or a folder in circuit-tracer's layout."""
    prompt: str
    """The prompt. (For an addition Run: 36+28=?????)"""
    target: str | None = None
    """What to explain: a token ('small'), a difference ('small - large'). Default: the likeliest next token."""
    against: str | None = None
    """A second model on the same prompt, to put beside the first."""
    against_transcoder: Path | None = None
    """The second model's transcoder."""
    clusters: Path | None = None
    """Clusters edited by hand (clusters.json, as --out writes it)."""
    edge: str | None = None
    """The cluster edge to look at closely, source->target. Default: the strongest from elsewhere into the answer."""
    out: Path | None = None
    """Folder for trace.json, the graph, figure 4, clusters.json and the graph in Neuronpedia's format."""
    json: Path | None = None
    """Write the rows to this file."""
    settings: OmitArgPrefixes[Trace] = dataclasses.field(default_factory=Trace)

    def __call__(self) -> None:
        against = (self.against, self.against_transcoder) if self.against and self.against_transcoder else None
        if against is None and (self.against is not None or self.against_transcoder is not None):
            raise ValueError("--against needs its own transcoder, --against-transcoder, and the other way round")
        from .attribution.trace import trace
        from .reporting.figures.attribution import draw_trace_all

        graph = trace(
            self.model, self.transcoder, self.prompt, self.target, settings=self.settings, clusters=self.clusters,
            against=against, edge=self.edge, out=self.out, json=self.json, say=print,
        )  # fmt: skip
        if self.out is not None and graph.rows is not None:
            draw_trace_all(graph.rows, self.out)
            print(f"trace.json, figure 4, the graph and clusters.json are in {self.out}")


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """One HTML page of a Run (or two) to explore, keep and send: opens from disk, offline, in any browser."""

    runs: Positional[tuple[Path, ...]]
    """One Run folder, or two to switch between."""
    out: Path | None = None
    """The page. Default: report.html in the (first) Run."""
    prompt: tuple[str, ...] = ()
    """Prompts for the attention explorer, before the built-in ones (for an addition Run: sums, such as 36+28)."""
    serve: bool = False
    """Serve the page on this machine instead, and reload it while the Run goes on."""
    port: int = 8765
    """Port of --serve."""

    def __call__(self) -> None:
        if not 1 <= len(self.runs) <= 2:
            raise ValueError(f"a report shows one or two Runs, not {len(self.runs)}")
        if self.serve and self.out is not None:
            raise ValueError("--serve writes no file; leave out --out, or leave out --serve")
        if self.serve:
            from .serving.serve import serve

            return serve(self.runs, self.port, self.prompt)
        from .serving.publish import report

        path = report(*self.runs, out=self.out, prompts=self.prompt)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser; it needs nothing else")


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures 1 to 4 of a Run for print, from the same rows as the report."""

    run: Positional[Path]
    """Run folder."""
    format: Literal["pdf", "svg", "png"] = "pdf"
    """File format."""
    out: Path | None = None
    """Folder for the figures. Default: the Run."""

    def __call__(self) -> None:
        from .serving.publish import figures

        for path in figures(self.run, self.format, self.out):
            print(path)


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
        from .evaluation.export import export

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
        from .evaluation.kernel_timing import bench_kernels

        bench_kernels(self.quick, self.json)


Command = Callable[[], None]  # arguments, and what to do with them
COMMANDS: dict[str, Callable[..., Command]] = {
    "demo": Demo, "sparsify": SparsifyCommand, "plan": PlanCommand, "evaluate": Evaluate, "discover": DiscoverCommand,
    "compare": CompareCommand, "transcode": TranscodeCommand, "trace": TraceCommand, "report": ReportCommand,
    "figures": Figures, "export": Export, "bench": Bench,
}  # fmt: skip
DESCRIPTION = "Make a transformer's attention sparse without losing what it can do, and see what is left."


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and turn expected failures into one sentence and an exit code."""
    command = _parse(arguments)
    prog = "sparselens" if distributed.is_main() else f"sparselens, process {distributed.rank()}"
    try:
        if distributed.world() > 1 and not isinstance(command, SparsifyCommand | TranscodeCommand | DiscoverCommand):
            raise ValueError("only sparsify, transcode and discover use several processes; run this without a launcher")
        _check(command)
        command()
        distributed.stop()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "Interrupted":
            if distributed.is_main():
                print(f"sparselens: {error}", file=sys.stderr)
            distributed.stop()
            sys.exit(130)
        if os.environ.get("SPARSELENS_DEBUG"):
            raise
        if isinstance(error, ValueError | OSError):
            print(f"{prog}: {one_line(error)}", file=sys.stderr)
            sys.exit(2)
        if isinstance(error, RuntimeError | MemoryError):
            from .training.measure import out_of_memory

            if out_of_memory(error):
                lower = "--batch or --micro-batch (training), --memory-mb (discover, trace), or the prompts' length"
                print(f"{prog}: not enough memory; lower {lower} ({one_line(error, 200)})", file=sys.stderr)
                sys.exit(2)
        if distributed.world() > 1 and re.search("gloo|nccl|connection", str(error), re.IGNORECASE):
            lost = "another process of this run has ended or cannot be reached; start them all again with --resume"
            print(f"{prog}: {lost} ({one_line(error, 200)})", file=sys.stderr)
            sys.exit(2)
        raise


def _check(command: Any) -> None:
    """Refuse what can be refused before torch is imported, which takes seconds. The verbs check for themselves, too."""
    given = vars(command)
    for task in given.get("tasks", ()) + ((given["task"],) if "task" in given else ()):
        find_task(task)
    check_writable(given.get("json"))
    if isinstance(command, SparsifyCommand | TranscodeCommand):
        if distributed.is_main():
            Run.check(command.out, command.resume)
        find_files([text for text in (*command.data, *command.text.heldout) if is_local(text)])
    elif isinstance(command, Export) and command.out.exists():
        raise ValueError(f"{command.out} exists already; choose another --out")
    elif isinstance(command, DiscoverCommand | CompareCommand | TraceCommand | Figures):
        check_folder(command.out)


def _parse(arguments: list[str] | None) -> Command:
    said, plain = io.StringIO(), (tyro.conf.OmitSubcommandPrefixes,)
    choice: Any = Union[*(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]
    try:
        with contextlib.redirect_stderr(said):
            found: Any = tyro.cli(choice, prog="sparselens", description=DESCRIPTION, args=arguments, config=plain)
            return found  # type: ignore[no-any-return]
    except SystemExit:
        # Where a setting refuses its value, the parser's frame around our sentence says nothing more.
        lines = said.getvalue().replace("│", " ").splitlines()
        text = " ".join(line for line in lines if not set(line) <= set(" -─╭╮╰╯"))
        ours = re.search(r"Error parsing __tyro-dummy-inner__\S*: (.*?)\s+For full helptext", text)
        print(f"sparselens: {' '.join(ours[1].split())}" if ours else said.getvalue().rstrip(), file=sys.stderr)
        raise
