"""From a pretrained model to a sparse one, with its dense control: the whole of sparse post-training.

1. check everything that can be checked before any work: model, text, lengths, disk, output folder
2. measure the base on held-out sequences; the first quarter may steer the training, the rest is for the report
3. train the matched dense control (if asked for), then the sparse model under the loss constraint
4. evaluate base, control and sparse side by side on the held-out sequences that steered nothing
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..config import Sparsify, Text, Training, Transcode, unknown_setting
from ..data.batches import Batches, TextBatches, refuse_overlap
from ..models.architectures import architecture, base_model, blocks, dimensions
from ..models.loading import Source, check_source, is_gated, load, name_of, resolve, save
from ..runs import distributed
from ..runs.rows import Cost, EvaluationRow, Summary, SummaryRow, budget_in_words, open_in_words
from ..runs.run import Metrics, Run, refuse_full_disk
from .controllers import Budget, Constraint
from .copies import count_parameters, dense_copy, gated_copy, left_as_it_was, start_within_reach
from .loop import Best, Stage, train
from .measure import in_bf16, measure

Data = (
    str | Path | Sequence[str | Path] | Batches
)  # files and globs, a dataset name, or anything with `Batches`' methods
Settings = TypeVar("Settings", Sparsify, Transcode)
HARM = 0.02  # nats that a control may be above its base without a word
MANY_PASSES = 3  # over the same text; KL on it and on held-out text then begin to part (docs/LOG.md)
STEERING_SHARE = 4  # one held-out sequence in this many may steer


def sparsify(
    model: Source, data: Data, out: str | Path, *, settings: Sparsify | None = None, text: Text | None = None,
    resume: bool = False, show_progress: bool = True, say: Callable[[str], None] = print, **overrides: Any,
) -> Run:  # fmt: skip
    """Make the attention of a model sparse without losing what it can do; returns the Run.

    model: hub name, folder, Run, .gguf file, or (model, tokenizer). data: files, globs, a dataset name, or anything
    with `Batches`' methods.
    overrides: fields of `Sparsify`, `Training` or `Text` by name, e.g. steps=500, length=256, control=True.
    """
    settings, text = overridden(settings or Sparsify(), text or Text(), overrides)
    distributed.micro_batch(settings.training.batch, settings.training.micro_batch, text.length)
    distributed.start()
    say = distributed.quiet(say)
    distributed.on_main(lambda: Run.check(out, resume))
    check_source(model)
    name = source_name(model)
    base, tokenizer = resolve(model, say=say)
    if is_gated(base):
        raise ValueError(f"{name} is already sparse; start from a dense model")
    config = base_model(base).config
    text = fitting(config, data, text, say)
    need = disk(*count_parameters(config, settings), settings)
    refuse_full_disk(Path(out), sum(need.values()), "train adapters (--lora)")
    batches = batches_of(data, tokenizer, text, settings.training, show_progress)
    asked = {"model": name, "data": batches.describe(), **dataclasses.asdict(settings)}
    if isinstance(data, str | Path | Sequence):
        patterns = patterns_of(data)
        asked["text"] = dataclasses.asdict(text) | {"patterns": patterns, "cache": str(text.cache.absolute())}
    run = Run.create(out, "sparsify", asked, resume)
    say(_announcement(name, base, batches, settings))
    say_heldout(batches, say)
    say_passes(batches, settings.training.steps * settings.training.batch, say)
    try:
        with left_as_it_was(base):
            sparsify_into(run, base, tokenizer, batches, settings, resume=resume, show_progress=show_progress, say=say)
    finally:
        run.unlock()
    return run


def _announcement(name: str, model: nn.Module, batches: Batches, settings: Sparsify) -> str:
    """What is about to happen, in two lines."""
    size, training = dimensions(model.config), settings.training
    tokens = training.steps * training.batch * batches.length
    parameters = sum(p.numel() for p in model.parameters())
    stages = "the sparse model" if settings.control else "the sparse model (without --control)"
    if settings.trains_control:
        stages = "the dense control, then the sparse model"
    return (
        f"{name}: {parameters / 1e6:.1f}M parameters, {size.n_layers} layers x {size.n_heads} heads\n"
        f"training {stages}: {training.steps} steps of {training.batch} x {batches.length} tokens "
        f"({tokens / 1e6:.1f}M); {batches.n_heldout} held-out sequences, {steering_count(batches)} to steer by and "
        f"{report_slice(batches)[1]} to report on; {distributed.in_words()}"
    )


def say_heldout(batches: Batches, say: Callable[[str], None]) -> None:
    """Where less text is held out than was asked for, that and why."""
    if isinstance(batches, TextBatches) and (note := batches.heldout_note()):
        say(note)


def say_passes(batches: Batches, sequences: int, say: Callable[[str], None]) -> None:
    """Where the text is read often enough to be learnt by heart, how often."""
    if isinstance(batches, TextBatches) and (passes := sequences / batches.n_train) > MANY_PASSES:
        tokens = batches.n_train * batches.length
        say(
            f"the text has {tokens:,} tokens to train on: each is read {passes:,.1f} times. From the third time on "
            "held-out text gains less and less; more text is worth more than more steps"
        )


def sparsify_into(
    run: Run, base: nn.Module, tokenizer: PreTrainedTokenizerBase | None, batches: Batches, settings: Sparsify, *,
    resume: bool = False, show_progress: bool = True, say: Callable[[str], None] = print,
) -> nn.Module:  # fmt: skip
    """Steps 2 to 4 inside an open Run; returns the sparse model. What a finished stage left there is used again."""
    training = settings.training
    device = distributed.device()
    source = base.requires_grad_(False)  # of all copies: with FSDP2 it stays whole, on the CPU
    base = copy.deepcopy(source) if distributed.sharded() else source
    distributed.place(base, device, blocks(base))
    steering = steering_count(batches)
    micro = distributed.micro_batch(training.batch, training.micro_batch, batches.length)
    autocast = torch.autocast(device, torch.bfloat16, enabled=in_bf16(training.precision))
    with autocast:
        reference = measure(base, batches, 0, steering, micro_batch=micro, progress=show_progress * "base").losses
    report_from, report_count = report_slice(batches)
    kl = settings.loss == "kl"
    stage = functools.partial(
        Stage, batches=batches, settings=training, steering=steering, reference=reference, say=say,
        show_progress=show_progress, teacher=base if kl else None,
    )  # fmt: skip

    def result(model: nn.Module, name: object, kind: str) -> EvaluationRow:
        bar = show_progress * f"{kind}, measured"
        with autocast:
            found = measure(model, batches, report_from, report_count, micro_batch=micro, base=base, progress=bar)
        return found.row(str(name), kind)

    rows = [result(base, run.record["config"]["model"], "base")]
    control_loss = None
    if settings.control:
        folder = run.path / "control" / "model"
        control = _control(run, source, tokenizer, stage, settings, resume, say)
        if settings.trains_control:
            rows.append(result(control, folder, "control"))
            with autocast:
                control_loss = measure(control, batches, 0, steering, micro_batch=micro).loss
        else:  # it is the base
            rows.append({**rows[0], "name": str(folder), "kind": "control"})
            control_loss = reference.mean().item()
        del control

    target = _target(settings, reference.mean().item(), control_loss)
    sparse = gated_copy(source, settings)
    lowered = start_within_reach(sparse, batches.train(0, max(1, 256 // batches.length))["input_ids"])
    if lowered:
        say(f"{lowered} heads whose attention logits are nearly all positive start with a lower gate bias")
    constraint = _constraint(settings, target)
    within = budget_in_words(dataclasses.asdict(settings))
    budget = f"least loss with at most {within}" if within else "fewest edges"
    trained = "KL to base" if kl else "cross-entropy"
    measured = f"on {steering} held-out sequences"
    say(f"{budget}, trained on {trained}; target: {_target_of(settings)} at most {target:.4f} nats {measured}")
    best = train(stage("sparse", sparse, folder=run.path, constraint=constraint), resume)
    plain = distributed.collect(sparse, into=gated_copy(source, settings)) if distributed.sharded() else sparse
    distributed.on_main(lambda: save(plain, tokenizer, run.path / "model"))
    rows.append(result(sparse, run.path / "model", "sparse"))
    if distributed.is_main():
        run.write("evaluation.json", rows)
        summary: Summary = {
            "target": target, "target_of": _target_of(settings), "met": best.met, "best_step": best.step,
            "report_sequences": report_count, "base": _summary_row(rows[0]), "sparse": _summary_row(rows[-1]),
        }  # fmt: skip
        if settings.control:
            summary["control"] = _summary_row(rows[1])
        run.write("summary.json", {**summary, **_cost(run, training.steps * training.batch * batches.length)})
    _tell(best, target, settings, rows, steering, say)
    say(f"sparse model: {run.path / 'model'}   table: {run.path / 'evaluation.json'}")
    return plain


def disk(parameters: float, trained: float, settings: Sparsify) -> dict[str, float]:
    """Bytes a run of `sparsify` writes, at the moment when most of it is there."""
    checkpoint = 4 * 3 * trained  # weights and both moments
    model = 4 * (trained if settings.training.lora else parameters)
    # Two checkpoints are kept while the next is written, and for each the state that was best then. The model comes
    # when there are two again, and is smaller.
    found = {"checkpoints": 3 * checkpoint, "best states": 3 * 4 * trained}
    if settings.control:
        found["control"] = 2 * checkpoint * settings.trains_control + model
    return found


def steering_count(batches: Batches) -> int:
    """How many held-out sequences, from the first, may steer the training."""
    return max(1, batches.n_heldout // STEERING_SHARE)


def report_slice(batches: Batches) -> tuple[int, int]:
    """(first, count) of the held-out sequences that steered nothing; a single one has to do both."""
    steering = steering_count(batches)
    return (steering, batches.n_heldout - steering) if batches.n_heldout > steering else (0, batches.n_heldout)


def _control(
    run: Run, base: nn.Module, tokenizer: PreTrainedTokenizerBase | None, stage: Callable[..., Stage],
    settings: Sparsify, resume: bool, say: Callable[[str], None],
) -> nn.Module:  # fmt: skip
    """The same training without gates. A finished one is not trained again, one with nothing to learn not at all."""
    folder = run.path / "control"
    if not settings.trains_control and not (folder / "model").is_dir():
        say("control: taught by the base, a model without gates has nothing to learn; it is the base, not trained")
        distributed.on_main(lambda: save(base, tokenizer, folder / "model"))
    if (folder / "model").is_dir():
        model: nn.Module = load(folder / "model")[0]
        return distributed.place(model, distributed.device(), blocks(model))
    training = settings.training
    model = dense_copy(base, training)
    train(stage("control", model, folder=folder), resume and folder.is_dir())
    plain = distributed.collect(model, into=dense_copy(base, training)) if distributed.sharded() else model
    distributed.on_main(lambda: save(plain, tokenizer, folder / "model"))
    return model


def _target(settings: Sparsify, base_loss: float, control_loss: float | None) -> float:
    if settings.target not in ("base", "control"):
        return float(settings.target) + settings.tolerance
    if _target_of(settings) == "KL to base":
        return settings.tolerance  # the base's distance from itself is zero
    return (base_loss if settings.target == "base" else control_loss) + settings.tolerance  # type: ignore[operator]


def _target_of(settings: Sparsify) -> Literal["KL to base", "held-out loss"]:
    """What the target speaks of: a budget is judged by what text costs, whatever it is trained on."""
    return "KL to base" if settings.loss == "kl" and settings.budget is None else "held-out loss"


def _constraint(settings: Sparsify, target: float) -> Budget | Constraint:
    """What steers the run: a budget of edges where one is given, else the loss alone."""
    if settings.budget is not None:
        return Budget(target, settings.budget, settings.edges is not None, settings.closing)
    return Constraint(target, settings.tolerance, settings.slack, settings.slack_until)


def _cost(run: Run, tokens: int) -> Cost:
    """Tokens the sparse model was trained on, minutes of that, tokens per second; peak GPU memory of this process."""
    rates = sorted(line["tokens_per_second"] for line in Metrics.read(run.path)) or [0]
    peak = torch.cuda.max_memory_allocated() / 2**30 if distributed.device() == "cuda" else None
    minutes = sum(tokens / len(rates) / max(1, rate) for rate in rates) / 60
    return {"tokens": tokens, "minutes": minutes, "tokens_per_second": rates[len(rates) // 2], "peak_gib": peak}


def _summary_row(row: EvaluationRow) -> SummaryRow:
    kl, per_query = row["kl_to_base"], row["edges_per_query"]
    return {"loss": row["loss"], "kl_to_base": kl, "density": row["density"], "edges_per_query": per_query}


def _tell(
    best: Best, target: float, settings: Sparsify, rows: list[EvaluationRow], steering: int, say: Callable[[str], None]
) -> None:
    if not best.met:
        config = dataclasses.asdict(settings)
        over = settings.budget is not None and best.open > settings.budget
        missed = f"budget of {budget_in_words(config)}" if over else f"target {target:.4f}"
        more_edges = "--density" if settings.edges is None else "--edges"
        advice = "loosen the start (--slack)" if settings.budget is None else f"keep more edges ({more_edges})"
        more = "Close faster (--bias-lr)" if over else "Allow more (--tolerance)"
        kept = open_in_words({**_summary_row(rows[-1]), "density": best.open, "edges_per_query": best.open}, config)
        say(
            f"The {missed} was not reached: the best state (step {best.step}) has {_target_of(settings)} "
            f"{best.loss:.4f} (n = {steering} steering sequences) with {kept}; it was kept. {more}, "
            f"train longer (--steps), or {advice}."
        )
    say(loss_table(rows))
    if note := control_note(rows):
        say(note)


def control_note(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Where the control ended worse than the base by more than chance: that, and what it means."""
    base, control = (next((row for row in rows if row["kind"] == kind), None) for kind in ("base", "control"))
    if base is None or control is None:
        return None
    above = control["loss"] - base["loss"]
    error = math.hypot(*(row["loss_standard_error"] or 0.0 for row in (base, control)))
    if above <= max(2 * error, HARM):
        return None
    return (
        f"The control is {above:.2f} nats above the base: this training harms the model without any gate. "
        "Lower --lr, train for fewer steps, or give text more like what the base has learnt."
    )


