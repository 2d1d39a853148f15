"""What transformers calls in place of its own attention: gates, document masks in linear memory, counts of pairs.

Registered under the name "sparselens". Keyword arguments of `model(...)` that reach the gates:
    gate_sample   draw the gates (training) instead of opening them where G > 0
    gate_seed     seed of the draw; layer, batch, head, query and key are mixed in. (seed, n): draw as the sequences of
                  a larger batch would, from its n-th on. None: what `keep_seeds` left on the attention modules
    gate_output   what comes back in `outputs.attentions[layer]` with output_attentions=True: "pattern" (default) and
                  "margin" [batch, n_heads, queries, keys]: gate * softmax, and G = S + b; "edges" [batch, n_heads, 2]:
                  open edges and allowed pairs, in linear memory. "kept": nothing comes back; the counts wait on the
                  attention modules for `take_counts`

Compiled blocks are one graph each with `gate_seed=None, gate_output="kept"`: seeds are tensors, so that no step
compiles anew, and counts leave without transformers' hooks, which no graph can hold.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..gating import PatternOptions, dense_attention, gated_attention, gated_pattern
from ..gating.reference import kernel_seed, later_seed, layer_seed
from .architectures import architecture, attention_modules, base_model, dimensions

NAME = "sparselens"
UNGATED = "sparselens-ungated"  # the same kernels for a dense model; no folder ever says so
DENSE_SHARE = 0.25  # |attention output| / |values| in a dense model: 0.2 to 0.6 in Gemma-3-270m
LEAST_FACTOR = 1e-3  # where nothing is left the norm's own epsilon, usually 1e-6, bounds its gradient at 1e3


Seed = int | tuple[int, int]  # of a whole batch; of its sequences from the n-th on


def gated_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    gate_output: str = "edges", **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(value mixes [batch, queries, n_heads, d_head], what `gate_output` asks for), as transformers wants them."""
    if gate_output == "kept":
        out, edges, used = _attend(module, query, key, value, attention_mask, **options)
        module.kept_counts = (edges, used["mask"], used["window"], query.shape[2], key.shape[2])  # type: ignore
        return out.transpose(1, 2), None
    asked = {**options, "gate_output": gate_output}
    return _attend_and_tell(module, query, key, value, attention_mask, **asked)  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_and_tell(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, gate_output: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, edges, used = _attend(module, query, key, value, attention_mask, **options)
    if gate_output == "edges":
        pairs = pairs_once(used["mask"], query.shape[2], key.shape[2], used["window"], query.device, edges.dtype)
        attentions = torch.stack([edges, pairs.expand_as(edges)], dim=-1)
    elif gate_output in ("pattern", "margin"):
        pattern, _edges = gated_pattern(query, key, module.gate_bias, **used)  # type: ignore[arg-type]
        attentions = pattern.weights if gate_output == "pattern" else pattern.margin
    else:
        raise ValueError(f"gate_output={gate_output!r}: expected 'edges', 'pattern', 'margin' or 'kept'")
    return out.transpose(1, 2), attentions


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    gate_sample: bool = False, gate_seed: Seed | None = 0, **_: Any,
) -> tuple[Tensor, Tensor, PatternOptions]:  # fmt: skip
    """(value mixes [batch, n_heads, queries, d_head], edges [batch, n_heads], how it looked)."""
    bias = getattr(module, "gate_bias", None)
    if bias is None:
        raise ValueError(
            f"{type(module).__name__} has no gates although its attention is {NAME!r}: "
            "load this model with sparselens.load(), not with from_pretrained()."
        )
    if dropout:
        raise ValueError(f"gated attention has no dropout (got {dropout}); set the config's attention dropout to 0")
    seed: int | Tensor = 0
    if gate_sample and gate_seed is None:
        seed = module.kept_seed  # type: ignore[assignment]
    elif gate_sample:
        seed = seed_of_layer(gate_seed, module.layer_idx, query.shape[1])  # type: ignore[arg-type]
    complete = attention_mask is not None and attention_mask.ndim == 4
    if complete and attention_mask.dtype != torch.bool:  # type: ignore[union-attr]
        attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min / 2  # type: ignore
    window = None if complete else sliding_window  # a 4-dimensional mask already says everything
    options: PatternOptions = {  # a plain dict: dynamo cannot trace the making of a TypedDict
        "scale": scaling, "causal": not complete, "window": window, "softcap": softcap, "mask": attention_mask,
        "sample": gate_sample, "seed": seed, "normalise": module.config.sparselens["normalise"],  # type: ignore
    }  # fmt: skip
    out, edges = gated_attention(query, key, value, bias, **options)
    if module.training and architecture(module.config).attention_post:
        out = bounded(out, value)
    return out, edges, options


