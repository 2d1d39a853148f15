"""What a Run looks like: report, figures."""

import dataclasses
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


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
            from ..serving.serve import serve

            return serve(self.runs, self.port, self.prompt)
        from ..serving.publish import report

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
        from ..serving.publish import figures

        for path in figures(self.run, self.format, self.out):
            print(path)
