"""One stage of training, from first step to last, whatever happens in between.

The same loop trains the sparse model (with a Constraint), its matched dense control and small models from scratch
(without). Each step:
  1. take the next numbered sequences; the number is all that data order depends on
  2. forward: loss and density, gates sampled or deterministic as the constraint says
  3. the constraint makes one objective of the two (constraint.py); without gates it is the loss
  4. discard the update if anything is not finite; otherwise clip, step, tell the constraint
  5. now and then: evaluate deterministically on held-out text and keep the state the constraint ranks best; write a
     checkpoint
"""

import functools
import math
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import Training
from .constraint import Budget, Constraint
from .data import Batches
from .evaluate import Measurement, forward, measure, token_kl, token_losses
from .huggingface import is_gated
from .run import Metrics, load_checkpoint, save_checkpoint

MAX_BAD_STEPS = 3
PARTING = 0.2  # nats between training and held-out loss, beyond where they started, that deserve a warning


class Interrupted(Exception):
    """The user asked to stop; a checkpoint has been written."""


@dataclass
class Best:
    """The state worth returning: the best by the constraint's rank (smaller is better)."""

    step: int = -1
    loss: float = math.inf
    density: float = math.inf
    met: bool = False
    rank: list[float] = field(default_factory=lambda: [math.inf])


@dataclass
class Progress:
    """Everything about a stage that is not a tensor. Goes into checkpoints as JSON."""

    step: int = 0
    data: int = 0  # sequences taken so far
    bad_steps: int = 0  # discarded updates in a row
    evaluations: int = 0
    first_gap: float | None = None  # held-out minus training loss at the first evaluation
    warned: bool = False  # that they part
    best: Best = field(default_factory=Best)


@dataclass
class Stage:
    """A model, its data, and how to train it."""

    name: str
    model: nn.Module
    batches: Batches
    folder: Path
    settings: Training
    constraint: Budget | Constraint | None = None
    teacher: nn.Module | None = None  # frozen base; given, the constrained loss is KL to it
    steering: int = 0  # how many held-out sequences (from the first) may steer the training
    reference: Tensor | None = None  # [steering] the base's loss on each of them: pairs the comparison, less noise
    say: Callable[[str], None] = print
    show_progress: bool = True


def train(stage: Stage, resume: bool = False) -> Best:
    """Train to the end, or raise Interrupted with a checkpoint written. Leaves the best state in the model."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from tqdm import tqdm

    settings, model, folder = stage.settings, stage.model, stage.folder
    folder.mkdir(parents=True, exist_ok=True)
    precision = precision_of(settings.precision)
    tracker = None if settings.tracker == "none" else settings.tracker
    AcceleratorState._reset_state()  # accelerate remembers the first precision it saw; each stage has its own
    accelerator = Accelerator(mixed_precision=precision, log_with=tracker, project_dir=str(folder))
    if tracker:
        accelerator.init_trackers("sparselens", config={"stage": stage.name})
    model.to(accelerator.device)
    if stage.teacher is not None:
        stage.teacher.to(accelerator.device).eval()
    if settings.gradient_checkpointing:
        # Reentrant checkpointing would lose the edge counts on their way out of the model.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = accelerator.prepare(make_optimizer(parameters, settings))

    progress = Progress()
    if resume:
        progress = restore(stage, parameters, optimizer) or progress
    metrics = Metrics(folder, after_step=progress.step if resume else None)
    micro = settings.micro_batch or settings.batch
    chunks = settings.batch // micro
    tokens_per_step = settings.batch * stage.batches.length
    model.train()
    bar = tqdm(
        total=settings.steps, initial=progress.step, desc=stage.name, unit="step", disable=not stage.show_progress
    )
    with interruptible() as interrupted:
        if progress.step == 0:
            checkpoint(stage, parameters, optimizer, progress)
        while progress.step < settings.steps:
            began = time.perf_counter()
            step = progress.step
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * learning_rate(step, settings)
            done = step / settings.steps
            sample = stage.constraint is not None and stage.constraint.sampled(done)
            total_loss, total_density = 0.0, 0.0
            for chunk in range(chunks):
                batch = stage.batches.train(progress.data + chunk * micro, micro)
                batch = {name: value.to(accelerator.device) for name, value in batch.items()}
                with accelerator.autocast():
                    loss, density = loss_and_density(stage, batch, seed_of(settings.seed, step, chunk), sample)
                objective = stage.constraint.objective(loss, density) if stage.constraint else loss
                accelerator.backward(objective / chunks)
                total_loss += loss.item() / chunks
                total_density += density.item() / chunks
            norm = float(accelerator.clip_grad_norm_(parameters.values(), settings.clip))
            progress.data += settings.batch
            progress.step += 1
            if not (math.isfinite(norm) and math.isfinite(total_loss)):
                optimizer.zero_grad(set_to_none=True)
                discard(stage, progress, parameters, optimizer, total_loss, norm)
                continue
            progress.bad_steps = 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if stage.constraint:
                stage.constraint.step(total_loss, total_density, done)

            line: dict[str, Any] = {"step": progress.step, "loss": total_loss, "grad_norm": norm}
            if stage.constraint:
                line |= {"density": total_density, "lambda": stage.constraint.loss_weight}
            last = progress.step == settings.steps
            if progress.step % settings.evaluate_every == 0 or last:
                line |= evaluate(stage, progress, parameters, accelerator)
            rate = tokens_per_step / (time.perf_counter() - began)
            metrics.log(**line, tokens_per_second=round(rate))
            if tracker:
                accelerator.log(line | {"tokens_per_second": rate}, step=progress.step)
            bar.set_postfix_str(describe(stage, line, rate), refresh=False)
            bar.update()
            if progress.step % settings.checkpoint_every == 0 or last or interrupted():
                checkpoint(stage, parameters, optimizer, progress)
            if interrupted() and not last:
                bar.close()
                metrics.close()
                raise Interrupted(f"stopped after step {progress.step} of {settings.steps}; continue with --resume")
    bar.close()
    metrics.close()
    if tracker:
        accelerator.end_training()
    take_best(stage, parameters)
    model.eval()
    return progress.best


def loss_and_density(stage: Stage, batch: dict[str, Tensor], seed: int, sample: bool = True) -> tuple[Tensor, Tensor]:
    """Mean loss per token and density of one micro-batch, both differentiable.

    With sampled gates the density is the expected one; otherwise it is what is open, with the same gradient.
    """
    gated = is_gated(stage.model)
    output = forward(stage.model, batch, **({"gate_sample": sample, "gate_seed": seed} if gated else {}))
    labels = batch["labels"]
    if stage.teacher is None:
        losses = fused(token_losses, output.logits)(output.logits, labels)
    else:
        with torch.no_grad():
            reference = forward(stage.teacher, batch).logits
        losses = fused(token_kl, output.logits)(reference, output.logits, labels)
    loss = losses.sum() / (labels != -100).sum()
    if not gated:
        return loss, torch.zeros((), device=loss.device)
    record = torch.stack(output.attentions)  # [n_layers, batch, n_heads, 2]: edges, pairs
    return loss, record[..., 0].sum() / record[..., 1].sum()


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def fused(function: Callable[..., Tensor], logits: Tensor) -> Callable[..., Tensor]:
    """The function, compiled on a GPU: of a small model's step, eager passes over the logits are half the time."""
    return _compiled(function) if logits.is_cuda else function