def seed_of_layer(seed: Seed, layer: int, n_heads: int) -> int:
    """What one layer draws from: 32 bits."""
    seed, first = seed if isinstance(seed, tuple) else (seed, 0)
    return later_seed(layer_seed(seed, layer), first, n_heads)


def keep_seeds(model: nn.Module, seed: Seed) -> None:
    """Leave every layer's seed on its attention module, for passes with gate_seed=None."""
    modules = attention_modules(model)
    n_heads = dimensions(base_model(model).config).n_heads
    words = [kernel_seed(seed_of_layer(seed, module.layer_idx, n_heads)) for module in modules]  # type: ignore[arg-type]
    device = next(modules[0].parameters()).device
    for module, word in zip(modules, torch.tensor(words, dtype=torch.int32).to(device).split(1), strict=True):
        module.kept_seed = word  # type: ignore[assignment]


def take_counts(model: nn.Module) -> Tensor:
    """The open edges and allowed pairs that a pass with gate_output="kept" left: [n_layers, batch, n_heads, 2]."""
    layers = []
    for module in attention_modules(model):
        edges, mask, window, queries, keys = module.__dict__.pop("kept_counts")
        pairs = pairs_once(mask, queries, keys, window, edges.device, edges.dtype)
        layers.append(torch.stack([edges, pairs.expand_as(edges)], dim=-1))
    return torch.stack(layers)


def drop_counts(model: nn.Module) -> None:
    """Forget what a pass with gate_output="kept" left before it failed."""
    for module in attention_modules(model):
        module.__dict__.pop("kept_counts", None)


def refuse_other_attention(module: nn.Module, *_: Any) -> None:
    """Before every forward of an attention with gates: ValueError where transformers was told to run another one.

    `set_attn_implementation("sdpa")` leaves gates and config in place and would compute a dense model.
    """
    used = module.config._attn_implementation  # type: ignore[union-attr]
    if used != NAME and getattr(module.config, "sparselens", None) is not None:
        raise ValueError(
            f"this sparse model was switched to attn_implementation={used!r}, which would open every gate; "
            f"switch it back with set_attn_implementation({NAME!r})"
        )


def is_gated(model: nn.Module) -> bool:
    """Whether a model is sparse; ValueError where its config says so but nothing would close an edge."""
    if getattr(model.config, "sparselens", None) is None:
        return False
    for module in attention_modules(model):
        if getattr(module, "gate_bias", None) is None:
            raise ValueError(
                "this model's config says that it is sparse, but it has lost its gates, as from_pretrained() with an "
                "attn_implementation of its own leaves them out; load it with sparselens.load()"
            )
        refuse_other_attention(module)
    return True


def gate_biases(model: nn.Module) -> list[nn.Parameter]:
    """The gate bias [n_heads] of every layer."""
    return [module.gate_bias for module in attention_modules(model)]  # type: ignore[misc]


