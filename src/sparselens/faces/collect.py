"""What one pass over text keeps of every feature: counts, a histogram, its strongest contexts, samples of weaker ones.

Everything is a tensor per layer, merged batch by batch where the model is; no loop over features, and memory does not
grow with the text. n_features is F, tokens kept around a peak W.

1. fires, total [F], histogram [F, BINS] in half octaves
2. top [F, contexts]: of every sequence its strongest token, of all sequences the strongest
3. samples [F, BANDS, samples]: activations in half octaves below the largest so far. Every one draws a lot and the
   largest lots stay, so each band is sampled evenly; when the largest activation grows, bands move down with it
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BINS, LOWEST = 64, -24  # half octaves: activations from 2^-12 to 2^20
BANDS = 5  # the largest activation's own half octave, three below it, and everything lower
LARGEST = 65504.0  # that half precision holds


@dataclass
class Kept:
    """One layer's features. Places are (sequence, position); a sequence of -1 is an empty slot."""

    fires: Tensor  # [F]
    total: Tensor  # [F] sum of activations
    peak: Tensor  # [F]
    histogram: Tensor  # [F, BINS]
    top_value: Tensor  # [F, contexts], largest first
    top_sequence: Tensor
    top_position: Tensor
    top_window: Tensor  # [F, contexts, W] activations around the peak
    lot: Tensor  # [F, BANDS * samples]
    low_value: Tensor
    low_sequence: Tensor
    low_position: Tensor
    low_window: Tensor  # [F, BANDS * samples, W]

    @classmethod
    def empty(cls, n_features: int, contexts: int, samples: int, window: int, device: torch.device) -> "Kept":
        def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((n_features, *shape), value, dtype=dtype, device=device)

        whole, half, slots = torch.int32, torch.float16, BANDS * samples
        return cls(
            full(0, dtype=torch.int64), full(0, dtype=torch.float64), full(0), full(0, BINS, dtype=torch.int64),
            full(0, contexts), full(-1, contexts, dtype=whole), full(0, contexts, dtype=whole),
            full(0, contexts, window, dtype=half), full(-1, slots), full(0, slots), full(-1, slots, dtype=whole),
            full(0, slots, dtype=whole), full(0, slots, window, dtype=half),
        )  # fmt: skip


def half_octave(value: Tensor) -> Tensor:
    """Which half octave a positive number lies in: 0 for 1 up to sqrt(2)."""
    return (2 * value.log2()).floor().long()


