"""The fused kernels as one custom operator, so that torch.compile sees a single opaque call.

    sparselens::gated_attention           (q, k, v, bias, documents, ...) -> out, edges, lse
    sparselens::gated_attention_backward  (gradients, saved tensors, ...) -> dq, dk, dv, dbias

CUDA runs the Triton kernels. The CPU registration runs the same kernels under Triton's interpreter when
TRITON_INTERPRET=1 (that is how CI tests them) and the reference otherwise. Saved for the backward pass: the inputs,
out, lse and the seed; nothing with queries x keys elements.
"""

import os
from contextlib import nullcontext

import torch
from torch import Tensor

from .reference import gated_attention_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? documents, {}"
    "float scale, bool causal, SymInt window, bool sample, SymInt seed"
)
torch.library.define(
    "sparselens::gated_attention", f"({_ARGUMENTS.format('')}) -> (Tensor out, Tensor edges, Tensor lse)"
)
torch.library.define(
    "sparselens::gated_attention_backward",
    f"(Tensor dout, Tensor dedges, {_ARGUMENTS.format('Tensor out, Tensor lse, ')})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
)


def _on(device: torch.device):
    """Launch on this device; entering a device that is current already is not free."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _forward_cuda(q, k, v, bias, documents, scale, causal, window, sample, seed):
    from .triton import forward

    with _on(q.device):
        return forward(q, k, v, bias, documents, scale, causal, window, sample, seed)


def _backward_cuda(dout, dedges, q, k, v, bias, documents, out, lse, scale, causal, window, sample, seed):
    from .triton_backward import backward

    with _on(q.device):
        return backward(dout, dedges, q, k, v, bias, documents, out, lse, scale, causal, window, sample, seed)


torch.library.impl("sparselens::gated_attention", "CUDA", _forward_cuda)
torch.library.impl("sparselens::gated_attention_backward", "CUDA", _backward_cuda)


@torch.library.impl("sparselens::gated_attention", "CPU")
def _forward_cpu(q, k, v, bias, documents, scale, causal, window, sample, seed):
    if INTERPRETED:
        from .triton import forward

        return forward(q, k, v, bias, documents, scale, causal, window, sample, seed)
    options = dict(scale=scale, causal=causal, window=window or None, mask=documents, sample=sample, seed=seed)
    out, edges = gated_attention_reference(q, k, v, bias, **options)
    # The reference's backward pass starts over from the inputs and needs no row sums.
    return out.contiguous(), edges.float(), q.new_zeros(q.shape[:3], dtype=torch.float32)


@torch.library.impl("sparselens::gated_attention_backward", "CPU")
def _backward_cpu(dout, dedges, q, k, v, bias, documents, out, lse, scale, causal, window, sample, seed):
    if INTERPRETED:
        from .triton_backward import backward

        return backward(dout, dedges, q, k, v, bias, documents, out, lse, scale, causal, window, sample, seed)
    options = dict(scale=scale, causal=causal, window=window or None, mask=documents, sample=sample, seed=seed)
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v, bias)]
        out, edges = gated_attention_reference(*inputs, **options)
        return torch.autograd.grad((out, edges), inputs, (dout, dedges.to(edges.dtype)))


@torch.library.register_fake("sparselens::gated_attention")
def _forward_fake(q, k, v, bias, documents, scale, causal, window, sample, seed):
    return (
        torch.empty_like(q),
        q.new_empty(q.shape[:2], dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


@torch.library.register_fake("sparselens::gated_attention_backward")
def _backward_fake(dout, dedges, q, k, v, bias, documents, out, lse, scale, causal, window, sample, seed):
    if q.shape[1] == k.shape[1]:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    return torch.empty_like(q), dk, dv, torch.empty_like(bias)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, bias, documents, *ctx.options = inputs
    out, _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, bias, documents, out, lse)


def _backward(ctx, dout, dedges, _dlse):
    gradients = torch.ops.sparselens.gated_attention_backward(dout, dedges, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None, None


torch.library.register_autograd("sparselens::gated_attention", _backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which costs as much host time as a small attention takes on the device."""

    @staticmethod
    def forward(ctx, q, k, v, bias, documents, *options):
        out, edges, lse = _forward_cuda(q, k, v, bias, documents, *options)
        ctx.save_for_backward(q, k, v, bias, documents, out, lse)
        ctx.options = options
        return out, edges

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dedges):
        return *_backward_cuda(dout, dedges, *ctx.saved_tensors, *ctx.options), None, None, None, None, None, None


def fused_gated_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, documents: Tensor | None, scale: float, causal: bool,
    window: int | None, sample: bool, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, edges) by the fused kernels. bias: fp32 [n_heads]; documents: int32 [batch, keys] or None."""
    arguments = (q, k, v, bias, documents, scale, causal, window or 0, sample, seed)
    if q.is_cuda and type(q) is Tensor and not torch.compiler.is_compiling():
        return _Eager.apply(*arguments)  # type: ignore[no-any-return]
    out, edges, _ = torch.ops.sparselens.gated_attention(*arguments)
    return out, edges
