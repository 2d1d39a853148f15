"""Where things are in a Hugging Face decoder: the only file that knows GPT-2 from Llama.

A Site is the address of one part of a model: `a3` all heads of layer 3, `a3.h1` one of them, `m4` the MLP of layer 4.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, order=True)
class Site:
    """The address of one part of a model."""

    kind: str  # "a": attention, "m": MLP
    layer: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}" + ("" if self.head is None else f".h{self.head}")

    @classmethod
    def parse(cls, text: "str | Site") -> "Site":
        """`a3`, `a3.h1` or `m4`; ValueError otherwise."""
        if isinstance(text, Site):
            return text
        match = re.fullmatch(r"([am])(\d+)(?:\.h(\d+))?", text)
        if match is None or (match[1] == "m" and match[3]):
            raise ValueError(
                f"unknown site {text!r}: expected a3 (all heads of layer 3), a3.h1 (one head) or m3 (an MLP)"
            )
        return cls(match[1], int(match[2]), int(match[3]) if match[3] else None)


@dataclass(frozen=True)
class Architecture:
    """Where the parts of one model family are, and the few things about it that no module can be asked."""

    layers: str  # path of the list of blocks
    attention: str  # name of the attention in a block
    mlp: str = "mlp"
    final_norm: str = "model.norm"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: a fused projection
    interleaved: bool = False  # a fused projection is [head, q/k/v, d_head] instead of [q/k/v, head, d_head]
    output: str = "o_proj"
    attention_norm: str | None = "input_layernorm"  # before attention
    mlp_norm: str | None = "post_attention_layernorm"  # before the MLP
    attention_post: str | None = None  # norm of what attention writes, before it is added
    mlp_post: str | None = None
    query_norm: str = "q_norm"  # of queries and keys, before they are rotated; most families have none
    key_norm: str = "k_norm"
    positions: str | None = None  # path of an embedding of positions, where they do not rotate
    parallel: bool | str = False  # attention and MLP of a block read the same residual stream; a config field says so
    window: str | None = None  # config field with the window of all layers; None: each attention's own `sliding_window`
    softcap: str | None = None  # config field with the softcap of attention logits


_LLAMA_LIKE = Architecture(layers="model.layers", attention="self_attn")
_GEMMA = replace(
    _LLAMA_LIKE, attention_post="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)  # fmt: skip

# config.model_type -> where to look. Each has a tiny model in tests/tiny_models.py.
ARCHITECTURES = {
    "gpt2": Architecture(
        layers="transformer.h", attention="attn", final_norm="transformer.ln_f", projections=("c_attn",),
        output="c_proj", attention_norm="ln_1", mlp_norm="ln_2", positions="transformer.wpe",
    ),
    "gpt_neox": Architecture(
        layers="gpt_neox.layers", attention="attention", final_norm="gpt_neox.final_layer_norm",
        projections=("query_key_value",), interleaved=True, output="dense", parallel="use_parallel_residual",
    ),
    "llama": _LLAMA_LIKE,
    "mistral": replace(_LLAMA_LIKE, window="sliding_window"),
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "olmo": _LLAMA_LIKE,
    "olmo2": replace(_GEMMA, attention_norm=None, mlp_norm=None),
    "gemma2": replace(_GEMMA, softcap="attn_logit_softcapping"),
    "gemma3_text": _GEMMA,
}  # fmt: skip


@dataclass(frozen=True)
class Dimensions:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    max_tokens: int  # longest sequence the model was made for


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Make a family known, by the `model_type` of its config. ValueError when another one has that name."""
    if ARCHITECTURES.setdefault(model_type, architecture) != architecture:
        raise ValueError(f"there is another architecture {model_type!r} already: {ARCHITECTURES[model_type]}")


def architecture(config: Any) -> Architecture:
    """The architecture of this config; ValueError naming the supported families otherwise."""
    try:
        return ARCHITECTURES[config.model_type]
    except KeyError:
        raise ValueError(
            f"a {config.model_type!r} model cannot be gated or taken apart here. Supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. Others may be added with register_architecture() (docs/extending.md)."
        ) from None


