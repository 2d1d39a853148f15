"""Numbers of a studio at their limits: the last position, the last token, the longest prompt."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from studio_run import PROMPT
from tiny_models import tiny_tokenizer
from tracing_setup import biased_model

from sparselens.attribution.graph import FEATURE
from sparselens.attribution.qk_terms import explain_look
from sparselens.live.circuit import _fewest
from sparselens.live.features import Features
from sparselens.live.models import MOST_TOKENS, Changes, Member, Models, _places, answers
from sparselens.models.decoder import Decoder
from sparselens.runs.run import Run, write_json
from sparselens.tasks.registry import Words
from sparselens.transcoders.transcoder import Transcoder


@pytest.fixture(scope="module")
def models():
    model = biased_model("llama", True, torch.float32)
    return Models({"sparse": Member("llama", Decoder(model), Words(tiny_tokenizer()))})


def test_a_prompt_shorter_than_its_answer_is_all_answer(models, monkeypatch):
    monkeypatch.setattr(models, "filled", 40)
    assert all(models.look(PROMPT)["models"]["sparse"]["says"])


@pytest.mark.parametrize("filled", [0, 1, 3])
def test_what_is_said_stands_behind_the_prompt(models, filled, monkeypatch):
    """At the last position, or where answers are filled in at so many last ones; nothing before."""
    monkeypatch.setattr(models, "filled", filled)
    shown = models.look(PROMPT)["models"]["sparse"]
    ids = torch.tensor([models.ids("sparse", PROMPT)])
    member = models.member("sparse")
    with torch.no_grad():
        best = member.decoder.model(ids).logits[0].softmax(-1).max(-1)
    n, said = ids.shape[1], max(1, filled)
    assert shown["says"] == [""] * (n - said) + member.pieces(best.indices[-said:].tolist())
    assert shown["probability"] == pytest.approx([0.0] * (n - said) + best.values[-said:].tolist(), abs=1e-5)


def test_what_comes_next_is_asked_at_a_position(models):
    ids = torch.tensor([models.ids("sparse", PROMPT)])
    with torch.no_grad():
        logits = models.member("sparse").decoder.model(ids).logits[0]
    for position in range(ids.shape[1]):
        found = models.look(PROMPT, position=position)
        assert found["position"] == position
        assert found["models"]["sparse"]["next"][0]["id"] == int(logits[position].argmax())
    n = ids.shape[1]
    assert found["possible"] == n * (n + 1) // 2


def test_what_lies_behind_the_end_is_refused(models):
    ids = models.ids("sparse", PROMPT)
    vocabulary = models.member("sparse").decoder.vocabulary
    assert models.question("sparse", PROMPT, vocabulary - 1, len(ids) - 1, []).position == len(ids) - 1
    with pytest.raises(ValueError, match=f"no position {len(ids)}: it has {len(ids)} tokens"):
        models.question("sparse", PROMPT, 9, len(ids))
    with pytest.raises(ValueError, match=f"no token {vocabulary}"):
        models.question("sparse", PROMPT, vocabulary)
    assert models.ids("sparse", PROMPT, [vocabulary - 1])[-1] == vocabulary - 1
    with pytest.raises(ValueError, match="a token that this model does not know"):
        models.ids("sparse", PROMPT, [vocabulary])


@pytest.mark.parametrize("longest", [MOST_TOKENS + 1, MOST_TOKENS - 1])
def test_a_prompt_is_as_long_as_model_and_page_allow(models, longest, monkeypatch):
    member = models.member("sparse")
    monkeypatch.setattr(member.decoder, "dims", replace(member.decoder.dims, max_tokens=longest))
    most = min(longest, MOST_TOKENS)
    assert member.most_tokens == most == models.describe()["most_tokens"]
    start = models.ids("sparse", "w3")
    assert len(models.ids("sparse", "w3", [5] * (most - len(start)))) == most
    with pytest.raises(ValueError, match=f"has {most + 1} tokens; the studio shows up to {most}"):
        models.ids("sparse", "w3", [5] * (most - len(start) + 1))


def test_the_shortest_model_says_how_long_a_prompt_may_be(models, monkeypatch):
    (member,) = models.members.values()
    other = Member("short", copy.copy(member.decoder), member.words)
    other.decoder.dims = replace(member.decoder.dims, max_tokens=20)
    for pair in ({"a": member, "b": other}, {"b": other, "a": member}):
        monkeypatch.setattr(models, "members", pair)
        assert models.describe()["most_tokens"] == 20


@pytest.mark.parametrize("kind, places", [("sparsify", ["dense", "sparse"]), ("demo", ["sparse"])])
def test_a_run_of_sparsify_names_its_base(kind, places, tmp_path):
    write_json(tmp_path / "run.json", {"kind": kind, "config": {"model": "somebody/model"}})
    (tmp_path / "model").mkdir()
    found = _places(Run(tmp_path))
    assert list(found) == places and found.get("dense") in (None, "somebody/model")
    (tmp_path / "base" / "model").mkdir(parents=True)
    assert _places(Run(tmp_path))["dense"] == tmp_path / "base" / "model"


def test_a_gate_is_said_to_close_without_features_that_close_it(models, tmp_path, monkeypatch):
    """Of all sources without which it would close, the features; as many as the look itself finds."""
    member = models.member("sparse")
    Transcoder.random(2, 48, 32, seed=1).save(tmp_path)
    monkeypatch.setattr(member, "transcoder", tmp_path)
    features, question, told = Features(models), models.question("sparse", PROMPT, 9), 0
    shares = [abs(row["share"]) for row in features.active("sparse", question)]
    assert len(shares) > 3 and shares == sorted(shares, reverse=True)
    for *edge, _ in models.effects("sparse", question)[:12]:
        found = features.opened("sparse", question, tuple(edge))
        graph = features.graph("sparse", question)
        look = explain_look(graph, *edge, top=12)
        closing = [node for node in look.closing()[:60] if int(graph.kind[node]) == FEATURE]
        assert [row["kind"] for row in found["closing"]] == ["feature"] * len(closing)
        assert [row["without"] for row in found["closing"]] == [look.without(node) for node in closing]
        told += len(closing)
    assert told > 0, "the case needs a feature that holds a gate open"


@pytest.mark.parametrize("most, wanted", [(100, 90), (1000, 90), (95, 90), (60, 60)])
def test_a_circuit_keeps_nine_tenths(most, wanted):
    """Of a metric to which each of the first hundred edges adds a hundredth, above what there is without any."""
    edges = SimpleNamespace(shape=(1, 1, 40, 50), metric=lambda mask, some: -3 + mask.flatten()[:100].sum() / 50)
    some = SimpleNamespace(embedding=torch.zeros(1))
    n, effect, curve = _fewest(edges, some, torch.arange(2000), most, -1.0, -3.0, lambda done, of: None)
    assert wanted <= n <= wanted + max(1, wanted // 50) and effect == pytest.approx(min(n, 100) / 100)
    assert curve == sorted(curve) and all(f == pytest.approx(min(at, 100) / 100) for at, f in curve)


@pytest.mark.parametrize("at", range(4))
def test_the_first_gate_behind_the_last_is_refused(models, at):
    member, n = models.member("sparse"), 5
    shape = [member.decoder.dims.n_layers, member.decoder.dims.n_heads, n, n]
    last = [size - 1 for size in shape]
    assert member.mask(n, Changes(closed=(tuple(last),)))[tuple(last)] == 0
    beyond = tuple(size if i == at else place for i, (size, place) in enumerate(zip(shape, last, strict=True)))
    with pytest.raises(ValueError, match="no gate or head"):
        member.mask(n, Changes(closed=(beyond,)))


def test_answers_by_hand():
    before, after = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.2, 0.4, 0.4]).log()
    found = answers(before, after, 0)
    assert found == {
        "before": pytest.approx(0.0, abs=1e-6), "after": pytest.approx(-1.3862944), "p_before": pytest.approx(0.5),
        "p_after": pytest.approx(0.2),
    }  # fmt: skip
