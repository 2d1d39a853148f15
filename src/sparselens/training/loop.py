"""One stage of training, from first step to last, whatever happens in between.

The same loop trains the sparse model (with a Constraint), its matched dense control and small models from scratch
(without). Each step:
  1. take the next numbered sequences; the number is all that data order depends on
  2. forward: loss and density, gates sampled or deterministic as the constraint says
  3. the constraint makes one objective of the two (controllers.py); without gates it is the loss
  4. discard the update if anything is not finite; otherwise clip, step, tell the constraint
  5. now and then: evaluate deterministically on held-out text and keep the state the constraint ranks best; write a
     checkpoint
Several processes share the sequences of a step. Loss and density are those of the whole step everywhere, gates are
drawn by a sequence's place in it, and so they follow one process with the same batch.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Training
from ..data.batches import Batches
from ..models.architectures import blocks
from ..models.loading import is_gated
from ..models.memory import out_of_memory
from ..runs import distributed
from ..runs.checkpoints import checkpoint_states, fill, fill_optimizer, load_checkpoint, save_checkpoint
from ..runs.run import Metrics, reading
from .compilation import faster, fused
from .controllers import Budget, Constraint
from .measure import forward, measure, token_kl, token_losses
from .optimizers import learning_rate, make_optimizer

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
    runner: nn.Module | None = None  # set by `train`: the model, with DDP around it where there are several processes
    kept: dict[str, Tensor] | None = None  # the best state so far, until the next checkpoint writes it


def train(stage: Stage, resume: bool = False) -> Best:
    """Train to the end, or raise Interrupted with a checkpoint written. Leaves the best state in the model."""
    from accelerate import Accelerator, AutocastKwargs
    from accelerate.state import AcceleratorState
    from tqdm import tqdm

    settings, model, folder = stage.settings, stage.model, stage.folder
    folder.mkdir(parents=True, exist_ok=True)
    stage.kept = None
    precision = precision_of(settings.precision)
    tracker = None if settings.tracker == "none" else settings.tracker
    AcceleratorState._reset_state()  # accelerate remembers the first precision it saw; each stage has its own
    distributed.start()
    on_cpu = distributed.world() > 1 and not torch.cuda.is_available()
    # Autocast's cache would hold a whole bf16 model in every process that has but its share of the weights.
    handlers = [AutocastKwargs(cache_enabled=not distributed.sharded())]
    accelerator = Accelerator(
        mixed_precision=precision, log_with=tracker, project_dir=str(folder), cpu=on_cpu, kwargs_handlers=handlers
    )
    if tracker:
        accelerator.init_trackers("sparselens", config={"stage": stage.name})
    distributed.place(model, accelerator.device, blocks(model))
    if stage.teacher is not None:
        distributed.place(stage.teacher, accelerator.device, blocks(stage.teacher)).eval()
    if settings.gradient_checkpointing:
        # Reentrant checkpointing would lose the edge counts on their way out of the model.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(parameters, settings)
    stage.runner = distributed.trainable(model)

    progress = Progress()
    if resume:
        progress = restore(stage, parameters, optimizer) or progress
    metrics = Metrics(folder, after_step=progress.step if resume else None)
    micro = distributed.micro_batch(settings.batch, settings.micro_batch, stage.batches.length)
    tokens_per_step = settings.batch * stage.batches.length
    model.train()
    show = stage.show_progress and distributed.is_main()
    bar = tqdm(total=settings.steps, initial=progress.step, desc=stage.name, unit="step", disable=not show)
    models = [model] if stage.teacher is None else [model, stage.teacher]
    with bar, distributed.interruptible() as interrupted, faster(models, settings, accelerator.device.type):
        if progress.step == 0:
            checkpoint(stage, parameters, optimizer, progress)
        while progress.step < settings.steps:
            began = time.perf_counter()
            step = progress.step
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * learning_rate(step, settings)
            done = step / settings.steps
            sample = stage.constraint is not None and stage.constraint.sampled(done)
            while (found := accumulate(stage, accelerator, progress, micro, sample)) is None:
                optimizer.zero_grad(set_to_none=True)
                micro = smaller(stage, micro, step)
            total_loss, total_density = found
            norm = float(distributed.whole(nn.utils.clip_grad_norm_(parameters.values(), settings.clip)))
            progress.data += settings.batch
            progress.step += 1
            if not (math.isfinite(norm) and math.isfinite(total_loss)):
                optimizer.zero_grad(set_to_none=True)
                discard(stage, progress, parameters, optimizer, total_loss, norm)
                progress.step = min(progress.step, settings.steps - 1)  # the last one also evaluates: do it again
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
            due = progress.step % settings.evaluate_every == 0 or progress.step % settings.checkpoint_every == 0
            if (due or last) and not finite(parameters):
                # Before it is kept as a checkpoint or as the best state: the step after would notice too late.
                discard(stage, progress, parameters, optimizer, total_loss, norm)
            if progress.step % settings.evaluate_every == 0 or last:
                line |= evaluate(stage, progress, parameters, accelerator, micro)
            rate = tokens_per_step / (time.perf_counter() - began)
            metrics.log(**line, tokens_per_second=round(rate))
            if tracker:
                accelerator.log(line | {"tokens_per_second": rate}, step=progress.step)
            bar.set_postfix_str(describe(stage, line, rate), refresh=False)
            bar.update()
            stopping = distributed.any_of(interrupted())
            if progress.step % settings.checkpoint_every == 0 or last or stopping:
                checkpoint(stage, parameters, optimizer, progress)
            if stopping and not last:
                bar.close()
                metrics.close()
                raise Interrupted(f"stopped after step {progress.step} of {settings.steps}; continue with --resume")
    bar.close()
    metrics.close()
    if tracker:
        accelerator.end_training()
    best = take_best(stage, parameters, progress.best)
    model.eval()
    return best


def accumulate(stage: Stage, accelerator, progress: Progress, micro: int, sample: bool) -> tuple[float, float] | None:
    """Gradients of one step, `micro` sequences at a time: (loss, density), or None where the memory was not enough.

    A sequence draws the same gates wherever the batch is cut. (Loss and density are means over the parts: with packed
    documents, of which each part has other ones, their size changes the density in its fourth digit.)
    Processes take turns: of two, one takes the first, third, ... micro-batch.
    """
    settings = stage.settings
    total_loss = total_density = 0.0
    round_size = micro * distributed.world()
    chunks = settings.batch // round_size
    seed = seed_of(settings.seed, progress.step)
    runner = stage.runner or stage.model
    try:
        for first in range(distributed.rank() * micro, settings.batch, round_size):
            batch = stage.batches.train(progress.data + first, micro)
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            with distributed.accumulating(runner, more=first + round_size < settings.batch):
                with accelerator.autocast():
                    loss, density = loss_and_density(stage, batch, (seed, first), sample)
                objective = stage.constraint.objective(loss, density) if stage.constraint else loss
                (objective / chunks).backward()
            total_loss += loss.item() / chunks
            total_density += density.item() / chunks
    except (RuntimeError, MemoryError) as error:
        # One process of several cannot do its part again alone: the others wait for it in the middle of theirs.
        if not out_of_memory(error) or distributed.world() > 1:
            raise
        return None  # not from here: the traceback holds the tensors that were too many
    loss_of_all, density_of_all = distributed.mean(
        torch.tensor([total_loss, total_density], dtype=torch.float64)
    ).tolist()
    return loss_of_all, density_of_all


def smaller(stage: Stage, micro: int, step: int) -> int:
    """The next smaller micro-batch that divides the batch; the batch itself stays as it is."""
    if micro == 1:
        raise ValueError(
            f"step {step + 1}: not enough memory for a single sequence of {stage.batches.length} tokens. Lower "
            "--length, or try --gradient-checkpointing, --lora or --precision bf16; then start again."
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = next(size for size in range(micro // 2, 0, -1) if stage.settings.batch % size == 0)
    stage.say(
        f"step {step + 1}: not enough memory for {micro} sequences at once; going on with {half} at a time, and still "
        f"{stage.settings.batch} per step (--micro-batch {half} would do so from the start)"
    )
    return half


def loss_and_density(
    stage: Stage, batch: dict[str, Tensor], seed: tuple[int, int], sample: bool = True
) -> tuple[Tensor, Tensor]:
    """Mean loss per token and density of one micro-batch, both differentiable.

    With sampled gates the density is the expected one; otherwise it is what is open, with the same gradient. Several
    processes divide by the mean of their tokens and pairs, so that the mean of their results is that of all together.
    """
    gated = is_gated(stage.model)
    output = forward(
        stage.runner or stage.model, batch, **({"gate_sample": sample, "gate_seed": seed} if gated else {})
    )
    labels = batch["labels"]
    if stage.teacher is None:
        losses = fused(token_losses, output.logits)(output.logits, labels)
    else:
        with torch.no_grad():
            reference = forward(stage.teacher, batch).logits
        losses = fused(token_kl, output.logits)(reference, output.logits, labels)
    loss = losses.sum() / distributed.mean((labels != -100).sum())
    if not gated:
        return loss, torch.zeros((), device=loss.device)
    record = torch.stack(output.attentions)  # [n_layers, batch, n_heads, 2]: edges, pairs
    return loss, record[..., 0].sum() / distributed.mean(record[..., 1].sum())


def evaluate(
    stage: Stage, progress: Progress, parameters: dict[str, nn.Parameter], accelerator, micro: int
) -> dict[str, Any]:
    """Measure on the next held-out slice, correct the constraint, keep the state if it is the best so far."""
    if not stage.steering:
        return {}
    count = min(stage.settings.evaluate_sequences, stage.steering)
    slices = max(1, stage.steering // count)
    start = progress.evaluations % slices * count
    progress.evaluations += 1
    with accelerator.autocast():
        result = measure(stage.model, stage.batches, start, count, micro_batch=micro, base=stage.teacher)
    by_text = steering_loss(stage, result.losses, stage.reference, start)
    loss, margin = by_text if stage.teacher is None else steering_loss(stage, result.kl, None, start)
    line: dict[str, Any] = {"heldout_loss": loss, "heldout_density": result.density}
    if stage.teacher is not None:
        line["heldout_cross_entropy"] = by_text[0]
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
        # A budget is judged by what text costs, whatever it was trained on; a constraint by what it constrains.
        judged = by_text if isinstance(stage.constraint, Budget) else (loss, margin)
        progress.best = Best(progress.step, judged[0], density, stage.constraint.met(*judged, density), rank)
        stage.kept = {name: p.detach().to("cpu", copy=True) for name, p in distributed.own_part(parameters).items()}
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


def steering_loss(stage: Stage, values: Tensor | None, reference: Tensor | None, start: int) -> tuple[float, float]:
    """The mean of a slice's cross-entropies (or KL) as if measured on all steering sequences, and its standard error.

    A slice may be easier or harder text than the rest. The base's own loss on the same sequences takes that out.
    """
    assert values is not None
    if reference is None:
        difference, level = values, 0.0
    else:
        difference = values - reference[start : start + len(values)]
        level = reference.mean().item()
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
    if not finite(parameters):
        step, data, bad = progress.step, progress.data, progress.bad_steps
        found = restore(stage, parameters, optimizer)
        if found is None:
            raise ValueError("the weights are not finite and there is no checkpoint to go back to")
        stage.say(f"weights were not finite: went back to the checkpoint of step {found.step}")
        # Weights go back, the data does not: the same batch would do the same again.
        progress.step, progress.data, progress.bad_steps = step, data, bad


def finite(parameters: dict[str, nn.Parameter]) -> bool:
    """Whether all weights are, in every process."""
    return not distributed.any_of(not all(torch.isfinite(distributed.local(p)).all() for p in parameters.values()))


def seed_of(seed: int, step: int) -> int:
    """Seed of the gates' noise for one step."""
    return (seed * 1_000_003 + step) * 1_009