def dimensions(config: Any) -> Dimensions:
    """The sizes every room speaks of, under one set of names."""
    n_heads = config.num_attention_heads
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if getattr(config, name) < 1:
            raise ValueError(f"the model's config says {name}={getattr(config, name)}: expected at least 1")
    return Dimensions(
        n_layers=config.num_hidden_layers, n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads, d_model=config.hidden_size,
        d_head=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
        max_tokens=config.max_position_embeddings,
    )  # fmt: skip


def mlp_width(config: Any) -> int:
    """Width of the MLP's hidden layer."""
    return int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size)


def parallel_blocks(config: Any) -> bool:
    """Whether attention and MLP of a block read the same residual stream (GPT-NeoX), not one after the other."""
    parallel = architecture(config).parallel
    return bool(getattr(config, parallel)) if isinstance(parallel, str) else parallel


def base_model(model: nn.Module) -> Any:
    """The Hugging Face model itself, seen through a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, first to last."""
    base = base_model(model)
    return list(base.get_submodule(architecture(base.config).layers))


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention module of every layer, first to last. Looks through PEFT wrappers."""
    name = architecture(base_model(model).config).attention
    return [getattr(layer, name) for layer in blocks(model)]


def output_projections(model: nn.Module) -> list[nn.Module]:
    """Per layer, what takes all heads' value mixes [batch, tokens, n_heads * d_head] to the residual stream."""
    name = architecture(base_model(model).config).output
    return [getattr(attention, name) for attention in attention_modules(model)]


def mlp_modules(model: nn.Module) -> list[nn.Module]:
    """The MLP of every layer, first to last."""
    name = architecture(base_model(model).config).mlp
    return [getattr(layer, name) for layer in blocks(model)]


@dataclass(frozen=True)
class Parts:
    """What one block is made of, under the same names for every family. `None`: the family has no such part."""

    weights: dict[str, tuple[Tensor, Tensor | None]]  # q, k, v -> [heads, d_model, d_head], bias [heads, d_head]
    output: tuple[Tensor, Tensor | None]  # [n_heads, d_head, d_model], bias [d_model]
    attention_norm: nn.Module | None
    attention_post: nn.Module | None
    mlp_norm: nn.Module | None
    mlp: nn.Module
    mlp_post: nn.Module | None
    query_norm: nn.Module | None  # on queries before rotation, over one head or over all heads at once
    key_norm: nn.Module | None
    rotate: Callable[..., tuple[Tensor, Tensor]] | None  # (q, k, cos, sin) -> (q, k)
    clip: float | None
    scale: float
    window: int | None
    softcap: float | None


def parts(model: nn.Module, layer: int) -> Parts:
    """Take one block apart. Weights are views wherever the family stores them plainly."""
    base = base_model(model)
    config, names, d = base.config, architecture(base.config), dimensions(base.config)
    block = blocks(model)[layer]
    attention: Any = getattr(block, names.attention)

    def module(owner: Any, name: str | None) -> Any:
        return None if name is None else getattr(owner, name, None)

    out, out_bias = linear(getattr(attention, names.output))
    return Parts(
        weights=_projections(attention, names, d), output=(out.view(d.n_heads, d.d_head, -1), out_bias),
        attention_norm=module(block, names.attention_norm), attention_post=module(block, names.attention_post),
        mlp_norm=module(block, names.mlp_norm), mlp=getattr(block, names.mlp), mlp_post=module(block, names.mlp_post),
        query_norm=module(attention, names.query_norm), key_norm=module(attention, names.key_norm),
        # The family's own rotation: NeoX turns part of a head, the others all of it.
        rotate=getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None),
        clip=getattr(config, "clip_qkv", None), scale=getattr(attention, "scaling", d.d_head**-0.5),
        window=getattr(config, names.window) if names.window else getattr(attention, "sliding_window", None),
        softcap=getattr(config, names.softcap) if names.softcap else None,
    )  # fmt: skip


