"""What a studio shows, against the models themselves: transformers' own forward pass, plain hooks, and differences."""

import copy
import shutil

import pytest
import torch
from studio_run import PROMPT, make_studio_run
from tiny_models import CONFIGS, tiny_model, tiny_tokenizer
from tracing_setup import biased_model

import sparselens as sl
from sparselens.live.models import PASSES, Changes, Member, Models, log_odds, same_weights
from sparselens.live.passes import full_pass
from sparselens.live.server import _check_named
from sparselens.models.architectures import attention_modules
from sparselens.models.decoder import Decoder
from sparselens.models.delta import save_delta
from sparselens.tasks.registry import Words

CLOSED = ((0, 1, 5, 3), (1, 2, 7, 0), (1, 2, 7, 7), (0, 3, 7, 2))


def alone(family, gated, dtype=torch.float32, **options):
    """Models with one member, and the model itself."""
    try:
        model = biased_model(family, gated, dtype, **options)
    except ValueError as reason:
        pytest.skip(str(reason))
    member = Member(family, Decoder(model), Words(tiny_tokenizer()))
    return Models({"sparse": member}), model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_studio_run(tmp_path_factory.mktemp("studio") / "run")


@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
@pytest.mark.parametrize("family", CONFIGS)
def test_it_says_what_the_model_says(family, gated):
    models, model = alone(family, gated)
    for text in (PROMPT, "w4 w4 w9", PROMPT):  # a shorter prompt in between must not spoil the longer one
        ids = torch.tensor([models.ids("sparse", text)])
        with torch.no_grad():
            theirs = model(ids).logits[0, -1].log_softmax(-1)
            weights = torch.stack(model(ids, output_attentions=True).attentions)[:, 0]
        member = models.member("sparse")
        ran = member.run(ids[0].tolist())
        assert torch.allclose(member.log_p(ran, [-1])[0], theirs, atol=2e-5)
        assert torch.allclose(ran.weights, weights.to(ran.weights), atol=1e-5)
        shown = models.look(text)["models"]["sparse"]
        assert shown["next"][0]["id"] == int(theirs.argmax())
        assert shown["next"][0]["p"] == pytest.approx(float(theirs.max().exp()), abs=1e-5)
        assert shown["open"] == int((weights > 0).sum())


def without(model, ids, changes, after):
    """The model's own log-probabilities with the mix of values computed anew, edges taken out of it, by a plain hook.

    Queries, keys and values are what the attention function is given: taken where transformers calls it.
    """
    import transformers

    layers = {id(m): i for i, m in enumerate(attention_modules(model))}
    name = model.config._attn_implementation
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    original = functions[name]

    def masked(module, query, key, value, attention_mask, **keywords):
        _, weights = original(module, query, key, value, attention_mask, **keywords | {"output_attentions": True})
        weights = weights.to(value.dtype).clone()
        layer = layers[id(module)]
        for place in changes.closed:
            if place[0] == layer:
                weights[0, place[1], place[2], place[3]] = 0
        for at, head in changes.silenced:
            if at == layer:
                weights[0, head] = 0
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    functions[name] = masked
    try:
        with torch.no_grad():
            return model(torch.tensor([ids]), output_attentions=True).logits[0, after].log_softmax(-1)
    finally:
        functions[name] = original


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_closed_gate_and_a_silenced_head_do_to_the_answer_what_they_do_to_the_model(family):
    models, model = alone(family, gated=True, gate_bias=2.0)
    changes = Changes(CLOSED, ((1, 3),))
    question = models.question("sparse", PROMPT, 9)
    found = models.touch("sparse", question, changes)
    theirs = without(model, list(question.ids), changes, -1)
    assert found["p_after"] == pytest.approx(float(theirs[9].exp()), rel=1e-3)
    assert found["after"] == pytest.approx(float(log_odds(theirs, 9)), abs=1e-4)
    nothing = without(model, list(question.ids), Changes(), -1)
    assert found["p_before"] == pytest.approx(float(nothing[9].exp()), rel=1e-3)
    assert abs(found["after"] - found["before"]) > 1e-3, "a change that does nothing proves nothing"


