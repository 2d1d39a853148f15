"""Gated attention: one function, one specification, as many implementations as there are devices worth it.

Imports nothing else of the package.
"""

import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from .reference import (
    GatedPattern,
    PatternOptions,
    allowed_pairs,
    dense_attention_reference,
    gated_attention_reference,
    gated_pattern,
)

__all__ = ["GatedPattern", "PatternOptions", "allowed_pairs", "dense_attention", "gated_attention", "gated_pattern"]

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the fused kernel
NORMALISATIONS = ("all", "open")
HAS_TRITON = importlib.util.find_spec("triton") is not None


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, scale: float | None = None, causal: bool = True,
    mask: Tensor | None = None, sample: bool = False, seed: int | Tensor = 0, normalise: str = "all",
    backend: str = "auto", *, window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention whose edges open and close: (out [batch, n_heads, queries, d_head], edges [batch, n_heads] fp32).

    q: [batch, n_heads, queries, d_head]; k, v: [batch, n_kv_heads, keys, d_head], n_heads a multiple of n_kv_heads.
    bias: [n_heads] or a float, added to the attention logit to give the gate logit G.
    scale: multiplies Q K^T; None is 1/sqrt(d_head).
    mask: [batch, keys] document number of each token (0 = padding), or bool [batch, heads or 1, queries, keys].
    sample: draw gates with probability sigmoid(G) from `seed`; otherwise a gate is open where G > 0.
    seed: any int, of which 32 bits count; or an integer tensor of one number, which a compiled graph reads anew.
    normalise: "all" keeps the softmax over every allowed key; "open" renormalises over open ones.
    window: a query sees its last `window` keys, itself included. softcap: logits become softcap * tanh(logits/softcap).
    backend: "auto" and "triton" use the fused kernel where it can do the call, and the reference where it cannot.
    edges: expected number of open edges when sampling, the real number otherwise; differentiable in both cases.
    """
    _check(q, k, v, mask, normalise, backend)
    if backend != "reference":
        if q.is_cuda and torch.is_autocast_enabled("cuda"):  # as autocast does for scaled_dot_product_attention
            q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
        reason = _unsupported(q, k, v, bias, scale, mask, sample, normalise, softcap, backend)
        if reason is None:
            if (
                not isinstance(bias, Tensor)
                or (bias.dtype, bias.ndim) != (torch.float32, 1)
                or not bias.is_contiguous()
            ):
                bias = torch.as_tensor(bias, dtype=torch.float32, device=q.device).expand(q.shape[1]).contiguous()
            documents = None if mask is None else mask.to(torch.int32).contiguous()
            scale = q.shape[3] ** -0.5 if scale is None else scale
            if normalise == "all":
                from .op import fused_gated_attention

                return fused_gated_attention(q, k, v, bias, documents, scale, causal, window, sample, seed)
            from .triton_open import open_attention

            return open_attention(q, k, v, bias, documents, scale, causal, window)
        # On a CPU the reference is the natural choice; anywhere else, or when asked for, say why it is slow.
        if q.device.type != "cpu" or backend == "triton":
            _warn_once(reason)
    return gated_attention_reference(
        q, k, v, bias, scale=scale, causal=causal, window=window, softcap=softcap, mask=mask, sample=sample, seed=seed,
        normalise=normalise,
    )  # fmt: skip


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = True, mask: Tensor | None = None, *,
    window: int | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention without gates: out [batch, n_heads, queries, d_head]. Arguments as in `gated_attention`.

    By the same kernels, which skip what lies between packed documents; PyTorch's read a mask of queries x keys.
    """
    _check(q, k, v, mask, "all", backend)
    if q.is_cuda and torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if backend == "reference" or _unsupported(q, k, v, 0.0, scale, mask, False, "all", None, backend) is not None:
        return dense_attention_reference(q, k, v, mask, scale, causal, window or 0)
    from .op import fused_gated_attention

    documents = None if mask is None else mask.to(torch.int32).contiguous()
    return fused_gated_attention(q, k, v, None, documents, scale, causal, window, False, 0)[0]


def _unsupported(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, scale: float | None, mask: Tensor | None, sample: bool,
    normalise: str, softcap: float | None, backend: str,
) -> str | None:  # fmt: skip
    """Why the fused kernel cannot do this call, or None if it can."""
    if reason := _no_kernel(q.device, backend) or _misfit(q, k, v, 256 if normalise == "all" else 128):
        return reason
    if mask is not None and mask.ndim == 4:
        return "a 4-dimensional mask has queries x keys elements; pass document numbers [batch, keys] instead"
    if softcap is not None:
        return "it has no softcap"
    if scale is not None and scale <= 0:
        return f"scale={scale} is not positive"
    if normalise == "open":
        if sample:
            return 'it has no sampled gates with normalise="open"'
        inputs = (q, k, v, *((bias,) if isinstance(bias, Tensor) else ()))
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            return 'it has no gradients with normalise="open"; use torch.no_grad() for inference'
    return None


def _no_kernel(device: torch.device, backend: str) -> str | None:
    """Why there is no fused kernel for this device."""
    interpreted = backend == "triton" and device.type == "cpu" and _interpreted()
    if device.type != "cuda" and not interpreted:
        return f"it needs a CUDA device, the tensors are on {device.type!r}"
    if not HAS_TRITON:
        return "the triton package is not installed"
    if device.type == "cuda" and _too_old(device.index):
        return "it needs compute capability 8.0 or newer"
    return None


def _misfit(q: Tensor, k: Tensor, v: Tensor, most: int) -> str | None:
    """Why the fused kernel cannot read these tensors; `most`: its largest head."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not one of {', '.join(map(str, DTYPES))} for all three"
    if not 8 <= q.shape[3] <= most or q.shape[3] % 8 or v.shape[3] != q.shape[3]:
        return f"head sizes {q.shape[3]} (keys) and {v.shape[3]} (values) are not one multiple of 8 from 8 to {most}"
    return None


def _interpreted() -> bool:
    """Whether the kernels were imported for Triton's CPU interpreter (TRITON_INTERPRET=1), for tests."""
    from .op import INTERPRETED

    return INTERPRETED


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _too_old(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device)[0] < 8


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"gated attention runs without its fused kernel: {reason}", stacklevel=3)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, normalise: str, backend: str) -> None:
    if normalise not in NORMALISATIONS:
        raise ValueError(f"normalise={normalise!r}: expected one of {NORMALISATIONS}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {BACKENDS}")
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, k, v must be [batch, heads, tokens, d_head]; got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[1] % k.shape[1] or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"shapes do not fit together: q {q.shape}, k {k.shape}, v {v.shape}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries but only {k.shape[2]} keys: the last query stands on the last key")
    if mask is not None and mask.ndim == 4 and mask.dtype != torch.bool:
        raise ValueError(f"a 4-dimensional mask must be bool (True = allowed); got {mask.dtype}")
    if mask is not None and mask.ndim not in (2, 4):
        raise ValueError(f"mask must be [batch, keys] or [batch, heads, queries, keys]; got {tuple(mask.shape)}")
