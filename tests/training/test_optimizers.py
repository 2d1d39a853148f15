"""Muon moves the matrices of the blocks, AdamW the rest; a padded head is the same head."""

import pytest
import torch
from tiny_models import CONFIGS, tiny_model

from sparselens.config import Gate, Training
from sparselens.models.loading import add_gates
from sparselens.training.engine import Together, learning_rate, make_optimizer


def optimizer_of(model, **settings):
    return make_optimizer(dict(model.named_parameters()), Training(**settings))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_parameter_is_moved_by_one_optimiser(family):
    model = tiny_model(family)
    add_gates(model, Gate())
    both = optimizer_of(model, optimizer="muon", lr=1e-3, bias_lr=0.5, weight_decay=0.1)
    assert isinstance(both, Together)
    adamw, muon = both.optimizers
    rest, gates = adamw.param_groups
    (matrices,) = muon.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    moved = [names[id(p)] for group in both.param_groups for p in group["params"]]
    assert sorted(moved) == sorted(names.values())
    # Everything that is a matrix and not an embedding of tokens or positions, nor the head.
    outside = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside += [module for name, module in model.named_modules() if name.endswith("wpe")]
    excluded = {id(p) for module in outside for p in module.parameters()}
    expected = {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in excluded}
    assert {names[id(p)] for p in matrices["params"]} == {name for name in expected if "gate_bias" not in name}
    assert all(names[id(p)].endswith("gate_bias") for p in gates["params"]) and gates["params"]
    assert (matrices["base_lr"], rest["base_lr"], gates["base_lr"]) == (1e-3, 1e-3, 0.5)
    assert (matrices["weight_decay"], rest["weight_decay"], gates["weight_decay"]) == (0.1, 0.0, 0.0)


def test_adamw_alone_decays_all_but_gates():
    model = tiny_model("gpt2")
    add_gates(model, Gate())
    others, gates = optimizer_of(model, weight_decay=0.2).param_groups
    assert (others["weight_decay"], gates["weight_decay"]) == (0.2, 0.0)
    assert len(others["params"]) + len(gates["params"]) == len(list(model.parameters()))


def test_muon_steps_are_orthogonal_and_as_large_as_adamws():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(32, 48))
    before = weight.detach().clone()
    both = make_optimizer({"h.0.weight": weight, "bias": torch.nn.Parameter(torch.zeros(3))},
                          Training(optimizer="muon", lr=1e-2))  # fmt: skip
    for group in both.param_groups:
        group["lr"] = group["base_lr"]
    weight.grad = torch.randn(32, 4) @ torch.randn(4, 48) + 0.1 * torch.randn(32, 48)  # a few large directions
    both.step()
    step = (before - weight).detach() / 1e-2
    singular = torch.linalg.svdvals(step)
    assert (
        singular.max() / singular.min()
        < 2
        < torch.linalg.matrix_norm(weight.grad, 2) / torch.linalg.svdvals(weight.grad).min()
    )
    assert step.square().mean().sqrt() == pytest.approx(0.2, rel=0.3)  # the root mean square of AdamW's steps
    both.zero_grad()
    assert weight.grad is None and list(both.state[weight]) == ["momentum_buffer"]


def test_muon_is_refused_with_adapters():
    with pytest.raises(ValueError, match="not with lora"):
        Training(optimizer="muon", lora=4)


def test_learning_rate_rises_stays_and_falls():
    settings = Training(steps=100, warmup=0.1, decay=0.5)
    factors = [learning_rate(step, settings) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == factors[50] == 1.0
    assert factors[99] == pytest.approx(0.05 + 0.95 / 50)
    assert factors[74] == pytest.approx(0.05 + 0.95 * 26 / 50) and factors[4] == pytest.approx(0.5)
    short = Training(steps=4, warmup=0.1, decay=0.1)  # both of less than a step
    assert [learning_rate(step, short) for step in range(4)] == [1.0] * 4
