"""`sparselens parity`: a model that computes something else is noticed, whichever way it does."""

import json
import math

import pytest
import torch

from sparselens.evaluation import parity as module
from sparselens.evaluation.parity import ALLOWED, COLUMNS, differences, parity, random_model, table
from sparselens.models.architectures import ARCHITECTURES


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_family_is_the_same(family):
    """And has what makes it hard: heads of another size than its width, windows shorter than the text."""
    model = random_model(family)
    for name, value in module.OWN.get(family, {}).items():
        assert getattr(model.config, name) == value
    if "sliding_window" in module.OWN.get(family, {}) and family != "mistral":  # all of its layers have one
        assert {"sliding_attention", "full_attention"} <= set(model.config.layer_types)
    assert model.config.hidden_size % model.config.num_attention_heads == 0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    row = differences(family, model)
    assert row["model"] == family and all(0 <= row[column] < ALLOWED / 10 for column in COLUMNS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "left as it was"


def test_a_random_model_looks_at_some_tokens_more_than_at_others():
    """Attention that is nearly uniform would be nearly the same with a wrong mask or rotation."""
    model = random_model("llama")
    ids = torch.randint(1, 96, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        last = torch.stack(model(ids, output_attentions=True).attentions)[:, 0, :, -1]
    assert (last.max(-1).values > 4 / 24).all()


def test_a_difference_is_a_share_of_the_largest_logit():
    ours, theirs = torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0])
    assert module._share(ours, theirs) == pytest.approx(0.2)


@pytest.mark.parametrize("wrong", [2 * ALLOWED, math.nan, math.inf])
@pytest.mark.parametrize("column", COLUMNS)
def test_what_differs_is_an_error_after_the_table(column, wrong, monkeypatch, tmp_path):
    row = {"model": "llama", **dict.fromkeys(COLUMNS, 0.0), column: wrong}
    monkeypatch.setattr(module, "differences", lambda name, model: row)
    said = []
    with pytest.raises(ValueError, match="not the same as in transformers: llama"):
        parity(["llama"], json=tmp_path / "rows.json", say=said.append)
    assert "llama" in said[0] and len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1


@pytest.mark.parametrize("part", ["attention", "cache"])
def test_a_model_that_computes_something_else_is_noticed(part, monkeypatch):
    """Gates that are not all open; and a cache that is read from the wrong place."""
    if part == "attention":
        monkeypatch.setattr(module, "OPEN", module.Gate(bias=-0.5))
        columns = {"open", "cached", "padded"}
    else:
        monkeypatch.setattr(module, "_with_cache", lambda model, ids: model(ids).logits[:, : module.TOKENS // 2])
        columns = {"cached"}
    row = differences("llama", random_model("llama"))
    assert {column for column in COLUMNS if row[column] > ALLOWED} == columns


def test_the_table_has_a_line_for_every_model():
    rows = [{"model": name, **dict.fromkeys(COLUMNS, 1e-6)} for name in ("a", "longer")]
    lines = table(rows).splitlines()
    assert len(lines) == 4 and lines[0].split() == list(COLUMNS) and len({len(line) for line in lines[:3]}) == 1
