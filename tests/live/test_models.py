"""What a studio shows, against the models themselves: transformers' own forward pass, plain hooks, and differences."""

import pytest
import torch
from studio_run import PROMPT, make_studio_run
from tiny_models import CONFIGS, tiny_tokenizer
from tracing_setup import biased_model

from sparselens.live.models import Changes, Member, Models, log_odds
from sparselens.models.architectures import attention_modules
from sparselens.models.decoder import Decoder
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
        ran = models.member("sparse").run(ids[0].tolist())
        assert torch.allclose(ran.log_p[0], theirs, atol=2e-5)
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
    (_, gradient), checked = member.gradient(question), 0
    for place in CLOSED:
        low, high = (torch.ones_like(gradient) for _ in range(2))
        low[place], high[place] = 1 - 1e-4, 1 + 1e-4
        with torch.no_grad():
            a, b = (
                float(log_odds(member.run(question.ids, mask, [question.position]).log_p[0].double(), 9))
                for mask in (low, high)
            )
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


def test_gradients_are_remembered_but_not_all_of_them():
    models, _ = alone("llama", gated=True)
    for i in range(40):
        models.effects("sparse", models.question("sparse", PROMPT, i))
    assert len(models._asked) <= 12