def evaluate(stage: Stage, progress: Progress, parameters: dict[str, nn.Parameter], accelerator) -> dict[str, Any]:
    """Measure on the next held-out slice, correct the constraint, keep the state if it is the best so far."""
    if not stage.steering:
        return {}
    count = min(stage.settings.evaluate_sequences, stage.steering)
    slices = max(1, stage.steering // count)
    start = progress.evaluations % slices * count
    progress.evaluations += 1
    micro = stage.settings.micro_batch or stage.settings.batch
    with accelerator.autocast():
        result = measure(stage.model, stage.batches, start, count, micro_batch=micro, base=stage.teacher)
    loss, margin = steering_loss(stage, result, start)
    line: dict[str, Any] = {"heldout_loss": loss, "heldout_density": result.density}
    if result.edges is not None and result.pairs is not None:
        line["heldout_density_per_layer"] = (result.edges.mean(1) / result.pairs).tolist()
    if stage.constraint is None:
        return line
    warn_if_parting(stage, progress, loss)
    stage.constraint.correct(loss)
    density = result.density
    assert density is not None
    rank = stage.constraint.rank(loss, margin, density)
    if rank < progress.best.rank:
        progress.best = Best(progress.step, loss, density, stage.constraint.met(loss, margin, density), rank)
        save_checkpoint(stage.folder / "best", progress.step, dict(parameters), {"best": vars(progress.best)}, keep=1)
    return line


def warn_if_parting(stage: Stage, progress: Progress, heldout: float) -> None:
    """Say it once when held-out loss rises away from training loss: the run is learning its text by heart."""
    assert stage.constraint is not None and stage.constraint.average is not None
    gap = heldout - stage.constraint.average
    if progress.first_gap is None:
        progress.first_gap = gap
    parted = gap - progress.first_gap
    if parted > PARTING and not progress.warned:
        progress.warned = True
        stage.say(
            f"step {progress.step}: held-out loss has moved {parted:.2f} nats away from training loss. "
            "The text is being learnt by heart: give more of it, or train for fewer steps."
        )


def steering_loss(stage: Stage, result: Measurement, start: int) -> tuple[float, float]:
    """The held-out loss as if measured on all steering sequences, and its standard error.

    A slice may be easier or harder text than the rest. The base's own loss on the same sequences takes that out.
    """
    values = result.losses if stage.teacher is None else result.kl
    assert values is not None
    if stage.reference is None or stage.teacher is not None:
        difference, level = values, 0.0
    else:
        difference = values - stage.reference[start : start + len(values)]
        level = stage.reference.mean().item()
    whole = len(values) == stage.steering
    error = 0.0 if whole or len(values) < 2 else (difference.std() / len(values) ** 0.5).item()
    return level + difference.mean().item(), error


def discard(stage: Stage, progress: Progress, parameters, optimizer, loss: float, norm: float) -> None:
    """Answer a NaN: drop the update; if the weights are hit, go back to the last checkpoint; stop at the third."""
    progress.bad_steps += 1
    stage.say(f"step {progress.step}: loss {loss}, gradient norm {norm}; the update was discarded")
    if progress.bad_steps >= MAX_BAD_STEPS:
        raise ValueError(
            f"{MAX_BAD_STEPS} steps in a row were not finite (last: step {progress.step}). The last good state is in "
            f"{stage.folder / 'checkpoints'}. Lower --lr, or use --precision fp32."
        )
    if not all(torch.isfinite(p).all() for p in parameters.values()):
        step, data, bad = progress.step, progress.data, progress.bad_steps
        found = restore(stage, parameters, optimizer)
        if found is None:
            raise ValueError("the weights are not finite and there is no checkpoint to go back to")
        stage.say(f"weights were not finite: went back to the checkpoint of step {found.step}")
        # Weights go back, the data does not: the same batch would do the same again.
        progress.step, progress.data, progress.bad_steps = step, data, bad


def make_optimizer(parameters: dict[str, nn.Parameter], settings: Training) -> torch.optim.AdamW:
    gates = [p for name, p in parameters.items() if name.endswith("gate_bias")]
    others = [p for name, p in parameters.items() if not name.endswith("gate_bias")]
    groups = [
        {"params": others, "lr": settings.lr, "base_lr": settings.lr, "weight_decay": settings.weight_decay},
        {"params": gates, "lr": settings.bias_lr, "base_lr": settings.bias_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.98), fused=others[0].is_cuda or None
    )


def learning_rate(step: int, settings: Training) -> float:
    """Factor on the learning rates: a linear rise, a plateau, a linear fall to a twentieth."""
    rise = min(1.0, (step + 1) / max(1.0, settings.warmup * settings.steps))
    left = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return rise * min(1.0, 0.05 + 0.95 * left)


def seed_of(seed: int, step: int, chunk: int) -> int:
    """Seed of the gates' noise for one micro-batch."""
    return (seed * 1_000_003 + step) * 1_009 + chunk


def precision_of(precision: str) -> str:
    """accelerate's name for the precision."""
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    return {"fp32": "no", "bf16": "bf16"}[precision]


def describe(stage: Stage, line: dict[str, Any], rate: float) -> str:
    """What the progress bar says."""
    text = f"loss {line['loss']:.4f}"
    if stage.constraint:
        text += f" (target {stage.constraint.target:.4f}) density {line['density']:.2%} λ {line['lambda']:.2g}"
    return text + f" {rate:,.0f} tok/s"


# ---- saving and restoring --------------------------------------------------------------------------------------------


def checkpoint(stage: Stage, parameters: dict[str, nn.Parameter], optimizer, progress: Progress) -> None:
    tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in parameters.items()}
    for name, p in parameters.items():
        tensors |= {f"adam.{name}.{key}": value for key, value in optimizer.state.get(p, {}).items()}
    state = vars(progress) | {"best": vars(progress.best)}
    if stage.constraint:
        state["constraint"] = stage.constraint.state()
    save_checkpoint(stage.folder / "checkpoints", progress.step, tensors, state)