@pytest.mark.parametrize("normalise", ["all", "open"])
@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
def test_the_prediction_is_the_slope_of_what_is_measured(gated, normalise):
    """Whether first order is good enough for a whole edge is the model's business; that it is first order is ours.

    Gates are held where they are, as in a derivative: over a step this small none of them flips.
    """
    models, _ = alone("llama", gated, torch.float64, normalise=normalise, gate_bias=2.0)
    member, question = models.member("sparse"), models.question("sparse", PROMPT, 9)
    gradient, checked = member.gradient(question), 0
    x = member.embed(question.ids)

    def odds(mask):
        run = full_pass(member.decoder, x, mask)
        return float(log_odds(member.log_p(run, [question.position])[0].double(), 9))

    for place in CLOSED:
        low, high = (torch.ones_like(gradient) for _ in range(2))
        low[place], high[place] = 1 - 1e-4, 1 + 1e-4
        a, b = odds(low), odds(high)
        slope = (b - a) / 2e-4
        assert float(gradient[place]) == pytest.approx(slope, abs=5e-3, rel=2e-2)
        checked += abs(slope) > 1e-3
    assert checked >= 2


def test_effects_are_ranked_and_predictions_are_their_sum():
    models, _ = alone("llama", gated=True)
    question = models.question("sparse", PROMPT, 9)
    effects = models.effects("sparse", question)
    sizes = [abs(effect) for *_, effect in effects]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0
    by_place = {tuple(place): effect for *place, effect in effects}
    assert all(key <= query for _, _, query, key in by_place)
    two = [tuple(place) for *place, _ in effects[:2]]
    predicted = models.predicted("sparse", question, Changes(tuple(two)))
    assert predicted == pytest.approx(by_place[two[0]] + by_place[two[1]], rel=1e-4)
    head = two[0][:2]
    whole = sum(effect for place, effect in by_place.items() if place[:2] == head)
    assert models.predicted("sparse", question, Changes(silenced=(head,))) == pytest.approx(whole, rel=1e-3)
    assert models.predicted("sparse", question, Changes((two[0],), (head,))) == pytest.approx(whole, rel=1e-3)


def test_a_run_opens_with_its_three_models(run):
    said = []
    models = Models.open(run, said.append)
    assert list(models.members) == ["dense", "control", "sparse"] and models.prompts == [PROMPT]
    told = models.describe()["models"]
    assert [told[role]["gated"] for role in told] == [False, False, True]
    assert [told[role]["features"] for role in told] == [True, False, True]
    assert any("sparse" in text for text in said)


def test_a_model_alone_is_shown_alone(run):
    assert list(Models.open(run / "base" / "model", print).members) == ["dense"]
    assert list(Models.open(run / "model", print).members) == ["sparse"]


@pytest.mark.parametrize(
    ("text", "why"),
    [("  ", "type a prompt"), ("a\ud800", "half a character"), (" ".join(["w1"] * 90), "up to 64")],
)
def test_prompts_that_cannot_be_are_refused_in_words(run, text, why):
    models, _ = alone("llama", gated=True)
    with pytest.raises(ValueError, match=why):
        models.look(text)


@pytest.mark.parametrize("changes", [Changes(((9, 0, 0, 0),)), Changes(((0, 0, 2, 3),)), Changes(silenced=((0, 7),))])
def test_changes_that_cannot_be_are_refused_in_words(changes):
    models, _ = alone("llama", gated=True)
    with pytest.raises(ValueError, match="no gate or head"):
        models.touch("sparse", models.question("sparse", PROMPT, 9), changes)


