"""From what a pass has kept to cards: words, neighbours, contexts as text, labels. One layer at a time.

1. promoted and suppressed words: what a feature writes to all its layers together, through the gain of the last norm
   and the unembedding, in standard deviations over the vocabulary (norm denominators and later layers left out)
2. nearest features: the mean of the cosines of what they read and of what they write, over all layers
3. contexts: tokens are looked up again by the number of their sequence; equal ones are shown once
"""

import multiprocessing
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..config import Faces as Settings
from ..data.batches import Batches
from ..models.architectures import norm_parts, parts, rms_gain, unembedding
from ..tasks.registry import piece
from ..transcoders.transcoder import Transcoder
from .collect import LOWEST
from .labels import Background, Context, facts, label, shares
from .store import Card, Excerpt, write_layer

AT_ONCE = 1 << 26  # numbers in one product
READ_BACK, READ_ON = 60, 8  # tokens around a peak that labels are made from
SHARED_FROM = 20_000  # features: so many are worth several processes
WORDS_KEPT = 6  # that a search finds a feature by

Labeller = Callable[[Card], str | None]


class Book:
    """The text that was read: tokens as numbers and as words."""

    def __init__(self, batches: Batches, sequences: int, batch: int, tokenizer: PreTrainedTokenizerBase | None):
        rows, places = [], []
        for first in range(0, sequences, batch):
            found = batches.train(first, min(batch, sequences - first))
            ids = found["input_ids"]
            at = found.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
            rows.append(ids.numpy().astype(np.int32))
            places.append(at.numpy().astype(np.int32))
        self.ids, self.places = np.concatenate(rows), np.concatenate(places)
        self.tokenizer, self._pieces = tokenizer, dict[int, str]()
        for token in np.unique(self.ids).tolist():
            self.piece(token)

    def piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(token) if self.tokenizer is None else piece(self.tokenizer, token)
        return self._pieces[token]

    def around(self, sequence: int, position: int, before: int, after: int) -> tuple[list[str], int]:
        """Tokens of the same document around a place, and which of them it is."""
        first = max(0, position - before, position - int(self.places[sequence, position]))
        row = self.ids[sequence, first : position + after + 1].tolist()
        later = self.places[sequence, position + 1 : position + after + 1].tolist()
        if 0 in later:  # the next document begins
            row = row[: position - first + 1 + later.index(0)]
        return [self._pieces[token] for token in row], position - first


class Columns(NamedTuple):
    """One layer's features as plain arrays, [F, ...]: what a process without torch can work on."""

    kept: "dict[str, np.ndarray[Any, Any]]"  # the fields of Kept
    words: tuple[Any, ...]  # (z, ids) of the promoted and of the suppressed words
    cosines: Any  # of the nearest features
    nearest: Any  # their numbers


