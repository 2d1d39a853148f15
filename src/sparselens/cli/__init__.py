"""The command line: a dataclass per command, whose fields and their texts are the help.

Every command imports what it runs when it runs. May import every package; nothing imports this one.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

import tyro

from .. import demo as demo  # registers its task and data, as a user's module would
from ..data.documents import find_files, is_local
from ..runs import distributed
from ..runs.run import Run, check_folder, check_writable, one_line
from ..tasks import find as find_task
from .circuits import CompareCommand, DiscoverCommand
from .features import FeaturesCommand, TraceCommand, TranscodeCommand
from .models import Bench, Demo, Evaluate, Export, PlanCommand, SparsifyCommand
from .pages import Figures, ReportCommand, StudioCommand

Command = Callable[[], None]  # arguments, and what to do with them
COMMANDS: dict[str, Callable[..., Command]] = {
    "demo": Demo, "sparsify": SparsifyCommand, "plan": PlanCommand, "evaluate": Evaluate, "discover": DiscoverCommand,
    "compare": CompareCommand, "transcode": TranscodeCommand, "features": FeaturesCommand, "trace": TraceCommand,
    "report": ReportCommand, "studio": StudioCommand, "figures": Figures, "export": Export, "bench": Bench,
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
            from ..training.measure import out_of_memory

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
    elif isinstance(command, FeaturesCommand):
        Run.check(command.out or command.transcoder / "faces", command.resume)
        find_files([text for text in command.data if is_local(text)])
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