def give_patterns(decoder: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Before every forward of a decoder with gates: whoever asks for attentions and not what kind gets patterns.

    Here and not in the attention, which is not told whether anybody asked: without, a pattern would cost for nothing.
    """
    return (args, {"gate_output": "pattern"} | options) if options.get("output_attentions") else None


def bounded(out: Tensor, value: Tensor) -> Tensor:
    """`out` itself; where gates let little of the attention through, its gradient is as much smaller, token by token.

    For families with a norm right behind attention (Gemma, OLMo 2). The norm brings whatever is left back to full size,
    and so multiplies the gradient of every closed gate by one over the share that is left: in every layer, and they
    add up to gradients of 1e15 (docs/LOG.md). Without such a norm nothing of the kind happens, and this undoes it.
    """
    with torch.no_grad():
        group = out.shape[1] // value.shape[1]
        full = group * value.float().square().sum((1, 3)).mean(1, keepdim=True)  # all attention on one average token
        share = (out.float().square().sum((1, 3)) / full.clamp(min=torch.finfo(full.dtype).tiny)).sqrt()
        factor = (share / DENSE_SHARE).clamp(LEAST_FACTOR, 1)[:, None, :, None].to(out.dtype)
    return out.detach() + (out - out.detach()) * factor


def document_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
    use_vmap: bool = False, device: torch.device | str = "cpu", **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The mask in linear memory: the document number of every key, [batch, keys], 0 for padding; None if all are one.

    Two neighbouring tokens that may not see each other belong to different documents, so asking transformers' own
    mask function about neighbours is enough to find packed documents (and chunks). Whatever does not fit this form
    (custom mask functions, static caches) is built in full, [batch, 1, queries, keys].
    """
    if use_vmap or int(q_offset) + q_length != int(kv_offset) + kv_length:
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            use_vmap=use_vmap, device=device, **kwargs,
        )  # fmt: skip
    if mask_function is causal_mask_function and attention_mask is None:
        return None
    position = torch.arange(1, kv_length, device=device)[None, :] + kv_offset
    batch = torch.arange(batch_size, device=device)[:, None]
    together = mask_function(batch, torch.zeros_like(batch), position, position - 1).expand(batch_size, -1)
    document = torch.ones(batch_size, kv_length, dtype=torch.int32, device=device)
    document[:, 1:] += (~together).cumsum(1, dtype=torch.int32)
    if attention_mask is not None:
        document *= attention_mask[:, int(kv_offset) : int(kv_offset) + kv_length].to(torch.int32)
    return document


def count_pairs(mask: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """How many (query, key) pairs the mask allows, fp64 [batch] (or [1]), without building the pairs."""
    if mask is not None and mask.ndim == 4:
        return mask.sum((-1, -2), dtype=torch.float64).mean(1)
    document = torch.ones(1, keys, dtype=torch.int32, device=device) if mask is None else mask
    real = document != 0
    # seen[t] tokens up to t are real; a document starts where its number first appears (numbers only grow).
    seen = torch.cat([real.new_zeros(len(document), 1), real], 1).cumsum(1)
    number = document.cummax(1).values
    position = torch.arange(keys, device=device).expand_as(number)
    first = torch.ones_like(real)
    first[:, 1:] = number[:, 1:] != number[:, :-1]
    start = torch.where(first, position, 0).cummax(1).values
    if window is not None:
        start = torch.maximum(start, position - window + 1)
    visible = (seen[:, 1:] - seen.gather(1, start)) * real
    return visible[:, keys - queries :].sum(1).to(torch.float64)


def pairs_once(
    mask: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`count_pairs` as [batch or 1, 1], once per forward pass: its many small kernels would cost as much as attention.

    Layers share the mask tensor, so the count is kept on it; without a mask it depends on the sizes alone.
    """
    if mask is None:
        return _causal_pairs(queries, keys, window, device, dtype)
    known: dict[Any, Tensor] = mask.__dict__.setdefault("_sparselens_pairs", {})
    if (queries, window, dtype) not in known:
        known[queries, window, dtype] = count_pairs(mask, queries, keys, window, device).to(dtype)[:, None]
    return known[queries, window, dtype]


@functools.lru_cache(maxsize=64)
def _causal_pairs(queries: int, keys: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # the tensor outlives the caller
        return count_pairs(None, queries, keys, window, device).to(dtype)[:, None]


def dense_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """A dense model's attention by the kernels of the sparse one: for training, where documents are packed."""
    if getattr(module, "gate_bias", None) is not None:
        raise ValueError(f"this attention has gates; {UNGATED!r} would open all of them")
    if dropout or (attention_mask is not None and attention_mask.ndim == 4):
        raise ValueError(f"{UNGATED!r} has no dropout and no mask of queries x keys")
    out = dense_attention(query, key, value, scaling, mask=attention_mask, window=sliding_window)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, gated_attention_forward)
AttentionMaskInterface.register(NAME, document_mask)
AttentionInterface.register(UNGATED, dense_attention_forward)
AttentionMaskInterface.register(UNGATED, document_mask)
