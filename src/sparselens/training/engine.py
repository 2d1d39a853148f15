"""The loop under everything that is trained here: sparse models, their dense controls, transcoders.

Each step:
  1. set the learning rates; the trainee leaves the gradients of the next numbered sequences in its parameters
  2. discard the update if anything is not finite; otherwise clip, step, tell the trainee
  3. now and then: evaluate; write a checkpoint
Ctrl-C finishes the step and writes a checkpoint. Several processes see the same loss and norm, and so decide alike.

What moves the weights: AdamW, or Muon for the matrices inside the blocks and AdamW for the rest. Muon makes each
matrix's momentum orthogonal before it steps, so that directions of small gradient move as far as the others. From
random weights that learns several times as much per token (docs/LOG.md has the figures).
"""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Training, Transcode
from ..runs import distributed
from ..runs.checkpoints import fill, fill_optimizer, load_checkpoint, save_checkpoint
from ..runs.rows import MetricsLine
from ..runs.run import Metrics, reading

MAX_BAD_STEPS = 3
BETAS = (0.9, 0.98)
TINY = 1_000_000  # parameters of a model that one thread trains fastest


@contextmanager
def threads_for(parameters: int) -> Iterator[None]:
    """One thread where a model is so small that several wait for each other longer than they compute.

    On two busy cores the demo makes 10 steps a second with one thread and 2 to 3 with two. Whoever sets OMP_NUM_THREADS
    has chosen.
    """
    before = torch.get_num_threads()
    if parameters < TINY and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Interrupted(Exception):
    """The user asked to stop; a checkpoint has been written."""


@dataclass
class Progress:
    """Everything about a training that is not a tensor. Goes into checkpoints as JSON."""

    step: int = 0
    data: int = 0  # sequences taken so far
    bad_steps: int = 0  # discarded updates in a row


class Together:
    """Several optimisers of different parameters as one, as far as training and its checkpoints need it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = optimizers[0].state
        for optimizer in optimizers:
            optimizer.state = self.state  # parameter -> its moments; no parameter is in two of them

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def make_optimizer(parameters: dict[str, nn.Parameter], settings: Training) -> "torch.optim.Optimizer | Together":
    """Each parameter group has its `base_lr`: what `learning_rate` is a factor on."""
    gates = {name: p for name, p in parameters.items() if name.endswith("gate_bias")}
    others = {name: p for name, p in parameters.items() if name not in gates}
    muon = settings.optimizer == "muon"
    matrices = {name: p for name, p in others.items() if muon and is_matrix_of_a_block(name, p)}
    # AdamW decays whatever it moves but gates; beside Muon, which moves the matrices, nothing is left worth decaying.
    decay = 0.0 if muon else settings.weight_decay
    groups = [
        _group([p for name, p in others.items() if name not in matrices], settings.lr, decay),
        _group(list(gates.values()), settings.bias_lr, 0.0),
    ]
    on_gpu = next(iter(parameters.values())).is_cuda
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=on_gpu or None)
    if not matrices:
        return adamw
    # Steps as large as AdamW's, so that one learning rate serves both.
    group = _group(list(matrices.values()), settings.lr, settings.weight_decay)
    return Together(adamw, torch.optim.Muon([group], adjust_lr_fn="match_rms_adamw"))


def _group(parameters: list[nn.Parameter], lr: float, weight_decay: float) -> dict[str, object]:
    return {"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": weight_decay}


def is_matrix_of_a_block(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a weight matrix of a numbered block (h.3, layers.11): not an embedding, not the head."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


def learning_rate(step: int, settings: Training | Transcode) -> float:
    """Factor on the learning rates: a linear rise, a plateau, a linear fall to a twentieth."""
    rise = min(1.0, (step + 1) / max(1.0, settings.warmup * settings.steps))
    left = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return rise * min(1.0, 0.05 + 0.95 * left)


class Trainee(ABC):
    """What is trained: everything the loop does not know by itself."""

    name: str
    folder: Path
    model: nn.Module
    settings: Training | Transcode
    say: Callable[[str], None]
    show_progress: bool
    progress: Progress
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | Together

    def begin(self) -> None:  # noqa: B027 (nothing, for most)
        """What precedes the first step of a run that is not resumed."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor, int]:
        """Leave the gradients of the next step in the parameters; returns its numbers, the loss first, and how many
        tokens it took. The device may still be at work on all of them."""

    def meanwhile(self) -> None:  # noqa: B027
        """What can be begun of the next step before this one's numbers are there: a GPU need not wait for the host."""

    @abstractmethod
    def stepped(self, numbers: list[float], tokens: int, seconds: float) -> MetricsLine:
        """Take in an update that was made; returns what metrics.jsonl shall say of it."""

    @abstractmethod
    def evaluate(self) -> MetricsLine:
        """Measure on held-out sequences; for metrics.jsonl."""

    @abstractmethod
    def describe(self, line: MetricsLine) -> str:
        """What the progress bar says."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the optimiser's moments."""
        return dict(self.parameters)

    def state(self) -> dict[str, object]:
        """What it holds beside tensors and progress; `put_back` takes it out of there again."""
        return {}

    def put_back(self, state: dict[str, Any]) -> None: ...  # noqa: B027

    def before_checkpoint(self) -> None:  # noqa: B027
        """Write what the next checkpoint speaks of: a killed run must find it."""