class Writer(NamedTuple):
    """What cards of all layers need."""

    book: Book
    settings: Settings
    tokens: int
    n_features: int

    def cards(self, layer: int, columns: Columns, labeller: Labeller | None = None) -> list[Card]:
        """The cards of one layer's features."""
        cards, known = [], []
        for f in range(self.n_features):
            card, slots = self._card(layer, f, columns)
            cards.append(card)
            known.append([facts(self._context(columns.kept, f, slot)) for slot in slots])
        background = Background()
        for found in known:
            if found:
                background.add(shares(found))
        for card, found in zip(cards, known, strict=True):
            card["label"], card["fits"] = label(found, background, card["promoted"])
            if labeller is not None and (own := labeller(card)):
                card["own"] = str(own)
        return cards

    def _context(self, kept: "dict[str, np.ndarray[Any, Any]]", f: int, slot: int) -> Context:
        place = int(kept["top_sequence"][f, slot]), int(kept["top_position"][f, slot])
        return Context(*self.book.around(*place, READ_BACK, READ_ON), int(self.book.places[place]))

    def _card(self, layer: int, f: int, columns: Columns) -> tuple[Card, list[int]]:
        """A card without its label, and which of the top contexts are shown."""
        kept = columns.kept
        fires, largest = int(kept["fires"][f]), float(kept["peak"][f])
        bins = np.flatnonzero(kept["histogram"][f]).tolist() or [0]
        high, high_ids, low, low_ids = (column[f].tolist() for column in columns.words)
        size, seen = self.n_features, set[str]()
        top, lower = (self._excerpts(kept, which, f, largest, seen) for which in ("top", "low"))
        near = zip(columns.nearest[f].tolist(), columns.cosines[f].tolist(), strict=True)
        card: Card = {
            "layer": layer, "feature": f, "label": "", "fits": 0, "contexts": len(top), "fires": fires,
            "share": fires / self.tokens,
            "mean": _short(float(kept["total"][f]) / max(fires, 1)), "largest": _short(largest),
            "histogram": kept["histogram"][f, bins[0] : bins[-1] + 1].tolist(),
            "lowest": _short(2 ** ((bins[0] + LOWEST) / 2)),
            "promoted": [(self.book.piece(i), _short(z, 3)) for i, z in zip(high_ids, high, strict=True)],
            "suppressed": [(self.book.piece(i), _short(z, 3)) for i, z in zip(low_ids, low, strict=True)],
            "nearest": [(i // size, i % size, _short(c, 3)) for i, c in near if c > 0],
            "top": [one for _, one in top], "lower": [one for _, one in lower],
        }  # fmt: skip
        return card, [slot for slot, _ in top]

    def _excerpts(
        self, kept: "dict[str, np.ndarray[Any, Any]]", which: str, f: int, largest: float, seen: set[str]
    ) -> list[tuple[int, Excerpt]]:
        """(slot, context) of the contexts that are there, equal texts once."""
        sequences, positions, values = (
            kept[f"{which}_{name}"][f].tolist() for name in ("sequence", "position", "value")
        )
        scaled = np.ceil(kept[f"{which}_window"][f].astype(np.float32) * (255 / max(largest, 1e-30)))
        levels, found = np.minimum(scaled, 255).astype(np.int32).tolist(), []
        for slot, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            if sequence < 0:
                continue
            text, at = self.book.around(sequence, position, self.settings.before, self.settings.after)
            whole = "\x00".join(text)
            if whole in seen:
                continue
            seen.add(whole)
            first = self.settings.before - at
            found.append((slot, Excerpt(text=text, activations=levels[slot][first : first + len(text)], at=at,
                                        value=_short(values[slot]), place=[sequence, position])))  # fmt: skip
        return found


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def words_of(card: Card) -> str:
    """The words a search finds a feature by: those it fires on and those it promotes most, between tabs."""
    fired = [one["text"][one["at"]].strip().lower() for one in card["top"]]
    most = [word for word, _ in sorted({w: fired.count(w) for w in fired if w}.items(), key=lambda p: -p[1])]
    promoted = [word.strip().lower() for word, _ in card["promoted"][:3]]
    return "\t".join(dict.fromkeys([*most[:WORDS_KEPT], *promoted]))


Told = tuple[list[str], list[str], float]  # labels, words, bytes per feature
_writer: list[tuple[Path, Writer]] = []  # of forked processes, which find it here


def write_layers(
    folder: Path, writer: Writer, columns: Callable[[int], Columns], n_layers: int, labeller: Labeller | None = None
) -> list[Told]:
    """Cards and files of all layers. Many features on several cores share the work; a labeller stays in one process."""
    workers = min(os.cpu_count() or 1, n_layers, 16)
    many = writer.n_features * n_layers >= SHARED_FROM and workers > 1 and labeller is None
    if not many or "fork" not in multiprocessing.get_all_start_methods():
        return [write_one(folder, writer, layer, columns(layer), labeller) for layer in range(n_layers)]
    for token in range(0 if writer.book.tokenizer is None else len(writer.book.tokenizer)):
        writer.book.piece(token)  # a tokenizer does not like to be asked in several processes
    _writer.append((folder, writer))
    try:
        # Forked, so that the text is not copied; what runs there is Python and numpy, never torch.
        with (
            warnings.catch_warnings(),
            ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool,
        ):
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which here only wait
            waiting, told = deque[Future[Told]](), list[Told]()
            for layer in range(n_layers):
                waiting.append(pool.submit(_write_forked, layer, columns(layer)))
                if len(waiting) > workers:  # no more than that in memory
                    told.append(waiting.popleft().result())
            return told + [one.result() for one in waiting]
    finally:
        _writer.pop()


def _write_forked(layer: int, columns: Columns) -> Told:
    return write_one(*_writer[-1], layer, columns)


def write_one(folder: Path, writer: Writer, layer: int, columns: Columns, labeller: Labeller | None = None) -> Told:
    """The file of one layer; what the index needs of it."""
    cards = writer.cards(layer, columns, labeller)
    size = write_layer(folder, layer, cards, writer.settings.budget)
    return [card.get("own") or card["label"] for card in cards], [words_of(card) for card in cards], size


# ---- words and neighbours --------------------------------------------------------------------------------------------


@torch.no_grad()
def written(model: nn.Module, transcoder: Transcoder, layer: int) -> Tensor:
    """What every feature of a layer adds to the residual stream at activation 1, all its layers together, [F, D]."""
    total = torch.zeros_like(transcoder.W_dec[layer][:, 0])
    for j in range(transcoder.n_targets(layer)):
        rows, post = transcoder.W_dec[layer][:, j], parts(model, layer + j).mlp_post
        total += rows if post is None else rows * rms_gain(post)[0].to(rows)
    return total


@torch.no_grad()
def promoted(model: nn.Module, transcoder: Transcoder, layer: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(z, ids) of the words promoted most, then of those suppressed most, each [F, n]; z over the vocabulary."""
    norm, weight, _, _ = unembedding(model)
    rows = written(model, transcoder, layer)
    gain, _, centred, _ = norm_parts(norm, rows.to(weight.dtype))
    if centred:
        rows = rows - rows.mean(-1, keepdim=True)
    rows, weight = rows * gain.to(rows), weight.to(rows)
    n = min(n, weight.shape[1])
    found = []
    for part in torch.split(rows, max(1, AT_ONCE // weight.shape[1])):
        logits = part @ weight
        logits = logits - logits.mean(-1, keepdim=True)
        z = logits / logits.std(-1, keepdim=True).clamp(min=1e-12)
        high, low = z.topk(n), (-z).topk(n)
        found.append((high.values, high.indices, -low.values, low.indices))
    columns = [torch.cat(column).cpu() for column in zip(*found, strict=True)]
    return columns[0], columns[1], columns[2], columns[3]


@torch.no_grad()
def nearest(model: nn.Module, transcoder: Transcoder, fires: Sequence[Tensor], n: int) -> tuple[Tensor, Tensor]:
    """(cosines, numbers layer * F + feature) of every feature's nearest ones that fired, [n_layers * F, n]."""
    sides = []
    for layer in range(transcoder.n_layers):
        reads, writes = transcoder.W_enc[layer], written(model, transcoder, layer)
        both = torch.cat([_unit(reads), _unit(writes)], 1) * 0.5**0.5
        sides.append(both * (fires[layer].to(both.device) > 0)[:, None])
    every = torch.cat(sides)
    n = min(n, len(every) - 1)
    found, first = [], 0
    for part in torch.split(every, max(1, AT_ONCE // len(every))):
        cosines = part @ every.T
        own = torch.arange(len(part), device=part.device)
        cosines[own, own + first] = -1
        best = cosines.topk(n)
        found.append((best.values.cpu(), best.indices.cpu()))
        first += len(part)
    return torch.cat([v for v, _ in found]), torch.cat([i for _, i in found])


def _unit(rows: Tensor) -> Tensor:
    length: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / length.clamp(min=1e-12)
