"""Circuits of one model and of two: discover, compare."""

import dataclasses
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..config import Search
from ..runs import distributed
from .common import File, Folder, Model, Name, OnDevice


@dataclasses.dataclass(frozen=True)
class DiscoverCommand(OnDevice):
    """Find the circuits with which a model does a task: how few attention edges, heads or parts are enough."""

    model: Model
    """Hugging Face name, model folder, Run or .gguf file."""
    task: str = "ioi"
    """ioi, ioi-long, greater-than, docstring, antonym, induction, addition, or a .jsonl file of your own pairs."""
    out: Folder = None
    """Folder for results.json, the figures and, with components, circuit.json (MIB's format)."""
    json: File = None
    """Write the results to this file."""
    settings: OmitArgPrefixes[Search] = dataclasses.field(default_factory=Search)

    def __call__(self) -> None:
        from ..circuits.discover import discover, table

        circuit = discover(self.model, **self.options("model"), show_progress=True)
        if not distributed.is_main():
            return
        print("\n" + table(circuit.results))
        if self.out is not None:
            from ..circuits.rows import alone
            from ..reporting.figures.circuits import draw_all

            draw_all(alone(circuit.results), self.out)
            print(f"circuit, results and figures are in {self.out}")


@dataclasses.dataclass(frozen=True)
class CompareCommand(OnDevice):
    """The same tasks in a dense and in a sparse model: how many times fewer edges does the sparse one need?"""

    dense: Annotated[Positional[str], arg(metavar="DENSE")]
    """The dense model: name, folder, Run or .gguf file."""
    sparse: Annotated[Positional[str], arg(metavar="SPARSE")]
    """The sparse model; a Run brings its matched dense control along."""
    tasks: Annotated[tuple[str, ...], arg(metavar="TASK ...")] = ("ioi",)
    """Tasks, by name or as .jsonl files."""
    control: Name = None
    """A dense model that has had the same training as the sparse one."""
    out: Folder = None
    """Folder for the circuits, results.json and figures 2 and 3."""
    json: File = None
    """Write the multipliers to this file."""
    settings: OmitArgPrefixes[Search] = dataclasses.field(default_factory=Search)

    def __call__(self) -> None:
        from ..circuits.compare import compare, table

        result = compare(**self.options(), show_progress=True)
        print("\n" + table(result))
        if self.out is not None:
            from ..reporting.figures.circuits import draw_all

            draw_all(result, self.out)
            print(f"circuits, results and figures are in {self.out}")
