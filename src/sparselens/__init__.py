"""sparselens: make a transformer's attention sparse without losing what it can do, and see the circuit that is left."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Heavy imports (torch, transformers) happen when a name is first used, so that `import sparselens` is instant.
# A public function never shares its name with a package: importing that would hide the function.
_NAMES = {
    "attribution.graph": "Graph", "attribution.trace": "trace", "circuits.circuit": "Circuit",
    "circuits.compare": "compare", "circuits.discover": "discover", "config": "Gate Search",
    "data.registry": "register_data", "data.sample": "write_text", "faces.features": "features",
    "faces.store": "Feature", "evaluation.side_by_side": "evaluate",
    "gating": "gated_attention", "models.architectures": "Architecture register_architecture",
    "models.loading": "add_gates load save", "runs.run": "Run", "serving.export": "export push",
    "serving.publish": "report", "live.server": "studio", "tasks": "Pair Task register_task",
    "training.plan": "plan",
    "training.sparsify": "sparsify", "transcoders.transcode": "transcode", "transcoders.transcoder": "Transcoder",
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)  # noqa: PLE0605

if TYPE_CHECKING:
    from .attribution.graph import Graph as Graph
    from .attribution.trace import trace as trace
    from .circuits.circuit import Circuit as Circuit
    from .circuits.compare import compare as compare
    from .circuits.discover import discover as discover
    from .config import Gate as Gate, Search as Search
    from .data.registry import register_data as register_data
    from .data.sample import write_text as write_text
    from .evaluation.side_by_side import evaluate as evaluate
    from .faces.features import features as features
    from .faces.store import Feature as Feature
    from .gating import gated_attention as gated_attention
    from .live.server import studio as studio
    from .models.architectures import Architecture as Architecture, register_architecture as register_architecture
    from .models.loading import add_gates as add_gates, load as load, save as save
    from .runs.run import Run as Run
    from .serving.export import export as export, push as push
    from .serving.publish import report as report
    from .tasks import Pair as Pair, Task as Task, register_task as register_task
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
