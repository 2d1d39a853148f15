"""A sparse model as its difference to the base: what comes back, what is refused."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.config import Gate
from sparselens.models.delta import GROUP, LEVELS, restored, rounded, save_delta
from sparselens.models.loading import add_gates, gate_biases


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 64), (1, 1000)])
def test_rounding_is_within_half_a_step(shape, bits):
    difference = torch.randn(shape) * torch.logspace(-6, 0, shape[-1])
    difference.view(-1)[::3] = 0
    numbers, scale = rounded(difference, bits)
    groups = -(-difference.numel() // GROUP)
    assert numbers.dtype == torch.uint8 and numbers.numel() == groups * GROUP * bits // 8 and len(scale) == groups
    found = restored(numbers, scale, bits, list(shape))
    step = scale.repeat_interleave(GROUP)[: difference.numel()].view(shape)
    assert ((found - difference).abs() <= step * 0.5001).all() and (found[difference == 0] == 0).all()
    assert scale.max() == pytest.approx(float(difference.abs().max()) / LEVELS[bits])


@pytest.fixture
def pair(tmp_path):
    """A base in a folder, and a sparse model a little away from it."""
    base = tiny_model("llama")
    sl.save(base, tiny_tokenizer(), tmp_path / "base")
    sparse = add_gates(copy.deepcopy(base), Gate(normalise="open"))
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    (tmp_path / "delta").mkdir()
    return base, sparse, tmp_path


@pytest.mark.parametrize("bits, most", [(8, 1e-2), (4, 0.15)])  # half a step of normal numbers: 0.6 and 11 %
def test_the_model_comes_back(pair, bits, most):
    base, sparse, folder = pair
    save_delta(sparse, base, str(folder / "base"), folder / "delta", bits)
    found, tokenizer = sl.load(folder / "delta")
    assert len(tokenizer) == 64 and found.config.sparselens["normalise"] == "open"
    for ours, theirs in zip(gate_biases(found), gate_biases(sparse), strict=True):
        assert torch.equal(ours, theirs), "gates are kept as they are"
    before, wanted = dict(base.named_parameters()), dict(sparse.named_parameters())
    for name, parameter in found.named_parameters():
        if not name.endswith("gate_bias"):
            assert (parameter - wanted[name]).norm() < most * (wanted[name] - before[name]).norm(), name


def test_what_is_refused(pair, tmp_path):
    base, sparse, folder = pair
    delta = folder / "delta"
    save_delta(sparse, base, str(folder / "nowhere"), delta, 8)
    with pytest.raises(ValueError, match=r"needs its base, .*nowhere.*sl.load\(folder, base=...\)"):
        sl.load(delta)
    assert sl.load(delta, base=folder / "base")[0] is not None
    sl.save(tiny_model("llama", seed=5), tiny_tokenizer(), folder / "other")
    with pytest.raises(ValueError, match="the base at hand is another model"):
        sl.load(delta, base=folder / "other")
    with pytest.raises(ValueError, match="is a whole model"):
        sl.load(folder / "base", base=folder / "other")
    with pytest.raises(ValueError, match=r"bits=3: expected one of 4, 8"):
        save_delta(sparse, base, "base", delta, 3)
    with pytest.raises(ValueError, match="another model"):
        save_delta(sparse, tiny_model("gpt2"), "base", delta, 8)
    about = json.loads((delta / "delta.json").read_text())
    for change in ({"version": 2}, {"bits": 5}, {"shapes": None}, {"normalise": "often"}):
        (delta / "delta.json").write_text(json.dumps(about | change))
        with pytest.raises(ValueError, match=r"delta.json|normalise"):
            sl.load(delta, base=folder / "base")
    (delta / "delta.json").write_text(json.dumps(about))
    tensors = load_file(delta / "delta.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "q_proj" not in name}, delta / "delta.safetensors")
    with pytest.raises(ValueError, match=r"delta\.json and delta\.safetensors are damaged"):
        sl.load(delta, base=folder / "base")


def changed(folder, tensors=None, **about):
    """The same difference with some of it replaced; tensors: by name, None leaves one out."""
    told = json.loads((folder / "delta.json").read_text())
    (folder / "delta.json").write_text(json.dumps(told | about))
    found = load_file(folder / "delta.safetensors") | (tensors or {})
    save_file({n: t for n, t in found.items() if t is not None}, folder / "delta.safetensors")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "damage", ["other bits", "a weight not told of", "a weight told of twice", "few", "scale", "cut off", "text"]
)
def test_damage_never_gives_another_model(pair, bits, damage):
    base, sparse, folder = pair
    delta = folder / "delta"
    save_delta(sparse, base, str(folder / "base"), delta, bits)
    shapes = json.loads((delta / "delta.json").read_text())["shapes"]
    tensors, name = load_file(delta / "delta.safetensors"), next(n for n in shapes if "q_proj" in n)
    if damage == "other bits":
        changed(delta, bits=12 - bits)
    elif damage == "a weight not told of":
        changed(delta, shapes={n: shape for n, shape in shapes.items() if n != name})
    elif damage == "a weight told of twice":
        changed(delta, shapes=shapes | {"model.nothing.weight": shapes[name]})
    elif damage == "few":
        changed(delta, {f"{name}.q": tensors[f"{name}.q"][:1]})
    elif damage == "scale":
        changed(delta, {f"{name}.scale": tensors[f"{name}.scale"] * torch.nan})
    elif damage == "cut off":
        path = delta / "delta.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    else:
        changed(delta, base=["base"])
    with pytest.raises(ValueError, match=r"delta\.(json|safetensors)"):
        sl.load(delta, base=folder / "base")


def test_a_difference_to_a_difference_is_refused(pair):
    """Its own folder, say: there would be no end to it."""
    base, sparse, folder = pair
    save_delta(sparse, base, str(folder / "delta"), folder / "delta", 8)
    for given in ({}, {"base": folder / "delta"}):
        with pytest.raises(ValueError, match="itself the difference to a base"):
            sl.load(folder / "delta", **given)


def test_gates_stay_in_fp32(pair):
    """Whatever the model is in, as everywhere else: in bf16 they would move, and gates flip."""
    base, sparse, folder = pair
    save_delta(sparse, base, str(folder / "base"), folder / "delta", 8)
    found, _ = sl.load(folder / "delta", dtype="bfloat16")
    for ours, theirs in zip(gate_biases(found), gate_biases(sparse), strict=True):
        assert torch.equal(ours, theirs)
    assert found.lm_head.weight.dtype == torch.bfloat16
    sl.save(sparse, tiny_tokenizer(), folder / "whole")
    whole, _ = sl.load(folder / "whole", dtype="bfloat16")
    assert {n: p.dtype for n, p in found.named_parameters()} == {n: p.dtype for n, p in whole.named_parameters()}
