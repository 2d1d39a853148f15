"""From a model and text to a transcoder: the whole of its training.

1. check everything that can be checked before any work: model, text, lengths, settings, disk, output folder
2. measure the scale of MLP inputs and outputs on the first batches; start the features where the data is
3. per step: take the next numbered sequences, run the model up to its last MLP, and improve the transcoder on what went
   into the MLPs and came out of them. Activations live for one step; nothing is cached on disk
4. now and then: a checkpoint; FVU and replacement loss of the folded transcoder on held-out sequences
5. fold the scales into the weights, save in circuit-tracer's layout, write results.json
"""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Text, Transcode
from ..data.batches import Batches, TextBatches, refuse_overlap
from ..models.architectures import architecture, base_model, blocks, dimensions
from ..models.loading import load
from ..runs import distributed
from ..runs.checkpoints import fill, fill_optimizer, load_checkpoint, save_checkpoint
from ..runs.run import Metrics, Run
from ..training.loop import MAX_BAD_STEPS, Interrupted, precision_of
from ..training.optimizers import learning_rate
from .evaluation import measure_fit, measure_replacement, tokens_of
from .files import FOLDER
from .losses import Learner, Losses
from .mlp_hooks import observe
from .transcoder import Transcoder

CALIBRATION = 1 << 14  # tokens from which BatchTopK's thresholds are measured
BETAS = (0.9, 0.99)


def transcode(
    model: "str | Path | nn.Module",
    tokenizer: Any = None,
    *,
    data: "str | list[str] | Batches",
    out: str | Path,
    settings: Transcode | None = None,
    text: Text | None = None,
    name: str | None = None,
    resume: bool = False,
    show_progress: bool = True,
    say: Callable[[str], None] = print,
    **overrides: Any,
) -> Transcoder:
    """Train features that stand in for a model's MLPs; returns the transcoder and leaves a Run in `out`.

    model: a model, dense or sparse, or a name, folder, Run or .gguf file. data: files, globs, a dataset name, or
    anything with `Batches`' methods. name: what to call the model in the record. overrides: fields of `Transcode` or
    `Text` by name.
    """
    settings, text = _settings(settings or Transcode(), text or Text(), overrides)
    share = distributed.micro_batch(settings.batch, None)
    distributed.start()
    say, show_progress = distributed.quiet(say), show_progress and distributed.is_main()
    distributed.on_main(lambda: Run.check(out, resume))
    if isinstance(model, str | Path):
        name = name or str(model)
        model, tokenizer = load(model)
    architecture(base_model(model).config)
    longest = dimensions(base_model(model).config).max_tokens
    length = text.length if isinstance(data, str | list) else data.length
    if length > longest:
        raise ValueError(f"sequences of {length} tokens are longer than the {longest} this model allows (--length)")
    if isinstance(data, str | list) and tokenizer is None:
        raise ValueError("text needs a tokenizer; give the model's own, or the model by name")
    _refuse_full_disk(Path(out), model, settings)
    batches = (
        data
        if not isinstance(data, str | list)
        else distributed.main_first(lambda: _text_batches(data, tokenizer, settings, text, show_progress))
    )
    if batches.n_heldout < 1:
        raise ValueError("there are no held-out sequences to measure on; give more data")
    asked = {"model": name or "", "data": batches.describe(), **dataclasses.asdict(settings)}
    run = Run.create(out, "transcode", asked, resume)
    try:
        return _transcode_into(run, model, batches, settings, name or "", resume, show_progress, say, share)
    finally:
        run.unlock()


def _settings(settings: Transcode, text: Text, overrides: dict[str, Any]) -> tuple[Transcode, Text]:
    for name, value in overrides.items():
        if name in {field.name for field in dataclasses.fields(settings)}:
            settings = dataclasses.replace(settings, **{name: value})
        elif name in {field.name for field in dataclasses.fields(text)}:
            text = dataclasses.replace(text, **{name: value})
        else:
            raise ValueError(f"unknown setting {name!r}; see sparselens transcode --help for all of them")
    return settings, text


