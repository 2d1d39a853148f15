"""The cross-layer transcoder: sparse features that stand in for a model's MLPs.

A feature of layer l reads the MLP input of layer l and writes to the MLP outputs of layers l, l + 1, ... (cross-layer)
or of layer l alone (per-layer):

  1. pre-activations  z_l = W_enc[l] x_l + b_enc[l]                             [n_features]
  2. activations      a_l = z_l where it is large enough, else 0                JumpReLU, TopK or BatchTopK
  3. reconstruction   y_m = b_dec[m] + sum over l <= m of a_l W_dec[l][:, m - l]    [d_model]

Everything is in the model's own units: x is what the MLP module receives, y what it returns.

Its folder has circuit-tracer's layout. Cross-layer (model_kind: cross_layer_transcoder):
    config.yaml             model_name, model_kind, feature_input_hook, feature_output_hook, scan
    model.json              some weights of that model, so that another one can be refused (ours; need not be there)
    W_enc_i.safetensors     W_enc_i [n_features, d_model], b_enc_i, b_dec_i, threshold_i (without it: ReLU)
    W_dec_i.safetensors     W_dec_i [n_features, n_layers - i, d_model]
Per-layer (model_kind: transcoder_set):
    layer_i.safetensors     W_enc, W_dec [n_features, d_model], b_enc, b_dec, activation_function.threshold
TopK and BatchTopK add `activation` and `k` to config.yaml. Nothing but YAML scalars and safetensors is ever read.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..models.identity import Sketch
from ..runs import pictures
from ..runs.run import read_json, reading, whole_folder, write_bytes, write_json
from .decoding import active, batch_topk_mask, batch_topk_threshold, entries, topk_mask, write
from .place import FOLDER, find_transcoder

Activation = Literal["jumprelu", "topk", "batchtopk"]
InputHook = Literal["mlp-input", "residual"]
# circuit-tracer's names for what features read. Its hook_mlp_in is the residual stream, before the MLP's norm.
HOOKS: dict[str, InputHook] = {"mlp.hook_in": "mlp-input", "hook_resid_mid": "residual", "hook_mlp_in": "residual"}
OUTPUT_HOOKS = ("hook_mlp_out", "mlp.hook_out")
MODEL = "model.json"  # in it: by what its model is known


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


class Transcoder(nn.Module):
    """Encoders, decoders and thresholds of all layers.

    W_enc[l] [n_features, d_model]; b_enc[l] [n_features]; W_dec[l] [n_features, targets, d_model], where W_dec[l][f, j]
    is what feature f of layer l writes to the MLP output of layer l + j; b_dec[l] [d_model]; threshold[l] [n_features]
    (JumpReLU only).
    """

    def __init__(
        self, n_layers: int, n_features: int, d_model: int, *, cross_layer: bool = True,
        activation: Activation = "jumprelu", k: int | None = None, input_hook: InputHook = "mlp-input",
        model_name: str = "", dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        super().__init__()
        for name, value in (("n_layers", n_layers), ("n_features", n_features), ("d_model", d_model)):
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        check_activation(activation, k, n_features)
        if input_hook not in get_args(InputHook):
            raise ValueError(f"input_hook={input_hook!r}: expected 'mlp-input' or 'residual'")
        self.n_layers, self.n_features, self.d_model = n_layers, n_features, d_model
        self.cross_layer, self.activation, self.input_hook = cross_layer, activation, input_hook
        self.k = None if activation == "jumprelu" else k
        self.model_name = model_name
        self.sketch: Sketch | None = None  # of the model it was trained on, where that is known

        def each(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for _ in range(n_layers))

        self.W_enc, self.b_enc = each(n_features, d_model), each(n_features)
        self.W_dec = nn.ParameterList(
            nn.Parameter(torch.zeros(n_features, self.n_targets(layer), d_model, dtype=dtype))
            for layer in range(n_layers)
        )
        self.b_dec = each(d_model)
        self.threshold = each(n_features) if activation == "jumprelu" else nn.ParameterList()

    @torch.no_grad()
    def _repr_html_(self) -> str:
        """For notebooks: how much the features of each layer write to the MLP output of each."""
        norms = [
            [0.0] * (layer if self.cross_layer else 0) + self.W_dec[layer].float().norm(dim=-1).mean(0).tolist()
            for layer in range(self.n_layers)
        ]
        if not self.cross_layer:
            return pictures.page(repr(self), pictures.heat(norms, "its own layer", "features of layer"))
        return pictures.page(repr(self), pictures.heat(norms, "MLP output of layer", "features of layer"))

    def n_targets(self, layer: int) -> int:
        """How many MLP outputs the features of a layer write to."""
        return self.n_layers - layer if self.cross_layer else 1

    def pre_activations(self, layer: int, x: Tensor) -> Tensor:
        """[..., n_features] from what the layer's MLP receives, [..., d_model]: affine."""
        return F.linear(x, self.W_enc[layer], self.b_enc[layer])

    def activate(self, layer: int, pre: Tensor) -> Tensor:
        """Activations >= 0, mostly zero, from pre-activations [..., n_features]."""
        if self.activation == "jumprelu":
            return pre * active(pre, self.threshold[layer])
        assert self.k is not None
        select = topk_mask if self.activation == "topk" else batch_topk_mask
        return pre * select(pre.flatten(0, -2), self.k).view_as(pre)

    def encode(self, layer: int, x: Tensor) -> Tensor:
        """Activations [..., n_features] of the features of a layer. BatchTopK looks at all tokens of x together."""
        return self.activate(layer, self.pre_activations(layer, x))

    def decode(self, activations: list[Tensor]) -> list[Tensor]:
        """Reconstructed MLP outputs [..., d_model] of every layer, from the activations of every layer."""
        outputs = [self.b_dec[layer].expand(*a.shape[:-1], self.d_model) for layer, a in enumerate(activations)]
        for layer, a in enumerate(activations):
            written = torch.einsum("...f,fjd->...jd", a, self.W_dec[layer])
            for j in range(self.n_targets(layer)):
                outputs[layer + j] = outputs[layer + j] + written[..., j, :]
        return outputs

    def written(self, layer: int, activations: Tensor) -> Tensor:
        """[..., targets, d_model]: what a layer's activations [..., n_features] write. The sparse path of `decode`."""
        flat = activations.flatten(0, -2)
        at = entries(flat != 0)
        written = write(flat[at.tokens, at.features], at, self.W_dec[layer])
        return written.view(*activations.shape[:-1], *written.shape[1:])

    def reconstruct(self, inputs: list[Tensor]) -> list[Tensor]:
        """Reconstructed MLP outputs of every layer from what the MLPs receive, each [..., d_model]."""
        return self.decode([self.encode(layer, x) for layer, x in enumerate(inputs)])

    @torch.no_grad()
    def as_jumprelu(self, inputs: list[Tensor]) -> "Transcoder":
        """The same features behind fixed thresholds, one per layer, that give the same activations on these inputs.

        inputs: per layer [..., d_model]. Only for BatchTopK, whose choice already is a threshold, one per batch.
        """
        if self.activation != "batchtopk" or self.k is None:
            raise ValueError(f"a {self.activation} transcoder has no common threshold; only batchtopk can be converted")
        kind = replace(self.kind, activation="jumprelu", k=None)
        converted = Transcoder(self.n_layers, self.n_features, self.d_model, **vars(kind), dtype=self.W_enc[0].dtype)
        converted.to(self.W_enc[0].device)
        converted.load_state_dict(self.state_dict(), strict=False)
        for layer, x in enumerate(inputs):
            pre = self.pre_activations(layer, x).flatten(0, -2)
            converted.threshold[layer].fill_(batch_topk_threshold(pre, self.k))
        return converted.requires_grad_(False)

    @classmethod
    def random(
        cls, n_layers: int, n_features: int, d_model: int, *, cross_layer: bool = True,
        activation: Activation = "jumprelu", seed: int = 0, dtype: torch.dtype = torch.float32,
    ) -> "Transcoder":  # fmt: skip
        """A random transcoder of which about a fifth of the features is active on inputs of unit scale. For tests."""
        k = None if activation == "jumprelu" else max(1, n_features // 5)
        made = cls(n_layers, n_features, d_model, cross_layer=cross_layer, activation=activation, k=k, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        scale = {"W_enc": d_model**-0.5, "b_enc": 0.1, "W_dec": (n_features * n_layers * 0.2) ** -0.5, "b_dec": 0.1}
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                kind = name.split(".")[0]
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.84 + 0.05 * noise if kind == "threshold" else noise * scale[kind])
        return made.requires_grad_(False)

    @classmethod
    def load(cls, folder: str | Path, device: str | None = None) -> "Transcoder":
        """Read a folder in circuit-tracer's layout, or the transcoder of a Run.

        ValueError naming the file for anything missing, misshapen or not finite.
        """
        kind, layers = read_folder(Path(folder))
        n_features, d_model = layers[0]["W_enc"].shape
        double = any(tensor.dtype == torch.float64 for layer in layers for tensor in layer.values())
        dtype = torch.float64 if double else torch.float32
        made = cls(len(layers), n_features, d_model, **vars(kind), dtype=dtype)
        wanted = ["W_dec", "W_enc", "b_dec", "b_enc"]
        if kind.activation == "jumprelu" and any("threshold" in layer for layer in layers):  # without them: ReLU
            wanted.append("threshold")
        for layer, tensors in enumerate(layers):
            for name in wanted:
                what = f"{name} of layer {layer} in {folder}"
                fill_from_file(getattr(made, name)[layer], tensors.get(name), what)
        made.sketch = read_sketch(Path(folder))
        return made.to(device).requires_grad_(False).eval()

    def save(self, folder: str | Path) -> Path:
        """Write a folder in circuit-tracer's layout: config.yaml and safetensors. It appears whole or not at all."""
        names = ["W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if self.activation == "jumprelu" else [])]
        layers = [{name: getattr(self, name)[layer].detach() for name in names} for layer in range(self.n_layers)]
        return write_folder(Path(folder), self.kind, layers, self.sketch)

    @property
    def kind(self) -> Kind:
        return Kind(self.cross_layer, self.activation, self.k, self.input_hook, self.model_name)

    def __repr__(self) -> str:
        kind = "cross-layer" if self.cross_layer else "per-layer"
        k = "" if self.k is None else f", k={self.k}"
        size = f"{self.n_layers} x {self.n_features} features, d_model={self.d_model}"
        return f"Transcoder({kind}, {size}, {self.activation}{k})"


# ---- its folder ------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, kind: Kind, layers: list[dict[str, Tensor]], sketch: Sketch | None = None) -> Path:
    """Write the folder beside its final place, then rename it. layers: their tensors, under their plain names."""
    config: dict[str, str | int] = {
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
        if sketch is not None:
            write_json(fresh / MODEL, sketch)
    return folder


def read_sketch(folder: Path) -> Sketch | None:
    """The sketch of the model that a transcoder was trained on; None where its folder has none."""
    path = next((path for path in (folder / MODEL, folder / FOLDER / MODEL) if path.is_file()), None)
    if path is None:
        return None
    found: Sketch = read_json(path)
    with reading(path):
        if not all(isinstance(value, float | int) for name in ("weights", "gates") for value in found[name]):
            raise TypeError("expected numbers")
    return found


def read_folder(folder: Path) -> tuple[Kind, list[dict[str, Tensor]]]:
    """What the transcoder in a folder or Run is, and per layer its tensors; W_dec [n_features, targets, d_model]."""
    folder = find_transcoder(folder)
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
