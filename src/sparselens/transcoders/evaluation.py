"""How well a transcoder stands in for the MLPs, on held-out sequences.

FVU (fraction of variance unexplained) of a layer: squared error of its reconstruction over the squared distance of its
MLP outputs from their mean, all tokens together, reading the model's true activations. Replacement loss: the model's
loss when every MLP returns its reconstruction, so that errors feed on errors; between the model's own loss (nothing
lost) and its loss with silent MLPs (everything lost).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Batches
from ..models.hooks import patch
from ..runs import distributed
from ..runs.rows import FitRow, ReplacementRow
from ..training.measure import measure
from .mlp_hooks import observe, replaced
from .transcoder import Transcoder


class Variance:
    """FVU from sums, so that no batch has to be kept. Doubles: variances are differences of large sums."""

    def __init__(self, d_model: int) -> None:
        self.n, self.error, self.square, self.total = 0, 0.0, 0.0, torch.zeros(d_model, dtype=torch.float64)

    def add(self, true: Tensor, guess: Tensor) -> None:
        """true, guess: [tokens, d_model]."""
        true, guess = true.double(), guess.double()
        self.n += len(true)
        self.error += (true - guess).pow(2).sum().item()
        self.square += true.pow(2).sum().item()
        self.total = self.total + true.sum(0).cpu()

    def fvu(self) -> float:
        """Of all processes together."""
        sums = torch.tensor([self.n, self.error, self.square], dtype=torch.float64)
        n, error, square = distributed.total(sums).tolist()
        spread = square - distributed.total(self.total).pow(2).sum().item() / max(1, n)
        return error / spread if spread > 0 else float("nan")


def tokens_of(batch: dict[str, Tensor], layers: list[Tensor]) -> list[Tensor]:
    """Per layer [tokens, d_model]: all real tokens of a batch in a row; padding is left out."""
    mask = batch.get("attention_mask")
    return [one.flatten(0, 1) if mask is None else one[mask.bool()] for one in layers]


@torch.no_grad()
def measure_fit(
    model: nn.Module, transcoder: Transcoder, batches: Batches, count: int, *, micro_batch: int = 8,
    autocast: AbstractContextManager[Any] | None = None,
) -> FitRow:  # fmt: skip
    """FVU and active features on the first `count` held-out sequences, reading the model's own activations."""
    device = next(model.parameters()).device
    n_layers = transcoder.n_layers
    every, after_first = ([Variance(transcoder.d_model) for _ in range(n_layers)] for _ in range(2))
    active, used, n = [0] * n_layers, torch.zeros(n_layers, transcoder.n_features, dtype=torch.bool, device=device), 0
    for first, some in distributed.rounds(count, micro_batch):
        batch = batches.heldout(first, max(some, 1))
        batch = {name: value.to(device) for name, value in batch.items()}
        with autocast or nullcontext():
            inputs, outputs = observe(model, batch, transcoder.input_hook)
        if not some:  # here for company: a split model needs all processes to run
            continue
        position = torch.arange(inputs[0].shape[1], device=device).expand(inputs[0].shape[:2])[..., None]
        later = tokens_of(batch, [position])[0][:, 0] > 0
        inputs = [x.to(transcoder.W_enc[0].dtype) for x in tokens_of(batch, inputs)]
        outputs = tokens_of(batch, outputs)
        n += len(inputs[0])
        total: Tensor | None = None  # [tokens, layers still to come, d_model]
        for layer in range(n_layers):
            a = transcoder.encode(layer, inputs[layer])
            active[layer] += int((a > 0).sum())
            used[layer] |= (a > 0).any(0)
            written = transcoder.written(layer, a)
            total = written if total is None or not transcoder.cross_layer else total + written
            guess = total[:, 0] + transcoder.b_dec[layer]
            every[layer].add(outputs[layer], guess)
            after_first[layer].add(outputs[layer][later], guess[later])
            total = total[:, 1:]
    n = int(distributed.total(torch.tensor(n)))
    fvu, without_first = ([one.fvu() for one in some] for some in (every, after_first))
    l0 = [one / n for one in distributed.total(torch.tensor(active)).tolist()]
    return {
        "fvu": sum(fvu) / n_layers, "fvu_per_layer": fvu, "fvu_per_layer_after_first": without_first,
        "l0": sum(l0) / n_layers, "l0_per_layer": l0,
        "used_share": (distributed.total(used.int()) > 0).float().mean().item(),
    }  # fmt: skip


def measure_replacement(
    model: nn.Module, transcoder: Transcoder, batches: Batches, count: int, **options: Any
) -> ReplacementRow:
    """The model's loss as it is, with its MLPs replaced and with its MLPs silent; exact: faultless sequences.

    options: those of `measure`.
    """
    own = measure(model, batches, 0, count, **options)
    with replaced(model, transcoder):
        instead = measure(model, batches, 0, count, **options)
    with patch(model, {f"m{layer}": 0.0 for layer in range(transcoder.n_layers)}):
        silent = measure(model, batches, 0, count, **options)
    lost = silent.loss - own.loss
    return {
        "replacement_loss": instead.loss, "model_loss": own.loss, "zero_loss": silent.loss,
        "loss_standard_errors": {"model": own.error, "replacement": instead.error, "zero": silent.error},
        "loss_recovered": (silent.loss - instead.loss) / lost if abs(lost) > 1e-9 else float("nan"),
        "replacement_exact": instead.correct.float().mean().item(), "model_exact": own.correct.float().mean().item(),
    }  # fmt: skip