def loss_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Base, control and sparse side by side, as text."""
    lines = [f"{'':10}{'loss':>18}{'KL to base':>12}{'density':>10}{'edges/query':>13}"]
    for row in rows:
        kl = "" if row["kl_to_base"] is None else f"{row['kl_to_base']:.4f}"
        per_query = "" if row["edges_per_query"] is None else f"{row['edges_per_query']:.3f}"
        lines.append(f"{row['kind']:10}{with_error(row):>18}{kl:>12}{row['density']:10.3%}{per_query:>13}")
    counts = sorted({row["sequences"] for row in rows})
    n = " to ".join(f"{count:,}" for count in (counts if len(counts) == 1 else (counts[0], counts[-1])))
    lines.append(f"loss: mean cross-entropy in nats ± its standard error, n = {n} held-out sequences")
    return "\n".join(lines)


def with_error(row: Mapping[str, Any], digits: int = 4) -> str:
    """A row's loss as text, with its standard error; one sequence has none."""
    error = row.get("loss_standard_error")
    return f"{row['loss']:.{digits}f} ± " + ("?" if error is None else f"{error:.{digits}f}")


def overridden(settings: Settings, text: Text, changes: Mapping[str, object]) -> tuple[Settings, Text]:
    """Both with every change in the field of that name, wherever it is: steps=500 is one of `Sparsify.training`."""
    left = dict(changes)
    settings, text = _replaced(settings, left), _replaced(text, left)
    if left:
        raise ValueError(unknown_setting(next(iter(left)), [*_names(settings), *_names(text)]))
    if isinstance(settings, Sparsify) and settings.target == "control":
        settings = dataclasses.replace(settings, control=True)  # type: ignore[call-arg]  # never a Transcode
    return settings, text