def _text_batches(data: str | list[str], tokenizer, settings: Transcode, text: Text, show: bool) -> TextBatches:
    patterns = [data] if isinstance(data, str) else list(data)
    refuse_overlap(patterns, list(text.heldout))
    return TextBatches(
        patterns, tokenizer, text.length, cache=text.cache,
        need=settings.steps * settings.batch * text.length, heldout_patterns=list(text.heldout),
        heldout_tokens=text.heldout_tokens, field=text.text_field, seed=settings.seed,
        progress=show,
    )  # fmt: skip


def n_parameters(n_layers: int, d_model: int, settings: Transcode) -> int:
    """Weights of a transcoder: one encoder row and one decoder row per target for every feature, and the biases."""
    targets = n_layers * (n_layers + 1) // 2 if settings.cross_layer else n_layers
    return settings.features * (d_model * (n_layers + targets) + 2 * n_layers) + n_layers * d_model


def _refuse_full_disk(out: Path, model: nn.Module, settings: Transcode) -> None:
    """Two checkpoints (weights and both Adam moments) and the result must fit."""
    d = dimensions(base_model(model).config)
    need = 4 * n_parameters(d.n_layers, d.d_model, settings) * 7
    place = next(path for path in [out.absolute(), *out.absolute().parents] if path.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise ValueError(f"{place} has {free / 1e9:.1f} GB free; this run may need {need / 1e9:.1f} GB")


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Everything about the run that is not a tensor. Goes into checkpoints as JSON."""

    step: int = 0
    data: int = 0  # sequences taken so far
    tokens: int = 0
    seconds: float = 0.0  # of training, evaluation not included
    bad_steps: int = 0  # discarded updates in a row


@dataclass
class Stage:
    """A model, its data, and the transcoder that learns from it."""

    run: Run
    model: nn.Module
    batches: Batches
    settings: Transcode
    learner: Learner
    optimizer: torch.optim.Adam
    compute: torch.dtype | None  # of matrix products; None: as the weights are
    say: Callable[[str], None]
    share: int  # sequences per step of this process
    runner: nn.Module | None = None  # the learner, with DDP around it where there are several processes

    @property
    def device(self) -> torch.device:
        return self.learner.silent.device

    def autocast(self):
        return torch.autocast(self.device.type, self.compute) if self.compute else nullcontext()

    def activations(self, start: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """(MLP inputs, MLP outputs) of training sequences `start` ..., per layer [tokens, d_model]."""
        batch = {name: value.to(self.device) for name, value in self.batches.train(start, count).items()}
        with self.autocast():
            inputs, outputs = observe(self.model, batch, self.settings.reads)
        return tokens_of(batch, inputs), tokens_of(batch, outputs)


def _transcode_into(
    run: Run, model: nn.Module, batches: Batches, settings: Transcode, name: str, resume: bool, show: bool, say, share
) -> Transcoder:
    from tqdm import tqdm

    device = distributed.device()
    was_training = model.training
    distributed.place(model.requires_grad_(False) if distributed.sharded() else model, device, blocks(model)).eval()
    d = dimensions(base_model(model).config)
    learner = Learner(d.n_layers, d.d_model, settings, name)
    distributed.place(learner, device)
    optimizer = torch.optim.Adam(learner.parameters(), lr=settings.lr, betas=BETAS, fused=device == "cuda" or None)
    compute = torch.bfloat16 if precision_of(settings.precision) == "bf16" else None
    stage = Stage(run, model, batches, settings, learner, optimizer, compute, say, share)
    kind = f"{'cross-layer' if settings.cross_layer else 'per-layer'}, {settings.activation}"
    say(
        f"{n_parameters(d.n_layers, d.d_model, settings) / 1e6:.1f}M parameters: {d.n_layers} layers x "
        f"{settings.features} features, {kind}; "
        f"{settings.steps} steps of {settings.batch} x {batches.length} tokens"
    )
    progress = (restore(stage) if resume else None) or begin(stage)
    stage.runner = distributed.trainable(learner)
    metrics = Metrics(run.path, after_step=progress.step if resume else None)
    bar = tqdm(total=settings.steps, initial=progress.step, desc="transcode", unit="step", disable=not show)
    with bar, distributed.interruptible() as interrupted:
        while progress.step < settings.steps:
            line = train_step(stage, progress)
            last = progress.step == settings.steps
            if line is not None:
                if progress.step % settings.evaluate_every == 0 and not last:
                    line |= {f"heldout_{key}": value for key, value in evaluate(stage, learner.folded()).items()}
                metrics.log(**line)
                bar.set_postfix_str(describe(line), refresh=False)
            bar.update()
            stopping = distributed.any_of(interrupted())
            if progress.step % settings.checkpoint_every == 0 or last or stopping:
                checkpoint(stage, progress)
            if stopping and not last:
                bar.close()
                metrics.close()
                raise Interrupted(f"stopped after step {progress.step} of {settings.steps}; continue with --resume")
    bar.close()
    metrics.close()
    transcoder = finish(stage, progress)
    model.train(was_training)
    return transcoder


def begin(stage: Stage) -> Progress:
    """Scales and first weights, from the first batches."""
    settings = stage.settings
    # Every process looks at all of them: they start alike.
    taken = [stage.activations(i, stage.share) for i in range(0, settings.normalise_over * settings.batch, stage.share)]
    inputs, outputs = ([torch.cat(layer) for layer in zip(*side, strict=True)] for side in zip(*taken, strict=True))
    if not all(one.isfinite().all() for one in [*inputs, *outputs]):
        raise ValueError("the model's activations are not finite on this data; there is nothing to learn from")
    stage.learner.begin(inputs, outputs)
    progress = Progress()
    checkpoint(stage, progress)
    return progress


def train_step(stage: Stage, progress: Progress) -> dict[str, Any] | None:
    """One step; returns its line for metrics.jsonl, or None when the update had to be discarded."""
    settings, learner = stage.settings, stage.learner
    began = time.perf_counter()
    step = progress.step
    for group in stage.optimizer.param_groups:
        group["lr"] = settings.lr * learning_rate(step, settings)  # type: ignore[arg-type]
    sparsity = settings.sparsity * min(1.0, (step + 1) / max(1.0, settings.sparsity_warmup * settings.steps))
    inputs, outputs = stage.activations(progress.data + distributed.rank() * stage.share, stage.share)
    losses: Losses = (stage.runner or learner)(inputs, outputs, stage.compute)
    loss = learner.loss(losses, sparsity)
    stage.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = float(distributed.whole(nn.utils.clip_grad_norm_(learner.parameters(), settings.clip)))
    total_loss = distributed.mean(loss).item()
    n = int(distributed.total(torch.tensor(len(inputs[0]))))
    progress.step += 1
    progress.data += settings.batch
    progress.tokens += n
    if not (math.isfinite(norm) and math.isfinite(total_loss)):
        discard(stage, progress, total_loss, norm)
        return None
    progress.bad_steps = 0
    stage.optimizer.step()
    learner.note_fired(losses, n)
    seconds = time.perf_counter() - began
    progress.seconds += seconds
    errors, l0 = distributed.mean(losses.errors).tolist(), distributed.mean(losses.l0).tolist()
    return {
        "step": progress.step, "loss": total_loss, "fvu": sum(errors) / len(errors), "fvu_per_layer": errors,
        "l0": sum(l0) / len(l0), "l0_per_layer": l0, "dead_share": learner.dead.float().mean().item(),
        "sparsity": sparsity, "grad_norm": norm, "tokens_per_second": round(n / seconds),
    }  # fmt: skip


def discard(stage: Stage, progress: Progress, loss: float, norm: float) -> None:
    """Answer a NaN: drop the update; stop at the third in a row."""
    progress.bad_steps += 1
    stage.say(f"step {progress.step}: loss {loss}, gradient norm {norm}; the update was discarded")
    if progress.bad_steps >= MAX_BAD_STEPS:
        raise ValueError(
            f"{MAX_BAD_STEPS} steps in a row were not finite (last: step {progress.step}). The last good state is in "
            f"{stage.run.path / 'checkpoints'}. Lower --lr, or use --precision fp32."
        )


def evaluate(stage: Stage, transcoder: Transcoder) -> dict[str, Any]:
    """FVU, L0 and replacement loss on held-out sequences."""
    count = min(stage.settings.evaluate_sequences, stage.batches.n_heldout)
    # The model runs in the training's precision, the transcoder in fp32: that is how it is saved and will be used.
    options: dict[str, Any] = {"micro_batch": min(stage.settings.batch, count), "autocast": stage.autocast()}
    fit = measure_fit(stage.model, transcoder, stage.batches, count, **options)
    return fit.row() | measure_replacement(stage.model, transcoder, stage.batches, count, **options)


def finish(stage: Stage, progress: Progress) -> Transcoder:
    """Fold, convert BatchTopK, save, measure what was saved, write it down."""
    settings, run = stage.settings, stage.run
    transcoder = stage.learner.folded()
    if settings.activation == "batchtopk":
        count = max(1, min(settings.batch * settings.normalise_over, CALIBRATION // stage.batches.length))
        transcoder = transcoder.as_jumprelu([x.float() for x in stage.activations(0, count)[0]])
    distributed.on_main(lambda: transcoder.save(run.path / FOLDER))
    results = evaluate(stage, transcoder) | {
        "dead_share": stage.learner.dead.float().mean().item(),
        "heldout_sequences": min(settings.evaluate_sequences, stage.batches.n_heldout),
        "parameters": n_parameters(transcoder.n_layers, transcoder.d_model, settings),
        "tokens": progress.tokens,
        "minutes": progress.seconds / 60,
        "tokens_per_second": progress.tokens / max(progress.seconds, 1e-9),
    }
    run.write("results.json", results)
    stage.say(table(results))
    stage.say(f"transcoder: {run.path / FOLDER}   numbers: {run.path / 'results.json'}")
    return transcoder


def describe(line: dict[str, Any]) -> str:
    """What the progress bar says."""
    return (
        f"FVU {line['fvu']:.4f} L0 {line['l0']:.1f} dead {line['dead_share']:.1%} {line['tokens_per_second']:,} tok/s"
    )


def table(results: dict[str, Any]) -> str:
    """FVU and L0 by layer, and what the replacement costs, as text."""
    lines = [f"{'layer':>5}{'FVU':>9}{'L0':>8}"]
    for layer, (fvu, l0) in enumerate(zip(results["fvu_per_layer"], results["l0_per_layer"], strict=True)):
        lines.append(f"{layer:5}{fvu:9.4f}{l0:8.2f}")
    lines.append(f"{'mean':>5}{results['fvu']:9.4f}{results['l0']:8.2f}   dead features: {results['dead_share']:.1%}")
    lines.append(
        f"loss: model {results['model_loss']:.4f}, MLPs replaced {results['replacement_loss']:.4f}, MLPs silent "
        f"{results['zero_loss']:.4f} ({results['loss_recovered']:.1%} recovered, n = {results['heldout_sequences']} "
        "held-out sequences)"
    )
    return "\n".join(lines)


# ---- saving and restoring --------------------------------------------------------------------------------------------


def checkpoint(stage: Stage, progress: Progress) -> None:
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in stage.learner.state_dict().items()}
    for name, parameter in stage.learner.named_parameters():
        tensors |= {f"adam.{name}.{key}": value for key, value in stage.optimizer.state.get(parameter, {}).items()}
    save_checkpoint(stage.run.path / "checkpoints", progress.step, distributed.own_part(tensors), vars(progress))


def restore(stage: Stage) -> Progress | None:
    """Put the newest whole checkpoint back into transcoder and optimiser."""
    found = load_checkpoint(stage.run.path / "checkpoints")
    if found is None:
        return None
    tensors, state, complaints = found
    for complaint in complaints:
        stage.say(complaint)
    try:
        fill(stage.learner.state_dict(), tensors, "model.")
    except RuntimeError:
        raise ValueError("the checkpoint belongs to another transcoder; choose another --out") from None
    fill_optimizer(stage.optimizer, dict(stage.learner.named_parameters()), tensors)
    return Progress(**state)
