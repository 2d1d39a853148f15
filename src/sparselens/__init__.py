"""sparselens: make a transformer's attention sparse without losing what it can do, and see the circuit that is left."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Heavy imports (torch, transformers) happen when a name is first used, so that `import sparselens` is instant.
# A public function never shares its name with a package: importing that would hide the function.
_HOMES = {
    "Gate": "config",
    "Circuit": "circuits.circuit",
    "Graph": "attribution.graph",
    "Run": "runs.run",
    "Transcoder": "transcoders.transcoder",
    "compare": "circuits.compare",
    "discover": "circuits.discover",
    "gated_attention": "gating",
    "load": "models.loading",
    "report": "serving.publish",
    "save": "models.loading",
    "sparsify": "training.sparsify",
    "trace": "attribution.trace",
    "transcode": "transcoders.transcode",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605

if TYPE_CHECKING:
    from .attribution.graph import Graph as Graph
    from .attribution.trace import trace as trace
    from .circuits.circuit import Circuit as Circuit
    from .circuits.compare import compare as compare
    from .circuits.discover import discover as discover
    from .config import Gate as Gate
    from .gating import gated_attention as gated_attention
    from .models.loading import load as load
    from .models.loading import save as save
    from .runs.run import Run as Run
    from .serving.publish import report as report
    from .training.sparsify import sparsify as sparsify
    from .transcoders.transcode import transcode as transcode
    from .transcoders.transcoder import Transcoder as Transcoder


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'sparselens' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
