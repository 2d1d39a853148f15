"""The custom operator where there is no GPU: the reference, forward and backward."""

import pytest
import torch

from sparselens.gating import dense_attention
from sparselens.gating.op import fused_gated_attention
from sparselens.gating.reference import gated_attention_reference

DOCUMENTS = torch.tensor([[0, 1, 1, 1, 2, 2], [1, 1, 1, 3, 3, 0]], dtype=torch.int32)


@pytest.mark.parametrize("sample, seed", [(False, 0), (True, 5), (True, torch.tensor([5], dtype=torch.int32))])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window, documents", [(None, None), (3, DOCUMENTS)])
def test_the_operator_on_a_cpu_is_the_reference(kv_heads, window, documents, sample, seed):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, kv_heads, 6, 8), (2, kv_heads, 6, 8), (4,))
    inputs = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    gradients = torch.randn(2, 4, 6, 8, generator=generator), torch.randn(2, 4, generator=generator)
    found = fused_gated_attention(*inputs, documents, 0.3, True, window, sample, seed)
    wanted = gated_attention_reference(*inputs, scale=0.3, window=window, mask=documents, sample=sample, seed=5)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other)
    ours, theirs = (torch.autograd.grad(pair, inputs, gradients) for pair in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_without_numbers():
    """What torch.compile is told: shapes and dtypes as they will be."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, bias = torch.empty(2, 4, 6, 8), torch.empty(2, 2, 6, 8), torch.empty(4)
        options = (0.3, True, 0, False, torch.zeros(1, dtype=torch.int32))
        out, edges, lse = torch.ops.sparselens.gated_attention(q, k, k, bias, None, *options)
        assert (out.shape, edges.shape, lse.shape) == ((2, 4, 6, 8), (2, 4), (2, 4, 6))
        assert edges.dtype == lse.dtype == torch.float32
        found = torch.ops.sparselens.gated_attention_backward(out, edges, q, k, k, bias, None, out, lse, *options)
        assert [t.shape for t in found] == [q.shape, q.shape, q.shape, (2, 4)], (
            "of every query head, before the last sums"
        )


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window, documents", [(None, None), (3, DOCUMENTS)])
def test_without_a_bias_it_is_dense_attention(kv_heads, window, documents):
    """As gates that are all open, values and gradients, padding included."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, kv_heads, 6, 8), (2, kv_heads, 6, 8))
    inputs = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    gradient = torch.randn(2, 4, 6, 8, generator=generator)
    found = fused_gated_attention(*inputs, None, documents, 0.3, True, window, False, 0)[0]
    wanted = gated_attention_reference(*inputs, 1e4, scale=0.3, window=window, mask=documents)[0]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(dense_attention(*inputs, 0.3, mask=documents, window=window), wanted)
    ours, theirs = (torch.autograd.grad(out, inputs, gradient) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_dense_attention_takes_a_mask_of_pairs():
    """[batch, heads or 1, queries, keys], as gated attention does."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    pairs = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    pairs[0, 0, 3, 1] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
    torch.testing.assert_close(dense_attention(q, k, v, mask=pairs), wanted)
