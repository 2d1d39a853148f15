"""The fused kernels as one custom operator, so that torch.compile sees a single opaque call.

    sparselens::gated_attention           (q, k, v, bias, documents, ...) -> out, edges, lse
    sparselens::gated_attention_backward  (gradients, saved tensors, ...) -> dq, dk, dv, dbias before the last sums

The last sums, over query heads that share a key head, and the scale of dq are plain PyTorch behind it, which a compiler
fuses with what follows. Without a bias there are no gates: dense attention by the same kernels.
The seed is a tensor of one number, so that one traced graph serves every step. CUDA runs the Triton kernels. The CPU
registration runs the same kernels under Triton's interpreter when TRITON_INTERPRET=1 (that is how CI tests them) and
the reference otherwise. Saved for the backward pass: the inputs, out, lse and the seed;
nothing with queries x keys elements.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .reference import PatternOptions, dense_attention_reference, gated_attention_reference, signed

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? documents, {}"
    "float scale, bool causal, SymInt window, bool sample, Tensor seed"
)
torch.library.define(
    "sparselens::gated_attention", f"({_ARGUMENTS.format('')}) -> (Tensor out, Tensor edges, Tensor lse)"
)
torch.library.define(
    "sparselens::gated_attention_backward",
    f"(Tensor dout, Tensor? dedges, {_ARGUMENTS.format('Tensor out, Tensor lse, ')})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
)


Forward = tuple[Tensor, Tensor, Tensor]  # out, edges, lse
Backward = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dbias


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on this device; entering a device that is current already is not free."""
    current = INTERPRETED or device.index == torch.cuda.current_device()
    return nullcontext() if current else torch.cuda.device(device)


def _forward_fused(q: Tensor, *arguments: Any) -> Forward:
    from .triton import forward

    with _on(q.device):
        return forward(q, *arguments)


def _backward_fused(dout: Tensor, *arguments: Any) -> Backward:
    from .triton_backward import accumulate

    with _on(dout.device):
        return accumulate(dout, *arguments)


def _options(
    documents: Tensor | None, scale: float, causal: bool, window: int, sample: bool, seed: Tensor
) -> PatternOptions:
    """The operator's arguments by the reference's names; its window is 0 for none."""
    return {
        "scale": scale, "causal": causal, "window": window or None, "mask": documents, "sample": sample, "seed": seed
    }  # fmt: skip


def _forward_plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any) -> Forward:
    out, edges = _reference(q, k, v, bias, *options)
    # The reference's backward pass starts over from the inputs and needs no row sums.
    return out.contiguous(), edges.float(), q.new_zeros(q.shape[:3], dtype=torch.float32)


def _reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    if bias is not None:
        return gated_attention_reference(q, k, v, bias, **_options(*options))
    return dense_attention_reference(q, k, v, *options[:4]), q.new_zeros(q.shape[:2], dtype=torch.float32)


def _backward_plain(dout: Tensor, dedges: Tensor | None, *arguments: Any) -> Backward:
    q, k, v, bias, documents, _out, _lse, scale, *options = arguments
    inputs = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, bias)]
    with torch.enable_grad():
        out, edges = _reference(*inputs, documents, scale, *options)  # type: ignore[arg-type]
        objective = (out * dout).sum()
        if bias is not None and dedges is not None:
            objective = objective + (edges * dedges).sum()
        dq, dk, dv, *rest = torch.autograd.grad(objective, [x for x in inputs if x is not None])
    dbias = q.new_zeros(q.shape[:2], dtype=torch.float32)
    dbias[0] = rest[0] if rest else 0
    group = q.shape[1] // k.shape[1]
    return dq.float() / scale, _to_first_of(group, dk), _to_first_of(group, dv), dbias


def _to_first_of(group: int, gradient: Tensor) -> Tensor:
    """As the fused kernel leaves it, but of the query heads that share a key head the first has all."""
    if group == 1:
        return gradient.contiguous()
    spread = gradient.new_zeros(*gradient.shape[:2], group, *gradient.shape[2:])
    spread[:, :, 0] = gradient
    return spread.flatten(1, 2)


