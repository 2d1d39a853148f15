"""One training step of a model that is not there: its memory and work counted, its time measured on a shallow copy.

Counting: the step runs on fake tensors (shapes and dtypes without numbers), so a 70B model costs nothing and no formula
has to know what autograd keeps. Every layer adds the same, so that two depths tell the rest:

    count(L layers) = count(1) + (L - 1) * (count(2) - count(1))

Timing: real steps with random weights, at two depths as well.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PretrainedConfig

from ..config import Sparsify
from ..models.architectures import base_model, dimensions
from ..models.attention import _causal_pairs
from .copies import has_fused_attention, shallow, shallow_trainable, sizes
from .engine import make_optimizer
from .head import MOST_LOGITS
from .loop import Stage, loss_and_density
from .measure import forward, in_bf16

TIMED_DEPTHS = (2, 6)  # layers; a model with no more than the second is timed whole
TIMED_SECONDS = 1.0  # a timed step takes as many sequences as fit into this

StorageWeakRef: Any = reductions.StorageWeakRef  # untyped


class Step(NamedTuple):
    """What one forward and backward pass takes."""

    parameters: float  # numbers in the model
    trained: float  # of them (or of adapters and gates) trained
    kept: float  # bytes kept from the forward pass for the backward pass
    forward: float  # bytes at most in the forward pass
    peak: float  # bytes at most, gradients included, weights not
    flops: float  # in matrix products and attention
    moved: float  # bytes read and written by all operations
    operations: float


def count_step(
    config: PretrainedConfig, settings: Sparsify, length: int, sequences: int, gpu: bool, cache: bool
) -> tuple[Step, Step]:
    """(the whole model's step, what one layer adds to it), for so many sequences at once.

    cache: autocast holds on to the bf16 form of every weight while the forward pass lasts.
    """
    one, two = (_count(config, settings, length, sequences, gpu, cache, layers) for layers in (1, 2))
    rest = dimensions(config).n_layers - 1
    layer = Step(*(b - a for a, b in zip(one, two, strict=True)))
    whole = Step(*(a + rest * b for a, b in zip(one, layer, strict=True)))
    # The peak comes at the end of the forward pass; or when the backward pass begins, with everything kept; or
    # (checkpointing) while that runs one layer again. What it adds to what is kept does not grow with depth.
    return whole._replace(peak=max(whole.forward, whole.kept + two.peak - two.kept)), layer


def _count(
    config: PretrainedConfig, settings: Sparsify, length: int, sequences: int, gpu: bool, cache: bool, layers: int
) -> Step:
    fused = gpu and has_fused_attention(config) and settings.gate.normalise == "all"
    with torch.device("meta"):
        model = shallow_trainable(config, settings, layers, gated=not fused)
        teacher = shallow(config, layers) if settings.loss == "kl" else None
    bf16 = in_bf16(settings.training.precision, "cuda" if gpu else "cpu")
    work = _Work(collect=settings.training.gradient_checkpointing)
    if work.collect:
        gc.collect()
        gc.freeze()  # what is there already need not be looked through again
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            for each in (model, teacher):
                if each is not None:
                    _make_fake(each)
                    work.ignore(each)
            ids = torch.zeros(sequences, length, dtype=torch.long)
            with work:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=cache):
                    loss = _loss(model, teacher, {"input_ids": ids, "labels": ids}, settings, gpu)
                kept, forward_peak = work.begin_backward()
                loss.backward()
    except RuntimeError as error:  # sizes that only show when something is computed, such as an MLP without width
        raise ValueError(f"a model of this configuration cannot compute anything: {error}") from error
    finally:
        gc.unfreeze()
        _causal_pairs.cache_clear()  # it remembers tensors, here fake ones
    return Step(*sizes(model), kept, forward_peak, work.peak, work.flops, work.moved, work.operations)


def _loss(
    model: nn.Module, teacher: nn.Module | None, batch: dict[str, Tensor], settings: Sparsify, gpu: bool
) -> Tensor:
    """The objective; on a GPU the loss is compiled, and made in stretches where nothing follows the head."""
    if not gpu:
        stage = Stage("plan", model, None, Path(), settings.training, teacher=teacher)  # type: ignore[arg-type]
        loss, density = loss_and_density(stage, batch, (0, 0))
        return loss + density
    in_stretches = getattr(base_model(model).config, "final_logit_softcapping", None) is None
    head, base_head = (
        base_model(one).get_output_embeddings() if in_stretches and one is not None else None
        for one in (model, teacher)
    )
    found = forward(model, batch, head=head).logits
    with torch.no_grad():
        reference = None if teacher is None else forward(teacher, batch, head=base_head).logits
    if head is None:
        return _FusedLoss.apply(found, reference)  # type: ignore[no-any-return,no-untyped-call]
    other = None if base_head is None else base_head.weight
    return _StretchedLoss.apply(found, head.weight, reference, other)  # type: ignore[no-any-return,no-untyped-call]


class _StretchedLoss(torch.autograd.Function):
    """Memory and products of `head.stretched_loss`, its passes over a stretch's logits compiled to one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, reference: Tensor | None, base_weight: Tensor | None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        states, gradient = hidden.flatten(0, 1), torch.empty_like(hidden)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast("cpu", enabled=False):
            matrix, other = weight.to(dtype), None if base_weight is None else base_weight.to(dtype)
            for part in states.split(max(1, MOST_LOGITS // len(weight))):
                logits = part.to(dtype) @ matrix.T
                if other is not None:
                    wanted = part.to(dtype) @ other.T
                    del wanted
                slope = torch.empty_like(logits)
                product = slope @ matrix
                if of_weight is not None:
                    product = slope.T @ part.to(dtype)
                del logits, slope, product
        ctx.save_for_backward(gradient, of_weight)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gradient, of_weight = ctx.saved_tensors
        return gradient * dloss, None if of_weight is None else of_weight * dloss, None, None


class _FusedLoss(torch.autograd.Function):
    """The memory of a compiled loss: it keeps logits as they are and makes one gradient of the same size.

    For KL the gradient exists in fp32 first (measured: the peak is higher by just that).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, reference: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits, reference)
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, reference = ctx.saved_tensors
        dtype = logits.dtype if reference is None else torch.float32
        return torch.empty_like(logits, dtype=dtype).to(logits.dtype), None


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

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._before:
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


class _Work(PeakMemory):
    """Also counts operations, what they compute, and the bytes they read and write.

    collect: under checkpointing, fake tensors leave reference cycles behind that real ones do not; clear them away.
    """

    flops = 0
    moved = 0.0
    operations = 0

    def __init__(self, collect: bool) -> None:
        super().__init__()
        self.collect = collect

    def begin_backward(self) -> tuple[float, float]:
        """(bytes alive now, the most there were), and the peak begins anew."""
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        kept, forward_peak = sum(size for _, size in self.alive.values()), self.peak
        self.peak = kept
        return kept, forward_peak

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        if formula := FLOPS.get(function._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        if not function.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.operations += 1
            if self.collect and self.operations % 10 == 0:
                gc.collect()
            self.moved += sum(t.numel() * t.element_size() for t in tensors)
        return out


_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLOPS: dict[Any, Callable[..., int]] = (
    flop_registry
    | {  # causal attention: half of the pairs
        _attention: lambda *qkv, **_: int(sdpa_flop_count(*(t.shape for t in qkv[:3]))) // 2,
        _attention_backward: lambda *dqkv, **_: int(sdpa_backward_flop_count(*(t.shape for t in dqkv[:4]))) // 2,
    }
)


def _make_fake(model: nn.Module) -> None:
    """Replace tensors on the meta device, which know no autocast, by fake ones on the CPU; shared ones stay shared."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new: Tensor = torch.empty(old.shape, dtype=old.dtype)
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = new, old  # the old one too: its id must not be used again
                table[name] = made[id(old)][0]  # type: ignore[assignment]


def time_step(
    config: PretrainedConfig, settings: Sparsify, length: int, sequences: int, device: str
) -> tuple[float, float]:
    """(seconds per token for gradients, seconds per optimiser step) of the whole model, measured on shallow ones."""
    n_layers = dimensions(config).n_layers
    depths = [n_layers] if n_layers <= TIMED_DEPTHS[1] else list(TIMED_DEPTHS)
    few, *more = [_time(config, settings, length, sequences, device, layers) for layers in depths]
    if not more:
        return few
    factor = (n_layers - depths[0]) / (depths[1] - depths[0])
    return tuple(max(b, a + factor * (b - a)) for a, b in zip(few, *more, strict=True))  # type: ignore


def _time(
    config: PretrainedConfig, settings: Sparsify, length: int, sequences: int, device: str, layers: int
) -> tuple[float, float]:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = shallow_trainable(config, settings, layers, gated=True)
        teacher = shallow(config, layers).eval() if settings.loss == "kl" else None
        ids = torch.randint(0, config.vocab_size, (sequences, length))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(parameters, settings.training)
    stage = Stage("plan", model, None, Path(), settings.training, teacher=teacher)  # type: ignore[arg-type]
    bf16 = in_bf16(settings.training.precision, device)

    def gradients(n: int) -> float:
        began = _now(device)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss, density = loss_and_density(stage, {"input_ids": ids[:n], "labels": ids[:n]}, (0, 0))
        (loss + density.sum()).backward()
        return _now(device) - began

    def update() -> float:
        began = _now(device)
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.training.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return _now(device) - began

    few = sequences if device == "cuda" else 1  # a GPU compiles for the size it will see, and is quick enough
    gradients(few)  # compiles, fills caches
    update()
    once = gradients(few)
    n = max(few, min(sequences, int(TIMED_SECONDS / once)))
    computing, updating = zip(*((gradients(n), update()) for _ in range(4)), strict=True)
    return min(computing) / (n * length), min(updating)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
