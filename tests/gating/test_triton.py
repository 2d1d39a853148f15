"""The fused kernels, small and in fp32: under Triton's interpreter in CI, compiled where there is a GPU."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fused_check import DEVICE, INTERPRETED, Case, gates_of_backward, gates_of_forward, relative_errors

from sparselens.gating import _warn_once, gated_attention
from sparselens.gating.reference import gated_attention_reference, gated_pattern, uniform

direct = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs inside test_under_the_interpreter")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run directly")
def test_under_the_interpreter():
    """All tests below, in a process of their own: triton must be told to interpret before anything imports it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


CASES = [
    Case(),
    Case(sample=False),
    Case(batch=2, heads=6, kv_heads=2, queries=35, keys=35),
    Case(heads=3, kv_heads=1, queries=1, keys=1),
    Case(queries=5, keys=77, d_head=32),
    Case(queries=33, keys=33, d_head=24, causal=False),
    Case(queries=70, keys=70, window=20),
    Case(queries=70, keys=70, window=20, documents="packed", sample=False),
    Case(batch=2, queries=66, keys=66, documents="left"),
    Case(batch=2, queries=66, keys=66, documents="right"),
    Case(batch=2, queries=40, keys=70, documents="packed"),
    Case(queries=40, keys=40, documents="packed", causal=False),
    Case(heads=4, kv_heads=1, queries=40, keys=40, d_head=256, window=12, documents="packed"),
    Case(queries=35, keys=35, d_head=136, sample=False),
    Case(dense=True, batch=2, heads=6, kv_heads=2, queries=66, keys=66, documents="left"),
    Case(dense=True, queries=70, keys=70, window=20, documents="packed"),
]


@direct
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case):
    errors = relative_errors(case)
    assert max(errors.values()) < 2e-6, errors


LARGE = [Case(size=10), Case(size=10, sample=False), Case(bias=-70), Case(bias=60), Case(size=30)]


@direct
@pytest.mark.parametrize("case", [*LARGE, Case(size=30, dense=True)], ids=str)
def test_logits_of_any_size(case):
    """Logits beyond the range of the short path: repeated with a running maximum, to the accuracy of the logits."""
    errors = relative_errors(case)
    errors.pop("dbias" if case.bias > 50 else "", None)  # its true value is 1e-33
    # At size 30 the logits are near 1,000: fp32 holds them to 1e-4, and so the weights.
    assert max(errors.values()) < 2e-3, errors


@direct
def test_gates_equal_in_forward_backward_and_every_tile_size():
    case = Case(heads=2, queries=50, keys=50, d_head=32)
    small, wide = {"M": 16, "N": 32}, {"M": 32, "N": 16}
    gates = gates_of_forward(case, 3)
    assert 0.1 < gates.float().mean() < 0.4
    for other in (
        gates_of_forward(case, 3, small),
        gates_of_backward(case, 3, small),
        gates_of_backward(case, 3, wide),
    ):
        assert torch.equal(gates, other)
    q, k, _, bias = case.inputs()
    pattern, _ = gated_pattern(q.double(), k.double(), bias.double(), sample=True, seed=3)
    assert (gates != pattern.gate).float().mean() < 1e-4
    assert not torch.equal(gates, gates_of_forward(case, 4))
    in_memory = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    assert torch.equal(gates, gates_of_forward(case, in_memory))
    assert torch.equal(gates, gates_of_backward(case, in_memory, small))


@direct
def test_kernel_draws_the_noise_of_the_reference():
    """With logits 0 the gate is exactly [u < 1/2]."""
    case = Case(queries=40, keys=50, d_head=32, size=0.0, bias=0.0, heads=1, kv_heads=1, batch=3)
    q, k, v, _ = case.inputs()
    u = uniform(2**40 + 9, 3, 1, 40, 50, DEVICE)
    _, edges = gated_attention(q, k, v, 0.0, sample=True, seed=2**40 + 9, backend="triton")
    assert edges.shape == (3, 1)
    case = replace(case, bias=1.0)  # linspace over one head starts at -1
    gates = gates_of_forward(case, 2**40 + 9)
    causal = torch.ones(40, 50, dtype=torch.bool, device=DEVICE).tril(10)
    assert torch.equal(gates, (u < 0.5) & causal)


@direct
def test_edges_alone_and_out_alone_have_gradients():
    q, k, v, bias = (x.requires_grad_() for x in Case(queries=20, keys=20).inputs())
    out, edges = gated_attention(q, k, v, bias, sample=True, backend="triton")
    (dbias,) = torch.autograd.grad(edges.sum(), bias, retain_graph=True)
    assert (dbias > 0).all()
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert dv.abs().sum() > 0


@direct
@pytest.mark.parametrize(
    "case",
    [
        Case(queries=70, keys=70, sample=False),
        Case(heads=4, kv_heads=2, queries=33, keys=90, sample=False, d_head=32),
        Case(batch=2, queries=66, keys=66, documents="packed", sample=False),
        Case(queries=50, keys=50, window=16, sample=False),
        Case(batch=2, heads=4, kv_heads=2, queries=1, keys=200, sample=False),
        Case(batch=2, queries=1, keys=100, documents="left", sample=False),
        Case(queries=40, keys=40, size=30, sample=False),
        Case(queries=40, keys=40, bias=-40, sample=False),
    ],
    ids=str,
)
def test_open_inference_matches_reference(case):
    inputs = case.inputs()
    options = dict(window=case.window, mask=case.make_documents(), normalise="open")
    with torch.no_grad():
        out, edges = gated_attention(*inputs, backend="triton", **options)
        reference, reference_edges = gated_attention_reference(*(x.double() for x in inputs), **options)
    assert (out - reference).norm() <= 2e-5 * reference.norm()
    assert torch.equal(edges.double(), reference_edges.round())


@direct
def test_unsupported_calls_fall_back_with_one_warning():
    q, k, v, bias = (x.double() for x in Case(queries=8, keys=8).inputs())
    expected, _ = gated_attention(q, k, v, bias, backend="reference")
    _warn_once.cache_clear()
    with pytest.warns(UserWarning, match="float64"):
        out, _ = gated_attention(q, k, v, bias, backend="triton")
    assert torch.equal(out, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the same reason is given once
        gated_attention(q, k, v, bias, backend="triton")
    q, k, v, bias = Case(queries=8, keys=8).inputs()
    everything = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=DEVICE)
    for options, reason in [
        (dict(softcap=5.0), "softcap"),
        (dict(mask=everything), "4-dimensional"),
        (dict(normalise="open", sample=True), "sampled"),
        (dict(scale=-1.0), "positive"),
    ]:
        with pytest.warns(UserWarning, match=reason):
            gated_attention(q, k, v, bias, backend="triton", **options)
    with pytest.warns(UserWarning, match="multiple of 8"):
        gated_attention(q[..., :12], k[..., :12], v[..., :12], bias, backend="triton")
    with pytest.raises(ValueError, match="backend"):
        gated_attention(q, k, v, bias, backend="fast")


@direct
def test_operator_registrations():
    """Schema, fake kernel and autograd agree with what the operator does."""
    q, k, v, bias = (x.requires_grad_() for x in Case(heads=4, queries=12, keys=12).inputs())
    op = torch.ops.sparselens.gated_attention.default
    documents = torch.ones(1, 12, dtype=torch.int32, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    seed = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(op, (q, k, v, bias, documents, 0.25, True, 0, True, seed), test_utils=tests)
