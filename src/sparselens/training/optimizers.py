"""What moves the weights: AdamW, or Muon for the matrices inside the blocks and AdamW for the rest.

Muon makes each matrix's momentum orthogonal before it steps, so that directions of small gradient move as far as the
others. From random weights that learns several times as much per token (docs/LOG.md has the figures).
"""

from typing import Any

import torch
from torch import nn

from ..config import Training, Transcode

BETAS = (0.9, 0.98)


def make_optimizer(parameters: dict[str, nn.Parameter], settings: Training) -> "torch.optim.Optimizer | Together":
    """Each parameter group has its `base_lr`: what `learning_rate` is a factor on."""
    gates = {name: p for name, p in parameters.items() if name.endswith("gate_bias")}
    others = {name: p for name, p in parameters.items() if name not in gates}
    muon = settings.optimizer == "muon"
    matrices = {name: p for name, p in others.items() if muon and is_matrix_of_a_block(name, p)}
    # AdamW decays whatever it moves but gates; beside Muon, which moves the matrices, nothing is left worth decaying.
    decay = 0.0 if muon else settings.weight_decay
    groups = [
        _group([p for name, p in others.items() if name not in matrices], settings.lr, decay),
        _group(list(gates.values()), settings.bias_lr, 0.0),
    ]
    on_gpu = next(iter(parameters.values())).is_cuda
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=on_gpu or None)
    if not matrices:
        return adamw
    # Steps as large as AdamW's, so that one learning rate serves both.
    group = _group(list(matrices.values()), settings.lr, settings.weight_decay)
    return Together(adamw, torch.optim.Muon([group], adjust_lr_fn="match_rms_adamw"))


def _group(parameters: list[nn.Parameter], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": weight_decay}


def is_matrix_of_a_block(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a weight matrix of a numbered block (h.3, layers.11): not an embedding, not the head."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


class Together:
    """Several optimisers of different parameters as one, as far as training and its checkpoints need it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = optimizers[0].state
        for optimizer in optimizers:
            optimizer.state = self.state  # parameter -> its moments; no parameter is in two of them

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def learning_rate(step: int, settings: Training | Transcode) -> float:
    """Factor on the learning rates: a linear rise, a plateau, a linear fall to a twentieth."""
    rise = min(1.0, (step + 1) / max(1.0, settings.warmup * settings.steps))
    left = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return rise * min(1.0, 0.05 + 0.95 * left)
