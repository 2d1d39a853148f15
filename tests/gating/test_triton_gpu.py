"""The fused kernels in full, on a GPU: every head size, grouping, length, mask and dtype; speed is bench's business."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fused_check import Case, gates_of_backward, gates_of_forward, relative_errors

from sparselens.gating import gated_attention
from sparselens.gating.reference import gated_attention_reference, gated_pattern

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Rounding of inputs is not counted (the reference gets the rounded ones); of weights, dS and outputs it is.
# Sampled gates within rounding of their threshold may differ from fp64's: a handful in a million, hence 1e-4 in fp32.
TOLERANCE = {BF16: 6e-3, FP16: 2e-3, FP32: 3e-4}


def check(case: Case) -> None:
    errors = relative_errors(case)
    assert errors.pop("edges", 0) < 1e-5, errors
    assert max(errors.values()) < TOLERANCE[case.dtype], errors


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("sample", [True, False], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("d_head", [32, 64, 80, 96, 128, 192, 256])
def test_head_sizes(d_head, sample, dtype):
    check(Case(batch=2, heads=3, kv_heads=3, queries=257, keys=257, d_head=d_head, dtype=dtype, sample=sample))


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("d_head", [64, 128])
def test_grouped_heads(heads, d_head):
    check(Case(batch=2, heads=heads[0], kv_heads=heads[1], queries=200, keys=200, d_head=d_head, dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("length", [1, 17, 63, 257, 1000])
def test_odd_lengths(length, dtype):
    check(Case(batch=2, heads=2, kv_heads=1, queries=length, keys=length, d_head=64, dtype=dtype))


@pytest.mark.parametrize("documents", ["left", "right", "packed"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("d_head", [64, 128])
def test_masks(documents, window, dtype, d_head):
    check(
        Case(batch=3, heads=4, kv_heads=2, queries=700, keys=700, d_head=d_head, documents=documents, window=window,
             dtype=dtype)
    )  # fmt: skip


@pytest.mark.parametrize("case", [
    Case(queries=500, keys=500, d_head=64, dtype=BF16, window=64),
    Case(queries=500, keys=500, d_head=64, dtype=BF16, causal=False),
    Case(queries=300, keys=900, d_head=64, dtype=BF16),
    Case(batch=2, heads=4, kv_heads=1, queries=500, keys=500, d_head=256, dtype=BF16, window=256, documents="packed"),
    Case(queries=300, keys=300, d_head=192, dtype=BF16, sample=False),
    Case(queries=3, keys=700, d_head=128, dtype=BF16, documents="packed"),
    Case(queries=3, keys=700, d_head=128, dtype=BF16, window=50, sample=False),
    Case(dense=True, batch=3, heads=9, kv_heads=3, queries=700, keys=700, d_head=64, dtype=BF16, documents="packed"),
    Case(dense=True, batch=2, heads=4, kv_heads=1, queries=500, keys=500, d_head=256, dtype=BF16, window=256),
    Case(dense=True, queries=300, keys=900, d_head=128, dtype=FP16),
], ids=str)  # fmt: skip
def test_other_shapes(case):
    check(case)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    "case", [Case(size=4), Case(bias=-65), Case(bias=50), Case(size=4, sample=False), Case(size=4, dense=True)], ids=str
)
def test_logits_of_any_size(case, dtype):
    errors = relative_errors(replace(case, queries=300, keys=300, d_head=64, dtype=dtype))
    if abs(case.bias) > 40:  # gradients of saturated gates: 1e-20 and less, below what the formats hold
        errors = {"out": errors["out"], "edges": errors["edges"]} if case.bias > 0 else {"edges": errors["edges"]}
    assert max(errors.values()) < max(TOLERANCE[dtype], 1e-3), errors


@pytest.mark.parametrize("d_head", [64, 128])
def test_gates_equal_in_forward_backward_and_every_tile_size(d_head):
    """Bit by bit: one flipped gate is one wrong gradient."""
    case = Case(batch=2, heads=4, kv_heads=4, queries=1000, keys=1000, d_head=d_head, dtype=BF16)
    gates = gates_of_forward(case, 5)
    tiles = {"num_stages": 2}
    for config in ({"M": 128, "N": 64, "num_warps": 8}, {"M": 64, "N": 32, "num_warps": 4}):
        assert torch.equal(gates, gates_of_forward(case, 5, config | tiles)), config
    assert torch.equal(gates, gates_of_backward(case, 5))
    for config in ({"M": 64, "N": 64, "num_warps": 4}, {"M": 32, "N": 128, "num_warps": 8}):
        assert torch.equal(gates, gates_of_backward(case, 5, config | tiles)), config
    q, k, _, bias = case.inputs()
    pattern, _ = gated_pattern(q.double(), k.double(), bias.double(), sample=True, seed=5)
    assert (gates != pattern.gate).float().mean() < 1e-5


def test_deterministic_run_to_run():
    case = Case(batch=4, heads=8, kv_heads=8, queries=1500, keys=1500, d_head=64, dtype=BF16)
    runs = []
    for _ in range(3):
        inputs = [x.requires_grad_() for x in case.inputs()]
        out, edges = gated_attention(*inputs, sample=True, seed=1)
        gradients = torch.autograd.grad((out.float().square().sum() + edges.sum()), inputs)
        runs.append((out, edges, *gradients))
    for name, first, *others in zip(("out", "edges", "dq", "dk", "dv", "dbias"), *runs, strict=True):
        if name == "dq":  # fp32 additions in memory, in no fixed order
            assert all((first - x).norm() < 1e-3 * first.norm() for x in others)
        else:
            assert all(torch.equal(first, x) for x in others), name


def test_memory_is_linear():
    def peak(tokens: int) -> int:
        inputs = [torch.randn(1, 4, tokens, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, edges = gated_attention(*inputs, 0.0, sample=True, mask=torch.ones(1, tokens, device="cuda").int())
        (out.sum() + edges.sum()).backward()
        return torch.cuda.max_memory_allocated() - before

    peak(4096)
    assert peak(32768) < 8.5 * peak(4096)


def test_compiles_as_one_call():
    def step(q, k, v, bias):
        out, edges = gated_attention(q * 1.0, k, v, bias, sample=True, seed=3)
        return out.float().square().sum() + edges.sum()

    case = Case(batch=2, heads=4, kv_heads=2, queries=300, keys=300, d_head=64, dtype=BF16)
    inputs = [x.requires_grad_() for x in case.inputs()]
    plain = torch.autograd.grad(step(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(*inputs), inputs)
    for a, b in zip(plain, compiled, strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm()


def test_autocast_behaves_as_for_sdpa():
    q, k, v, bias = Case(queries=100, keys=100, d_head=64).inputs()
    with torch.autocast("cuda", BF16):
        out, _ = gated_attention(q, k, v.to(BF16), bias)
    assert out.dtype == BF16


@pytest.mark.parametrize("queries", [1, 1500])
@pytest.mark.parametrize("d_head", [64, 80, 128])
@pytest.mark.parametrize("documents", ["", "packed"])
@pytest.mark.parametrize("bias", [-0.5, -3.0])
def test_open_inference(queries, d_head, documents, bias):
    case = Case(batch=2, heads=8, kv_heads=2, queries=queries, keys=1500, d_head=d_head, dtype=BF16,
                documents=documents, sample=False, bias=bias)  # fmt: skip
    inputs = case.inputs()
    mask = case.make_documents()
    if mask is not None:
        mask = torch.where(mask == 0, 1, mask)  # the last token is a real one when decoding
    with torch.no_grad():
        out, edges = gated_attention(*inputs, mask=mask, normalise="open")
        reference, reference_edges = gated_attention_reference(
            *(x.double() for x in inputs), mask=mask, normalise="open"
        )
    assert (edges - reference_edges).abs().max() <= 1e-5 * reference_edges.max() + 1
    assert (out - reference).norm() < 6e-3 * reference.norm() + 1e-6
