"""Readings of attention edges as rows: by hand, in pieces, over processes; curves of single prompts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs import QUIET, chosen, random_prompts
from tiny_models import tiny_model, tiny_tokenizer
from torch.utils.flop_counter import FlopCounterMode

from sparselens.circuits.attention_edges import AttentionEdges
from sparselens.circuits.compare import compare, published
from sparselens.circuits.discover import discover, table
from sparselens.circuits.estimate import CPU_SHARE, Need, check_memory, measured, plan_task, runs_per_prompt, total_runs
from sparselens.circuits.faithfulness import NoEffect
from sparselens.circuits.prompt_curves import (
    PromptCurves,
    geometric_mean,
    interval,
    measure_curves,
    n_columns,
    ratio,
    usable,
)
from sparselens.circuits.readings import EdgeReader, _alternatives, _jaccard
from sparselens.circuits.rows import SCOPES, WORDING, Reading, wording
from sparselens.cli import main
from sparselens.config import Gate, Search
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates, save
from sparselens.tasks.prompts import build
from sparselens.tasks.registry import Pair, Task

THRESHOLDS = ["0.8", "0.9", "0.95", "0.98"]


def gated(bias=0.3):
    return add_gates(tiny_model("llama"), Gate(bias=bias))


def reader(model=None, n=5, **settings):
    settings = {"points": 6, "prompts": n, "seed": 3, **settings}
    return EdgeReader(Decoder(model or tiny_model("llama")), random_prompts(n), Search(**settings))


# ---- curves in numbers alone ----


def test_edges_needed_are_found_exactly_for_every_prompt():
    """Two prompts whose effect is n / 40 and n / 10: bisection finds the very sizes."""
    full, calls = np.array([40, 10]), []

    def run(sizes):
        calls.append(sizes)
        return np.minimum(sizes, full) / full

    curves = measure_curves(run, np.array([64, 32]), 100, 6, np.ones(2), np.zeros(2))
    assert [curves.edges_at(t).tolist() for t in (0.8, 0.9, 0.95, 0.98)] == [[32, 8], [36, 9], [38, 10], [40, 10]]
    assert curves.sizes.shape == (2, n_columns(6)) and (np.diff(curves.sizes, axis=1) >= 0).all()
    assert len(calls) < n_columns(6) - 2  # what is known is not measured again
    assert all((sizes <= [64, 32]).all() for sizes in calls)


def test_an_effect_must_stay_above_the_threshold():
    curves = PromptCurves(np.array([[0, 1, 2, 4, 8]]), np.array([[0.0, 0.95, 0.5, 0.92, 1.0]]), np.ones(1), np.zeros(1))
    assert curves.edges_at(0.9).tolist() == [4] and curves.brackets(0.9)[0].tolist() == [2]
    assert curves.edges_at(0.99).tolist() == [8]
    never = PromptCurves(np.array([[0, 1, 2]]), np.array([[0.0, 0.1, 0.2]]), np.ones(1), np.zeros(1))
    assert never.edges_at(0.9).tolist() == [2]  # the whole model, whatever it gives


def test_the_mean_curve_and_the_curve_of_one_prompt():
    sizes, metrics = np.array([[0, 10, 1000], [0, 100, 1000]]), np.array([[2.0, 4.0, 4.0], [0.0, 0.0, 1.0]])
    curves = PromptCurves(sizes, metrics, np.array([4.0, 1.0]), np.array([2.0, 0.0]))
    row = curves.mean_row()
    at = dict(zip(row["edges"], row["effect"], strict=True))
    assert at[0] == 0 and at[1000] == 1
    nearest = min(at, key=lambda n: abs(n - 10))
    first = np.interp(np.log1p(nearest), np.log1p(sizes[0]), [0, 1, 1])
    second = np.interp(np.log1p(nearest), np.log1p(sizes[1]), [0, 0, 1])
    assert at[nearest] == pytest.approx((first + second) / 2)
    assert all(low <= mean <= high for low, mean, high in zip(row["low"], row["effect"], row["high"], strict=True))
    one = curves.one_row(0)
    assert (one["edges"], one["effect"]) == ([0, 10, 1000], [0.0, 1.0, 1.0]) and one["low"] == one["effect"]


def test_ratios_are_geometric_means_over_prompts():
    found = ratio(np.array([100, 400]), np.array([10, 10]))
    assert found["multiplier"] == pytest.approx(20) and found["n_prompts"] == 2
    assert (found["dense_edges"], found["sparse_edges"]) == (pytest.approx(200), pytest.approx(10))
    assert (found["low"], found["high"]) == (pytest.approx(10), pytest.approx(40))
    assert ratio(np.array([5, 5]), np.array([0, 1]))["multiplier"] == pytest.approx(5)  # no edge counts as one
    assert geometric_mean(np.array([0, 100])) == pytest.approx(10)
    low, high = interval(np.array([10, 1000]))
    assert (low, high) == (pytest.approx(10), pytest.approx(1000))
    with pytest.raises(ValueError, match="different prompts: 2 and 3"):
        ratio(np.ones(2), np.ones(3))


def test_intervals_are_percentiles_of_a_bootstrap_over_prompts():
    dense, sparse = np.arange(1.0, 30.0) ** 2, np.array([0.0, 1.0, *np.arange(3.0, 30.0)])
    logs = {"dense": np.log(dense), "sparse": np.log(np.maximum(sparse, 1))}
    for seed in (0, 1):
        draw = np.random.default_rng(seed).integers(0, 29, (1000, 29))
        for values, name in ((dense, "dense"), (sparse, "sparse")):
            wanted = np.exp(np.percentile(logs[name][draw].mean(1), [2.5, 97.5]))
            assert (
                interval(values, seed) == pytest.approx(wanted) and (interval(values) == pytest.approx(wanted)) != seed
            )
        wanted = np.exp(np.percentile((logs["dense"] - logs["sparse"])[draw].mean(1), [2.5, 97.5]))
        for found in (ratio(dense, sparse, seed), *([] if seed else [ratio(dense, sparse)])):
            assert [found["low"], found["high"]] == pytest.approx(wanted)
        ends = np.stack([np.zeros(29), dense / 900, np.ones(29)], 1)
        curves = PromptCurves(np.tile([0, 9, 99], (29, 1)), ends, np.ones(29), np.zeros(29))
        wanted = np.percentile((dense / 900)[draw].mean(1), [2.5, 97.5])
        for row in (curves.mean_row(seed), *([] if seed else [curves.mean_row()])):
            at = row["edges"].index(9)
            assert [row["low"][at], row["high"][at]] == pytest.approx(wanted)


def test_prompts_without_an_effect_do_not_count():
    assert usable(np.array([1.0, 2.0, 1.0]), np.array([0.0, 0.0, 0.999]), "x").tolist() == [True, True, False]
    raised = np.array([1.0, 1.0, 1.0, 0.0205, 0.0195])  # two in a hundred of the median
    assert usable(1 + raised, np.ones(5), "x").tolist() == [True, True, True, True, False]
    assert usable(np.array([1.0, 0.0]), np.array([0.0, 1.0]), "x").tolist() == [True, False]  # half of them will do
    with pytest.raises(NoEffect, match="1 of 3 prompts"):
        usable(np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 1.0]), "x")


def test_alternatives_by_hand():
    counts = np.array([[10.0, 20.0], [15.0, 80.0], [40.0, 99.0]])
    reached = np.array([[True, True], [True, True], [False, False]])
    found = _alternatives(counts, reached, np.array([[0.0, 0.0], [0.1, 0.3], [0.5, 0.5]]))
    assert found["reached"] == [1.0, 1.0, 0.0] and found["within_twice"] == [1.0, 0.5, 0.0]
    assert found["edges"] == [pytest.approx(200**0.5), pytest.approx(1200**0.5), None]
    assert found["overlap"] == [None, pytest.approx(0.2), None]


def test_overlap_with_circuits_found_before():
    masks = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]).bool().view(2, 1, 1, 2, 2)
    earlier = [torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]]).bool().view(2, 1, 1, 2, 2), masks]
    assert _jaccard(masks, earlier).tolist() == [0.75, 0.0] and _jaccard(masks, []).tolist() == [0.0, 0.0]


# ---- rows ----


@pytest.mark.parametrize("model", [tiny_model("llama"), gated()], ids=["dense", "sparse"])
def test_a_row_is_what_its_circuits_do(model):
    """The listed edges of the example, kept by hand, give the example's curve."""
    read = reader(model)
    ((row, curve),) = [read.read("removed")["removed"]]
    assert curve is None and row["scope"] == "prompt" and list(row["edges_at"]) == THRESHOLDS
    assert row["length"] == len(row["tokens"]) == 8 and row["n_prompts"] == 5 and row["n_edges"] == 2 * 4 * 36
    edges = AttentionEdges(read.decoder, read.prompts.take(slice(0, 1)))
    some = next(edges.parts())
    listed = [dict(zip(row["columns"], edge, strict=True)) for edge in row["circuit"]]
    with torch.no_grad():
        whole, nothing = edges.metric(edges.all(some), some), edges.metric(edges.all(some, 0.0), some)
        pattern = torch.stack([weights[0] for weights, _ in edges.seen(some.embedding)])
        for n, effect in list(zip(row["example_curve"]["edges"], row["example_curve"]["effect"], strict=True))[:-1]:
            mask = edges.all(some, 0.0).clone()
            for edge in listed[:n]:
                mask[0, edge["layer"], edge["head"], edge["query"], edge["key"]] = 1
            assert float((edges.metric(mask, some) - nothing) / (whole - nothing)) == pytest.approx(effect, abs=1e-4)
    for edge in listed:
        at = edge["layer"], edge["head"], edge["query"], edge["key"]
        assert edge["weight"] == pytest.approx(float(pattern[at]), abs=1e-6) and edge["weight"] > 0
    for t, name in row["ranking"].items():
        assert row["rankings"][name][t] == min(tried[t] for tried in row["rankings"].values()) == row["edges_at"][t]
        assert geometric_mean(np.array(row["edges_per_prompt"][t])) == pytest.approx(row["edges_at"][t])
    assert row["random"]["effect"][-1] == pytest.approx(1.0)


