"""How much memory scoring needs: an estimate before, a measurement to check it by."""

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .architectures import Dimensions

SLICES = 8  # reader gradients exist for an eighth of the tokens at a time
WRITERS_AT_ONCE = 48  # writers' differences in the residual stream, for the same slice


@dataclass(frozen=True)
class Memory:
    """What scoring will need beside the model's weights, in bytes."""

    per_token: float
    tokens: int
    logits: float  # logits at the reads, and the model's own on both prompts

    @property
    def total(self) -> float:
        return self.per_token * self.tokens + self.logits

    def __str__(self) -> str:
        each = f"{self.per_token / 2**20:.2f} MB per token, {self.tokens:,} tokens at a time"
        return f"{self.total / 2**20:,.0f} MB ({each})"


def estimate_memory(
    dims: Dimensions, d_mlp: int, n_prompts: int, tokens: int, reads: int = 1, vocabulary: int = 0, gated: bool = False
) -> Memory:
    """Peak memory of scoring n_prompts prompts of `tokens` tokens at once, fp32. d_mlp: width inside the MLP."""
    stored = 3 * dims.n_layers * dims.d_model
    # One block's graph: residual streams, norms, q/k/v with rotations; attention patterns (or flash statistics).
    width = dims.n_heads * dims.d_head
    patterns = dims.n_heads * tokens * 8 if gated else 0
    graph = max(8 * dims.d_model + 16 * width + patterns, 6 * dims.d_model + 9 * d_mlp)
    # Gradients at q, k, v, and one slice of reader gradients with their norm's temporaries.
    readers = 4 * width + (8 * dims.n_heads + 2 * min(WRITERS_AT_ONCE, 2 * dims.n_heads)) * dims.d_model / SLICES
    return Memory(4.0 * (stored + graph + readers), n_prompts * tokens, 4.0 * n_prompts * 6 * reads * vocabulary)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block that are alive at once; `peak` is the most there ever were.

    What existed before (weights, prompts) does not count. Slow: for tests and benchmarks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._before: set[int] = set()

    def ignore(self, *modules: torch.nn.Module) -> "PeakMemory":
        for module in modules:
            self._before |= {p.untyped_storage()._cdata for p in (*module.parameters(), *module.buffers())}
        return self

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
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
