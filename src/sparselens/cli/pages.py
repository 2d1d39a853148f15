"""What a Run looks like: report, studio, figures."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from .common import File, Folder, OnDevice, RunFolder


@dataclasses.dataclass(frozen=True)
class ReportCommand(OnDevice):
    """One HTML page of a Run (or two) to explore, keep and send: opens from disk, offline, in any browser."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """One Run folder, or two to switch between."""
    out: File = None
    """The page. Default: report.html in the (first) Run."""
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
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
            from ..serving.serve import serve

            return serve(self.runs, self.port, self.prompt)
        from ..serving.publish import report

        path = report(*self.runs, out=self.out, prompts=self.prompt)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser; it needs nothing else")


@dataclasses.dataclass(frozen=True)
class StudioCommand(OnDevice):
    """A live page: type a prompt, close a gate, silence a head, and see what the answer does."""

    run: Annotated[Positional[str | None], arg(metavar="RUN|MODEL", help_behavior_hint="")] = None
    """Run folder, model folder or Hugging Face name. Without it: the demo's Run, made first if it is missing."""
    port: int = 8766
    """Port on this machine; 0 takes any free one."""
    browser: bool = True
    """Open it in the browser."""

    def __call__(self) -> None:
        from ..live.server import studio

        demo = Path("runs/demo")
        made = self.run is None and not (demo / "report.html").is_file()
        run = self.run or (None if made else demo)
        studio(run, self.port, browser=self.browser, prepare=(lambda say: _make_demo(demo, say)) if made else None)


def _make_demo(out: Path, say: Callable[[str], None]) -> Path:
    """`sparselens demo` in a process of its own; its last line is what the page shows."""
    talk: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-m", "sparselens", "demo", "--out", str(out)], **talk) as process:
        last = ""
        try:
            for line in process.stdout or ():
                last = line.strip() or last
                say(f"making the demo, a few minutes: {last}")
        except BaseException:
            process.terminate()  # it goes on where it stopped when it is asked for again
            raise
    if process.returncode:
        raise ValueError(f"the demo could not be made: {last}")
    return out


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures 1 to 4 of a Run for print, from the same rows as the report."""

    run: RunFolder
    """Run folder."""
    format: Literal["pdf", "svg", "png"] = "pdf"
    """File format."""
    out: Folder = None
    """Folder for the figures. Default: the Run."""

    def __call__(self) -> None:
        from ..serving.publish import figures

        left_out: list[str] = []
        for path in figures(self.run, self.format, self.out, say=left_out.append):
            print(path)
        print(*left_out, sep="\n", end="\n" if left_out else "", file=sys.stderr)
