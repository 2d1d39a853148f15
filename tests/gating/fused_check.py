"""What the interpreter tests and the GPU tests share: cases, the fp64 reference, and gates read off the kernels."""

import os
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparselens.gating import _warn_once, dense_attention, gated_attention
from sparselens.gating.reference import gated_attention_reference
from sparselens.gating.triton import forward
from sparselens.gating.triton_backward import accumulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Case:
    """One call of gated_attention."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 64
    keys: int = 64
    d_head: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int | None = None
    documents: str = ""  # "left", "right", "packed" or none
    sample: bool = True
    size: float = 1.0  # of the logits
    bias: float = -0.5
    dense: bool = False  # without gates

    def __str__(self) -> str:
        shown = [f"{k}={v}" for k, v in self.__dict__.items() if v != getattr(Case, k)]
        return ",".join(shown).replace("torch.", "") or "plain"

    def make_documents(self) -> Tensor | None:
        if not self.documents:
            return None
        length = torch.arange(self.keys)
        rows = []
        for row in range(self.batch):
            pad = min(5 + 9 * row, self.keys - 1)
            if self.documents == "left":
                rows.append((length >= pad).int())
            elif self.documents == "right":
                rows.append((length < self.keys - pad).int())
            else:  # documents of growing length, padding at both ends
                number = ((2 * length.float() / 10 + row).sqrt().floor() + 1).int()
                rows.append(number * ((length >= 2) & (length < self.keys - 3)).int())
        return torch.stack(rows).to(DEVICE)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.queries * 1000 + self.d_head)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, self.dtype)

        q = normal(self.batch, self.heads, self.queries, self.d_head) * self.size
        k = normal(self.batch, self.kv_heads, self.keys, self.d_head) * self.size
        v = normal(self.batch, self.kv_heads, self.keys, self.d_head)
        return q, k, v, (torch.linspace(-1, 1, self.heads) + self.bias).to(DEVICE)


def relative_errors(case: Case, seed: int = 11) -> dict[str, float]:
    """||ours - reference|| / ||reference|| of out, edges and every gradient; the reference in fp64."""
    mine = [x.requires_grad_() for x in case.inputs()]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    options = dict(causal=case.causal, window=case.window, mask=case.make_documents(), sample=case.sample, seed=seed)
    _warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # falling back to the reference would compare it with itself
        if case.dense:
            return _without_gates(case, mine[:3], theirs[:3])
        out, edges = gated_attention(*mine, backend="triton", **options)
    reference_out, reference_edges = gated_attention_reference(*theirs, **options)
    assert out.dtype == case.dtype and edges.dtype == torch.float32
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(DEVICE)
    dedges = torch.randn(edges.shape, generator=generator).to(DEVICE)
    gradients = torch.autograd.grad((out, edges), mine, (dout.to(out.dtype), dedges))
    references = torch.autograd.grad((reference_out, reference_edges), theirs, (dout.double(), dedges.double()))
    pairs = zip(
        ("out", "edges", "dq", "dk", "dv", "dbias"),
        (out, edges, *gradients), (reference_out, reference_edges, *references), strict=True,
    )  # fmt: skip
    return {name: _relative(a.detach().double(), b.detach()) for name, a, b in pairs}


def _without_gates(case: Case, mine: list[Tensor], theirs: list[Tensor]) -> dict[str, float]:
    options = dict(causal=case.causal, window=case.window, mask=case.make_documents())
    out, reference = (
        dense_attention(*inputs, backend=backend, **options)
        for inputs, backend in ((mine, "triton"), (theirs, "reference"))
    )
    assert out.dtype == case.dtype
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients = torch.autograd.grad(out, mine, dout.to(out.dtype))
    references = torch.autograd.grad(reference, theirs, dout.double())
    pairs = zip(("out", "dq", "dk", "dv"), (out, *gradients), (reference, *references), strict=True)
    return {name: _relative(a.detach().double(), b.detach()) for name, a, b in pairs}


def _relative(a: Tensor, b: Tensor) -> float:
    assert a.isfinite().all()
    scale = float(b.norm())
    return float((a - b).norm()) / scale if scale > 0 else float((a - b).norm())


def gates_of_forward(case: Case, seed: int, config: dict | None = None) -> Tensor:
    """Open gates [batch, heads, queries, keys] as the forward kernel sees them: its output for one-hot values."""
    q, k, v, bias = case.inputs()
    columns = []
    for start in range(0, case.keys, case.d_head):
        v = torch.zeros_like(v)
        width = min(case.d_head, case.keys - start)
        v[:, :, range(start, start + width), range(width)] = 1
        out = forward(
            q, k, v, bias, case.make_documents(), case.d_head**-0.5, case.causal, case.window or 0, case.sample, seed,
            config,
        )[0]  # fmt: skip
        columns.append(out[..., :width] != 0)
    return torch.cat(columns, -1)


def gates_of_backward(case: Case, seed: int, config: dict | None = None) -> Tensor:
    """The same as the backward kernel sees them: dv for one-hot gradients at out."""
    case = replace(case, kv_heads=case.heads)
    q, k, v, bias = case.inputs()
    options = (case.d_head**-0.5, case.causal, case.window or 0, case.sample, seed)
    out, edges, lse = forward(q, k, v, bias, case.make_documents(), *options)
    rows = []
    for start in range(0, case.queries, case.d_head):
        dout = torch.zeros_like(out)
        width = min(case.d_head, case.queries - start)
        dout[:, :, range(start, start + width), range(width)] = 1
        none = torch.zeros_like(edges)
        _, _, dv, _ = accumulate(dout, none, q, k, v, bias, case.make_documents(), out, lse, *options, config)
        rows.append(dv[..., :width].transpose(-1, -2) != 0)
    return torch.cat(rows, -2)
