"""Which model is this: rounding and adapters' names do not matter, training does."""

import copy

import pytest
import torch
from tiny_models import CONFIGS, tiny_model

import sparselens as sl
from sparselens.config import Training
from sparselens.models.identity import same_model, sketch
from sparselens.models.loading import add_gates, gate_biases
from sparselens.training.copies import trainable
from sparselens.transcoders.transcoder import Transcoder, read_sketch


@pytest.mark.parametrize("family", CONFIGS)
def test_same_and_other(family):
    model = tiny_model(family)
    own = sketch(model)
    assert same_model(own, sketch(tiny_model(family))) and len(own["weights"]) > 10
    assert same_model(own, sketch(copy.deepcopy(model).bfloat16())), "rounding is not another model"
    assert not same_model(own, sketch(tiny_model(family, seed=1)))
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    assert not same_model(own, sketch(trained))


def test_gates_count():
    dense, sparse = sketch(tiny_model("gpt2")), sketch(add_gates(tiny_model("gpt2"), sl.Gate(bias=0.5)))
    assert not same_model(dense, sparse) and sparse["gates"]
    other = add_gates(tiny_model("gpt2"), sl.Gate(bias=0.5))
    gate_biases(other)[0].data -= 0.3
    assert not same_model(sparse, sketch(other))


def test_the_transcoders_folder_keeps_it(tmp_path):
    coder = Transcoder.random(2, 8, 32)
    coder.sketch = sketch(tiny_model("gpt2"))
    coder.save(tmp_path / "coder")
    assert Transcoder.load(tmp_path / "coder").sketch == coder.sketch
    Transcoder.random(2, 8, 32).save(tmp_path / "plain")
    assert read_sketch(tmp_path / "plain") is None
    (tmp_path / "coder" / "model.json").write_text('{"weights": ["x"], "gates": []}')
    with pytest.raises(ValueError, match=r"model\.json does not hold what was expected"):
        Transcoder.load(tmp_path / "coder")


def test_an_adapter_counts_as_if_it_were_merged():
    """A dense control trained with LoRA is not its base, and is itself when it is exported merged."""
    base = tiny_model("llama")
    adapted = trainable(copy.deepcopy(base), Training(lora=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    own = sketch(adapted)
    assert not same_model(own, sketch(base))
    assert same_model(own, sketch(copy.deepcopy(adapted).merge_and_unload()))
    with adapted.disable_adapter():
        assert same_model(sketch(adapted), sketch(base))