def _projections(attention: Any, names: Architecture, d: Dimensions) -> dict[str, tuple[Tensor, Tensor | None]]:
    """`Parts.weights`: q, k and v, whether they are stored apart or in one matrix."""
    if len(names.projections) > 1:
        found = {}
        for name, projection in zip("qkv", names.projections, strict=True):
            weight, bias = linear(getattr(attention, projection))
            each = weight.view(len(weight), -1, d.d_head).permute(1, 0, 2)
            found[name] = each, None if bias is None else bias.view(-1, d.d_head)
        return found
    weight, bias = linear(getattr(attention, names.projections[0]))
    # [d_model, q/k/v, head, d_head], or the head first
    shape = (d.n_heads, 3, d.d_head) if names.interleaved else (3, d.n_heads, d.d_head)
    which = 1 if names.interleaved else 0
    every = weight.view(-1, *shape).unbind(which + 1)
    biases = (None,) * 3 if bias is None else bias.view(shape).unbind(which)
    return {name: (every[i].permute(1, 0, 2), biases[i]) for i, name in enumerate("qkv")}


def linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(weight [d_in, d_out], bias [d_out] or None) of a linear map, however it is stored (also with LoRA on it)."""
    if type(module) is torch.nn.Linear:
        return module.weight.T, module.bias
    if type(module) is Conv1D:
        return module.weight, module.bias
    weight = next(module.parameters())
    d_in = int(getattr(module, "in_features", None) or module.weight.shape[0])  # type: ignore
    with torch.no_grad():  # whatever it is, it is what it does to the unit vectors
        bias = module(weight.new_zeros(1, d_in))[0]
        return module(torch.eye(d_in, dtype=weight.dtype, device=weight.device)) - bias, bias


class Unembedding(NamedTuple):
    """From the last residual stream to logits."""

    norm: nn.Module
    weight: Tensor  # [d_model, vocabulary]
    bias: Tensor | None  # [vocabulary]
    softcap: float | None  # logits become softcap * tanh(logits / softcap)


def unembedding(model: nn.Module) -> Unembedding:
    """The last norm and what turns its output into logits."""
    base = base_model(model)
    norm = base.get_submodule(architecture(base.config).final_norm)
    softcap = getattr(base.config, "final_logit_softcapping", None)
    return Unembedding(norm, *linear(base.get_output_embeddings()), softcap)


def unembed(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., vocabulary] from the last residual stream [..., d_model]."""
    base = base_model(model)
    normed = base.get_submodule(architecture(base.config).final_norm)(hidden)
    return softcapped(base.get_output_embeddings()(normed), getattr(base.config, "final_logit_softcapping", None))


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits after a softcap, where there is one."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def position_embeddings(model: nn.Module, tokens: int) -> Tensor | None:
    """What the first positions add to the residual stream, [tokens, d_model]; None where positions only rotate."""
    base = base_model(model)
    path = architecture(base.config).positions
    return None if path is None else base.get_submodule(path).weight[:tokens]


def norm_parts(norm: nn.Module, like: Tensor) -> tuple[Tensor, Tensor, bool, float]:
    """(gain, bias, centred, epsilon): norm(x) = gain * c / sqrt(mean(c^2) + epsilon) + bias.

    c is x, or x - mean(x) if centred. Asked of the norm itself, so that it does not matter how its weights are stored.
    like: [..., d_model], for its dtype and device.
    """
    epsilon: Any = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-5)  # OLMo's has it in its code
    zero = torch.zeros_like(like.reshape(-1, like.shape[-1])[0])
    bias = norm(zero)
    centred = bool((norm(zero + 1) - bias).abs().max() < 1e-3 * (norm(_alternating(zero)) - bias).abs().max())
    probe = _alternating(zero)
    probe = probe - probe.mean() if centred else probe
    return (norm(probe) - bias) / probe * (probe.pow(2).mean() + epsilon).sqrt(), bias, centred, float(epsilon)


def _alternating(zero: Tensor) -> Tensor:
    return zero + 1 - 2 * (torch.arange(len(zero), device=zero.device) % 2).to(zero.dtype)


def rms_gain(norm: nn.Module) -> tuple[Tensor, float]:
    """(gain [d_model], epsilon) of an RMS norm x -> gain * x / sqrt(mean(x^2) + epsilon), whatever its weights mean."""
    weight = next(norm.parameters())
    epsilon = float(getattr(norm, "variance_epsilon", None) or norm.eps)  # type: ignore[arg-type]
    return norm(torch.ones_like(weight)) * (1 + epsilon) ** 0.5, epsilon
