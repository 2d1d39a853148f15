"""`sparselens features`: one pass over text, and a face for every feature of a transcoder.

1. the transcoder, and the model it belongs to: its Run says which; another one is refused
2. the pass: the model up to its last MLP, features of every layer, merged into what is kept of each (collect.py).
   The state is written now and then; a killed pass goes on with --resume
3. words, neighbours, contexts, labels (finish.py), and files (store.py)
"""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..config import Faces as Settings, Text
from ..data.batches import Batches, TextBatches
from ..data.registry import make_again
from ..models.architectures import base_model
from ..models.loading import Source, resolve
from ..runs import distributed
from ..runs.run import Run, provenance, read_json, refuse_full_disk, whole_folder, write_json
from ..training.engine import Interrupted, threads_for
from ..training.measure import in_bf16
from ..training.sparsify import Data, fitting, patterns_of, source_name
from ..transcoders.mlp_hooks import check_fit, observe
from ..transcoders.transcoder import Transcoder
from .collect import Collector
from .finish import Book, Columns, Labeller, Writer, nearest, promoted, write_layers
from .store import FOLDER, FORMAT, Faces, write_index

LEAST = 4096  # tokens: of fewer, most features would have seen nothing
PROGRESS = "progress"


def features(
    transcoder: str | Path | Run | Transcoder, data: Data | None = None, *, out: str | Path | None = None,
    model: Source | None = None, tokenizer: PreTrainedTokenizerBase | None = None, settings: Settings | None = None,
    text: Text | None = None, resume: bool = False, labeller: Labeller | None = None, show_progress: bool = True,
    say: Callable[[str], None] = print, **overrides: Any,
) -> Faces:  # fmt: skip
    """Faces for the features of a transcoder: contexts, words, neighbours and a label for each; left in `out`.

    transcoder: its Run or folder, or the Transcoder itself (then `model` and `out` are needed). data: files, globs, a
    dataset name, or anything with `Batches`' methods; None: what it was trained on, where that can be made again.
    model: what it belongs to; None: what its Run says. out: None: `faces` in its folder. labeller: is given every card
    and may return a label of its own, or None. overrides: fields of `Faces` (config) or `Text` by name.
    """
    settings, text = _overridden(settings or Settings(), text or Text(), overrides)
    if isinstance(transcoder, Run):
        transcoder = transcoder.path
    _refuse_few(settings.tokens)
    folder = None if isinstance(transcoder, Transcoder) else Path(transcoder)
    if folder is None and (model is None or out is None):
        raise ValueError(
            "a transcoder in memory does not say where its model and its files are: give `model` and `out`"
        )
    place = Path(out) if out is not None else folder / FOLDER  # type: ignore[operator]  # one of them is there
    Run.check(place, resume)
    if resume and (place / "faces.json").is_file():
        say(f"{place} is complete")
        return Faces(place)
    coder = transcoder if isinstance(transcoder, Transcoder) else Transcoder.load(folder)  # type: ignore[arg-type]
    loaded, own = resolve(model, tokenizer) if model is not None else _model_of(folder, coder)  # type: ignore[arg-type]
    tokenizer = tokenizer or own
    check_fit(loaded, coder)
    device = next(loaded.parameters()).device
    coder = coder.to(device)
    batches, text = _batches(data, folder, loaded, tokenizer, settings, text, say, show_progress)
    sequences = _sequences(batches, settings, say)
    kept = settings.contexts + 5 * settings.samples
    state = len(coder.W_enc) * coder.n_features * kept * (2 * (settings.before + settings.after + 1) + 16)
    refuse_full_disk(place, 2 * state, "keep fewer --contexts")
    name = str(folder) if model is None else source_name(model)
    asked = {"transcoder": str(folder or "in memory"), "model": name, "data": batches.describe(),
             **dataclasses.asdict(settings)}  # fmt: skip
    run = Run.create(place, "features", asked, resume)
    try:
        task = _Pass(run, loaded.eval(), coder, batches, settings, sequences, show_progress, say)
        task.read(resume)
        return task.write(tokenizer, labeller)
    finally:
        run.unlock()


def _overridden(settings: Settings, text: Text, changes: dict[str, Any]) -> tuple[Settings, Text]:
    names = [{field.name for field in dataclasses.fields(part)} for part in (settings, text)]
    if unknown := changes.keys() - names[0] - names[1]:
        raise ValueError(f"unknown setting {min(unknown)!r}; see sparselens features --help for all of them")
    first, second = ({k: v for k, v in changes.items() if k in some} for some in names)
    return dataclasses.replace(settings, **first), dataclasses.replace(text, **second)


