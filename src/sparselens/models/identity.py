"""Which model is this? A sketch of a few hundred of its weights, by which a transcoder knows the model it belongs to.

Names do not tell: folders move, and a dense and a sparse model may have the same one. A few weights of every matrix do:
training moves them all, saving in half precision hardly (by 0.4 % at most).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..runs import distributed
from .architectures import base_model, blocks
from .attention import gate_biases, is_gated

EACH, MATRICES = 3, 64  # weights of each matrix; matrices, evenly over the model
ALIKE = 5e-3  # relative distance up to which two sketches are of one model
Sketch = dict[str, list[float]]


@torch.no_grad()
def sketch(model: nn.Module) -> Sketch | None:
    """Some weights and gate biases; None for a model that is split over processes."""
    if distributed.is_sharded(model):
        return None
    model = base_model(model)
    # Of the blocks alone: a vocabulary may be padded.
    every = ((block, name, p) for block in blocks(model) for name, p in block.named_parameters())
    found = [(block, name, p) for block, name, p in every if p.ndim >= 2 and "lora_" not in name]
    n = min(len(found), MATRICES)
    chosen = (_merged(*found[i * len(found) // n]) for i in range(n))  # one at a time: merged ones are copies
    gates = [bias.detach().float().mean() for bias in gate_biases(model)] if is_gated(model) else []
    return {"weights": _rounded([w for m in chosen for w in _some(m)]), "gates": _rounded(gates)}


def _merged(block: nn.Module, name: str, matrix: Tensor) -> Tensor:
    """The matrix with what LoRA adds to it: a model is the same whether its adapter is merged or not."""
    owner = name.removesuffix(".base_layer.weight")
    layer: Any = block.get_submodule(owner) if owner != name else None
    if layer is None or layer.disable_adapters or layer.merged:
        return matrix
    change: Tensor | int = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
    return matrix + change


def _some(matrix: Tensor) -> list[Tensor]:
    flat = matrix.detach().reshape(-1)
    return [flat[(2 * i + 1) * len(flat) // (2 * EACH)] for i in range(EACH)]


def _rounded(values: Sequence[Tensor]) -> list[float]:
    return [float(f"{float(value):.5g}") for value in values]


def same_model(a: Sketch, b: Sketch) -> bool:
    """Whether two sketches can be of one model."""
    return all(_close(a.get(name, []), b.get(name, [])) for name in ("weights", "gates"))


def _close(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b):
        return False
    one, other = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return float((one - other).norm()) <= ALIKE * max(float(one.norm()), 1e-6)
