"""One stage of training, from first step to last, whatever happens in between.

The same stage trains the sparse model (with a Constraint), its matched dense control and small models from scratch
(without). What engine.py, which runs it, asks for:
  gradients   of the next numbered sequences; the number is all that data order depends on. Loss and density, gates
              sampled or deterministic as the constraint says; the constraint makes one objective of the two
              (controllers.py), without gates it is the loss
  evaluate    deterministically on held-out text, and keep the state the constraint ranks best
Several processes share the sequences of a step. Loss and density are those of the whole step everywhere, gates are
drawn by a sequence's place in it, and so they follow one process with the same batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Training
from ..data.batches import Batches
from ..models.architectures import blocks
from ..runs import distributed
from ..runs.checkpoints import checkpoint_states, fill, load_checkpoint, save_checkpoint
from ..runs.rows import MetricsLine
from .compilation import faster
from .controllers import Budget, Constraint
from .copies import recompute
from .engine import Progress, Trainee, make_optimizer, run
from .head import head_to_leave_out, plain_head, stretched_loss
from .measure import forward, in_bf16, measure, out_of_memory, token_kl, token_losses

PARTING = 0.2  # nats between training and held-out loss, beyond where they started, that deserve a warning


@dataclass
class Best:
    """The state worth returning: the best by the constraint's rank (smaller is better)."""

    step: int = -1
    loss: float = math.inf
    open: float = math.inf  # in the unit of the budget
    met: bool = False
    rank: list[float] = field(default_factory=lambda: [math.inf])


@dataclass
class StageProgress(Progress):
    evaluations: int = 0
    first_gap: float | None = None  # held-out minus training loss at the first evaluation
    warned: bool = False  # that they part
    best: Best = field(default_factory=Best)

    def __post_init__(self) -> None:
        if isinstance(self.best, dict):  # out of a checkpoint
            self.best = Best(**self.best)