def _model_of(folder: Path, coder: Transcoder) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    """The model a transcoder belongs to: beside it where a Run keeps both, else by the name its Run has."""
    name = coder.model_name
    if (folder / "run.json").is_file():
        name = Run(folder).record["config"].get("model") or name
    if folder.resolve().parent.name == "transcoders":  # RUN/transcoders/ROLE, as the studio looks for them
        whole, role = folder.resolve().parents[1], folder.name
        beside = whole if role == "sparse" else whole / ("base" if role == "dense" else role) / "model"
        if beside.is_dir():
            return resolve(beside)
    if not name:
        raise ValueError(f"{folder} does not say which model it was trained on; name it with --model")
    try:
        return resolve(name)
    except ValueError as error:
        raise ValueError(
            f"the transcoder in {folder} was trained on {name!r}, which cannot be loaded from here; name that model "
            f"with --model ({error})"
        ) from None


def _batches(
    data: Data | None, folder: Path | None, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None,
    settings: Settings, text: Text, say: Callable[[str], None], progress: bool,
) -> tuple[Batches, Text]:  # fmt: skip
    if data is None or (isinstance(data, list) and not data):
        config = Run(folder).record["config"] if folder is not None and (folder / "run.json").is_file() else {}
        made = make_again(config.get("data") or {})
        if made is None:
            raise ValueError("there is no text to read; name some with --data")
        return made, text
    text = fitting(base_model(model).config, data, text, say)
    if not isinstance(data, str | Path | Sequence):
        return data, text
    if tokenizer is None:
        raise ValueError("text needs a tokenizer; give the model by name, or (model, tokenizer)")
    patterns = patterns_of(data)
    try:
        return TextBatches(
            patterns, tokenizer, text.length, cache=text.cache, need=settings.tokens, heldout_tokens=text.length,
            field=text.text_field, seed=settings.seed, progress=progress,
        ), text  # fmt: skip
    except ValueError as error:
        if "the text is" in str(error) and "short" in str(error):
            raise ValueError(f"{error}; faces need thousands of tokens, better a million") from None
        raise


