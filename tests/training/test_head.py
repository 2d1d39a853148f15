"""Losses in stretches against the plain definitions, in fp64: values and gradients, padding and labels of -100."""

import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from torch import nn
from torch.nn import functional as F

from sparselens.training import head
from sparselens.training.head import cross_entropy, divergence, head_to_leave_out, plain_head, stretched_loss
from sparselens.training.measure import token_kl, token_losses


@pytest.mark.parametrize("taught", [False, True], ids=["loss", "kl"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_values_and_gradients(rows, bias, taught, monkeypatch):
    torch.manual_seed(0)
    mine, other = nn.Linear(6, 17, bias=bias).double(), nn.Linear(5, 17).double()
    hidden = torch.randn(3, 5, 6, dtype=torch.double, requires_grad=True)
    reference = torch.randn(3, 5, 5, dtype=torch.double)
    labels = torch.randint(0, 17, (3, 5))
    labels[0, 2] = labels[2, 4] = -100
    wanted = mine(hidden)
    loss = (token_kl(other(reference), wanted, labels) if taught else token_losses(wanted, labels)).sum() * 0.3
    inputs = [hidden, *mine.parameters()]
    expected = torch.autograd.grad(loss, inputs)
    monkeypatch.setattr(head, "MOST_LOGITS", rows * 17)
    found = stretched_loss(hidden, mine, labels, (reference, other) if taught else None) * 0.3
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, theirs in zip(torch.autograd.grad(found, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # softmax and sums are in fp32


def test_columns_added_for_speed_count_nowhere():
    torch.manual_seed(0)
    ours, theirs, labels = torch.randn(4, 7), torch.randn(4, 7), torch.tensor([3, -100, 0, 6])
    wide = [F.pad(x, (0, 3), value=9.0) for x in (ours, theirs)]
    for plain, padded in (
        (divergence(ours, theirs, labels, 7), divergence(*wide, labels, 7)),
        (cross_entropy(ours, labels, 7), cross_entropy(wide[0], labels, 7)),
    ):
        torch.testing.assert_close(plain[0], padded[0])
        torch.testing.assert_close(F.pad(plain[1], (0, 3)), padded[1])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_head_is_left_out_only_where_it_is_all_that_follows(family):
    model = tiny_model(family)
    assert (plain_head(model) is None) == (family == "gemma2"), "which has a softcap behind its head"
    assert head_to_leave_out(model, 100) is None, "few logits stay whole"


def test_a_softcap_behind_the_head_keeps_it():
    model = tiny_model("gemma2")
    assert plain_head(model) is None and head_to_leave_out(model, 100, always=True) is None
    model.config.final_logit_softcapping = None
    assert plain_head(tiny_model("llama")) is not None and plain_head(model) is None, "tried once"
