"""What `sparsify`, `transcode` and `plan` are asked for, in one form: settings, model, text."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..config import Sparsify, Text, Training, Transcode
from ..data.batches import Batches, TextBatches, refuse_overlap
from ..models.architectures import architecture, dimensions
from ..models.loading import Source, name_of
from ..runs import distributed
from ..runs.run import Run

Data = str | list[str] | Batches  # files and globs, a dataset name, or anything with `Batches`' methods
Settings = TypeVar("Settings", Sparsify, Transcode)


def overridden(settings: Settings, text: Text, changes: dict[str, Any]) -> tuple[Settings, Text]:
    """Both with every change in the field of that name, wherever it is: steps=500 is one of `Sparsify.training`."""
    left = dict(changes)
    settings, text = _replaced(settings, left), _replaced(text, left)
    if left:
        command = type(settings).__name__.lower()
        raise ValueError(f"unknown setting {next(iter(left))!r}; see sparselens {command} --help for all of them")
    if isinstance(settings, Sparsify) and settings.target == "control":
        settings = dataclasses.replace(settings, control=True)  # type: ignore[call-arg]  # never a Transcode
    return settings, text


def _replaced(settings: Any, changes: dict[str, Any]) -> Any:
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


def check_length(config: PretrainedConfig, length: int) -> None:
    """ValueError for a model of an unknown kind, or sequences that it cannot read."""
    architecture(config)
    longest = dimensions(config).max_tokens
    if length > longest:
        raise ValueError(f"sequences of {length} tokens are longer than the {longest} this model allows (--length)")


def length_of(data: Data, text: Text) -> int:
    return text.length if isinstance(data, str | list) else data.length


def batches_of(
    data: Data, tokenizer: PreTrainedTokenizerBase | None, text: Text, settings: Training | Transcode, progress: bool
) -> Batches:
    """Numbered sequences: those given, or made of text, enough for all steps."""
    if not isinstance(data, str | list):
        return data
    if tokenizer is None:
        raise ValueError("text needs a tokenizer; give the model's own, or the model by name")
    patterns = [data] if isinstance(data, str) else data
    refuse_overlap(patterns, list(text.heldout))
    return distributed.main_first(
        lambda: TextBatches(
            patterns, tokenizer, text.length, cache=text.cache, need=settings.steps * settings.batch * text.length,
            heldout_patterns=list(text.heldout), heldout_tokens=text.heldout_tokens, field=text.text_field,
            seed=settings.seed, progress=progress,
        )
    )  # fmt: skip