def precision_of(precision: str) -> str:
    """accelerate's name for the precision."""
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    return {"fp32": "no", "bf16": "bf16"}[precision]


def describe(stage: Stage, line: dict[str, Any], rate: float) -> str:
    """What the progress bar says."""
    text = f"{'loss' if stage.teacher is None else 'KL'} {line['loss']:.4f}"
    if isinstance(stage.constraint, Constraint):
        text += f" (target {stage.constraint.target:.4f}) density {line['density']:.2%} λ {line['lambda']:.2g}"
    elif stage.constraint:
        text += f" density {line['density']:.2%} (budget {stage.constraint.unit:.2%})"
    return text + f" {rate:,.0f} tok/s"


# ---- saving and restoring --------------------------------------------------------------------------------------------


def checkpoint(stage: Stage, parameters: dict[str, nn.Parameter], optimizer, progress: Progress) -> None:
    """Write the state of the run; before it the best state it speaks of, which a killed run would find again."""
    if stage.kept is not None:
        # The one that an older checkpoint speaks of stays: a run resumed from there may yet return it.
        spoken_of = [found["best"]["step"] for found in checkpoint_states(stage.folder / "checkpoints")]
        best = {"best": vars(progress.best)}
        save_checkpoint(stage.folder / "best", progress.best.step, stage.kept, best, keep=1, also=spoken_of)
        stage.kept = None
    tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in parameters.items()}
    for name, p in parameters.items():
        tensors |= {f"adam.{name}.{key}": value for key, value in optimizer.state.get(p, {}).items()}
    state = vars(progress) | {"best": vars(progress.best)}
    if stage.constraint:
        state["constraint"] = stage.constraint.state()
    save_checkpoint(stage.folder / "checkpoints", progress.step, distributed.own_part(tensors), state)


def restore(stage: Stage, parameters: dict[str, nn.Parameter], optimizer) -> Progress | None:
    """Put the newest whole checkpoint back into model, optimiser and constraint."""
    found = load_checkpoint(stage.folder / "checkpoints")
    if found is None:
        return None
    tensors, state, complaints = found
    for complaint in complaints:
        stage.say(complaint)
    fill(parameters, tensors, "model.")
    fill_optimizer(optimizer, parameters, tensors)
    with reading(f"the checkpoint of step {state.get('step')} in {stage.folder} (another version's?)"):
        if stage.constraint:
            for key, value in state.pop("constraint").items():
                setattr(stage.constraint, key, value)
        return Progress(**(state | {"best": Best(**state["best"])}))


def take_best(stage: Stage, parameters: dict[str, nn.Parameter], best: Best) -> Best:
    """Leave the best state in the model (for a stage without constraint: the last one); returns what is known of it."""
    found = load_checkpoint(stage.folder / "best", best.step) if stage.constraint else None
    if found is None:
        return best
    tensors, state, complaints = found
    for complaint in complaints:
        stage.say(complaint)
    fill(parameters, tensors)
    return Best(**state["best"])
