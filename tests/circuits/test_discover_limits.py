"""What once went wrong in discovery: lengths that halves do not share, effects that are none, files without sense."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import QUIET, chosen, random_prompts, words_task
from tiny_models import tiny_model, tiny_tokenizer

from sparselens import tasks
from sparselens.circuits.attention_edges import AttentionEdges
from sparselens.circuits.circuit import Circuit
from sparselens.circuits.compare import compare
from sparselens.circuits.discover import discover, prepare
from sparselens.circuits.faithfulness import NoEffect
from sparselens.circuits.readings import EdgeReader, open_edges
from sparselens.circuits.run import Patcher
from sparselens.circuits.scores import eap
from sparselens.config import Gate, Search
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates, name_of, save
from sparselens.runs import distributed
from sparselens.runs.run import Run, write_json
from sparselens.tasks import Pair, Task
from sparselens.tasks.ioi_long import register_distance
from sparselens.tasks.prompts import build, of_common_length


def test_common_length_is_common_in_every_group():
    prompts = random_prompts(8, 8)
    prompts.lengths[:] = torch.tensor([7, 7, 7, 8, 8, 6, 6, 5])
    prompts.position[:] = prompts.position.clamp(max=5)
    scoring, heldout = of_common_length(prompts.take(slice(0, 4)), prompts.take(slice(4, 8)))
    assert len(scoring) == 1 and len(heldout) == 1 and scoring.clean.shape[1] == 8


def test_too_few_prompts_of_one_length_are_refused_before_any_work():
    pairs = [p for p in words_task(40).pairs]
    pairs = [dataclasses.replace(p, clean=p.clean + " w4" * i, corrupted=p.corrupted + " w4" * i)
             for i, p in enumerate(pairs[:12])]  # fmt: skip
    task = Task("mixed", None, "logit", tuple(pairs))
    with pytest.raises(ValueError, match=r"prompts of one length.*there are 1; at least 4.*--readings components"):
        discover(tiny_model("llama"), tiny_tokenizer(), task, readings=("removed",), **QUIET)


def test_more_processes_than_prompts(monkeypatch):
    """Each process reads its share of the prompts; together they have read all of them, once."""
    settings = Search(prompts=3, points=4, readings=("removed",))
    decoder, prompts = Decoder(tiny_model("gpt2")), random_prompts(3, 8)
    alone = EdgeReader(decoder, prompts, settings).leading()["per_prompt"]
    monkeypatch.setattr(distributed, "world", lambda: 4)
    monkeypatch.setattr(distributed, "total", lambda x: x)
    parts = []
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        parts.append(EdgeReader(decoder, prompts, settings).leading()["per_prompt"])
    assert np.array_equal(np.sum(parts, 0), alone) and parts[3] == [0, 0, 0]


def test_attention_without_an_effect_is_left_out():
    model = tiny_model("gpt2")
    with torch.no_grad():  # heads write nothing: the embedding and the MLPs do it all
        for block in model.transformer.h:
            block.attn.c_proj.weight.zero_()
    pairs = [
        dataclasses.replace(p, clean=f"w1 w2 {p.clean.split()[1]}", corrupted=f"w1 w2 {p.corrupted.split()[1]}")
        for p in words_task(400).pairs
    ]
    prompts = build(Task("last", None, "logit", tuple(pairs)), tiny_tokenizer(), 400, **QUIET)
    with torch.no_grad():
        good, bad = (prompts.score(prompts.at_reads(model(x).logits)) for x in (prompts.clean, prompts.corrupted))
    task = Task("last", None, "logit", prompts.take((good > 0) & (good - bad > 0.3)).pairs[:24])
    said = []
    found = discover(model, tiny_tokenizer(), task, prompts=12, points=4, steps=1, say=said.append).results
    assert "leading" not in found and list(found["readings"]) == ["components"]
    assert sum("no effect to explain" in s for s in said) == 1
    assert "NaN" not in json.dumps(found)
    with pytest.raises(NoEffect, match="no effect to explain"):  # where nothing else is asked for
        discover(model, tiny_tokenizer(), task, prompts=12, readings=("removed",), **QUIET)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text", "llama"])
def test_pairs_outside_a_window_are_no_pairs(family):
    model, prompts = add_gates(tiny_model(family), Gate(bias=1e4)), random_prompts(4, 8)
    found = open_edges(model, prompts)
    assert found["n_proven_absent"] == 0  # every gate is open
    assert AttentionEdges(Decoder(model), prompts).n_possible == found["n_open"]


def test_open_pairs_by_hand():
    """Five prompts of eight tokens, three of seven: the five count. Two at a time, or all at once."""
    model, prompts = add_gates(tiny_model("llama"), Gate(bias=0.0)), random_prompts(8, 8)
    prompts.lengths[:3] = 7
    prompts = dataclasses.replace(prompts, pairs=tuple(Pair(f"prompt {i}", "", "", "") for i in range(8)))
    with torch.no_grad():
        output = model(prompts.clean[3:], use_cache=False, output_attentions=True, gate_output="pattern")
    pattern = torch.stack(output.attentions).double()  # [layers, batch, heads, queries, keys]
    share, weight = (pattern > 0).double().mean(1), pattern.mean(1)
    for found in (open_edges(model, prompts), open_edges(model, prompts, at_once=2)):
        assert (found["n_prompts"], found["length"], found["n_possible"]) == (5, 8, 2 * 4 * 36)
        assert found["example"] == "prompt 3"
        assert found["n_open"] == int((share > 0).sum()) == len(found["open"]) > 50
        assert found["n_proven_absent"] == found["n_possible"] - found["n_open"] > 0
        assert found["open_per_prompt"] == pytest.approx(float((pattern > 0).sum() / 5))
        for *at, part, mean in found["open"]:
            assert part == pytest.approx(float(share[tuple(at)]), abs=1e-4)
            assert mean == pytest.approx(float(weight[tuple(at)]), abs=1e-5)
        means = [row[-1] for row in found["open"]]
        assert means == sorted(means, reverse=True)
    assert open_edges(model, prompts, most=7)["open"] == found["open"][:7]


def test_progress_counts_every_circuit_once():
    """In pieces of two of five prompts; three circuits."""
    model, prompts = tiny_model("llama"), random_prompts(5, 8)
    patcher = Patcher(Decoder(model), prompts, memory_mb=0.02)
    counts: list[int] = []
    patcher.run(np.stack([patcher.decoder.components.possible] * 3), counts.append)
    assert sum(counts) == 3


@pytest.mark.parametrize("gates", [False, True])
def test_prompts_are_chosen_as_the_model_is_evaluated(gates):
    model = tiny_model("gpt2")
    model = add_gates(model, Gate(bias=0.3)) if gates else model
    kept = []
    for mode in (False, True, True):
        model.train(mode)
        kept.append(
            prepare(
                [model],
                tiny_tokenizer(),
                words_task(300),
                Search(prompts=100, readings=("components",)),
                lambda text: None,
            ).mixed.pairs
        )
        assert model.training == mode
    assert kept[0] == kept[1] == kept[2]


def test_pairs_of_a_file_are_drawn_not_read_in_order():
    task = words_task(200)
    draws = [build(task, tiny_tokenizer(), 20, seed, **QUIET).pairs for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) != set(task.pairs[:20])


def test_scores_do_not_depend_on_padding():
    decoder, prompts = Decoder(tiny_model("llama").double()), random_prompts(4, 8)
    more = torch.zeros(4, 8, dtype=torch.long)
    padded = dataclasses.replace(
        prompts, clean=torch.cat([prompts.clean, more], 1), corrupted=torch.cat([prompts.corrupted, more], 1)
    )
    for path in ("whole", "own"):
        assert np.allclose(
            eap(decoder, prompts, 5, path=path), eap(decoder, padded, 5, path=path), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("ablation", ["corrupted", "mean", "zero"])
def test_scores_are_of_the_ablation_asked_for(ablation):
    model = tiny_model("gpt2").double()
    decoder, prompts = Decoder(model), random_prompts(2, 6)
    patcher, c = Patcher(decoder, prompts, ablation), decoder.components
    scores = eap(decoder, prompts, ablation=ablation)
    edges = np.flatnonzero(c.possible)
    masks = torch.from_numpy(c.possible).double().flatten().repeat(2 * len(edges), 1)
    rows = torch.arange(len(edges))
    masks[2 * rows, edges] += 1e-5
    masks[2 * rows + 1, edges] -= 1e-5
    values = patcher.run(masks.view(-1, *c.possible.shape)).mean(1)
    slope = ((values[0::2] - values[1::2]) / 2e-5).numpy()
    assert np.abs(slope - scores.ravel()[edges]).max() < 1e-3 * np.abs(scores).max()


BASE = {"clean": "w1 w5 w2 w3", "corrupted": "w1 w6 w2 w3"}


@pytest.mark.parametrize(
    "row",
    [
        {"answer": ""},
        {"answer": []},
        {"answer": " w9", "metric": "logit"},
        {"answer": " w9", "metric": "probability"},
        {"answer": " w9", "wrong": " w8", "metric": "log-probability"},
    ],
)
def test_what_a_file_cannot_mean_is_refused(row, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(BASE | row))
    with pytest.raises(ValueError, match="line 1"):
        build(tasks.find(tmp_path / "a.jsonl"), tiny_tokenizer(), 1, **QUIET)


def test_any_of_several_answers_is_right():
    task = Task("a", None, "log-probability", (Pair("w1 w5 w2", "w1 w6 w2", (" w30", " w9")),))
    prompts = build(task, tiny_tokenizer(), 1, **QUIET)
    logits = torch.randn(1, 1, 64)
    p = logits.softmax(-1)[0, 0]
    assert float(prompts.score(logits)) == pytest.approx(float((p[11] + p[32]).log()), abs=1e-5)


def test_two_files_of_one_name(tmp_path):
    model = tiny_model("llama")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.jsonl").write_text(
            "\n".join(
                json.dumps({"clean": p.clean, "corrupted": p.corrupted, "answer": p.answer, "wrong": p.wrong})
                for p in chosen([model]).pairs
            )
        )
    with pytest.raises(ValueError, match="same name"):
        compare(
            model,
            model,
            [str(tmp_path / name / "mine.jsonl") for name in "ab"],
            tokenizer=tiny_tokenizer(),
            settings=Search(prompts=8, points=4, steps=1, readings=("components",), random_control=False),
            **QUIET,
        )


def test_a_distance_names_its_task():
    register_distance(20)
    assert "ioi-long-20" in tasks.names()


@pytest.mark.parametrize("name, expected", [("m-1.5", "m-1.5"), ("m.gguf", "m"), ("org/m-1.5", "org/m-1.5")])
def test_models_keep_their_names(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "/" not in name:
        (tmp_path / name).mkdir()
    assert name_of(name) == expected


@pytest.mark.parametrize(
    "wrong, why",
    [({"task": "nonsense"}, "unknown task"), ({"out": "file"}, "is a file"), ({"json": "folder"}, "is a folder")],
)
def test_what_can_be_refused_is_refused_before_a_model_is_loaded(wrong, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    with pytest.raises(ValueError, match=why):
        discover("no-such-model", **wrong)
    wrong = {"tasks": [wrong["task"]]} if "task" in wrong else wrong
    with pytest.raises(ValueError, match=why):
        compare("no-such-model", "no-such-model", **wrong)


def test_every_source_will_do_and_results_are_written(tmp_path):
    model, task = tiny_model("gpt2"), chosen([tiny_model("gpt2")])
    save(model, tiny_tokenizer(), tmp_path / "run" / "model")
    save(model, tiny_tokenizer(), tmp_path / "run" / "control" / "model")
    write_json(tmp_path / "run" / "run.json", {"kind": "sparsify", "config": {}, "provenance": {}})
    quick = {"settings": Search(prompts=8, points=3, steps=1, readings=("components",)), **QUIET}
    sources = [(model, tiny_tokenizer()), str(tmp_path / "run" / "model"), Run(tmp_path / "run")]
    found = [discover(source, task=task, out=tmp_path / str(i), **quick) for i, source in enumerate(sources)]
    assert [circuit.edges for circuit in found] == [found[0].edges] * 3
    for i, circuit in enumerate(found):
        written = json.loads((tmp_path / str(i) / "results.json").read_text())
        assert written.pop("provenance") and written == json.loads(json.dumps(circuit.results))
        assert np.array_equal(Circuit.load(tmp_path / str(i) / "circuit.json").mask, circuit.mask)
    assert written["model"] == "run"
    result = compare(sources[0], sources[2], [task], out=tmp_path / "both", json=tmp_path / "both.json", **quick)
    assert list(result.circuits[task.name]) == ["dense", "sparse", "control"], "a Run brings its control along"
    assert {path.name for path in (tmp_path / "both").iterdir()} == {
        "results.json", *(f"circuit-{task.name}-{role}.json" for role in result.circuits[task.name])
    }  # fmt: skip
    assert list(json.loads((tmp_path / "both.json").read_text())["readings"]["components"]) == [task.name]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        discover(model, task=task, **quick)


def test_a_task_without_an_effect_does_not_cost_the_others_their_work(monkeypatch):
    """It is left out, and only where it is the only one does the comparison fail."""
    from sparselens.circuits import compare as comparison

    model = tiny_model("llama")
    good = chosen([model])
    bad = dataclasses.replace(good, name="bad")
    whole = comparison.discover_on

    def no_effect(model, name, *args, **options):
        if name == "bad":
            raise NoEffect("bad: no effect to explain")
        return whole(model, name, *args, **options)

    monkeypatch.setattr(comparison, "discover_on", no_effect)
    said: list[str] = []
    options = dict(
        tokenizer=tiny_tokenizer(), say=said.append, show_progress=False,
        settings=Search(prompts=8, points=4, steps=1, readings=("components",), random_control=False),
    )  # fmt: skip
    result = compare(model, model, [bad, good], **options)
    assert list(result["tasks"]) == [good.name] and result["left_out"] == {"bad": "bad: no effect to explain"}
    assert any("bad is left out" in line for line in said) and "multiplier" in comparison.table(result)
    with pytest.raises(NoEffect):
        compare(model, model, [bad], **options)


def test_a_component_graph_without_an_effect_does_not_cost_the_attention_edges(monkeypatch):
    from sparselens.circuits import compare as comparison, discover as discovery

    model, said, calls = tiny_model("llama"), [], []
    whole = discovery._Discovery.component_graph

    def no_effect(self, *args):
        calls.append(self.name)
        if len(calls) == 1:  # in the dense model alone
            raise NoEffect("no effect to explain")
        return whole(self, *args)

    monkeypatch.setattr(discovery._Discovery, "component_graph", no_effect)
    settings = Search(prompts=8, points=4, steps=1, readings=("share", "components"), random_control=False)
    result = compare(model, model, [chosen([model])], tokenizer=tiny_tokenizer(), say=said.append, settings=settings)
    found = result["tasks"]["words"]
    assert list(found["multipliers"]) == ["share"] and "components" in found["models"]["sparse"]["readings"]
    assert any("no component graph: no effect" in line for line in said)
    assert list(comparison.published(result)["readings"]) == ["share"] and comparison.table(result)


def test_what_no_model_can_do_is_said_before_any_work(monkeypatch):
    from sparselens.circuits import compare as comparison

    monkeypatch.setattr(comparison, "discover_on", lambda *a, **k: pytest.fail("work was done"))
    model = tiny_model("llama")
    one = Task("one", None, "logit", chosen([model]).pairs[:1])
    with pytest.raises(ValueError, match="only 1 usable prompts; at least 4"):
        compare(model, model, [chosen([model]), one], tokenizer=tiny_tokenizer(), **QUIET)
