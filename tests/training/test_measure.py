"""Losses, KL, agreement and density of held-out sequences against the definitions, labels of -100 left out."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from sparselens.config import Gate, Training
from sparselens.models.loading import add_gates
from sparselens.runs import distributed
from sparselens.training.controllers import Budget
from sparselens.training.engine import discard
from sparselens.training.loop import Stage, loss_and_density, seed_of, smaller, steering_loss, warn_if_parting
from sparselens.training.measure import Measurement, measure, token_kl, token_losses
from sparselens.training.sparsify import loss_table


class Patchy:
    """Sequences of which a different part has labels: 2 tokens of the first, 3 of the second, ..."""

    length, n_heldout = 8, 6

    def heldout(self, start, count):
        ids = torch.randint(2, 64, (self.n_heldout + 1, 9), generator=torch.Generator().manual_seed(3))
        labels = ids[:, 1:].clone()
        for i, row in enumerate(labels):
            row[i + 2 :] = -100
        return {"input_ids": ids[start : start + count, :-1], "labels": labels[start : start + count]}

    train = heldout


def models():
    return add_gates(tiny_model("llama"), Gate(bias=0.3)), tiny_model("llama")


def by_hand(model, base, batch):
    """Per sequence, over the labelled positions alone: mean loss, mean KL(base || model), agreement, all right."""
    rows = []
    with torch.no_grad():
        ours, theirs = (m(batch["input_ids"], use_cache=False).logits.log_softmax(-1) for m in (model, base))
    for mine, base_row, labels in zip(ours, theirs, batch["labels"], strict=True):
        at = [t for t, label in enumerate(labels.tolist()) if label != -100]
        losses = [-mine[t, labels[t]].item() for t in at]
        kl = [(base_row[t].exp() * (base_row[t] - mine[t])).sum().item() for t in at]
        same = [float(mine[t].argmax() == base_row[t].argmax()) for t in at]
        right = all(mine[t].argmax() == labels[t] for t in at)
        rows.append([sum(losses) / len(at), sum(kl) / len(at), sum(same) / len(at), float(right)])
    return torch.tensor(rows).T, sum((row != -100).sum().item() for row in batch["labels"])


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_labels_of_minus_100_count_nowhere(micro_batch):
    sparse, base = models()
    batches, first, count = Patchy(), 1, 5
    batch = batches.heldout(first, count)
    with torch.no_grad():
        batch["labels"][2, :5] = sparse(batch["input_ids"]).logits[2, :5].argmax(-1)  # one that is all right
    batches.heldout = lambda start, n: {name: value[start - 1 :][:n] for name, value in batch.items()}
    found = measure(sparse, batches, first, count, micro_batch=micro_batch, base=base)
    (losses, kl, same, right), _ = by_hand(sparse, base, batch)
    torch.testing.assert_close(found.losses, losses, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.kl, kl, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.agreement, same)
    assert found.correct.tolist() == right.bool().tolist() == [False, False, True, False, False]
    assert 0 < same.mean() < 1 and found.queries == count * 8 and found.loss == pytest.approx(losses.mean().item())
    with torch.no_grad():
        output = sparse(batch["input_ids"], output_attentions=True, use_cache=False, gate_output="pattern")
    opened = (torch.stack(output.attentions) > 0).sum((1, 3, 4)).double()  # [layers, heads]
    assert torch.equal(found.edges, opened) and found.pairs.tolist() == [count * 36.0] * 2
    assert found.density == pytest.approx(opened.sum().item() / (count * 36 * 8))


@pytest.mark.parametrize("taught", [False, True], ids=["loss", "kl"])
def test_training_divides_by_the_labelled_tokens(taught):
    sparse, base = models()
    batch = Patchy().train(0, 4)
    stage = Stage("s", sparse, Patchy(), Path(), Training(), teacher=base if taught else None)
    loss, density = loss_and_density(stage, batch, (0, 0), sample=False)
    rows, n_labels = by_hand(sparse, base, batch)
    counts = torch.tensor([2.0, 3.0, 4.0, 5.0])
    assert loss.item() == pytest.approx((rows[int(taught)] * counts).sum().item() / n_labels, rel=1e-5)
    assert density.item() == pytest.approx(measure(sparse, Patchy(), 0, 4).density)
    stage.constraint = Budget(3.0, 0.5, per_query=True)
    counted = loss_and_density(stage, batch, (0, 0), sample=False)[1].item()
    assert counted == pytest.approx(measure(sparse, Patchy(), 0, 4).edges_per_query)
    assert counted == pytest.approx(density.item() * 36 / 8), "36 pairs of 8 queries"
    stage.constraint, stage.model = None, base  # without gates
    stage.runner = base
    assert loss_and_density(stage, batch, (0, 0))[1].item() == 0


def test_too_little_memory_is_answered_with_half_as_much(monkeypatch):
    model, tried = tiny_model("llama"), []
    most, error = 2, RuntimeError("DefaultCPUAllocator: not enough memory")

    def check(module, arguments, keywords):
        tried.append(len(keywords["input_ids"]))
        if tried[-1] > most:
            raise error

    wanted = measure(model, Patchy(), 0, 5, micro_batch=1).losses
    model.register_forward_pre_hook(check, with_kwargs=True)
    torch.testing.assert_close(measure(model, Patchy(), 0, 5, micro_batch=8).losses, wanted)
    assert tried == [5, 4, 2, 2, 1] and not model.training
    most = 0
    with pytest.raises(RuntimeError, match="not enough memory"):
        measure(model, Patchy(), 0, 5, micro_batch=2)
    tried.clear()
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        measure(model, Patchy(), 0, 5, micro_batch=4)
    assert tried == [4]
    tried.clear()
    error = RuntimeError("DefaultCPUAllocator: not enough memory")
    monkeypatch.setattr(distributed, "world", lambda: 2)
    with pytest.raises(RuntimeError, match="not enough memory"):
        measure(model, Patchy(), 0, 4, micro_batch=4)
    assert tried == [2], "of several processes none tries again alone"


def test_positions_without_a_label_are_exactly_zero():
    ours, theirs, labels = torch.randn(2, 3, 7), torch.randn(2, 3, 7), torch.tensor([[1, -100, 2], [-100, 0, 6]])
    for values in (token_losses(ours, labels), token_kl(theirs, ours, labels)):
        assert torch.equal(values == 0, labels == -100) and (values[labels != -100] > 0).all()


def test_a_row_by_hand():
    """Two layers, two heads, three sequences of four tokens: 30 pairs a head."""
    found = Measurement(
        losses=torch.tensor([1.0, 2.0, 6.0]), kl=torch.tensor([0.1, 0.2, 0.6]), queries=12,
        edges=torch.tensor([[3.0, 6.0], [30.0, 9.0]]), pairs=torch.tensor([30.0, 30.0]),
        correct=torch.tensor([True, False, False]), agreement=torch.tensor([0.5, 0.5, 0.75]),
    )  # fmt: skip
    row = found.row("m", "sparse")
    assert row["loss"] == 3.0 and row["sequences"] == 3
    assert row["loss_standard_error"] == pytest.approx((7 / 3) ** 0.5)  # variance (4 + 1 + 9) / 2 = 7, three of them
    assert row["kl_to_base"] == pytest.approx(0.3) and row["exact"] == pytest.approx(1 / 3)
    assert row["top1_agreement"] == pytest.approx(7 / 12)
    assert row["agreement_standard_error"] == pytest.approx(1 / 12)
    assert row["density"] == pytest.approx(48 / 120) and row["density_per_layer"] == pytest.approx([0.15, 0.65])
    torch.testing.assert_close(torch.tensor(row["density_per_head"]), torch.tensor([[0.1, 0.2], [1.0, 0.3]]))
    assert row["edges_per_query"] == pytest.approx(1.0)
    dense = Measurement(found.losses[:1], None, None, None, 4, found.correct[:1]).row("m", "base")
    assert dense["loss_standard_error"] is None and dense["kl_to_base"] is None and dense["density"] == 1.0
    two = Measurement(found.losses[:2], None, None, None, 8, found.correct[:2]).row("m", "base")
    assert two["loss_standard_error"] == pytest.approx(0.5)


def test_the_next_smaller_micro_batch_divides_the_batch():
    said: list[str] = []
    stage = Stage("s", torch.nn.Linear(1, 1), Patchy(), Path(), Training(batch=12), say=said.append)
    for stage.micro, half in ((12, 6), (8, 4), (5, 2), (3, 1), (2, 1)):
        assert smaller(stage) == half
    assert said[1].startswith("step 1: not enough memory for 8 sequences at once; going on with 4 at a time, and still")
    stage.micro, stage.progress.step = 1, 2
    with pytest.raises(ValueError, match="step 3: not enough memory for a single sequence of 8 tokens"):
        smaller(stage)


def test_the_third_bad_step_in_a_row_stops():
    said: list[str] = []
    stage = Stage("s", torch.nn.Linear(1, 1), Patchy(), Path("folder"), Training(), say=said.append)
    progress, stage.parameters = stage.progress, {"weight": torch.nn.Parameter(torch.ones(2))}
    progress.step = 5
    for n in (1, 2):
        discard(stage, float("nan"), 1.0)
        assert progress.bad_steps == n == len(said) and (progress.step, progress.data) == (5, 0)
    with pytest.raises(ValueError, match="3 steps in a row were not finite"):
        discard(stage, float("nan"), 1.0)


def test_no_two_steps_share_their_noise():
    assert len({seed_of(seed, step) for seed in range(20) for step in range(500)}) == 20 * 500
    assert seed_of(2, 7) == (2 * 1_000_003 + 7) * 1_009, "a resumed run of an older version draws the same gates"


def test_parting_from_the_training_loss_is_said_once():
    """0.1 above at the first evaluation: from 0.3 on the text is being learnt by heart."""
    said: list[str] = []
    stage = Stage("s", torch.nn.Linear(1, 1), Patchy(), Path(), Training(), Budget(3.0, 0.1), say=said.append)
    stage.constraint.average = 2.0
    for heldout, times in ((2.1, 0), (2.29, 0), (2.31, 1), (2.9, 1)):
        warn_if_parting(stage, heldout)
        assert len(said) == times
    assert "moved 0.21 nats away" in said[0] and stage.progress.first_gap == pytest.approx(0.1)


def test_evaluations_take_the_slices_in_turn(monkeypatch):
    """Two of seven sequences each time: from 0, 2, 4 and again from the first; the last one is never alone."""
    sparse, base = models()
    stage = Stage("s", sparse, Patchy(), Path(), Training(evaluate_sequences=2), steering=7, reference=torch.zeros(7))
    starts, stage.micro = [], 2

    def seen(model, batches, start, count, **options):
        starts.append((start, count))
        return measure(model, batches, start % 4, count, **options)

    monkeypatch.setattr("sparselens.training.loop.measure", seen)
    lines = [stage.evaluate() for _ in range(4)]
    assert starts == [(0, 2), (2, 2), (4, 2), (0, 2)] and stage.progress.evaluations == 4
    first = measure(sparse, Patchy(), 0, 2)
    assert lines[0]["heldout_loss"] == pytest.approx(first.loss) and lines[0]["heldout_density"] == first.density
    assert lines[0]["heldout_density_per_layer"] == pytest.approx((first.edges.mean(1) / first.pairs).tolist())
    stage.teacher = base
    line = stage.evaluate()
    again = measure(sparse, Patchy(), 2, 2, base=base)
    assert line["heldout_loss"] == pytest.approx(again.kl.mean().item())
    assert line["heldout_cross_entropy"] == pytest.approx(again.loss)
    stage.steering = 1
    stage.evaluate()
    assert starts[-1] == (0, 1), "no more than there are"
    stage.steering = 0
    assert stage.evaluate() == {}


def test_the_loss_that_steers_is_paired_with_the_base():
    """A slice of 3 of 6 sequences, half a nat above the base on average: the base's mean over all six, plus that."""
    reference = torch.tensor([9.0, 1.0, 2.0, 6.0, 3.0, 3.0])
    values = reference[1:4] + torch.tensor([0.0, 0.5, 1.0])
    stage = Stage("s", torch.nn.Linear(1, 1), Patchy(), Path(), Training(), steering=6)
    assert steering_loss(stage, values, reference, 1) == pytest.approx((4.5, 0.5 / 3**0.5))
    assert steering_loss(stage, values, None, 1) == pytest.approx((3.5, values.std().item() / 3**0.5))
    assert steering_loss(stage, values[:2], reference, 1) == pytest.approx((4.25, 0.25))
    assert steering_loss(stage, values[:1], reference, 1) == (4.0, 0.0)
    assert steering_loss(stage, reference + 1, reference, 0) == (5.0, 0.0), "all of them: no sampling error"


def test_every_loss_in_the_terminal_has_its_n_and_spread():
    row = {"kl_to_base": 0.1, "edges_per_query": None, "density": 1.0, "loss": 2.5, "loss_standard_error": 0.25}
    rows = [row | {"kind": "base", "sequences": 3}, row | {"kind": "sparse", "sequences": 3}]
    text = loss_table(rows)
    assert text.count("2.5000 ± 0.2500") == 2 and "n = 3 held-out sequences" in text
    alone = loss_table([row | {"kind": "base", "sequences": 1, "loss_standard_error": None}])
    assert "2.5000 ± ?" in alone and "n = 1 held-out" in alone
