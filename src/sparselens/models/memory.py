"""How much memory something took: a measurement for tests and benchmarks, and whether it ran out."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

StorageWeakRef: Any = reductions.StorageWeakRef  # untyped


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors made inside the block that are alive at once; `peak` is the most there ever were.

    What existed before (weights, prompts) does not count. Slow: for tests and benchmarks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0
        self._before: set[int] = set()

    def ignore(self, *modules: torch.nn.Module) -> "PeakMemory":
        for module in modules:
            self._before |= {p.untyped_storage()._cdata for p in (*module.parameters(), *module.buffers())}
        return self

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._before:
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out, on a GPU or in PyTorch's and Python's words for a CPU."""
    words = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory", "alloc_failed")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