def test_pieces_and_processes_give_the_same_rows(monkeypatch):
    """One prompt at a time as well as all at once; and the sum over processes of what each has measured."""
    from sparselens.runs import distributed

    for name in ("removed", "corrupted", "share", "heads"):
        whole = {key: row for key, (row, _) in reader(gated(), random_control=False).read(name).items()}
        monkeypatch.setattr("sparselens.circuits.attention_edges.bytes_per_prompt", lambda *a: 1e12)
        pieces = {key: row for key, (row, _) in reader(gated(), random_control=False).read(name).items()}
        monkeypatch.undo()
        assert list(whole) == list(pieces)
        for key, row in whole.items():
            assert row["edges_at"] == pytest.approx(pieces[key]["edges_at"], rel=0.1)
            assert row["m_model"] == pytest.approx(pieces[key]["m_model"], rel=1e-5)
    totals = []
    monkeypatch.setattr(distributed, "total", lambda x: totals.append(x) or x)
    alone = reader(gated()).share()
    parts = []
    monkeypatch.setattr(distributed, "world", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        totals.clear()
        reader(gated()).share()
        parts.append([x.clone() for x in totals])
    sizes = sum(part[0] for part in parts)
    by_hand = PromptCurves(sizes.numpy().astype(int), sum(part[1] for part in parts).numpy(), np.ones(5), np.zeros(5))
    assert by_hand.edges_at(0.9).tolist() == alone["edges_per_prompt"]["0.9"]


def test_share_counts_the_largest_attributions():
    read = reader()
    row = read.share()
    edges = read.edges("corrupted")
    scores = edges.integrated(next(edges.parts())).abs().flatten(1).double()
    for prompt, counts in enumerate(scores):
        sums = counts.sort(descending=True).values.cumsum(0) / counts.sum()
        for t in THRESHOLDS:
            assert row["edges_per_prompt"][t][prompt] == int((sums < float(t)).sum()) + 1
    assert row["curve"]["effect"][0] == 0 and row["curve"]["effect"][-1] == pytest.approx(1.0)
    sizes = [abs(edge[4]) for edge in row["circuit"]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_circuit_for_all_prompts_is_measured_on_those_it_was_not_ranked_on():
    read = reader(n=6)
    row, curve = read.per_task("removed", ("gradient", "rescored"))
    assert row["scope"] == "task" and row["n_prompts"] == 3 and len(curve.m_model) == 3
    assert row["length"] == len(row["tokens"]) == 8 and row["n_edges"] == 2 * 4 * 36
    assert row["tokens"] == [read.prompts.piece(int(token)) for token in read.prompts.clean[3]]
    edges = AttentionEdges(read.decoder, read.prompts.take(slice(3, None)))
    some = next(edges.parts())
    n = curve.edges[len(curve.edges) // 2]
    mask = edges.all(some, 0.0).clone()
    for layer, head, query, key, *_ in row["circuit"][:n]:
        mask[0, layer, head, query, key] = 1
    with torch.no_grad():
        kept, whole, nothing = (edges.metric(m, some).mean() for m in (mask, edges.all(some), edges.all(some, 0.0)))
    effect = float((kept - nothing) / (whole - nothing))
    assert curve.effects()[list(curve.edges).index(n)] == pytest.approx(effect, abs=1e-4)
    scoring = AttentionEdges(read.decoder, read.prompts.take(slice(0, 3)))
    some = next(scoring.parts())
    scores = scoring.gradient(scoring.all(some), some).abs().double().sum(0)
    best = row["circuit"][0]
    if row["ranking"]["0.9"] == "gradient":
        assert best[4] == pytest.approx(float(scores.max()), rel=1e-5)
    assert best[4] == pytest.approx(float(scores[tuple(best[:4])]), rel=1e-5)
    weights = torch.stack([weights.mean(0) for weights, _ in edges.seen(next(edges.parts()).embedding)])
    assert best[5] == pytest.approx(float(weights[tuple(best[:4])]), rel=1e-5)


def test_heads_are_kept_whole():
    found = reader(gated()).read("heads")
    assert list(found) == ["heads", "heads-corrupted"]
    for row, _ in found.values():
        assert row["n_edges"] == 8 and row["columns"] == ["layer", "head", "score"] and len(row["circuit"]) == 8
        assert sorted((layer, head) for layer, head, _ in row["circuit"]) == [
            (i, j) for i in range(2) for j in range(4)
        ]
        assert max(row["edges_per_prompt"]["0.98"]) <= 8


def test_learnt_masks_and_other_circuits():
    row = reader(n=3, learnt_prompts=2, alternatives=1).learnt()
    assert row["n_prompts"] == 2 and list(row["edges_at"]) == ["0.9"] and "curve" not in row
    assert len(row["alternatives"]["edges"]) == 2 and row["alternatives"]["overlap"][0] is None


# ---- commands ----


def test_every_reading_side_by_side(tmp_path):
    dense, sparse = tiny_model("llama"), gated()
    settings = Search(
        prompts=6, points=4, steps=1, readings=("removed", "share", "heads", "corrupted", "mean"), random_control=False
    )
    result = compare(
        dense, sparse, [chosen([dense, sparse])], tokenizer=tiny_tokenizer(), settings=settings, out=tmp_path, **QUIET
    )
    rows = result["tasks"]["words"]["models"]["sparse"]["readings"]
    names = ["removed", "removed-task", "share", "heads", "heads-corrupted"]
    names += ["corrupted", "corrupted-task", "mean", "mean-task"]
    assert list(rows) == names
    for name, row in rows.items():
        assert Reading.__required_keys__ <= row.keys() <= Reading.__annotations__.keys()
        assert (
            row["scope"] in SCOPES and wording(name).others and row["scope"] == ("task" if "task" in name else "prompt")
        )
    found = published(result)
    row = found["readings"]["removed"]["words"]["0.9"]
    wanted = {"dense_edges", "sparse_edges", "multiplier", "low", "high", "n_prompts", "possible_edges", "ranking"}
    assert wanted <= row.keys() and row["possible_edges"] == 2 * 4 * 15
    assert "NaN" not in json.dumps(found) and not list(tmp_path.glob("circuit-*"))  # no component graph, no file of it
    text = table(result.circuits["words"]["sparse"].results)
    assert text.count("(per prompt)") == 6 and text.count("(per task)") == 3 and "lead to the answer" in text


def test_every_name_has_words():
    assert {"removed", "share", "corrupted", "mean", "learnt", "heads", "heads-corrupted", "components"} == set(WORDING)
    assert wording("removed-task").file == "-task" and wording("something").label == "Circuit (something)"
    assert len({words.file for words in WORDING.values()}) == len(WORDING)


@pytest.mark.parametrize("wrong", [{"readings": ("removd",)}, {"readings": ()}, {"alternatives": -1}, {"scope": "all"}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"expected|name at least one"):
        Search(**wrong)


def test_what_it_will_need_is_said_before_it_starts():
    model, said = tiny_model("llama"), []
    task = chosen([model])
    discover(
        model, tiny_tokenizer(), task, prompts=6, points=4, readings=("removed",), scope="prompt", say=said.append,
    )  # fmt: skip
    assert any("6 prompts of 5 tokens, 120 attention edges each" in line and "GiB at a time" in line for line in said)
    more = [{"readings": ("removed", "learnt")}, {"readings": ("removed", "share")}, {"alternatives": 2}]
    fewest = total_runs(Search(readings=("removed",), scope="prompt"), 1000, 64, 16)
    assert all(total_runs(Search(**{"readings": ("removed",)} | extra), 1000, 64, 16) > fewest for extra in more)
    learnt = total_runs(Search(readings=("learnt",), learnt_prompts=20, alternatives=1), 1000, 64, 16)
    assert learnt == 4 * 6 + 2 * 2 * 300 * 3  # 20 prompts are two parts of 16
    assert "about 3 min" in str(Need("ioi", 10, 5, 100, 2**30, 180.0)) and "1.00 GiB" in str(
        Need("i", 1, 5, 9, 2**30, 1)
    )


def test_plan_says_what_compare_will_need(tmp_path, capsys, monkeypatch):
    """Prompts, tokens and edges as `compare` itself says them, without the weights; and what cannot fit is refused."""
    model, said = tiny_model("llama"), []
    save(model, tiny_tokenizer(), tmp_path / "model")
    rows = [
        {"clean": p.clean, "corrupted": p.corrupted, "answer": p.answer, "wrong": p.wrong}
        for p in chosen([model]).pairs
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "model" / "model.safetensors").unlink()
    ask = ["plan", str(tmp_path / "model"), "--tasks", str(tmp_path / "mine.jsonl"), "--prompts", "6"]
    main([*ask, "--gpus", "0"])
    main([*ask, "--gpus", "1"])
    planned = capsys.readouterr().out.splitlines()
    discover(
        model, tiny_tokenizer(), tmp_path / "mine.jsonl", prompts=6, points=3, readings=("share",), say=said.append
    )
    own = next(line for line in said if "attention edges each" in line).split(";")[0]
    assert len(planned) == 2 and all(own in line and "GiB of weights" in line for line in planned)
    monkeypatch.setattr("sparselens.circuits.estimate.available_memory", lambda *a: 1.0)
    with pytest.raises(SystemExit):
        main(ask)
    assert "mine needs" in capsys.readouterr().err


def test_plan_counts_the_operations_of_a_run_and_the_bytes_of_prompts_at_once(tmp_path, monkeypatch):
    """On a processor of one operation per second; memory for two prompts of three; answers are read in two places."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    save(model, tokenizer, tmp_path)
    pairs = (Pair(f"w1 w{i} w2 w3", f"w1 w{i + 9} w2 w3", " w4 w5", (" w4 w6", " w7")) for i in (10, 11, 12))
    task = Task("two", None, "probability", tuple(pairs))
    prompts = build(task, tokenizer, 3, **QUIET)
    assert prompts.position.shape == (3, 2)
    one = 0.4 * 2**20
    monkeypatch.setattr("sparselens.circuits.estimate.prompt_bytes", lambda *a: one)
    settings = Search(prompts=3, readings=("removed",), memory_mb=1)
    monkeypatch.setattr("sparselens.circuits.estimate.matmul_flops", lambda: 1 / CPU_SHARE)
    need = plan_task(tmp_path, task, settings, n_models=2, gpus=0)
    assert need.bytes_at_once == pytest.approx(2 * one)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(prompts.clean[:1], logits_to_keep=2)
    per_run = need.seconds / (2 * 2 * total_runs(settings, need.n_edges, 3, 2))
    assert per_run == pytest.approx(counted.get_total_flops(), rel=0.002)


def test_what_is_measured_is_not_lost_with_a_later_task(tmp_path, monkeypatch):
    from sparselens.circuits import compare as comparison

    model = tiny_model("llama")
    good = chosen([model])
    whole = comparison.discover_on

    def fails(model, name, *args, **options):
        if name == "bad":
            raise MemoryError("out of memory")
        return whole(model, name, *args, **options)

    monkeypatch.setattr(comparison, "discover_on", fails)
    settings = Search(prompts=6, points=3, readings=("share",))
    with pytest.raises(MemoryError):
        compare(
            model, model, [good, replace(good, name="bad")], tokenizer=tiny_tokenizer(), settings=settings,
            out=tmp_path, json=tmp_path / "all.json", **QUIET,
        )  # fmt: skip
    assert list(json.loads((tmp_path / "results.json").read_text())["tasks"]) == [good.name]
    assert list(json.loads((tmp_path / "all.json").read_text())["open_edges"]) == [good.name]


def test_runs_by_hand():
    """Of 1,000 edges: a gradient is worth 3 runs, 10 rescore, 5 integrate; a curve has 2 + 6 + 5 * 4 sizes."""
    wanted = {"removed": 6 + 2 * 28 + 33 + 13, "corrupted": 6 + 2 * 28 + 18 + 13, "share": 6 + 17, "heads": 6 + 4 * 31}
    for reading, runs in {**wanted, "components": 0}.items():
        assert runs_per_prompt(Search(readings=(reading,), points=6, scope="prompt"), 1000) == runs
    assert runs_per_prompt(Search(readings=("removed",), points=6, scope="task"), 1000) == 6 + 0.5 * (36 + 33)
    quiet = Search(readings=("removed",), points=6, scope="both", random_control=False)
    assert runs_per_prompt(quiet, 1000) == 6 + 2 * 28 + 33 + 0.5 * (36 + 33)
    learnt = Search(readings=("learnt",), prompts=8, learnt_prompts=2, alternatives=1)
    assert total_runs(learnt, 1000, 8, 1) == 8 * 6 + 2 * 2 * 300 * 3


def test_needs_are_measured(monkeypatch):
    """A clock that goes on by a second whenever it is asked: a run takes one second, a model after the other."""
    clock = iter(range(100))
    monkeypatch.setattr("sparselens.circuits.estimate.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("sparselens.circuits.attention_edges.bytes_per_prompt", lambda *a: 2**20)
    monkeypatch.setattr("sparselens.circuits.estimate.bytes_per_prompt", lambda *a: 2**20)
    decoder, prompts = Decoder(tiny_model("llama")), random_prompts(5)
    settings = Search(readings=("share",), memory_mb=2)
    for n_models in (1, 2):
        need = measured("ioi", [decoder] * n_models, prompts, settings)
        assert need == Need("ioi", 5, 8, 288, 2 * 2**20, n_models * 3 * 23)  # five prompts, two at a time


def test_prompts_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("sparselens.circuits.estimate.bytes_per_prompt", lambda *a: 1e15)
    with pytest.raises(ValueError, match=r"one prompt of 8 tokens need .* GiB are free; take shorter prompts"):
        check_memory(Decoder(tiny_model("llama")), random_prompts(), "ioi")


def test_runs_are_counted_about_right():
    """The progress bar's end: what was planned for is what happens, within a third."""
    for readings in (("removed",), ("share",), ("heads",), ("corrupted",)):
        counts: list[int] = []
        read = reader(n=4, readings=readings)
        read.progress = counts.append
        read.leading()
        read.read(readings[0])
        planned = runs_per_prompt(read.settings, 288)
        # Of eight heads there are hardly any sizes to measure.
        assert (0.3 if readings == ("heads",) else 0.66) < sum(counts) / planned < 1.5, (readings, sum(counts), planned)