@dataclass
class Stage(Trainee):
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
    progress: StageProgress = field(default_factory=StageProgress)
    micro: int = 0  # sequences at once
    kept: dict[str, Tensor] | None = None  # the best state so far, until the next checkpoint writes it
    ahead: tuple[tuple[int, int], dict[str, Tensor]] | None = None  # sequences made before they were asked for
    taught: Tensor | None = None  # what the teacher's pass over them gave, head left out

    def __post_init__(self) -> None:
        self.runner = self.model

    def prepare(self) -> None:
        """Put the model where it computes, and make what trains it."""
        distributed.start()
        device, model, settings = distributed.device(), self.model, self.settings
        distributed.place(model, device, blocks(model)).train()
        if self.teacher is not None:
            distributed.place(self.teacher, device, blocks(self.teacher)).eval()
        if settings.gradient_checkpointing:
            recompute(model)
        for one in (model, self.teacher):
            if one is not None:
                plain_head(one)  # tried on two tokens: compiled blocks would take their number for one that varies
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.parameters, settings)
        self.runner = distributed.trainable(model)  # the model, with DDP around it where there are several processes
        self.micro = distributed.micro_batch(settings.batch, settings.micro_batch, self.batches.length)

    def autocast(self) -> AbstractContextManager[Any]:
        # Autocast's cache would hold a whole bf16 model in every process that has but its share of the weights.
        options = {"enabled": in_bf16(self.settings.precision), "cache_enabled": not distributed.sharded()}
        return torch.autocast(distributed.device(), torch.bfloat16, **options)

    def gradients(self) -> tuple[Tensor, int]:
        while (found := accumulate(self)) is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.micro = smaller(self)
        return found, self.settings.batch * self.batches.length

    def next_batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Training sequences first ... first + count - 1, where the model is."""
        where, batch = self.ahead or (None, {})
        self.ahead = None
        if where == (first, count):
            return batch
        self.taught = None  # of other sequences
        made = self.batches.train(first, count)
        return {name: value.to(distributed.device()) for name, value in made.items()}

    def meanwhile(self) -> None:
        """The next step's first sequences, and what the teacher says of them: neither depends on the step at hand."""
        # A CPU has nothing to do meanwhile; and there may be no sequences behind the last step's.
        if distributed.device() == "cpu" or self.progress.step + 1 >= self.settings.steps:
            return
        first = self.progress.data + self.settings.batch + distributed.rank() * self.micro
        made = self.batches.train(first, self.micro)
        batch = {name: _on_the_way(value) for name, value in made.items()}
        self.ahead = (first, self.micro), batch
        if self.teacher is not None and (head := plain_head(self.teacher)) is not None:
            with torch.no_grad(), self.autocast():
                self.taught = forward(self.teacher, batch, head=head).logits

    def stepped(self, numbers: list[float], tokens: int, seconds: float) -> MetricsLine:
        loss, found = numbers
        if self.constraint is None:
            return {}
        self.constraint.step(loss, found, (self.progress.step - 1) / self.settings.steps)
        line: MetricsLine = {"edges_per_query": found} if self.counts_per_query else {"density": found}
        return line | {"lambda": self.constraint.loss_weight}

    @property
    def counts_per_query(self) -> bool:
        """Whether what is open is counted per head and query, not as a share of the allowed pairs."""
        return isinstance(self.constraint, Budget) and self.constraint.per_query

    def evaluate(self) -> MetricsLine:
        """Measure on the next held-out slice, correct the constraint, keep the state if it is the best so far."""
        if not self.steering:
            return {}
        progress, constraint = self.progress, self.constraint
        count = min(self.settings.evaluate_sequences, self.steering)
        start = progress.evaluations % max(1, self.steering // count) * count
        progress.evaluations += 1
        with self.autocast():
            result = measure(self.model, self.batches, start, count, micro_batch=self.micro, base=self.teacher)
        by_text = steering_loss(self, result.losses, self.reference, start)
        loss, margin = by_text if result.kl is None else steering_loss(self, result.kl, None, start)
        line: MetricsLine = {
            "heldout_loss": loss, "heldout_density": result.density, "heldout_edges_per_query": result.edges_per_query
        }  # fmt: skip
        if result.kl is not None:
            line["heldout_cross_entropy"] = by_text[0]
        if result.edges is not None and result.pairs is not None:
            line["heldout_density_per_layer"] = (result.edges.mean(1) / result.pairs).tolist()
        if constraint is None:
            return line
        warn_if_parting(self, loss)
        constraint.correct(loss)
        density = result.edges_per_query if self.counts_per_query else result.density
        assert density is not None
        rank = constraint.rank(loss, margin, density)
        if rank < progress.best.rank:
            # A budget is judged by what text costs, whatever it was trained on; a constraint by what it constrains.
            judged = by_text if isinstance(constraint, Budget) else (loss, margin)
            progress.best = Best(progress.step, judged[0], density, constraint.met(*judged, density), rank)
            parts = distributed.own_part(self.parameters)
            self.kept = {name: p.detach().to("cpu", copy=True) for name, p in parts.items()}
        return line

    def describe(self, line: MetricsLine) -> str:
        text = f"{'loss' if self.teacher is None else 'KL'} {line['loss']:.4f}"
        if isinstance(self.constraint, Constraint):
            text += f" (target {self.constraint.target:.4f}) density {line['density']:.2%} λ {line['lambda']:.2g}"
        elif self.counts_per_query:
            text += f" {line['edges_per_query']:.2f} edges per query (budget {self.constraint.unit:.2f})"  # type: ignore
        elif self.constraint:
            text += f" density {line['density']:.2%} (budget {self.constraint.unit:.2%})"
        return text + f" {line['tokens_per_second']:,} tok/s"

    def state(self) -> dict[str, object]:
        return {"constraint": asdict(self.constraint)} if self.constraint else {}

    def put_back(self, state: dict[str, Any]) -> None:
        if self.constraint:
            for key, value in state.pop("constraint").items():
                setattr(self.constraint, key, value)

    def before_checkpoint(self) -> None:
        if self.kept is None:
            return
        # The one that an older checkpoint speaks of stays: a run resumed from there may yet return it.
        spoken_of = [found["best"]["step"] for found in checkpoint_states(self.folder / "checkpoints")]
        best = self.progress.best
        save_checkpoint(self.folder / "best", best.step, self.kept, {"best": vars(best)}, keep=1, also=spoken_of)
        self.kept = None


def _on_the_way(value: Tensor) -> Tensor:
    """On the GPU, or being copied there while it computes; somebody's sequences may be made there."""
    return value if value.is_cuda else value.pin_memory().to("cuda", non_blocking=True)


def train(stage: Stage, resume: bool = False) -> Best:
    """Train to the end, or raise Interrupted with a checkpoint written. Leaves the best state in the model (without
    constraint the last one); returns what is known of it."""
    stage.prepare()
    models = [stage.model] if stage.teacher is None else [stage.model, stage.teacher]
    with tracker(stage) as track, faster(models, stage.settings, distributed.device()):
        run(stage, resume, track)
    stage.model.eval()
    best = stage.progress.best
    found = load_checkpoint(stage.folder / "best", best.step) if stage.constraint else None
    if found is None:
        return best
    tensors, state, complaints = found
    for complaint in complaints:
        stage.say(complaint)
    fill(stage.parameters, tensors)
    return Best(**state["best"])


@contextmanager
def tracker(stage: Stage) -> Iterator[Callable[[MetricsLine], None] | None]:
    """What also sends a line of the metrics to the tracker that the settings name."""
    if stage.settings.tracker == "none":
        yield None
        return
    from accelerate import Accelerator

    on_cpu = distributed.world() > 1 and distributed.device() == "cpu"
    accelerator = Accelerator(log_with=stage.settings.tracker, project_dir=str(stage.folder), cpu=on_cpu)
    accelerator.init_trackers("sparselens", config={"stage": stage.name})
    try:
        yield lambda line: accelerator.log(line, step=line["step"])
    finally:
        for one in accelerator.trackers:  # its end_training() would end the group of processes as well
            one.finish()


def accumulate(stage: Stage) -> Tensor | None:
    """Gradients of one step, `micro` sequences at a time: [loss, density], or None where the memory was not enough.

    A sequence draws the same gates wherever the batch is cut. (Loss and density are means over the parts: with packed
    documents, of which each part has other ones, their size changes the density in its fourth digit.)
    Processes take turns: of two, one takes the first, third, ... micro-batch.
    """
    settings, progress, micro = stage.settings, stage.progress, stage.micro
    sample = stage.constraint is not None and stage.constraint.sampled(progress.step / settings.steps)
    total = torch.zeros(2, dtype=torch.float64, device=distributed.device())  # loss, density; read later
    round_size = micro * distributed.world()
    chunks = settings.batch // round_size
    seed = seed_of(settings.seed, progress.step)
    try:
        for first in range(distributed.rank() * micro, settings.batch, round_size):
            batch = stage.next_batch(progress.data + first, micro)
            with distributed.accumulating(stage.runner, more=first + round_size < settings.batch):
                with stage.autocast():
                    loss, density = loss_and_density(stage, batch, (seed, first), sample)
                objective = stage.constraint.objective(loss, density) if stage.constraint else loss
                (objective / chunks).backward()
            total += torch.stack([loss.detach().double(), density.detach().double()]) / chunks
    except (RuntimeError, MemoryError) as error:
        # One process of several cannot do its part again alone: the others wait for it in the middle of theirs.
        if not out_of_memory(error) or distributed.world() > 1:
            raise
        return None  # not from here: the traceback holds the tensors that were too many
    return distributed.mean(total)


def seed_of(seed: int, step: int) -> int:
    """Seed of the gates' noise for one step."""
    return (seed * 1_000_003 + step) * 1_009


def smaller(stage: Stage) -> int:
    """The next smaller micro-batch that divides the batch; the batch itself stays as it is."""
    step, micro, batch = stage.progress.step, stage.micro, stage.settings.batch
    if micro == 1:
        raise ValueError(
            f"step {step + 1}: not enough memory for a single sequence of {stage.batches.length} tokens. Lower "
            "--length, or try --gradient-checkpointing, --lora or --precision bf16; then start again."
        )
    torch.cuda.empty_cache()
    half = next(size for size in range(micro // 2, 0, -1) if batch % size == 0)
    stage.say(
        f"step {step + 1}: not enough memory for {micro} sequences at once; going on with {half} at a time, and still "
        f"{batch} per step (--micro-batch {half} would do so from the start)"
    )
    return half


def loss_and_density(
    stage: Stage, batch: dict[str, Tensor], seed: tuple[int, int], sample: bool = True
) -> tuple[Tensor, Tensor]:
    """Mean loss per token and density (or edges per head and query) of one micro-batch, both differentiable.

    With sampled gates the density is the expected one; otherwise it is what is open, with the same gradient. Several
    processes divide by the mean of their tokens and pairs, so that the mean of their results is that of all together.
    """
    labels = batch["labels"]
    head = head_to_leave_out(stage.model, labels.numel(), always=labels.is_cuda)
    base_head = None
    if head is not None and stage.teacher is not None:  # the loss takes both in the same stretches
        base_head = plain_head(stage.teacher)
        head = None if base_head is None else head
    output = forward(stage.runner, batch, head=head, sample=sample, seed=seed)
    reference, stage.taught = stage.taught, None
    if head is None or base_head is None:
        reference = None
    if reference is None and stage.teacher is not None:
        with torch.no_grad():
            reference = forward(stage.teacher, batch, head=base_head).logits
    if head is not None:
        base = None if reference is None or base_head is None else (reference, base_head)
        loss = stretched_loss(output.logits, head, labels, base)
    elif reference is None:
        loss = token_losses(output.logits, labels).sum()
    else:
        loss = token_kl(reference, output.logits, labels).sum()
    loss = loss / distributed.mean((labels != -100).sum())
    if output.counts is None:
        return loss, torch.zeros((), device=loss.device)
    edges, pairs = output.counts.unbind(-1)  # [n_layers, batch, n_heads]
    if stage.counts_per_query:
        return loss, edges.sum() / (edges.numel() * labels.shape[1])
    return loss, edges.sum() / distributed.mean(pairs.sum())


def warn_if_parting(stage: Stage, heldout: float) -> None:
    """Say it once when held-out loss rises away from training loss: the run is learning its text by heart."""
    assert stage.constraint is not None and stage.constraint.average is not None
    progress = stage.progress
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


def steering_loss(stage: Stage, values: Tensor, reference: Tensor | None, start: int) -> tuple[float, float]:
    """The mean of a slice's cross-entropies (or KL) as if measured on all steering sequences, and its standard error.

    A slice may be easier or harder text than the rest. The base's own loss on the same sequences takes that out.
    """
    level = 0.0 if reference is None else reference.mean().item()
    difference = values if reference is None else values - reference[start : start + len(values)]
    whole = len(values) == stage.steering
    error = 0.0 if whole or len(values) < 2 else (difference.std() / len(values) ** 0.5).item()
    return level + difference.mean().item(), error