def run(trainee: Trainee, resume: bool = False, track: Callable[[MetricsLine], None] | None = None) -> None:
    """Train to the end, or raise Interrupted with a checkpoint written. track: is given every line of the metrics."""
    from tqdm import tqdm

    settings = trainee.settings
    trainee.folder.mkdir(parents=True, exist_ok=True)
    if not (resume and restore(trainee)):
        trainee.begin()
    start = trainee.progress.step
    show = trainee.show_progress and distributed.is_main()
    bar = tqdm(total=settings.steps, initial=start, desc=trainee.name, unit="step", disable=not show)
    sizes = (sum(p.numel() for p in some) for some in (trainee.model.parameters(), trainee.parameters.values()))
    with (
        threads_for(max(sizes)),
        closing(Metrics(trainee.folder, after_step=start if resume else None)) as metrics,
        bar,
        distributed.interruptible() as interrupted,
    ):
        if start == 0:
            checkpoint(trainee)
        while trainee.progress.step < settings.steps:
            if (line := update(trainee)) is None:
                continue
            metrics.log(line)
            if track:
                track(line)
            bar.set_postfix_str(trainee.describe(line), refresh=False)
            bar.update()
            step, stopping = trainee.progress.step, distributed.any_of(interrupted())
            if step % settings.checkpoint_every == 0 or step == settings.steps or stopping:
                checkpoint(trainee)
            if stopping and step < settings.steps:
                raise Interrupted(f"stopped after step {step} of {settings.steps}; continue with --resume")


def update(trainee: Trainee) -> MetricsLine | None:
    """Make one step, and evaluate if it is time; returns its line for metrics.jsonl, None where it was discarded."""
    settings, progress, optimizer = trainee.settings, trainee.progress, trainee.optimizer
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * learning_rate(progress.step, settings)
    found, tokens = trainee.gradients()
    norms = distributed.whole(nn.utils.clip_grad_norm_(trainee.parameters.values(), settings.clip))
    numbers_of, norm_of = read_later(found), read_later(norms)
    trainee.meanwhile()
    numbers, norm = numbers_of(), float(norm_of())
    loss = numbers[0]
    progress.data += settings.batch
    progress.step += 1
    if not (math.isfinite(norm) and math.isfinite(loss)):
        optimizer.zero_grad(set_to_none=True)
        discard(trainee, loss, norm)
        progress.step = min(progress.step, settings.steps - 1)  # the last one also evaluates: do it again
        return None
    progress.bad_steps = 0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    line: MetricsLine = {"step": progress.step, "loss": loss, "grad_norm": norm}
    line |= trainee.stepped(numbers, tokens, time.perf_counter() - began)
    evaluates = progress.step % settings.evaluate_every == 0 or progress.step == settings.steps
    if (evaluates or progress.step % settings.checkpoint_every == 0) and not finite(trainee.parameters):
        # Before it is kept as a checkpoint or as the best state: the step after would notice too late.
        discard(trainee, loss, norm)
    if evaluates:
        line |= trainee.evaluate()
    line["tokens_per_second"] = round(tokens / (time.perf_counter() - began))
    return line


def read_later(values: Tensor) -> Callable[[], Any]:
    """The numbers of a tensor when they are asked for; what is sent to a GPU until then does not delay them."""
    if not values.is_cuda:
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> Any:
        event.synchronize()
        return copy.tolist()

    return read


def discard(trainee: Trainee, loss: float, norm: float) -> None:
    """Answer a NaN: drop the update; if the weights are hit, go back to the last checkpoint; stop at the third."""
    progress = trainee.progress
    progress.bad_steps += 1
    trainee.say(f"step {progress.step}: loss {loss}, gradient norm {norm}; the update was discarded")
    if progress.bad_steps >= MAX_BAD_STEPS:
        raise ValueError(
            f"{MAX_BAD_STEPS} steps in a row were not finite (last: step {progress.step}). The last good state is in "
            f"{trainee.folder / 'checkpoints'}. Lower --lr, or use --precision fp32."
        )
    if not finite(trainee.parameters):
        if not restore(trainee):
            raise ValueError("the weights are not finite and there is no checkpoint to go back to")
        trainee.say(f"weights were not finite: went back to the checkpoint of step {trainee.progress.step}")
        # Weights go back, the data does not: the same batch would do the same again.
        trainee.progress = progress


def finite(parameters: dict[str, nn.Parameter]) -> bool:
    """Whether all weights are, in every process."""
    return not distributed.any_of(not all(torch.isfinite(distributed.local(p)).all() for p in parameters.values()))


def checkpoint(trainee: Trainee) -> None:
    """Write all that the run needs to go on as if it had never stopped."""
    trainee.before_checkpoint()
    tensors = {f"model.{name}": tensor for name, tensor in trainee.tensors().items()}
    for name, p in trainee.parameters.items():
        tensors |= {f"adam.{name}.{key}": value for key, value in trainee.optimizer.state.get(p, {}).items()}
    state = asdict(trainee.progress) | trainee.state()
    save_checkpoint(trainee.folder / "checkpoints", trainee.progress.step, distributed.own_part(tensors), state)


def restore(trainee: Trainee) -> bool:
    """Put the newest whole checkpoint back; False where there is none."""
    found = load_checkpoint(trainee.folder / "checkpoints")
    if found is None:
        return False
    tensors, state, complaints = found
    for complaint in complaints:
        trainee.say(complaint)
    fill(trainee.tensors(), tensors, "model.")
    fill_optimizer(trainee.optimizer, trainee.parameters, tensors)
    with reading(f"the checkpoint of step {state.get('step')} in {trainee.folder} (another version's?)"):
        trainee.put_back(state)
        trainee.progress = type(trainee.progress)(**state)
    return True