def restore(stage: Stage, parameters: dict[str, nn.Parameter], optimizer) -> Progress | None:
    """Put the newest whole checkpoint back into model, optimiser and constraint."""
    found = load_checkpoint(stage.folder / "checkpoints")
    if found is None:
        return None
    tensors, state, complaints = found
    for complaint in complaints:
        stage.say(complaint)
    fill(parameters, {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")})
    for name, p in parameters.items():
        prefix = f"adam.{name}."
        saved = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if saved:
            optimizer.state[p] = {key: t if key == "step" else t.to(p.device) for key, t in saved.items()}
    if stage.constraint:
        for key, value in state.pop("constraint").items():
            setattr(stage.constraint, key, value)
    return Progress(**(state | {"best": Best(**state["best"])}))


def take_best(stage: Stage, parameters: dict[str, nn.Parameter]) -> None:
    """Leave the best state in the model (for a stage without constraint: the last one)."""
    found = load_checkpoint(stage.folder / "best") if stage.constraint else None
    if found is not None:
        fill(parameters, found[0])


def fill(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    if parameters.keys() != tensors.keys():
        raise ValueError("the checkpoint belongs to another model; choose another --out")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(tensors[name])


@contextmanager
def interruptible():
    """Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop. A second one stops at once."""
    asked = False

    def ask(number, frame):
        nonlocal asked
        if asked:
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
