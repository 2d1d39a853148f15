"""sparselens: make a transformer's attention sparse without losing what it can do, and see the circuit that is left."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Heavy imports (torch, transformers) happen when a name is first used, so that `import sparselens` is instant.
# A public function never shares its name with a module: importing the module would hide the function.
_HOMES = {
    "Gate": "config",
    "Circuit": "circuit",
    "Graph": "graph",
    "Run": "run",
    "Transcoder": "transcoder",
    "compare": "comparison",
    "discover": "discovery",
    "gated_attention": "gating",
    "load": "huggingface",
    "report": "report_commands",
    "save": "huggingface",
    "sparsify": "sparsification",
    "trace": "tracing",
    "transcode": "transcoding",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605

if TYPE_CHECKING:
    from .circuit import Circuit as Circuit
    from .comparison import compare as compare
    from .config import Gate as Gate
    from .discovery import discover as discover
    from .gating import gated_attention as gated_attention
    from .graph import Graph as Graph
    from .huggingface import load as load
    from .huggingface import save as save
    from .report_commands import report as report
    from .run import Run as Run
    from .sparsification import sparsify as sparsify
    from .tracing import trace as trace
    from .transcoder import Transcoder as Transcoder
    from .transcoding import transcode as transcode


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'sparselens' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
