"""FVU and L0 as both trainers are measured: the same sums over the same tokens, first positions left out."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Fit:
    """Sums over batches; layers are averaged at the end."""

    def __init__(self) -> None:
        self.n, self.error, self.square, self.total, self.active = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, true: Tensor, guess: Tensor, active: Tensor) -> None:
        """true, guess [tokens, layers, d_model]; active [layers]: features active on these tokens, in all."""
        true, guess = true.double(), guess.double()
        self.n += len(true)
        self.error = self.error + (true - guess).pow(2).sum((0, 2))
        self.square = self.square + true.pow(2).sum((0, 2))
        self.total = self.total + true.sum(0)
        self.active = self.active + active.double()

    def row(self) -> dict[str, float]:
        spread = self.square - self.total.pow(2).sum(1) / self.n
        return {
            "fvu": round(float((self.error / spread).mean()), 4),
            "l0": round(float((self.active / self.n).mean()), 2),
        }


def fit(batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    sums = Fit()
    with torch.no_grad():
        for true, guess, active in batches:
            sums.add(true, guess, active)
    return sums.row()
