"""The command line: a dataclass per command, whose fields and their texts are the help.

Every command imports what it runs when it runs. May import every package; nothing imports this one.
"""

import contextlib
import io
import os
import platform
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Union

import tyro

from .. import __version__, demo as demo  # registers its task and data, as a user's module would
from ..data.documents import find_files, is_local
from ..evaluation.nothing import is_run, nothing_to_evaluate_on
from ..runs import distributed
from ..runs.run import Run, check_folder, check_writable, one_line
from ..tasks import find as find_task
from ..transcoders.place import find_transcoder
from .circuits import CompareCommand, DiscoverCommand
from .common import OnDevice
from .features import FeaturesCommand, TraceCommand, TranscodeCommand
from .models import Bench, Demo, Evaluate, Export, Parity, PlanCommand, SparsifyCommand, TextCommand
from .pages import Figures, ReportCommand, StudioCommand

Command = Callable[[], None]  # arguments, and what to do with them
# By what a person wants; a line for each.
GROUPS: dict[str, dict[str, tuple[Callable[..., Command], str]]] = {
    "See it work": {
        "demo": (Demo, "a small model that adds, before and after: figures and a page, in minutes"),
        "studio": (StudioCommand, "a live page: close a gate, silence a head, see what the answer does"),
    },
    "Make a model sparse": {
        "text": (TextCommand, "write a small, free corpus to try things with"),
        "plan": (PlanCommand, "memory, time and disk a run will need, before it starts"),
        "sparsify": (SparsifyCommand, "close nearly all attention edges at nearly the loss there was"),
        "evaluate": (Evaluate, "loss, KL, density and benchmarks, models side by side"),
    },
    "See what is left": {
        "discover": (DiscoverCommand, "the circuits with which one model does a task"),
        "compare": (CompareCommand, "how many times fewer edges a sparse model needs"),
        "transcode": (TranscodeCommand, "train sparse features that stand in for the MLPs"),
        "features": (FeaturesCommand, "what each feature is about: contexts, words, neighbours, a label"),
        "trace": (TraceCommand, "one prompt taken apart: features, and the heads that carry them"),
    },
    "Show and share": {
        "report": (ReportCommand, "one page of a Run to explore, keep and send"),
        "figures": (Figures, "figures 1 to 4 for print"),
        "export": (Export, "a Hugging Face folder with a model card; --push: onto the hub"),
    },
    "Check this machine": {
        "bench": (Bench, "the kernels against PyTorch's own attention"),
        "parity": (Parity, "every family against transformers: largest difference of any logit"),
    },
}
COMMANDS = {name: kind for group in GROUPS.values() for name, (kind, _) in group.items()}
DESCRIPTION = "Make a transformer's attention sparse without losing what it can do, and see what is left."


def overview() -> str:
    """`sparselens --help`."""
    lines = ["usage: sparselens COMMAND ...", "", DESCRIPTION]
    for title, group in GROUPS.items():
        lines += ["", title, *(f"  {name:<11}{words}" for name, (_, words) in group.items())]
    return "\n".join([*lines, "", *NOTES])


NOTES = (
    "sparselens COMMAND --help says what a command takes; --version names the versions in use. A MODEL is a Hugging",
    "Face name, a model folder, a Run or a .gguf file. --device cpu computes on the CPU even where there is a GPU.",
)


def versions() -> str:
    """`sparselens --version`: ours and those that numbers depend on. Asks the installed packages, imports none."""
    parts = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{package} {version(package)}")
    return f"sparselens {__version__} ({', '.join(parts)})"


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and turn expected failures into one sentence and an exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        print(overview())
        print("sparselens: no command given; begin with `sparselens demo`", file=sys.stderr)
        sys.exit(2)
    if given[0] in ("-h", "--help", "--version"):
        print(versions() if given == ["--version"] else overview())
        sys.exit(0)
    command = _parse(given)
    prog = "sparselens" if distributed.is_main() else f"sparselens, process {distributed.rank()}"
    try:
        _run(command)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "Interrupted":
            if distributed.is_main():
                print(f"sparselens: {error}", file=sys.stderr)
            distributed.stop()
            sys.exit(130)
        sentence = None if os.environ.get("SPARSELENS_DEBUG") else _sentence(error)
        if sentence is None:
            raise
        print(f"{prog}: {sentence}", file=sys.stderr)
        sys.exit(2)


def _run(command: Command) -> None:
    if distributed.world() > 1 and not isinstance(command, SparsifyCommand | TranscodeCommand | DiscoverCommand):
        raise ValueError("only sparsify, transcode and discover use several processes; run this without a launcher")
    _check(command)
    if isinstance(command, OnDevice):
        distributed.choose_device(command.device)
    command()
    distributed.stop()


def _sentence(error: Exception) -> str | None:
    """An expected failure in words; None: a mistake of ours, to be shown in full."""
    if isinstance(error, ValueError | OSError):
        return one_line(error)
    if isinstance(error, RuntimeError | MemoryError):
        from ..training.measure import out_of_memory

        if out_of_memory(error):
            lower = "--batch or --micro-batch (training), --memory-mb (discover, trace), or the prompts' length"
            return f"not enough memory; lower {lower} ({one_line(error, 200)})"
    if distributed.world() > 1 and re.search("gloo|nccl|connection", str(error), re.IGNORECASE):
        lost = "another process of this run has ended or cannot be reached; start them all again with --resume"
        return f"{lost} ({one_line(error, 200)})"
    return None


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
    elif isinstance(command, FeaturesCommand):
        Run.check(command.out or command.transcoder / "faces", command.resume)
        find_files([text for text in command.data if is_local(text)])
    elif isinstance(command, Export) and command.out is not None and command.out.exists():
        raise ValueError(f"{command.out} exists already; choose another --out")
    elif isinstance(command, Evaluate) and not command.asks_more():
        for model in command.models:
            if not is_run(model):
                raise nothing_to_evaluate_on(model)
    elif isinstance(command, DiscoverCommand | CompareCommand | TraceCommand | Figures):
        check_folder(command.out)
    if isinstance(command, TraceCommand | FeaturesCommand):
        find_transcoder(command.transcoder)


def _parse(arguments: list[str]) -> Command:
    said, plain = io.StringIO(), (tyro.conf.OmitSubcommandPrefixes,)
    choice: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]  # noqa: UP007
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