class Collector:
    """Feeds on activations, layer by layer and batch by batch."""

    def __init__(
        self, n_layers: int, n_features: int, contexts: int, samples: int, before: int, after: int,
        device: torch.device, seed: int = 0,
    ):  # fmt: skip
        self.samples, self.seed = samples, seed
        self.around = torch.arange(-before, after + 1, device=device)
        window = len(self.around)
        self.layers = [Kept.empty(n_features, contexts, samples, window, device) for _ in range(n_layers)]

    def add(self, layer: int, a: Tensor, first: int) -> None:
        """Activations [sequences, tokens, F] >= 0 of a layer; `first`: the number of the first sequence."""
        kept, n_features = self.layers[layer], a.shape[-1]
        flat = a.flatten(0, 1)
        place, feature = flat.nonzero(as_tuple=True)
        value = flat[place, feature].float()
        octave = half_octave(value)
        kept.total += flat.sum(0, dtype=torch.float64)
        kept.fires += torch.bincount(feature, minlength=n_features)
        bins = feature * BINS + (octave - LOWEST).clamp(0, BINS - 1)
        kept.histogram += torch.bincount(bins, minlength=n_features * BINS).view(n_features, BINS)
        self._strongest(kept, a, first)
        self._sample(layer, a, first, place, feature, value, octave)

    def _strongest(self, kept: Kept, a: Tensor, first: int) -> None:
        value, position = a.float().max(1)  # [sequences, F]
        contexts, n = kept.top_value.shape[1], len(value)
        best = torch.cat([kept.top_value, value.T], 1).topk(contexts, 1)
        changed = (best.indices >= contexts).any(1) & (best.values[:, 0] > 0)
        rows = changed.nonzero()[:, 0]
        if not len(rows):
            return
        order, values = best.indices[rows], best.values[rows]
        number = torch.arange(first, first + n, dtype=torch.int32, device=a.device).expand(len(rows), n)
        sequence = torch.cat([kept.top_sequence[rows], number], 1).gather(1, order)
        where = torch.cat([kept.top_position[rows], position.T[rows].to(torch.int32)], 1).gather(1, order)
        old = order.clamp(max=contexts - 1)[..., None].expand(-1, -1, len(self.around))
        window = kept.top_window[rows].gather(1, old)
        row, slot = (order >= contexts).nonzero(as_tuple=True)
        window[row, slot] = self._window(a, order[row, slot] - contexts, where[row, slot].long(), rows[row])
        kept.top_value[rows], kept.top_window[rows], kept.top_position[rows] = values, window, where
        kept.top_sequence[rows] = torch.where(values > 0, sequence, -1)

    def _sample(
        self, layer: int, a: Tensor, first: int, place: Tensor, feature: Tensor, value: Tensor, octave: Tensor
    ) -> None:
        kept, tokens = self.layers[layer], a.shape[1]
        peak = torch.maximum(kept.peak, a.amax((0, 1)).float())
        self._move_bands(kept, peak)
        kept.peak = peak
        band = (half_octave(peak[feature]) - octave).clamp(0, BANDS - 1)
        generator = torch.Generator(a.device).manual_seed(hash((self.seed, layer, first)) & 0x7FFFFFFF)
        lot = torch.rand(len(value), generator=generator, device=a.device)
        slot = torch.randint(self.samples, (len(value),), generator=generator, device=a.device)
        cell = (feature * BANDS + band) * self.samples + slot
        winner = kept.lot.flatten().scatter_reduce(0, cell, lot, "amax")
        new = (lot == winner[cell]).nonzero()[:, 0]
        cell, place = cell[new], place[new]
        at, slots = place % tokens, kept.lot.shape[1]
        row, column = cell // slots, cell % slots
        kept.lot[row, column] = lot[new]
        kept.low_value[row, column] = value[new]
        kept.low_sequence[row, column] = (first + place // tokens).to(torch.int32)
        kept.low_position[row, column] = at.to(torch.int32)
        kept.low_window[row, column] = self._window(a, place // tokens, at, feature[new])

    def _move_bands(self, kept: Kept, peak: Tensor) -> None:
        """Where the largest activation has grown by half octaves, samples are as many bands further down."""
        grown = (kept.peak > 0) & (peak > kept.peak)
        rows = grown.nonzero()[:, 0]
        moved = half_octave(peak[rows]) - half_octave(kept.peak[rows])
        rows, moved = rows[moved > 0], moved[moved > 0]
        if not len(rows):
            return
        band, slot = (torch.arange(n, device=peak.device) for n in (BANDS, self.samples))
        source = (band - moved[:, None])[..., None].repeat(1, 1, self.samples)  # [rows, BANDS, samples]
        # Several bands become the lowest one: of each slot the largest lot stays, as if it had been one all the time.
        lots = kept.lot[rows].view(-1, BANDS, self.samples)
        # (-2: behind the empty slots, whose lot is -1.)
        source[:, -1] = lots.masked_fill((band < BANDS - 1 - moved[:, None])[..., None], -2).argmax(1)
        there = (source >= 0).flatten(1)
        source = (source.clamp(min=0) * self.samples + slot).flatten(1)
        for name in ("lot", "low_value", "low_sequence", "low_position"):
            column = getattr(kept, name)
            column[rows] = column[rows].gather(1, source)
        wide = source[..., None].expand(-1, -1, len(self.around))
        kept.low_window[rows] = kept.low_window[rows].gather(1, wide)
        kept.lot[rows] = torch.where(there, kept.lot[rows], -1.0)
        kept.low_sequence[rows] = torch.where(there, kept.low_sequence[rows], -1)

    def _window(self, a: Tensor, sequence: Tensor, position: Tensor, feature: Tensor) -> Tensor:
        """Activations [n, W] of a feature around a place; 0 outside the sequence."""
        at = position[:, None] + self.around
        inside = (at >= 0) & (at < a.shape[1])
        found = a[sequence[:, None], at.clamp(0, a.shape[1] - 1), feature[:, None]]
        return (found * inside).float().clamp(max=LARGEST).half()

    # ---- to go on later ----

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": value for i, kept in enumerate(self.layers) for name, value in vars(kept).items()}

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        for i, kept in enumerate(self.layers):
            for name, value in vars(kept).items():
                getattr(kept, name).copy_(tensors[f"{i}.{name}"].to(value.device))
