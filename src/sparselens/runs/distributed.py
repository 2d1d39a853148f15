"""Several processes as one: which part is mine, what do all of us say, who writes.

`accelerate launch` (or torchrun) starts the processes and tells each its number in the environment; nothing else marks
a run of several. Without a launcher every function here is the identity. Rules that keep the processes in step:

- numbers that decide something (loss, density, gradient norm, a wish to stop) are reduced first: all see the same ones
- one process, the main one, writes; `on_main` makes the others wait, and stop when it fails
- DDP: every process has the whole model. FSDP2 (accelerate's `fsdp_version: 2`): parameters, gradients and moments are
  split along their first dimension, block by block; a block is whole only while it computes

Messages are tensors: torch's object collectives would pickle.
"""

import functools
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
STEP_TIMEOUT = timedelta(minutes=10)  # for all processes to meet within a step
CPU_TOKENS = 1 << 13  # at once, by default
PATIENCE = timedelta(hours=24)  # while one process reads text or writes a model; a dead one is noticed at once


def world() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def in_words() -> str:
    """How many there are, to be said aloud: a launcher that started fewer than it was asked for shows there."""
    return f"{world()} process{'es' if world() > 1 else ''}"


def rank() -> int:
    """This one's number."""
    return int(os.environ.get("RANK") or 0) if world() > 1 else 0


def is_main() -> bool:
    return rank() == 0


def sharded() -> bool:
    """Whether parameters are split over the processes (FSDP2) rather than copied to each (DDP)."""
    if world() == 1 or os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return False
    if os.environ.get("FSDP_VERSION") != "2":
        raise ValueError("FSDP version 1 is not supported: set fsdp_version: 2 in accelerate's configuration")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        raise ValueError("FSDP with offloaded parameters is not supported: set fsdp_offload_params: false")
    return True


_chosen: list[str] = []  # by --device


def check_device_name(name: str) -> None:
    """ValueError for what is no device. Without torch, which takes seconds to import."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r}: expected cpu, cuda or one GPU by its number (cuda:1)")


def choose_device(name: str | None) -> None:
    """From now on models compute there; None: on a GPU, where there is one."""
    _chosen.clear()
    if name is None:
        return
    check_device_name(name)
    if name != "cpu":
        import torch

        gpus, number = torch.cuda.device_count(), int(name.partition(":")[2] or 0)
        if number >= gpus:
            found = f"there {'is' if gpus == 1 else 'are'} {gpus} here" if gpus else "found no CUDA device"
            raise ValueError(f"device={name!r}: {found}; leave out --device, or choose cpu")
        if world() > 1:
            raise ValueError("under a launcher every process has a GPU of its own; leave out --device")
        torch.cuda.set_device(number)
    _chosen.append(name.partition(":")[0])


def device() -> str:
    """Where models compute: as chosen, else on the GPU, where there is one."""
    if _chosen:
        return _chosen[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def start() -> None:
    """Join the other processes. Call it before anything touches a GPU; calling it twice does no harm."""
    if world() > 1:
        sharded()  # refuses what is not supported
        _control_group()


@functools.cache
def _control_group() -> "ProcessGroup":
    """The group for what is said on the CPU, however long it takes. Joins the default group first."""
    import torch
    import torch.distributed as dist

    # transformers would leave the weights empty in all processes but one, and we shard what each has loaded.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    gpus = torch.cuda.device_count()
    if gpus:
        local = int(os.environ.get("LOCAL_RANK") or 0)
        if local >= gpus:
            raise ValueError(f"process {local} of this machine has no GPU: there are {gpus}; start at most {gpus}")
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=STEP_TIMEOUT)
    return dist.new_group(backend="gloo", timeout=PATIENCE)  # type: ignore[no-any-return,no-untyped-call]


def stop() -> None:
    """Leave the others, at the end of a command that went well, or that all of them have stopped."""
    if world() > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            _gather([0])  # nobody leaves while another is still at it
            dist.destroy_process_group()
            # The groups' threads end with the last reference. One that lets go of a tensor after Python has begun to
            # shut down would abort the process.
            _mesh.cache_clear()
            _control_group.cache_clear()


def total(value: "Tensor") -> "Tensor":
    """The sum over processes, the same in all of them; no gradient."""
    if world() == 1:
        return value
    import torch.distributed as dist

    _control_group()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def mean(value: "Tensor") -> "Tensor":
    """The mean over processes, the same in all of them; no gradient."""
    return value if world() == 1 else total(value) / world()


def any_of(flag: bool) -> bool:
    """Whether it is true in any process."""
    if world() == 1:
        return flag
    import torch

    return bool(total(torch.tensor(int(flag))))


def from_main(number: int) -> int:
    """The main process' number."""
    return number if world() == 1 else _gather([number])[0][0]