def _names(settings: Any) -> list[str]:
    """Its fields and those of the settings inside."""
    parts = [(field.name, getattr(settings, field.name)) for field in dataclasses.fields(settings)]
    return [name for key, part in parts for name in (_names(part) if dataclasses.is_dataclass(part) else [key])]


def _replaced(settings: Any, changes: dict[str, object]) -> Any:
    """With the changes it has fields for, which are taken out; all at once, as one may be wrong without another."""
    values = {}
    for field in dataclasses.fields(settings):
        value = changes.pop(field.name, getattr(settings, field.name))
        values[field.name] = _replaced(value, changes) if dataclasses.is_dataclass(value) else value
    return dataclasses.replace(settings, **values)


def source_name(source: Source) -> str:
    """What the record calls a model: what it can be loaded by again, where it was."""
    source = source.path if isinstance(source, Run) else source
    return str(source) if isinstance(source, str | Path) else name_of(source)


def fitting(config: PretrainedConfig, data: Data, text: Text, say: Callable[[str], None]) -> Text:
    """The same with sequences no longer than the model reads, said where they were; ValueError for a model of an
    unknown kind, and for sequences that are already made and too long."""
    architecture(config)
    longest = dimensions(config).max_tokens
    if not isinstance(data, str | Path | Sequence):
        if not hasattr(data, "length"):
            raise ValueError(f"data={data!r}: expected files, globs, a dataset's name, or sequences (Batches)")
        if data.length > longest:
            raise ValueError(f"sequences of {data.length} tokens are longer than the {longest} this model allows")
        return text
    if text.length <= longest:
        return text
    say(f"sequences of {longest} tokens instead of {text.length} (--length): the model was made for no more")
    return dataclasses.replace(text, length=longest)


def patterns_of(data: str | Path | Sequence[str | Path]) -> list[str]:
    """Files, globs and names of datasets as a list, however they were given."""
    return [str(data)] if isinstance(data, str | Path) else [str(one) for one in data]


def batches_of(
    data: Data, tokenizer: PreTrainedTokenizerBase | None, text: Text, settings: Training | Transcode, progress: bool
) -> Batches:
    """Numbered sequences: those given, or made of text, enough for all steps."""
    if not isinstance(data, str | Path | Sequence):
        return data
    if tokenizer is None:
        raise ValueError("text needs a tokenizer; give the model's own, or the model by name")
    patterns = patterns_of(data)
    refuse_overlap(patterns, list(text.heldout))
    return distributed.main_first(
        lambda: TextBatches(
            patterns, tokenizer, text.length, cache=text.cache, need=settings.steps * settings.batch * text.length,
            heldout_patterns=list(text.heldout), heldout_tokens=text.heldout_tokens, field=text.text_field,
            seed=settings.seed, progress=progress, shortest=text.shortest,
        )
    )  # fmt: skip
