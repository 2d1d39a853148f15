"""sparselens: make a transformer's attention sparse without losing what it can do, and see the circuit that is left."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Heavy imports (torch, transformers) happen when a name is first used, so that `import sparselens` is instant.
# A public function never shares its name with a package: importing that would hide the function.
_HOMES = {
    "Architecture": "models.architectures",
    "Circuit": "circuits.circuit",
    "Gate": "config",
    "Graph": "attribution.graph",
    "Pair": "tasks",
    "Run": "runs.run",
    "Search": "config",
    "Task": "tasks",
    "Transcoder": "transcoders.transcoder",
    "add_gates": "models.loading",
    "compare": "circuits.compare",
    "discover": "circuits.discover",
    "evaluate": "evaluation.side_by_side",
    "export": "evaluation.export",
    "gated_attention": "gating",
    "load": "models.loading",
    "plan": "training.plan",
    "push": "evaluation.export",
    "register_architecture": "models.architectures",
    "register_data": "data.registry",
    "register_task": "tasks",
    "report": "serving.publish",
    "save": "models.loading",
    "sparsify": "training.sparsify",
    "studio": "serving.serve",
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
    from .config import Search as Search
    from .data.registry import register_data as register_data
    from .evaluation.export import export as export
    from .evaluation.export import push as push
    from .evaluation.side_by_side import evaluate as evaluate
    from .gating import gated_attention as gated_attention
    from .models.architectures import Architecture as Architecture
    from .models.architectures import register_architecture as register_architecture
    from .models.loading import add_gates as add_gates
    from .models.loading import load as load
    from .models.loading import save as save
    from .runs.run import Run as Run
    from .serving.publish import report as report
    from .serving.serve import studio as studio
    from .tasks import Pair as Pair
    from .tasks import Task as Task
    from .tasks import register_task as register_task
    from .training.plan import plan as plan
    from .training.sparsify import sparsify as sparsify
    from .transcoders.transcode import transcode as transcode
    from .transcoders.transcoder import Transcoder as Transcoder


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparselens' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
