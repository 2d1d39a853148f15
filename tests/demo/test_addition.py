"""The addition model: its data, its tokenizer, a shortened demo, figure 1."""

import dataclasses
import re

import pytest
import torch

import sparselens as sl
from sparselens.data.registry import make_again
from sparselens.demo import walk as demo_module
from sparselens.demo.addition import CHARACTERS, EXAMPLE, AdditionBatches, answer, encode, make_model
from sparselens.evaluation.side_by_side import evaluate
from sparselens.models.loading import add_gates
from sparselens.reporting.figures.flow import draw_flow
from sparselens.runs.run import Run
from sparselens.serving.export import export
from sparselens.tasks import find


def text_of(row):
    return "".join(CHARACTERS[i] for i in row)


def test_encoding():
    batch = encode(torch.tensor([[36, 28], [7, 5], [99, 99]]))
    assert [text_of(row) for row in batch["input_ids"]] == ["36+28=?????", "07+05=?????", "99+99=?????"]
    assert [text_of(row[-5:]) for row in batch["labels"]] == ["00064", "00012", "00198"]
    assert (batch["labels"][:, :6] == -100).all()


def test_every_sum_is_either_trained_on_or_held_out():
    batches = AdditionBatches(seed=3)
    train = {text_of(row) for row in batches.train(0, 8000)["input_ids"]}
    heldout = {text_of(row) for row in batches.heldout(0, 2000)["input_ids"]}
    assert len(train) == 8000 and len(heldout) == 2000 and not train & heldout
    assert f"{EXAMPLE[0]}+{EXAMPLE[1]}=?????" in heldout


def test_numbering_is_stable_across_epochs():
    batches = AdditionBatches()
    whole = batches.train(7990, 40)["input_ids"]
    assert torch.equal(whole[5:25], batches.train(7995, 20)["input_ids"])


def test_tokenizer_reads_characters():
    _, tokenizer = make_model()
    assert tokenizer("36+28=?????").input_ids == encode(torch.tensor([[36, 28]]))["input_ids"][0].tolist()


@pytest.fixture
def short(monkeypatch):
    quick = dict(steps=6, batch=8, evaluate_every=3, evaluate_sequences=8, checkpoint_every=3)
    monkeypatch.setattr(demo_module, "DENSE", dataclasses.replace(demo_module.DENSE, **quick))
    training = dataclasses.replace(demo_module.SPARSE.training, **quick)
    monkeypatch.setattr(demo_module, "SPARSE", dataclasses.replace(demo_module.SPARSE, training=training))
    features = dict(features=16, k=4, steps=4, batch=8, evaluate_every=4, evaluate_sequences=8, checkpoint_every=4)
    monkeypatch.setattr(demo_module, "FEATURES", dataclasses.replace(demo_module.FEATURES, **features))


def test_demo_end_to_end(short, tmp_path):
    said = []
    run = demo_module.demo(tmp_path / "demo", show_progress=False, say=said.append)
    summary = run.read("summary.json")
    assert summary.keys() >= {"dense_exact", "sparse_exact", "density", "edges_open", "edges_total", "seconds"}
    assert summary["edges_total"] == 1056
    assert summary["edges_open"] == pytest.approx(summary["density"] * 1056)
    assert sum(summary["edges_per_layer"]) == pytest.approx(summary["edges_open"])
    assert (run.path / "figure1.png").stat().st_size > 10_000
    assert (run.path / "trace" / "figure4.png").stat().st_size > 10_000
    assert "<!doctype html>" in (run.path / "report.html").read_text()[:200].lower()
    assert summary["features"].keys() == {"dense", "sparse"}
    about = run.read("about.json")
    assert about["task"] == "addition" and about["filled"] == 5 and "07+95=?????" in about["prompts"]
    rows = evaluate(run, say=said.append)
    written = run.read("evaluation.json")
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in written]), "the Run's own sums"
    with pytest.raises(ValueError, match="not trained on text"):
        evaluate(run.path, data="text.txt")
    export(run.path, tmp_path / "exported")
    assert "held-out loss" in (tmp_path / "exported" / "README.md").read_text()
    model, tokenizer = sl.load(tmp_path / "demo")
    assert re.fullmatch(r"\d{5}|.{5}", answer(model, 36, 28)) and len(tokenizer) == len(CHARACTERS)
    again = []
    demo_module.demo(tmp_path / "demo", show_progress=False, say=again.append)
    assert "is complete" in again[0] and any("exact sums" in line for line in again)