torch.library.impl("sparselens::gated_attention", "CUDA", _forward_fused)
torch.library.impl("sparselens::gated_attention_backward", "CUDA", _backward_fused)
torch.library.impl("sparselens::gated_attention", "CPU", _forward_fused if INTERPRETED else _forward_plain)
torch.library.impl("sparselens::gated_attention_backward", "CPU", _backward_fused if INTERPRETED else _backward_plain)


@torch.library.register_fake("sparselens::gated_attention")  # type: ignore[untyped-decorator]
def _forward_fake(q: Tensor, *_: Any) -> Forward:
    edges, lse = (q.new_empty(q.shape[:n], dtype=torch.float32) for n in (2, 3))
    return torch.empty_like(q), edges, lse


@torch.library.register_fake("sparselens::gated_attention_backward")  # type: ignore[untyped-decorator]
def _backward_fake(dout: Tensor, dedges: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Backward:
    alike = q.shape[1] == k.shape[1]
    shape = (*q.shape[:2], k.shape[2], q.shape[3])
    dk, dv = (torch.empty_like(x) if alike else x.new_empty(shape) for x in (k, v))
    dq, dbias = (q.new_empty(some, dtype=torch.float32) for some in (q.shape, q.shape[:2]))
    return dq, dk, dv, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    q, k, v, bias, documents, *ctx.options, seed = inputs
    out, _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, bias, documents, out, lse, seed)


def _backward(ctx: Any, dout: Tensor, dedges: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    *saved, seed = ctx.saved_tensors
    q, k, v, bias = saved[:4]
    dq, dk, dv, dbias = torch.ops.sparselens.gated_attention_backward(dout, dedges, *saved, *ctx.options, seed)
    of_bias = None if bias is None else dbias.sum(0)
    dq = (dq * ctx.options[0]).to(q.dtype)
    return dq, over_group(dk, k), over_group(dv, v), of_bias, None, None, None, None, None, None


def over_group(gradient: Tensor, like: Tensor) -> Tensor:
    """The sum over query heads that share a key head; bf16 in and out, fp32 inside."""
    batch, n_kv_heads, keys, d_head = like.shape
    if gradient.shape[1] == n_kv_heads:
        return gradient
    return gradient.view(batch, n_kv_heads, -1, keys, d_head).sum(2)


torch.library.register_autograd("sparselens::gated_attention", _backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which costs as much host time as a small attention takes on the device."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, documents: Tensor | None, *options: Any
    ) -> tuple[Tensor, Tensor]:
        out, edges, lse = _forward_fused(q, k, v, bias, documents, *options)
        ctx.save_for_backward(q, k, v, bias, documents, out, lse)
        ctx.options = options
        return out, edges

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dedges: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors[:4]
        dq, dk, dv, dbias = _backward_fused(dout, dedges, *ctx.saved_tensors, *ctx.options)
        of_bias = None if bias is None else dbias.sum(0)
        dq = torch.mul(dq, ctx.options[0], out=torch.empty_like(q))  # scaled and rounded in one pass
        return dq, over_group(dk, k), over_group(dv, v), of_bias, None, None, None, None, None, None


def fused_gated_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, documents: Tensor | None, scale: float, causal: bool,
    window: int | None, sample: bool, seed: int | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, edges) by the fused kernels. bias: fp32 [n_heads]; documents: int32 [batch, keys]; None: without."""
    arguments = (q, k, v, bias, documents, scale, causal, window or 0, sample)
    if q.is_cuda and type(q) is Tensor and not torch.compiler.is_compiling():
        return _Eager.apply(*arguments, seed)  # type: ignore[no-any-return,no-untyped-call]
    if not isinstance(seed, Tensor):
        seed = torch.full((1,), signed(seed), dtype=torch.int32, device=q.device)
    out, edges, _ = torch.ops.sparselens.gated_attention(*arguments, seed)
    return out, edges