def close(a, b):
    """Two passes, part by part."""
    assert torch.allclose(a.residual[-1], b.residual[-1], atol=2e-5)
    for one, other in ((a.residual, b.residual), (a.keys, b.keys), (a.values, b.values)):
        assert all(torch.allclose(x, y, atol=2e-5) for x, y in zip(one, other, strict=True))
    assert torch.allclose(a.weights, b.weights, atol=1e-5)
    assert (a.margins is None) == (b.margins is None)
    if a.margins is not None:
        assert torch.allclose(a.margins, b.margins, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_pass_that_goes_on_where_an_earlier_one_ended_is_a_whole_pass(family, gated):
    """Typed on, typed back, another last word, another prompt: whatever is looked up is what is computed."""
    models, _ = alone(family, gated, gate_bias=1.0)
    member = models.member("sparse")
    for text in (PROMPT[:11], PROMPT, PROMPT[:17], f"{PROMPT[:-1]}4 w7", "w9 w9", PROMPT):
        ids = models.ids("sparse", text)
        close(member.run(ids), full_pass(member.decoder, member.embed(ids)))


@pytest.mark.parametrize("normalise", ["all", "open"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_touched_pass_is_a_whole_pass_with_that_mask(family, normalise):
    """Lowest layer, last layer, last token alone, a head: what lies below and before is looked up."""
    models, _ = alone(family, gated=True, gate_bias=2.0, normalise=normalise)
    member, ids = models.member("sparse"), models.ids("sparse", PROMPT)
    changes = [Changes(CLOSED), Changes(CLOSED[2:3]), Changes(((0, 1, 5, 3),)), Changes(silenced=((1, 3),)), Changes()]
    for change in (*changes, Changes(CLOSED, ((0, 0),))):
        mask = member.mask(len(ids), change)
        whole = full_pass(member.decoder, member.embed(ids), mask)
        close(member.without(ids, change), whole)


def test_where_gates_renormalise_the_open_ones_share_what_a_closed_one_had():
    models, _ = alone("llama", gated=True, gate_bias=2.0, normalise="open")
    member, ids = models.member("sparse"), models.ids("sparse", PROMPT)
    before, after = member.run(ids).weights, member.without(ids, Changes(CLOSED)).weights
    for place in CLOSED:
        assert after[place] == 0 and before[place] > 0.01, "a case in which there is something to share"
    for weights in (before, after):
        total = weights.sum(-1)
        torch.testing.assert_close(total, (total > 0).float())


def test_typing_on_computes_new_tokens_alone_and_a_touch_what_lies_above(monkeypatch):
    models, _ = alone("llama", gated=True, gate_bias=2.0)
    member, seen = models.member("sparse"), []
    mlp = member.decoder.mlp
    monkeypatch.setattr(member.decoder, "mlp", lambda layer, x: (seen.append((layer, x.shape[1])), mlp(layer, x))[1])
    ids = models.ids("sparse", PROMPT)
    member.run(ids[:5])
    member.run(ids)
    member.run(ids)
    assert seen == [(0, 5), (1, 5), (0, len(ids) - 5), (1, len(ids) - 5)]
    seen.clear()
    member.without(ids, Changes(((1, 2, 7, 0),)))
    assert seen == [(1, 1)]


def test_passes_are_remembered_but_not_all_of_them():
    models, _ = alone("llama", gated=True)
    for i in range(30):
        models.look(f"w{i} w5")
    assert len(models.member("sparse")._passes) == PASSES


def test_models_with_the_same_weights_run_once(run, tmp_path):
    same = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(same / "control")
    shutil.copytree(same / "base", same / "control")
    models = Models.open(same, print)
    dense, control, sparse = (models.member(role) for role in ("dense", "control", "sparse"))
    assert control.decoder is dense.decoder and sparse.decoder is not dense.decoder
    assert any("control" in note and "once" in note for note in models.notes)
    ids = dense.words.encode(PROMPT)
    assert control.run(ids) is dense.run(ids)
    with torch.no_grad():
        next(sparse.decoder.model.parameters()).add_(1e-6)
    assert not same_weights(sparse.decoder.model, Member.load(same / "model").decoder.model), "to the last bit"


def test_gradients_are_remembered_but_not_all_of_them():
    models, _ = alone("llama", gated=True)
    for i in range(40):
        models.effects("sparse", models.question("sparse", PROMPT, i))
    assert len(models._asked) <= 12


def test_a_sparse_model_that_is_a_difference_is_shown_like_any_other(tmp_path):
    base = tiny_model("llama")
    sl.save(base, tiny_tokenizer(), tmp_path / "base")
    sparse = sl.add_gates(copy.deepcopy(base), sl.Gate(bias=-0.5))
    (tmp_path / "delta").mkdir()
    save_delta(sparse, base, str(tmp_path / "base"), tmp_path / "delta", 8)
    _check_named(str(tmp_path / "delta"))
    assert list(Models.open(tmp_path / "delta", say=lambda text: None).members) == ["sparse"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Run"):
        _check_named(str(tmp_path / "empty"))
