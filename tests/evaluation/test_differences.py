"""Where a sparse model differs from its base: sums, groups and places against plain forward passes."""

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.data.batches import TextBatches
from sparselens.evaluation.behaviour import behaviour, markdown
from sparselens.evaluation.differences import (
    NEW,
    PAIR,
    SEEN,
    START,
    Pieces,
    differences,
    next_kind,
    position_group,
    seen_before,
)
from sparselens.models.loading import add_gates

TEXT = "\n<|endoftext|>\n".join(" ".join(f"w{(i * j + j) % 62}" for j in range(5 + i % 30)) for i in range(60))


@pytest.fixture(scope="module")
def models():
    return tiny_model("llama"), add_gates(tiny_model("llama"), sl.Gate(bias=-1.0)).eval()


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return TextBatches([str(folder / "text.txt")], tiny_tokenizer(), 16, cache=folder / "cache", need=1 << 20,
                       heldout_tokens=200, progress=False)  # fmt: skip


@pytest.fixture(scope="module")
def by_hand(models, batches):
    """(KL, loss gap, same likeliest token) of sequences 1 to 5, [5, 16], and their batch."""
    batch = batches.heldout(1, 5)
    with torch.no_grad():
        p, q = (
            model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
            .logits.double()
            .log_softmax(-1)
            for model in models
        )
    kl = (p.exp() * (p - q)).sum(-1)
    gap = (p - q).gather(-1, batch["labels"][..., None])[..., 0]
    return kl, gap, p.argmax(-1) == q.argmax(-1), batch


def test_groups_hold_every_token_once(models, batches, by_hand):
    kl, gap, same, batch = by_hand
    assert 0 < same.float().mean() < 1 and kl.min() > 0, "models that differ, or this checks nothing"
    found = differences(*models, tiny_tokenizer(), batches, 1, 5, micro_batch=2)
    assert found["tokens"] == 80 and found["kl"] == pytest.approx(kl.mean().item(), rel=1e-5)
    for groups in (found["by_position"], found["by_next"], found["by_seen"]):
        assert len(groups) > 1 and sum(g["tokens"] for g in groups) == 80
        assert sum(g["kl_share"] for g in groups) == pytest.approx(1)
        assert sum(g["tokens"] * g["same_top1"] for g in groups) == pytest.approx(same.sum().item())
    middle = next(group for group in found["by_position"] if group["name"] == "4 to 15")
    here = (batch["position_ids"] >= 4) & (batch["position_ids"] < 16)
    assert [group["name"] for group in found["by_position"]] == ["0", "1 to 3", "4 to 15"]
    assert middle["kl"] == pytest.approx(kl[here].mean().item(), rel=1e-5)
    assert middle["loss_above_base"] == pytest.approx(gap[here].mean().item(), rel=1e-4, abs=1e-6)
    starts = batch["labels"] == batches.separator
    assert next(g for g in found["by_next"] if g["name"] == START)["tokens"] == starts.sum()
    assert found["by_next"] == sorted(found["by_next"], key=lambda group: -group["kl_share"])


def test_half_of_it(models, batches, by_hand):
    ordered = sorted(by_hand[0].flatten().tolist(), reverse=True)
    share = differences(*models, tiny_tokenizer(), batches, 1, 5)["half"]
    n = round(share * 80)
    assert sum(ordered[:n]) >= sum(ordered) / 2 > sum(ordered[: n - 1])


def test_places_are_the_worst_of_each_sequence(models, batches, by_hand):
    kl, _, _, batch = by_hand
    places = differences(*models, tiny_tokenizer(), batches, 1, 5, micro_batch=3)["places"]
    assert [place["kl"] for place in places] == pytest.approx(sorted(kl.max(1).values.tolist(), reverse=True), rel=1e-4)
    row, at = divmod(int(kl.argmax()), 16)
    pieces = Pieces(tiny_tokenizer())
    start = at - int(batch["position_ids"][row, at])
    assert places[0]["follows"] == pieces[int(batch["labels"][row, at])]
    assert places[0]["text"] == pieces.text(batch["input_ids"][row, max(start, at - 11) : at + 1].tolist())
    with torch.no_grad():
        logits = models[1](batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[row, at]
    best = logits.softmax(-1).topk(3)
    assert [one["p"] for one in places[0]["model"]] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert [one["token"] for one in places[0]["model"]] == [pieces[i] for i in best.indices.tolist()]


def test_a_model_does_not_differ_from_itself(models, batches):
    base, sparse = models
    same = differences(base, base, tiny_tokenizer(), batches, 0, 3)
    assert same["kl"] == pytest.approx(0, abs=1e-6)
    found = behaviour({"base": base, "copy": base, "sparse": sparse}, tiny_tokenizer(), ["w1"], batches=batches)
    assert list(found["differences"]) == ["copy", "sparse"]
    text = markdown(found)
    assert "copy says what base says on all of the text" in text
    assert "Where sparse differs from base" in text and "share of all KL" in text and NEW in text


def test_labels_that_count_nowhere_are_left_out(models, batches):
    class Patchy:
        length, n_heldout = 16, 5

        def heldout(self, start, count):
            batch = batches.heldout(start, count)
            labels = batch["labels"].clone()
            labels[:, 3:] = -100
            labels[0] = -100
            return {"input_ids": batch["input_ids"], "labels": labels}

    found = differences(*models, tiny_tokenizer(), Patchy(), 0, 4, micro_batch=4)
    assert found["tokens"] == 9 and len(found["places"]) == 3
    assert [group["name"] for group in found["by_position"]] == ["0", "1 to 3"]


def test_seen_before():
    #       0    1    2    3    4   | a new document
    ids = [5, 7, 5, 7, 9, 0, 7, 5]
    wanted = [7, 5, 7, 9, 0, 7, 5, 7]
    positions = [0, 1, 2, 3, 4, 0, 1, 2]
    assert seen_before(ids, wanted, positions) == [NEW, SEEN, PAIR, NEW, NEW, NEW, NEW, SEEN]


def test_positions_and_kinds():
    assert [position_group(i) for i in (0, 1, 3, 4, 300, 5000)] == [
        "0", "1 to 3", "1 to 3", "4 to 15", "256 to 1023", "4096 and later"
    ]  # fmt: skip

    class Some(dict):
        special = frozenset({0})

    pieces = Some({1: " red", 2: " Lily", 3: "ing", 4: " 12", 5: ".", 6: "\n", 7: "  ", 8: " “"})
    assert [next_kind(pieces, token) for token in range(9)] == [
        START, "word", "word with a capital", "rest of a word, or a word behind a mark", "number", "mark",
        "line break", "space", "mark",
    ]  # fmt: skip
