"""From a model and text to a transcoder: the whole of its training.

1. check everything that can be checked before any work: model, text, lengths, settings, disk, output folder
2. measure the scale of MLP inputs and outputs on the first batches; start the features where the data is
3. per step: take the next numbered sequences, run the model up to its last MLP, and improve the transcoder on what went
   into the MLPs and came out of them. Activations live for one step; nothing is cached on disk
4. now and then: a checkpoint; FVU and replacement loss of the folded transcoder on held-out sequences
5. fold the scales into the weights, save in circuit-tracer's layout, write results.json
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..config import Text, Transcode
from ..data.batches import Batches
from ..models.architectures import base_model, blocks, dimensions
from ..models.identity import sketch
from ..models.loading import Source, check_source, resolve
from ..runs import distributed
from ..runs.rows import Measured, MetricsLine, TranscoderRow
from ..runs.run import Run, refuse_full_disk
from ..training import engine
from ..training.copies import left_as_it_was
from ..training.engine import Progress, Trainee
from ..training.measure import in_bf16
from ..training.sparsify import Data, batches_of, fitting, overridden, say_heldout, say_passes, source_name
from .evaluation import measure_fit, measure_replacement, tokens_of
from .losses import Learner, Losses
from .mlp_hooks import observe
from .place import FOLDER
from .transcoder import Transcoder

CALIBRATION = 1 << 14  # tokens from which BatchTopK's thresholds are measured
BETAS = (0.9, 0.99)


def transcode(
    model: Source, tokenizer: PreTrainedTokenizerBase | None = None, *, data: Data, out: str | Path,
    settings: Transcode | None = None, text: Text | None = None, name: str | None = None, resume: bool = False,
    show_progress: bool = True, say: Callable[[str], None] = print, **overrides: Any,
) -> Transcoder:  # fmt: skip
    """Train features that stand in for a model's MLPs; returns the transcoder and leaves a Run in `out`.

    model: dense or sparse; a model, (model, tokenizer), or a name, folder, Run or .gguf file. data: files, globs, a
    dataset name, or anything with `Batches`' methods. name: what to call the model in the record. overrides: fields of
    `Transcode` or `Text` by name.
    """
    settings, text = overridden(settings or Transcode(), text or Text(), overrides)
    distributed.micro_batch(settings.batch, None)  # refuses one that the processes cannot share
    distributed.start()
    say = distributed.quiet(say)
    distributed.on_main(lambda: Run.check(out, resume))
    check_source(model)
    name = name or source_name(model)
    model, tokenizer = resolve(model, tokenizer, say)
    d = dimensions(base_model(model).config)
    text = fitting(base_model(model).config, data, text, say)
    parameters = n_parameters(d.n_layers, d.d_model, settings)
    # Two checkpoints (weights and both Adam moments) and the result must fit.
    refuse_full_disk(Path(out), 4 * 7 * parameters, "learn fewer --features")
    batches = batches_of(data, tokenizer, text, settings, show_progress and distributed.is_main())
    if batches.n_heldout < 1:
        raise ValueError("there are no held-out sequences to measure on; give more data")
    asked = {"model": name, "data": batches.describe(), **dataclasses.asdict(settings)}
    run = Run.create(out, "transcode", asked, resume)
    say_heldout(batches, say)
    say_passes(batches, settings.steps * settings.batch, say)
    kind = f"{'cross-layer' if settings.cross_layer else 'per-layer'}, {settings.activation}"
    say(
        f"{parameters / 1e6:.1f}M parameters: {d.n_layers} layers x {settings.features} features, {kind}; "
        f"{settings.steps} steps of {settings.batch} x {batches.length} tokens; {distributed.in_words()}"
    )
    try:
        with left_as_it_was(model):
            if distributed.sharded():
                model.requires_grad_(False)
            distributed.place(model, distributed.device(), blocks(model)).eval()
            learner = Learner(d.n_layers, d.d_model, settings, name)
            distributed.place(learner, distributed.device())
            stage = TranscoderStage(run.path, model, batches, settings, learner, say, show_progress)
            engine.run(stage, resume)
            return finish(stage, run)
    finally:
        run.unlock()


def n_parameters(n_layers: int, d_model: int, settings: Transcode) -> int:
    """Weights of a transcoder: one encoder row and one decoder row per target for every feature, and the biases."""
    targets = n_layers * (n_layers + 1) // 2 if settings.cross_layer else n_layers
    return settings.features * (d_model * (n_layers + targets) + 2 * n_layers) + n_layers * d_model


@dataclass
class TranscoderProgress(Progress):
    tokens: int = 0
    seconds: float = 0.0  # of training, evaluation not included


@dataclass
class TranscoderStage(Trainee):
    """A model, its data, and the transcoder that learns from it."""

    folder: Path
    model: nn.Module
    batches: Batches
    settings: Transcode
    learner: Learner
    say: Callable[[str], None]
    show_progress: bool
    name: str = "transcode"
    progress: TranscoderProgress = field(default_factory=TranscoderProgress)

    def __post_init__(self) -> None:
        settings, device = self.settings, self.learner.silent.device
        self.device = device.type
        self.compute = torch.bfloat16 if in_bf16(settings.precision) else None  # of matrix products; None: as weights
        self.share = distributed.micro_batch(settings.batch, None)  # sequences per step of this process
        self.parameters = dict(self.learner.named_parameters())
        group = {"params": list(self.parameters.values()), "base_lr": settings.lr}
        self.optimizer = torch.optim.Adam([group], lr=settings.lr, betas=BETAS, fused=device.type == "cuda" or None)

    @cached_property
    def runner(self) -> nn.Module:
        """The learner, with DDP around it where there are several processes, which then start alike."""
        return distributed.trainable(self.learner)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.compute) if self.compute else nullcontext()

    def activations(self, start: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """(MLP inputs, MLP outputs) of training sequences `start` ..., per layer [tokens, d_model]."""
        batch = {name: value.to(self.device) for name, value in self.batches.train(start, count).items()}
        with self.autocast():
            inputs, outputs = observe(self.model, batch, self.settings.reads)
        return tokens_of(batch, inputs), tokens_of(batch, outputs)

    def begin(self) -> None:
        """Scales and first weights, from the first batches. Every process looks at all of them."""
        sequences = self.settings.normalise_over * self.settings.batch
        taken = [self.activations(i, self.share) for i in range(0, sequences, self.share)]
        inputs, outputs = ([torch.cat(layer) for layer in zip(*side, strict=True)] for side in zip(*taken, strict=True))
        if not all(one.isfinite().all() for one in [*inputs, *outputs]):
            raise ValueError("the model's activations are not finite on this data; there is nothing to learn from")
        self.learner.begin(inputs, outputs)

    def gradients(self) -> tuple[Tensor, int]:
        settings, step = self.settings, self.progress.step
        self.sparsity = settings.sparsity * min(1.0, (step + 1) / max(1.0, settings.sparsity_warmup * settings.steps))
        inputs, outputs = self.activations(self.progress.data + distributed.rank() * self.share, self.share)
        losses: Losses = self.runner(inputs, outputs, self.compute)
        loss = self.learner.loss(losses, self.sparsity)
        loss.backward()
        self.errors, self.l0, self.fired = losses.errors.detach(), losses.l0, losses.fired
        tokens = int(distributed.total(torch.tensor(len(inputs[0]))))
        self.progress.tokens += tokens
        return distributed.mean(loss.detach())[None], tokens

    def stepped(self, numbers: list[float], tokens: int, seconds: float) -> MetricsLine:
        self.progress.seconds += seconds
        self.learner.note_fired(self.fired, tokens)
        errors, l0 = (distributed.mean(one).tolist() for one in (self.errors, self.l0))
        return {
            "fvu": sum(errors) / len(errors), "fvu_per_layer": errors, "l0": sum(l0) / len(l0), "l0_per_layer": l0,
            "dead_share": self.dead_share, "sparsity": self.sparsity,
        }  # fmt: skip

    @property
    def dead_share(self) -> float:
        return self.learner.dead.float().mean().item()

    def evaluate(self) -> MetricsLine:
        if self.progress.step == self.settings.steps:  # the saved transcoder will be measured
            return {}
        found = self.measured(self.learner.folded())
        return cast(MetricsLine, {f"heldout_{key}": value for key, value in found.items()})

    def measured(self, transcoder: Transcoder) -> Measured:
        """FVU, L0 and replacement loss on held-out sequences."""
        count = min(self.settings.evaluate_sequences, self.batches.n_heldout)
        # The model runs in the training's precision, the transcoder in fp32: that is how it is saved and will be used.
        micro, autocast = min(self.settings.batch, count), self.autocast()
        what = self.model, transcoder, self.batches, count
        fit = measure_fit(*what, micro_batch=micro, autocast=autocast)
        return {**fit, **measure_replacement(*what, micro_batch=micro, autocast=autocast)}

    def describe(self, line: MetricsLine) -> str:
        text = f"FVU {line['fvu']:.4f} L0 {line['l0']:.1f} dead {line['dead_share']:.1%}"
        return text + f" {line['tokens_per_second']:,} tok/s"

    def tensors(self) -> dict[str, Tensor]:
        return self.learner.state_dict()


def finish(stage: TranscoderStage, run: Run) -> Transcoder:
    """Fold, convert BatchTopK, save, measure what was saved, write it down."""
    settings, progress = stage.settings, stage.progress
    transcoder = stage.learner.folded()
    if settings.activation == "batchtopk":
        count = max(1, min(settings.batch * settings.normalise_over, CALIBRATION // stage.batches.length))
        transcoder = transcoder.as_jumprelu([x.float() for x in stage.activations(0, count)[0]])
    transcoder.sketch = sketch(stage.model)
    distributed.on_main(lambda: transcoder.save(run.path / FOLDER))
    results: TranscoderRow = {
        **stage.measured(transcoder), "dead_share": stage.dead_share,
        "heldout_sequences": min(settings.evaluate_sequences, stage.batches.n_heldout),
        "parameters": n_parameters(transcoder.n_layers, transcoder.d_model, settings), "tokens": progress.tokens,
        "minutes": progress.seconds / 60, "tokens_per_second": progress.tokens / max(progress.seconds, 1e-9),
    }  # fmt: skip
    run.write("results.json", results)
    stage.say(fit_table(results))
    stage.say(f"transcoder: {run.path / FOLDER}   numbers: {run.path / 'results.json'}")
    return transcoder


def fit_table(results: TranscoderRow) -> str:
    """FVU and L0 by layer, and what the replacement costs, as text."""
    errors, loss = results["loss_standard_errors"], {}
    for which, error in errors.items():
        loss[which] = f"{results[f'{which}_loss']:.4f} ± " + ("?" if error is None else f"{error:.4f}")  # type: ignore[literal-required]
    lines = [f"{'layer':>5}{'FVU':>9}{'L0':>8}"]
    for layer, (fvu, l0) in enumerate(zip(results["fvu_per_layer"], results["l0_per_layer"], strict=True)):
        lines.append(f"{layer:5}{fvu:9.4f}{l0:8.2f}")
    lines.append(f"{'mean':>5}{results['fvu']:9.4f}{results['l0']:8.2f}   dead features: {results['dead_share']:.1%}")
    lines.append(
        f"loss: model {loss['model']}, MLPs replaced {loss['replacement']}, MLPs silent {loss['zero']} "
        f"({results['loss_recovered']:.1%} recovered; mean ± standard error, n = {results['heldout_sequences']} "
        "held-out sequences)"
    )
    return "\n".join(lines)
