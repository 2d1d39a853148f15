"""The specification against fp64 autograd, closed forms and statistics."""

import math

import pytest
import torch
import torch.nn.functional as F

from sparselens.gating import allowed_pairs, gated_attention, gated_pattern
from sparselens.gating.reference import uniform

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 2, 3, 3, 0, 0]])  # left pad; packing; right pad


def make(batch=2, heads=4, kv_heads=2, queries=9, keys=9, d_head=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = dict(dtype=dtype, generator=generator)
    q = 2 * torch.randn(batch, heads, queries, d_head, **shape)
    k = torch.randn(batch, kv_heads, keys, d_head, **shape)
    v = torch.randn(batch, kv_heads, keys, d_head, **shape)
    bias = torch.randn(heads, **shape)
    return [t.requires_grad_() for t in (q, k, v, bias)]


CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 3},
    "packed and padded": {"mask": DOCUMENTS},
    "packed window": {"mask": DOCUMENTS, "window": 2},
    "softcap": {"softcap": 1.5},
    "4d mask": {"mask": torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.3},
}


@pytest.mark.parametrize("normalise", ["all", "open"])
@pytest.mark.parametrize("case", CASES)
def test_gates_wide_open_are_ordinary_attention(case, normalise):
    q, k, v, _ = make()
    options = dict(CASES[case])
    out, edges = gated_attention(q, k, v, 1e3, normalise=normalise, **options)
    softcap = options.pop("softcap", None)
    allowed = allowed_pairs(9, 9, **options).expand(2, 1, 9, 9)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(8)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    expected = scores.masked_fill(~allowed, -1e300).softmax(-1).masked_fill(~allowed, 0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(edges, allowed.sum((-1, -2)).expand(2, 4).double())


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_definition_pair_by_pair(case, sample):
    """Every number of METHOD's definition, computed with a loop."""
    q, k, v, bias = (t.detach() for t in make())
    options = dict(CASES[case])
    out, edges = gated_attention(q, k, v, bias, sample=sample, seed=5, **options)
    softcap = options.pop("softcap", None)
    allowed = allowed_pairs(9, 9, **options).expand(2, 4, 9, 9)
    noise = uniform(5, 2, 4, 9, 9, "cpu")
    for b in range(2):
        for h in range(4):
            count = 0.0
            for i in range(9):
                keys = [j for j in range(9) if allowed[b, h, i, j]]
                logits = {j: float(q[b, h, i] @ k[b, h // 2, j]) / math.sqrt(8) for j in keys}
                if softcap:
                    logits = {j: softcap * math.tanh(s / softcap) for j, s in logits.items()}
                total = sum(math.exp(s) for s in logits.values())
                row = torch.zeros(8, dtype=torch.float64)
                for j, s in logits.items():
                    gate_logit = s + float(bias[h])
                    u = float(noise[b, h, i, j]) if sample else 0.5
                    is_open = u * (1 + math.exp(-gate_logit)) < 1
                    count += 1 / (1 + math.exp(-gate_logit)) if sample else is_open
                    row += is_open * math.exp(s) / total * v[b, h // 2, j]
                torch.testing.assert_close(out[b, h, i], row, rtol=1e-9, atol=1e-9)
            assert edges[b, h] == pytest.approx(count, rel=1e-6)


@pytest.mark.parametrize("normalise", ["all", "open"])
def test_gradcheck_of_the_surrogate(normalise):
    """The straight-through gate is the smooth function A0 + s(G) - s0 at the point where it was drawn.

    Finite differences of that smooth function agree with its autograd, and its autograd with ours.
    """
    inputs = make(batch=1, heads=2, kv_heads=1, queries=4, keys=4, d_head=3)
    u = uniform(3, 1, 2, 4, 4, "cpu").double()
    causal = allowed_pairs(4, 4)
    pattern, _ = gated_pattern(*(t.detach() for t in (inputs[0], inputs[1], inputs[3])), sample=True, seed=3)
    drawn = pattern.gate.double()
    start = torch.sigmoid(pattern.margin + torch.log1p(-u) - torch.log(u))

    def smooth(q, k, v, bias):
        logits = q @ k.transpose(-1, -2) / math.sqrt(3)
        gate_logit = logits + bias.view(-1, 1, 1)
        soft = drawn + torch.sigmoid(gate_logit + torch.log1p(-u) - torch.log(u)) - start
        scores = logits.masked_fill(~causal, -torch.inf)
        if normalise == "all":
            weights = soft.masked_fill(~causal, 0) * scores.softmax(-1)
        else:
            best = scores.masked_fill(drawn == 0, -torch.inf).amax(-1, keepdim=True)
            best = torch.where(best.isfinite(), best, scores.amax(-1, keepdim=True)).detach()
            weight = soft.masked_fill(~causal, 0) * (scores - best).clamp(max=0).exp()
            weights = weight / torch.where(drawn.any(-1, keepdim=True), weight.sum(-1, keepdim=True), 1.0)
        return weights @ v, torch.sigmoid(gate_logit).masked_fill(~causal, 0).sum((-1, -2))

    assert torch.autograd.gradcheck(smooth, inputs)
    ours, expected = gated_attention(*inputs, sample=True, seed=3, normalise=normalise), smooth(*inputs)
    upstream = torch.randn_like(ours[0]), torch.randn_like(ours[1])
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sample", [False, True])
def test_closed_form_gradients(case, sample):
    """dV, dS, dG and db as METHOD.md writes them, against autograd through the reference."""
    q, k, v, bias = make(kv_heads=4)
    options = dict(CASES[case])
    out, edges = gated_attention(q, k, v, bias, sample=sample, seed=5, **options)
    d_out, g = torch.randn_like(out), torch.randn(2, 4, dtype=torch.float64)
    got = torch.autograd.grad((out * d_out).sum() + (edges * g).sum(), (q, k, v, bias))

    with torch.no_grad():
        softcap = options.pop("softcap", None)
        raw = q @ k.transpose(-1, -2) / math.sqrt(8)
        logits = softcap * torch.tanh(raw / softcap) if softcap else raw
        allowed = allowed_pairs(9, 9, **options).expand(2, 4, 9, 9)
        gate_logit = logits + bias.view(-1, 1, 1)
        noise = uniform(5, 2, 4, 9, 9, "cpu").double() if sample else torch.tensor(0.5, dtype=torch.float64)
        weight = logits.masked_fill(~allowed, -1e300).softmax(-1).masked_fill(~allowed, 0)
        gate = (noise * (1 + torch.exp(-gate_logit)) < 1) & allowed
        s = (1 - noise) / ((1 - noise) + noise * torch.exp(-gate_logit))
        p = torch.sigmoid(gate_logit)
        upstream = d_out @ v.transpose(-1, -2)
        delta = (d_out * out).sum(-1, keepdim=True)
        d_gate = (s * (1 - s) * weight * upstream + g[..., None, None] * p * (1 - p)) * allowed
        d_logits = weight * (gate * upstream - delta) + d_gate
        if softcap:
            d_logits = d_logits * (1 - (logits / softcap) ** 2)
        expected = (
            d_logits @ k / math.sqrt(8),
            d_logits.transpose(-1, -2) @ q / math.sqrt(8),
            (gate * weight).transpose(-1, -2) @ d_out,
            d_gate.sum((0, 2, 3)),
        )
    for name, a, b in zip(["dq", "dk", "dv", "dbias"], got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_open_normalisation_sums_to_one_over_open_keys():
    q, k, _, bias = make()
    pattern, _ = gated_pattern(q, k, bias, sample=True, seed=2, normalise="open")
    sums = pattern.weights.sum(-1)
    some = pattern.gate.any(-1)
    assert some.any() and not some.all(), "the case needs both kinds of rows"
    torch.testing.assert_close(sums, some.double())


@pytest.mark.parametrize("normalise", ["all", "open"])
def test_fully_closed_rows_give_zero_and_still_learn(normalise):
    q, k, v, _ = make()
    bias = torch.full((4,), -30.0, dtype=torch.float64, requires_grad=True)
    out, edges = gated_attention(q, k, v, bias, normalise=normalise)
    assert torch.equal(out, torch.zeros_like(out)) and edges.sum() == 0
    gradients = torch.autograd.grad(out.sum() + edges.sum(), (q, k, v, bias))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert gradients[3].abs().sum() > 0, "a closed gate must be able to open again"


def test_padding_touches_nothing():
    """Whatever stands in padding, outputs, edges and gradients of real tokens are the same."""
    q, k, v, bias = make()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
    real = mask.bool()[:, None, :, None]
    results = []
    for filler in (0.0, 50.0):
        tensors = [torch.where(real, t, filler).detach().requires_grad_() for t in (q, k, v)]
        out, edges = gated_attention(*tensors, bias, mask=mask, sample=True, seed=1)
        grads = torch.autograd.grad((out * real).square().sum() + edges.square().sum(), [*tensors, bias])
        results.append([out * real, edges, *(g * real for g in grads[:3]), grads[3]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_density_of_sampled_gates_follows_the_sigmoid():
    """Over many draws, each gate is open with frequency sigmoid(G), within five standard errors."""
    q, k, _, bias = (t.detach() for t in make(batch=1, heads=2, kv_heads=1, queries=6, keys=6))
    draws = 2000
    count = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    for seed in range(draws):
        pattern, edges = gated_pattern(q, k, bias, sample=True, seed=seed)
        count += pattern.gate
    probability = torch.sigmoid(pattern.margin)
    error = (probability * (1 - probability) / draws).sqrt() + 1e-9
    assert ((count / draws - probability).abs() / error)[pattern.allowed.expand_as(count)].max() < 5
    torch.testing.assert_close(edges, probability.sum((-1, -2)))


def test_decoding_one_query_at_a_time_equals_the_full_pass():
    q, k, v, bias = make()
    full, _ = gated_attention(q, k, v, bias, window=4)
    for t in range(9):
        step, _ = gated_attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], bias, window=4)
        torch.testing.assert_close(step[:, :, 0], full[:, :, t])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_fp32(dtype):
    q, k, v, bias = (t.detach() for t in make())
    low = [t.to(dtype) for t in (q, k, v)]
    out, edges = gated_attention(*low, bias)
    exact, exact_edges = gated_attention(*(t.double() for t in low), bias)
    assert out.dtype == dtype and edges.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(edges.double(), exact_edges, rtol=1e-5, atol=1e-5)


def test_sdpa_agrees_in_fp32():
    q, k, v, _ = (t.detach().float() for t in make(kv_heads=4))
    out, _ = gated_attention(q, k, v, 1e4)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"normalise": "some"}, "normalise='some'"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"mask": torch.ones(2, 1, 9, 9)}, "must be bool"),
        ({"mask": torch.ones(9)}, "mask must be"),
    ],
)
def test_bad_arguments_are_named(change, complaint):
    q, k, v, bias = make()
    with pytest.raises(ValueError, match=complaint):
        gated_attention(q, k, v, bias, **change)


def test_shapes_that_do_not_fit():
    q, k, v, bias = make()
    with pytest.raises(ValueError, match="do not fit"):
        gated_attention(q[:, :3], k, v, bias)
    with pytest.raises(ValueError, match="queries but only"):
        gated_attention(q, k[:, :, :4], v[:, :, :4], bias)
