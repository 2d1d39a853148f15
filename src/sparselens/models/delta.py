"""A sparse model as its difference to the base, in 8 or 4 bits: a fraction of a folder's size, and the same gates.

    delta.json            which base (its name and a sketch of its weights), bits, what the rounding costs
    delta.safetensors     NAME.q, NAME.scale of every weight that moved; gates as they are, in fp32

Weights move little in post-training, so a few bits hold their differences: every 64 neighbours share a scale and are
rounded to multiples of it.
"""

from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Gate
from ..runs.run import read_json, reading, write_json
from .architectures import base_model
from .identity import Sketch, same_model, sketch

ABOUT, WEIGHTS = "delta.json", "delta.safetensors"
GROUP = 64  # weights that share a scale
LEVELS = {8: 127, 4: 7}  # bits -> the largest multiple


class About(TypedDict):
    version: int
    bits: int
    base: str  # what the base is loaded by
    base_sketch: Sketch
    normalise: str  # of the gates
    shapes: dict[str, list[int]]


@torch.no_grad()
def save_delta(model: nn.Module, base: nn.Module, base_name: str, folder: Path, bits: int) -> None:
    """Write what makes the base the model. Both dense underneath, of one architecture; LoRA must be merged."""
    if bits not in LEVELS:
        raise ValueError(f"bits={bits}: expected one of {', '.join(map(str, sorted(LEVELS)))}")
    before, after = dict(base.named_parameters()), dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, weight in after.items():
        if name.endswith("gate_bias"):
            tensors[name] = weight.detach().float().cpu().contiguous()
            continue
        if name not in before or before[name].shape != weight.shape:
            raise ValueError(f"the base has no weight {name} of shape {tuple(weight.shape)}: it is another model")
        difference = weight.detach().float().cpu() - before[name].detach().float().cpu()
        if difference.any():
            tensors[f"{name}.q"], tensors[f"{name}.scale"] = rounded(difference, bits)
            shapes[name] = list(weight.shape)
    found = sketch(base)
    assert found is not None  # a model that is split over processes is not exported
    about: About = {
        "version": 1, "bits": bits, "base": base_name, "base_sketch": found,
        "normalise": base_model(model).config.sparselens["normalise"], "shapes": shapes,
    }  # fmt: skip
    save_file(tensors, folder / WEIGHTS)
    write_json(folder / ABOUT, about)


def rounded(difference: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(whole numbers as uint8, two to a byte with 4 bits; fp32 scale of each group)."""
    most = LEVELS[bits]
    flat = difference.reshape(-1)
    groups = F.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(1) / most
    whole = (groups / torch.where(scale > 0, scale, 1.0)[:, None]).round().clamp(-most, most) + most
    numbers = whole.to(torch.uint8)
    if bits == 4:
        numbers = numbers[:, ::2] * 16 + numbers[:, 1::2]
    return numbers.contiguous(), scale.to(torch.float32)


def restored(numbers: Tensor, scale: Tensor, bits: int, shape: list[int]) -> Tensor:
    """What `rounded` kept, in its shape."""
    if bits == 4:
        numbers = torch.stack([numbers // 16, numbers % 16], -1).flatten(1)
    groups = (numbers.float() - LEVELS[bits]) * scale[:, None]
    size = torch.Size(shape).numel()
    return groups.reshape(-1)[:size].view(shape)


@torch.no_grad()
def apply_delta(base: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Turn the base, in place, into what was saved, but for its gates, which are returned."""
    about = read_about(folder)
    with reading(folder / ABOUT):
        if not same_model(sketch(base) or {}, about["base_sketch"]):
            raise ValueError(
                f"{folder} is the difference to {about['base']!r}, and the base at hand is another model; name the "
                "right one: sl.load(folder, base=...)"
            )
        tensors, before, shapes = _read(folder / WEIGHTS), dict(base.named_parameters()), about["shapes"]
        gates = {name: tensor for name, tensor in tensors.items() if name.endswith("gate_bias")}
        told = {f"{name}.{part}" for name in shapes for part in ("q", "scale")}
        if told != tensors.keys() - gates.keys() or not shapes.keys() <= before.keys():
            raise _damaged(folder, "they do not name the same weights, or weights that the base does not have")
        for name, shape in shapes.items():
            numbers, scale = tensors[f"{name}.q"], tensors[f"{name}.scale"]
            if list(before[name].shape) != shape or not _whole(numbers, scale, about["bits"], before[name].numel()):
                raise _damaged(folder, f"what they hold of {name} does not fit the base")
            before[name].add_(restored(numbers, scale, about["bits"], shape).to(before[name]))
        return gates


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own error type is not public
        raise ValueError(f"{path} cannot be read ({error}); it is damaged") from None


def _whole(numbers: Tensor, scale: Tensor, bits: int, size: int) -> bool:
    """Whether they are what `rounded` makes of so many weights."""
    groups = -(-size // GROUP)
    sizes = (tuple(numbers.shape), tuple(scale.shape)) == ((groups, GROUP * bits // 8), (groups,))
    return sizes and numbers.dtype == torch.uint8 and scale.dtype == torch.float32 and bool(scale.isfinite().all())


def _damaged(folder: Path, why: str) -> ValueError:
    return ValueError(f"{folder / ABOUT} and {WEIGHTS} are damaged: {why}")


def read_about(folder: Path) -> About:
    """What delta.json says, or a sentence about what is wrong with it."""
    with reading(folder / ABOUT):
        about: About = read_json(folder / ABOUT)  # type: ignore[assignment]
        kinds = isinstance(about["shapes"], dict) and isinstance(about["base"], str)
        if about["version"] != 1 or about["bits"] not in LEVELS or not kinds:
            raise ValueError(f"{folder / ABOUT} is of another version, or damaged")
        Gate(normalise=about["normalise"])  # type: ignore[arg-type]
        return about