def _sequences(batches: Batches, settings: Settings, say: Callable[[str], None]) -> int:
    """How many to read: as asked, or as many as there are."""
    there = batches.describe().get("train_sequences")
    asked = max(1, settings.tokens // batches.length)
    count = min(asked, there) if isinstance(there, int) else asked
    _refuse_few(count * batches.length)
    if count < asked:
        say(f"reading {count * batches.length:,} tokens instead of {settings.tokens:,} (--tokens): there are no more")
    return count


def _refuse_few(tokens: int) -> None:
    if tokens < LEAST:
        raise ValueError(
            f"{tokens:,} tokens of text are too few: most features would have fired nowhere. Faces need at least "
            f"{LEAST:,}, better a million; give more text with --data (or raise --tokens)"
        )


class _Pass:
    """One pass over text, and what becomes of it."""

    def __init__(
        self, run: Run, model: nn.Module, coder: Transcoder, batches: Batches, settings: Settings, sequences: int,
        show_progress: bool, say: Callable[[str], None],
    ):  # fmt: skip
        self.run, self.model, self.coder, self.batches = run, model, coder, batches
        self.settings, self.sequences, self.show_progress, self.say = settings, sequences, show_progress, say
        self.device = coder.W_enc[0].device
        self.collector = Collector(
            coder.n_layers, coder.n_features, settings.contexts, settings.samples, settings.before, settings.after,
            self.device, settings.seed,
        )  # fmt: skip
        self.next, self.tokens, self.seconds = 0, 0, 0.0

    @torch.no_grad()
    def read(self, resume: bool) -> None:
        """Steps through the text from where the state says; Interrupted with the state written."""
        from tqdm import tqdm

        if resume:
            self._restore()
        bar = tqdm(total=self.sequences, initial=self.next, desc="features", unit="seq",
                   disable=not self.show_progress, leave=False)  # fmt: skip
        saved = began = time.monotonic()
        before = self.seconds
        size = sum(p.numel() for p in self.coder.parameters())
        with threads_for(size), _quick_products(self.device), bar, distributed.interruptible() as stop:
            while self.next < self.sequences:
                count = min(self.settings.batch, self.sequences - self.next)
                self._batch(count)
                bar.update(count)
                self.seconds = before + time.monotonic() - began
                if stop() and self.next < self.sequences:
                    self._save()
                    at = f"after {self.next:,} of {self.sequences:,} sequences"
                    raise Interrupted(f"stopped {at}; continue with --resume")
                if time.monotonic() - saved > 60 * self.settings.checkpoint_minutes:
                    self._save()
                    saved = time.monotonic()
        self._save()  # what follows is done again where it is killed, not the pass

    def _batch(self, count: int) -> None:
        batch = {name: value.to(self.device) for name, value in self.batches.train(self.next, count).items()}
        bf16 = in_bf16("auto") and self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            inputs, _ = observe(self.model, batch, self.coder.input_hook)
        mask = batch.get("attention_mask")
        for layer, x in enumerate(inputs):
            a = self.coder.encode(layer, x.to(self.coder.W_enc[layer].dtype))
            self.collector.add(layer, a if mask is None else a * mask[..., None], self.next)
        self.tokens += int(batch["input_ids"].numel() if mask is None else mask.sum())
        self.next += count

    def _save(self) -> None:
        with whole_folder(self.run.path / PROGRESS) as fresh:
            fresh.mkdir()
            save_file(
                {n: t.cpu().contiguous() for n, t in self.collector.tensors().items()}, fresh / "state.safetensors"
            )
            write_json(fresh / "state.json", {"next": self.next, "tokens": self.tokens, "seconds": self.seconds})

    def _restore(self) -> None:
        folder = self.run.path / PROGRESS
        if not (folder / "state.json").is_file():
            return  # killed before the first state: from the start
        told = read_json(folder / "state.json")
        try:
            self.collector.put_back(load_file(folder / "state.safetensors"))
            self.next, self.tokens, self.seconds = int(told["next"]), int(told["tokens"]), float(told["seconds"])
        except Exception as error:  # safetensors' own error type is not public
            raise ValueError(f"the state in {folder} is damaged ({error}); remove {self.run.path} and start") from error
        self.say(f"going on after {self.next:,} of {self.sequences:,} sequences")

    def write(self, tokenizer: PreTrainedTokenizerBase | None, labeller: Labeller | None) -> Faces:
        """Cards of every layer, then the files that say that all is there."""
        coder, settings, folder, layers = self.coder, self.settings, self.run.path, self.collector.layers
        book = Book(self.batches, self.sequences, 64, tokenizer)
        cosines, near = (t.numpy() for t in nearest(self.model, coder, [k.fires for k in layers], settings.nearest))
        n = coder.n_features

        def columns(layer: int) -> Columns:
            words = promoted(self.model, coder, layer, settings.words)
            kept = {name: value.cpu().numpy() for name, value in vars(layers[layer]).items()}
            own = slice(layer * n, (layer + 1) * n)
            return Columns(kept, tuple(t.numpy() for t in words), cosines[own], near[own])

        writer = Writer(book, settings, self.tokens, n)
        told = write_layers(folder, writer, columns, coder.n_layers, _careful(labeller, self.say))
        labels, words, sizes = (list(column) for column in zip(*told, strict=True))
        size = sum(sizes) / coder.n_layers
        write_index(folder, labels, words)
        fires = torch.stack([kept.fires for kept in layers])
        about = {
            "format": FORMAT, "transcoder": self.run.record["config"]["transcoder"], "model": coder.model_name,
            "n_layers": coder.n_layers, "n_features": coder.n_features, "tokens": self.tokens,
            "sequences": self.sequences, "data": dict(self.batches.describe()), "fired": int((fires > 0).sum()),
            "bytes_per_feature": round(size, 1), "seconds": round(self.seconds, 1), "provenance": provenance(),
        }  # fmt: skip
        write_json(folder / "faces.json", about)
        shutil.rmtree(folder / PROGRESS, ignore_errors=True)
        total = coder.n_layers * coder.n_features
        self.say(
            f"{about['fired']:,} of {total:,} features fired on {self.tokens:,} tokens; {size:,.0f} bytes each, "
            f"read in {self.seconds:.0f} s: {folder}"
        )
        return Faces(folder)


@contextmanager
def _quick_products(device: torch.device) -> Iterator[None]:
    """TF32 on a GPU, inside the block: a thousandth of an activation is nothing in a card."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _careful(labeller: Labeller | None, say: Callable[[str], None]) -> Labeller | None:
    """A labeller whose first failure is told, and ends its work, not ours."""
    broken = False

    def ask(card: Any) -> str | None:
        nonlocal broken
        if broken:
            return None
        try:
            return labeller(card)  # type: ignore[misc]  # only asked where there is one
        except Exception as error:
            broken = True
            say(f"the labeller failed on {card['layer']}/{card['feature']} ({error!r}); the other labels are our own")
            return None

    return None if labeller is None else ask