def test_a_sum_is_traced_at_its_tens_digit(tmp_path):
    dense, sparse = make_model(0), make_model(0)
    for model, _ in (dense, sparse):
        model.eval()
    add_gates(sparse[0], sl.Gate(bias=1.0))
    coders = [sl.Transcoder.random(4, 32, 64, seed=seed) for seed in (0, 1)]
    rows = demo_module.trace_sum((sparse, coders[0]), (dense, coders[1]), (36, 28), tmp_path).rows
    assert rows["tokens"] == list("36+28=?????") and rows["target"][0] | {"probability": 0} == {
        "label": "6", "token": 6, "probability": 0, "weight": 1.0, "position": 9
    }  # fmt: skip
    names = {c["name"]: c["positions"] for c in rows["clusters"]}
    assert names["?"] == [6, 7, 8, 9, 10] and names["3"] == [0] and names["6"] == [1] and "6 (output)" in names
    assert rows["gated"] and (tmp_path / "figure4.svg").is_file()


def test_interrupted_demo_goes_on(short, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "draw_flow", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        demo_module.demo(tmp_path / "demo", show_progress=False, say=lambda text: None)
    monkeypatch.undo()
    base = (tmp_path / "demo" / "base" / "model" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="holds another run"):  # settings are the full demo's again
        demo_module.demo(tmp_path / "demo", show_progress=False, say=lambda text: None)
    assert (tmp_path / "demo" / "base" / "model" / "model.safetensors").stat().st_mtime_ns == base
    assert Run(tmp_path / "demo").record["kind"] == "demo"


def test_figure_one_draws_every_open_edge_and_escapes_nothing_away(tmp_path):
    """The SVG holds both panels, both strings, and one line per open edge."""
    positions, layers, heads = 11, 4, 4
    dense = [[[[1 / (q + 1) if k <= q else 0 for k in range(positions)] for q in range(positions)]] * heads] * layers
    sparse = [[[[0.0] * positions for _ in range(positions)] for _ in range(heads)] for _ in range(layers)]
    sparse[0][1][10][4] = 0.7
    rows = {"input": "36+28=?????", "output": "36+28=00064"}
    flow = {"base": rows | {"attention": dense, "edges": 1056}, "sparse": rows | {"attention": sparse, "edges": 1}}
    draw_flow(flow, tmp_path / "figure.svg")
    svg = (tmp_path / "figure.svg").read_text()
    for text in ("Base Model", "Sparse Model", "Sparsity-Regularised Finetuning", "1,056 attention edges", "Layer 3"):
        assert text in svg
    draw_flow(flow, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg, "the same rows draw the same file"
    collections = re.findall(r'<g id="LineCollection_\d">(.*?)</g>', svg, re.S)
    assert [block.count("<path") for block in collections] == [1056, 1]


def test_the_task_and_the_data_are_registered_like_a_users(tmp_path):
    task = find("addition")
    assert task.prompt("7+95") == task.prompt("07+95=?????") == "07+95=?????"
    for wrong in ("7", "100+1", "a+b", "-1+2"):
        with pytest.raises(ValueError, match="adds two numbers from 0 to 99"):
            task.prompt(wrong)
    batches = AdditionBatches(seed=5)
    again = make_again(batches.describe())
    assert torch.equal(again.heldout(0, 9)["input_ids"], batches.heldout(0, 9)["input_ids"])
    assert make_again({"sources": {}}) is None
    with pytest.raises(ValueError, match="nobody has registered the data 'sums'"):
        make_again({"name": "sums"})