def _gather(numbers: list[int]) -> list[list[int]]:
    """Everybody's numbers, [process][number]."""
    import torch
    import torch.distributed as dist

    group = _control_group()
    mine = torch.tensor(numbers, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


def together(action: Callable[[], T]) -> T:
    """Do it in every process. When it fails in one, none goes on: an error there, OSError in the others."""
    if world() == 1:
        return action()
    failure: BaseException | None = None
    try:
        result = action()
    except BaseException as error:
        failure = error
    failed = [number for number, (flag,) in enumerate(_gather([int(failure is not None)])) if flag]
    if failure is not None:
        raise failure
    if failed:
        raise OSError(f"process {failed[0]} failed; it says why")
    return result


def on_main(action: Callable[[], Any]) -> None:
    """Do it in the main process; the others wait for it, and stop without a word when it fails."""
    try:
        together(lambda: action() if is_main() else None)
    except OSError:
        if is_main():
            raise
        raise SystemExit(2) from None


def main_first(action: Callable[[], T]) -> T:
    """Do it in every process, in the main one first: the others find what it has made."""
    if world() == 1:
        return action()
    made: list[T] = []
    on_main(lambda: made.append(action()))
    return made[0] if made else action()


def quiet(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` in the main process, silence in the others."""
    return say if is_main() else lambda text: None


def micro_batch(batch: int, micro: int | None, length: int = 1, gpu: bool | None = None) -> int:
    """Sequences of `length` tokens per forward pass of one process; ValueError where the batch cannot be shared evenly.

    By default a process takes its whole share at once; on a CPU, where memory ends without a word, some 8,000 tokens.
    """
    if micro is None:
        micro = max(1, batch // world())
        gpu = device() == "cuda" if gpu is None else gpu
        while not gpu and micro % 2 == 0 and micro * length > CPU_TOKENS:
            micro //= 2
    if batch % (micro * world()):
        what = f"{world()} processes" + (f" x micro_batch={micro}" if micro != batch // world() else "")
        raise ValueError(f"batch={batch} cannot be shared by {what}: choose a multiple of {micro * world()}")
    return micro


def rounds(count: int, at_once: int) -> Iterator[tuple[int, int]]:
    """(first, n) of this process' parts of items 0 ... count - 1: as many as in every process, so n may be 0."""
    at_once = min(at_once, -(-count // world()))
    for begin in range(0, count, at_once * world()):
        first = begin + rank() * at_once
        n = max(0, min(at_once, count - first))
        yield (first if n else 0), n


def mine(items: list[T]) -> list[T]:
    """Every `world()`-th of them."""
    return items[rank() :: world()]


def place(model: "nn.Module", device: Any, blocks: "Iterable[nn.Module]" = ()) -> "nn.Module":
    """The model, in place, where it computes: on the device, or with FSDP2 split over all of them, block by block."""
    if not sharded():
        return model.to(device)
    from torch.distributed.fsdp import fully_shard

    if not is_sharded(model):
        again = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        for block in blocks:
            fully_shard(block, mesh=_mesh(), reshard_after_forward=again)
        fully_shard(model, mesh=_mesh())
    return model


@functools.cache
def _mesh() -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    _control_group()
    return init_device_mesh(device(), (world(),))


def is_sharded(model: "nn.Module") -> bool:
    if world() == 1:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def trainable(model: "nn.Module") -> "nn.Module":
    """What to call so that `backward` leaves the mean gradient of all processes: the model itself, or DDP around it."""
    if world() == 1 or is_sharded(model):
        return model
    from torch.nn.parallel import DistributedDataParallel

    _control_group()
    # Buffers (rotary frequencies) do not change. torch 2.13 has another name for leaving them alone.
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    alone: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **alone)


def accumulating(model: "nn.Module", more: bool) -> AbstractContextManager[Any]:
    """While `more` micro-batches follow, DDP keeps gradients to itself. (FSDP2 would have to keep whole ones.)"""
    return model.no_sync() if more and hasattr(model, "no_sync") and world() > 1 else nullcontext()  # type: ignore


def whole(tensor: "Tensor") -> "Tensor":
    """All of a tensor that may be split. Every process has to ask."""
    return tensor.full_tensor() if world() > 1 and hasattr(tensor, "full_tensor") else tensor


def local(tensor: "Tensor") -> "Tensor":
    """The part of it that lies here."""
    return tensor.to_local() if world() > 1 and hasattr(tensor, "to_local") else tensor


def split_like(tensor: "Tensor", model: "Tensor") -> "Tensor":
    """A whole tensor, on the device of `model` and split as it is."""
    tensor = tensor.to(model.device)
    if world() == 1 or not hasattr(model, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)  # type: ignore


def own_part(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """What this process has to write: its parts of split tensors; the main process also what is not split."""
    parts = {name: local(tensor) for name, tensor in tensors.items() if is_main() or local(tensor) is not tensor}
    return {name: part for name, part in parts.items() if is_main() or part.numel()}


def collect(model: "nn.Module", into: "nn.Module") -> "nn.Module":
    """Copy the trained parameters of a split model into a plain one of the same kind."""
    import torch

    plain = dict(into.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                plain[name].copy_(whole(parameter))
    return into


def gather_checksums(digest: str) -> dict[int, str]:
    """process -> the hexadecimal digest it gives; none where it gives an empty one."""
    if world() == 1:
        return {0: digest} if digest else {}
    rows = _gather([*bytes.fromhex(digest or "00" * 32), int(bool(digest))])
    return {number: bytes(row[:-1]).hex() for number, row in enumerate(rows) if row[-1]}


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop. A second one stops at once.

    (Not under a launcher: on Ctrl-C it sends a SIGTERM of its own after the terminal's SIGINT.)
    """
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked and world() == 1:
            raise KeyboardInterrupt
        asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are someone else's business
        before = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
