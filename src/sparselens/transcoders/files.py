"""Transcoder folders in circuit-tracer's layout, written and read.

Cross-layer (model_kind: cross_layer_transcoder)
    config.yaml             model_name, model_kind, feature_input_hook, feature_output_hook, scan
    W_enc_i.safetensors     W_enc_i [n_features, d_model], b_enc_i, b_dec_i, threshold_i (without it: ReLU)
    W_dec_i.safetensors     W_dec_i [n_features, n_layers - i, d_model]
Per-layer (model_kind: transcoder_set)
    layer_i.safetensors     W_enc, W_dec [n_features, d_model], b_enc, b_dec, activation_function.threshold

TopK and BatchTopK add `activation` and `k` to config.yaml. Nothing but YAML scalars and safetensors is ever read.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..runs.run import whole_folder, write_bytes

Activation = Literal["jumprelu", "topk", "batchtopk"]
InputHook = Literal["mlp-input", "residual"]
# circuit-tracer's names for what features read. Its hook_mlp_in is the residual stream, before the MLP's norm.
HOOKS: dict[str, InputHook] = {"mlp.hook_in": "mlp-input", "hook_resid_mid": "residual", "hook_mlp_in": "residual"}
OUTPUT_HOOKS = ("hook_mlp_out", "mlp.hook_out")
FOLDER = "transcoder"  # of a Run


@dataclass(frozen=True)
class Kind:
    """What a transcoder is, beside its weights."""

    cross_layer: bool
    activation: Activation
    k: int | None  # None for JumpReLU
    input_hook: InputHook
    model_name: str


def check_activation(activation: str, k: int | None, n_features: int) -> Activation:
    """ValueError for an unknown activation, or a k that it does not have or cannot have."""
    if activation not in get_args(Activation):
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(get_args(Activation))}")
    if activation != "jumprelu" and (k is None or not 1 <= k <= n_features):
        raise ValueError(f"k={k}: {activation} expects between 1 and {n_features} (the features of a layer)")
    return activation  # type: ignore[return-value]  # one of them


def write_folder(folder: Path, kind: Kind, layers: list[dict[str, Tensor]]) -> Path:
    """Write the folder beside its final place, then rename it. layers: their tensors, under their plain names."""
    config: dict[str, Any] = {
        "model_name": kind.model_name, "model_kind": "cross_layer_transcoder" if kind.cross_layer else "transcoder_set",
        "feature_input_hook": next(name for name, hook in HOOKS.items() if hook == kind.input_hook),
        "feature_output_hook": "hook_mlp_out", "scan": Path(kind.model_name).name,
    }  # fmt: skip
    if kind.k is not None:
        config |= {"activation": kind.activation, "k": kind.k}
    with whole_folder(folder) as fresh:
        fresh.mkdir()
        for layer, plain in enumerate(layers):
            tensors = {name: tensor.cpu().contiguous() for name, tensor in plain.items()}
            if kind.cross_layer:
                decoder = tensors.pop("W_dec")
                numbered = {f"{name}_{layer}": tensor for name, tensor in tensors.items()}
                save_file(numbered, fresh / f"W_enc_{layer}.safetensors")
                save_file({f"W_dec_{layer}": decoder}, fresh / f"W_dec_{layer}.safetensors")
            else:
                tensors["W_dec"] = tensors["W_dec"][:, 0].contiguous()
                if "threshold" in tensors:
                    tensors["activation_function.threshold"] = tensors.pop("threshold")
                save_file(tensors, fresh / f"layer_{layer}.safetensors")
        # Scalars only; strings quoted as JSON, which YAML reads.
        lines = (f"{key}: {json.dumps(value)}\n" for key, value in config.items())
        write_bytes(fresh / "config.yaml", "".join(lines).encode())
    return folder


def read_folder(folder: Path) -> tuple[Kind, list[dict[str, Tensor]]]:
    """What the transcoder in a folder or Run is, and per layer its tensors; W_dec [n_features, targets, d_model]."""
    if not (folder / "config.yaml").is_file() and (folder / FOLDER / "config.yaml").is_file():
        folder = folder / FOLDER
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"no transcoder in {folder}: expected a config.yaml beside W_enc_*.safetensors or layer_*.safetensors "
            "(make one with `sparselens transcode`)"
        )
    config = _read_config(folder / "config.yaml")
    cross_layer = config["model_kind"] == "cross_layer_transcoder"
    layers = _read_layers(folder, cross_layer)
    activation = str(config.get("activation") or "jumprelu").replace("_", "").lower()
    if activation == "relu":
        activation = "jumprelu"  # with thresholds of zero
    k = config.get("k") if activation != "jumprelu" else None
    try:
        known = check_activation(activation, k, len(layers[0]["W_enc"]))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.yaml'}: {error}") from None
    name = str(config.get("model_name") or "")
    return Kind(cross_layer, known, k, HOOKS[config["feature_input_hook"]], name), layers


@torch.no_grad()
def fill_from_file(parameter: Tensor, found: Tensor | None, what: str) -> None:
    """Copy what a file held, if it is all there."""
    if found is None:
        raise ValueError(f"{what} is missing; the folder is not complete")
    if found.shape != parameter.shape:
        raise ValueError(f"{what} has shape {list(found.shape)}, expected {list(parameter.shape)}")
    if not found.isfinite().all():
        raise ValueError(f"{what} holds NaN or infinite numbers; the transcoder cannot be used")
    parameter.copy_(found)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found {type(config).__name__}")
    kinds = ("cross_layer_transcoder", "transcoder_set")
    if config.get("model_kind") not in kinds:
        raise ValueError(f"{path}: model_kind is {config.get('model_kind')!r}, expected {' or '.join(kinds)}")
    # Other releases write the full path of the hook, with the layer in it.
    for key in ("feature_input_hook", "feature_output_hook"):
        config[key] = re.sub(r"^blocks\.(\{layer\}|\d+)\.", "", str(config.get(key)))
    if config["feature_input_hook"] not in HOOKS:
        raise ValueError(
            f"{path}: features read {config['feature_input_hook']!r}; supported are {', '.join(HOOKS)} "
            "(ln2.hook_normalized lies between a norm and its gain: fold the gain into W_enc and use mlp.hook_in)"
        )
    if config["feature_output_hook"] not in OUTPUT_HOOKS:
        raise ValueError(f"{path}: features write {config['feature_output_hook']!r}; supported is hook_mlp_out")
    return config


def _read_layers(folder: Path, cross_layer: bool) -> list[dict[str, Tensor]]:
    """Per layer the tensors under their plain names, W_dec always [n_features, targets, d_model]."""
    prefix = "W_enc" if any(folder.glob("W_enc_*.safetensors")) else "layer"
    pattern = re.compile(rf"{prefix}_(\d+)\.safetensors")
    numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name)))
    if not numbers:
        raise ValueError(f"{folder} holds neither W_enc_*.safetensors nor layer_*.safetensors")
    if numbers != list(range(len(numbers))):
        missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
        raise ValueError(f"{folder} has no {prefix}_{missing[0]}.safetensors; every layer from 0 on is needed")
    layers = []
    for number in numbers:
        tensors = _read(folder / f"{prefix}_{number}.safetensors")
        if prefix == "W_enc":
            tensors |= _read(folder / f"W_dec_{number}.safetensors")
            tensors = {name.removesuffix(f"_{number}"): tensor for name, tensor in tensors.items()}
        tensors = {name.removeprefix("activation_function."): tensor for name, tensor in tensors.items()}
        if "W_skip" in tensors:
            raise ValueError(f"{folder} has skip connections (W_skip, layer {number}), which are not supported")
        if "W_enc" not in tensors or tensors["W_enc"].ndim != 2:
            raise ValueError(f"W_enc of layer {number} in {folder} is missing or not [n_features, d_model]")
        if not cross_layer and "W_dec" in tensors and tensors["W_dec"].ndim == 2:
            tensors["W_dec"] = tensors["W_dec"][:, None]
        layers.append(tensors)
    return layers


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; the transcoder is not complete")
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own error type is not public
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
