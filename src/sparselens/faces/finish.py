"""From what a pass has kept to cards: words, neighbours, contexts as text, labels. One layer at a time.

1. promoted and suppressed words: what a feature writes to all its layers together, through the gain of the last norm
   and the unembedding, in standard deviations over the vocabulary (norm denominators and later layers left out)
2. nearest features: the mean of the cosines of what they read and of what they write, over all layers
3. contexts: tokens are looked up again by the number of their sequence; equal ones are shown once
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..config import Faces as Settings
from ..data.batches import Batches
from ..models.architectures import norm_parts, parts, rms_gain, unembedding
from ..tasks.registry import piece
from ..transcoders.transcoder import Transcoder
from .collect import LOWEST, Kept
from .labels import Background, Context, facts, label, shares
from .store import Card, Excerpt

AT_ONCE = 1 << 26  # numbers in one product
READ_BACK, READ_ON = 60, 8  # tokens around a peak that labels are made from
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

    def piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(token) if self.tokenizer is None else piece(self.tokenizer, token)
        return self._pieces[token]

    def around(self, sequence: int, position: int, before: int, after: int) -> tuple[list[str], int]:
        """Tokens of the same document around a place, and which of them it is."""
        first = max(0, position - before, position - int(self.places[sequence, position]))
        row = self.ids[sequence, first : position + after + 1].tolist()
        later = self.places[sequence, position + 1 : position + after + 1]
        ends = np.flatnonzero(later == 0)  # the next document
        row = row[: position - first + 1 + int(ends[0])] if len(ends) else row
        return [self.piece(token) for token in row], position - first


class Writer(NamedTuple):
    """What cards of all layers need."""

    model: nn.Module
    transcoder: Transcoder
    book: Book
    settings: Settings
    tokens: int
    nearest: tuple[Tensor, Tensor]

    def cards(self, layer: int, kept: Kept, labeller: Labeller | None = None) -> list[Card]:
        """The cards of one layer's features."""
        words = promoted(self.model, self.transcoder, layer, self.settings.words)
        kept = Kept(**{name: value.cpu() for name, value in vars(kept).items()})
        cards = [self._card(layer, f, kept, words) for f in range(self.transcoder.n_features)]
        known = [[facts(self._context(kept, f, slot)) for slot in _filled(kept.top_sequence[f])]
                 for f in range(len(cards))]  # fmt: skip
        background = Background()
        for found in known:
            if found:
                background.add(shares(found))
        for card, found in zip(cards, known, strict=True):
            card["label"], card["fits"] = label(found, background, card["promoted"])
            if labeller is not None and (own := labeller(card)):
                card["own"] = str(own)
        return cards

    def _context(self, kept: Kept, f: int, slot: int) -> Context:
        place = int(kept.top_sequence[f, slot]), int(kept.top_position[f, slot])
        return Context(*self.book.around(*place, READ_BACK, READ_ON), int(self.book.places[place]))

    def _card(self, layer: int, f: int, kept: Kept, words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Card:
        fires, largest = int(kept.fires[f]), float(kept.peak[f])
        bins = kept.histogram[f].nonzero()[:, 0].tolist() or [0]
        high, high_ids, low, low_ids = (column[f].tolist() for column in words)
        cosines, index = (column[layer * self.transcoder.n_features + f].tolist() for column in self.nearest)
        size, seen = self.transcoder.n_features, set[str]()
        top = [self._excerpt(kept, "top", f, slot, largest) for slot in _filled(kept.top_sequence[f])]
        lower = [self._excerpt(kept, "low", f, slot, largest) for slot in _filled(kept.low_sequence[f])]
        return {
            "layer": layer, "feature": f, "label": "", "fits": 0, "fires": fires, "share": fires / self.tokens,
            "mean": _short(float(kept.total[f]) / max(fires, 1)), "largest": _short(largest),
            "histogram": kept.histogram[f, bins[0] : bins[-1] + 1].tolist(),
            "lowest": _short(2 ** ((bins[0] + LOWEST) / 2)),
            "promoted": [(self.book.piece(i), _short(z, 3)) for i, z in zip(high_ids, high, strict=True)],
            "suppressed": [(self.book.piece(i), _short(z, 3)) for i, z in zip(low_ids, low, strict=True)],
            "nearest": [(i // size, i % size, _short(c, 3)) for i, c in zip(index, cosines, strict=True) if c > 0],
            "top": [one for one in top if _new(one, seen)], "lower": [one for one in lower if _new(one, seen)],
        }  # fmt: skip

    def _excerpt(self, kept: Kept, which: str, f: int, slot: int, largest: float) -> Excerpt:
        columns = (getattr(kept, f"{which}_{name}") for name in ("sequence", "position", "value", "window"))
        sequence, position, value, window = (column[f, slot] for column in columns)
        place = [int(sequence), int(position)]
        text, at = self.book.around(place[0], place[1], self.settings.before, self.settings.after)
        first = self.settings.before - at
        level = (window[first : first + len(text)].float() * (255 / max(largest, 1e-30))).ceil().clamp(max=255)
        return {"text": text, "activations": level.int().tolist(), "at": at, "value": _short(float(value)),
                "place": place}  # fmt: skip


def _filled(sequences: Tensor) -> list[int]:
    return (sequences >= 0).nonzero()[:, 0].tolist()


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _new(one: Excerpt, seen: set[str]) -> bool:
    text = "\x00".join(one["text"])
    new = text not in seen
    seen.add(text)
    return new


def words_of(card: Card) -> str:
    """The words a search finds a feature by: those it fires on and those it promotes most, between tabs."""
    fired = [one["text"][one["at"]].strip().lower() for one in card["top"]]
    most = [word for word, _ in sorted({w: fired.count(w) for w in fired if w}.items(), key=lambda p: -p[1])]
    promoted = [word.strip().lower() for word, _ in card["promoted"][:3]]
    return "\t".join(dict.fromkeys([*most[:WORDS_KEPT], *promoted]))


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
