"""From models to the report: attention rows are the models' own, and the commands make pages and figures of a Run."""

import json
import shlex

import pytest
import torch
from report_runs import LONE, make_run, real_trace, rows_in
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.evaluation.attention_maps import _tokens, attention_rows, look
from sparselens.reporting import payload
from sparselens.runs.run import write_json
from sparselens.tasks.words import Words


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def real_run(tmp_path):
    """A tiny random model, dense and with gates, in a Run."""
    base, sparse = tiny_model("llama"), tiny_model("llama")
    sl.save(base, tiny_tokenizer(), tmp_path / "base")
    from sparselens.models.loading import add_gates

    add_gates(sparse, sl.Gate(bias=-0.5))
    sl.save(sparse, tiny_tokenizer(), tmp_path / "run" / "model")
    config = {"model": str(tmp_path / "base"), "loss": "kl"}
    write_json(tmp_path / "run" / "run.json", {"kind": "sparsify", "config": config, "provenance": {}})
    return tmp_path / "run"


def test_attention_rows_are_the_models(real_run):
    from safetensors.torch import load_file

    rows = attention_rows(real_run, ("w3 w1 w4 w1",), say=lambda text: None)
    first = rows["prompts"][0]
    assert first["text"] == "w3 w1 w4 w1" and first["tokens"] == ["<|endoftext|>", "w3", " w1", " w4", " w1"]
    kept = load_file(real_run / "attention" / first["file"])
    dense, _ = sl.load(real_run.parent / "base")
    dense.set_attn_implementation("eager")
    ids = torch.tensor([Words(tiny_tokenizer()).encode(first["text"])])
    expected = dense(ids, output_attentions=True).attentions
    for layer, weights in enumerate(expected):
        assert (kept["dense.weights"][layer].float() - weights[0]).abs().max() < 1e-3
    margin, weights = kept["sparse.margin"], kept["sparse.weights"]
    assert ((margin > 0) == (weights > 0)).all(), "open where the margin says so"
    again = attention_rows(real_run, say=lambda text: pytest.fail("it looked twice"))
    assert again["prompts"][0]["text"] == "w3 w1 w4 w1"
    kept, said = real_run / "attention" / "attention.json", []
    write_json(kept, {key: value for key, value in again.items() if key != "format"})
    assert attention_rows(real_run, say=said.append)["format"] == again["format"] and said, "older ones are not read"


def test_weak_edges_stay(real_run):
    """An open edge whose weight fp16 cannot hold is still there."""
    model, tokenizer = sl.load(real_run)
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.data.mul_(60)
        if "gate_bias" in name:
            parameter.data.fill_(50.0)  # every gate open
    ids = tokenizer("w3 w1 w4 w1 w5 w9 w2 w6", return_tensors="pt")["input_ids"]
    exact = model(ids, output_attentions=True, gate_output="pattern", use_cache=False).attentions[0][0]
    assert ((exact > 0) & (exact.half() == 0)).any(), "the case this test is about"
    _, found = look(model, tokenizer, ids)
    assert ((found["weights"][0] > 0) == (exact > 0)).all()


@pytest.mark.parametrize("prompt", [LONE, "  "])
def test_impossible_prompts(real_run, prompt):
    with pytest.raises(ValueError, match="prompt"):
        attention_rows(real_run, (prompt,))


def test_report_from_the_command_line(real_run, capsys):
    main(["report", str(real_run), "--prompt", "w5 w6"])
    page = (real_run / "report.html").read_text()
    assert rows_in(page)["runs"][0]["attention"]["prompts"][0]["text"] == "w5 w6"
    assert "report.html" in capsys.readouterr().out
    assert sl.report(real_run, real_run, out=real_run / "two.html").is_file()


def test_missing_base_is_said(real_run):
    record = json.loads((real_run / "run.json").read_text())
    record["config"]["model"] = str(real_run.parent / "gone")
    write_json(real_run / "run.json", record)
    rows = attention_rows(real_run, say=lambda text: None)
    assert list(rows["prompts"][0]["models"]) == ["sparse"] and "dense" in rows["notes"][0]


def test_bad_arguments(run, tmp_path, capsys):
    for arguments, message in (
        (["report", str(tmp_path / "none")], "is not a Run"),
        (["report", str(run), "--out", str(tmp_path)], "is a folder"),
        (["report", str(run), str(run), str(run)], "one or two Runs"),
        (["report", str(run), "--prompt", "x"], "no model yet"),
        (["report", str(run), "--serve", "--out", "x.html"], "--serve writes no file"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    (run / "circuits" / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json is damaged"):
        payload([run])


def test_sums_for_the_addition_model(tmp_path):
    from sparselens.demo.addition import encode, make_model

    model, tokenizer = make_model()
    sl.save(model, tokenizer, tmp_path / "run" / "base" / "model")
    write_json(tmp_path / "run" / "run.json", {"kind": "demo", "config": {"model": "addition"}, "provenance": {}})
    write_json(tmp_path / "run" / "about.json", {"task": "addition", "filled": 5, "prompts": ["50+50=?????"]})
    rows = attention_rows(tmp_path / "run", ("7+95",), say=lambda text: None)
    assert [prompt["text"] for prompt in rows["prompts"]] == ["07+95=?????", "50+50=?????"]
    assert rows["prompts"][0]["tokens"] == list("07+95=?????")
    assert len(rows["prompts"][0]["models"]["dense"]["says"]) == 11
    ids, _, cut = _tokens(tokenizer, "07+95=?????", 11)
    assert torch.equal(ids, encode(torch.tensor([[7, 95]]))["input_ids"]) and not cut
    assert payload([tmp_path / "run"])["runs"][0]["attention"]["filled"] == 5
    with pytest.raises(ValueError, match="from 0 to 99"):
        attention_rows(tmp_path / "run", ("7+950",))


def test_what_a_run_says_about_itself(run):
    """Anybody's Run may bring a name, a task, prompts; the page speaks of it so, whatever the model is called."""
    plain = payload([run])["runs"][0]
    assert plain["summary"]["sentence"].startswith("tiny-model keeps") and plain["attention"]["filled"] == 0
    assert not plain["summary"]["exact"] and "--tasks ioi " in plain["commands"]["circuits"]
    told = {"name": "My <parrot>", "exact": True, "filled": 2, "task": "no'such", "prompts": ["say 'a'"], "more": 1}
    write_json(run / "about.json", told)
    rows = payload([run])["runs"][0]
    assert (
        rows["summary"]["sentence"].startswith("My <parrot> keeps") and "exactly right" in rows["summary"]["sentence"]
    )
    assert rows["summary"]["exact"] and rows["attention"]["filled"] == 2
    assert shlex.split(rows["commands"]["circuits"])[5] == "no'such"
    assert shlex.split(rows["commands"]["attribution"])[6] == "say 'a'"


@pytest.mark.parametrize("told", [[], {"filled": "five"}, {"prompts": [3]}, {"exact": 1}, {"name": None}])
def test_nonsense_about_a_run_is_refused(run, told):
    write_json(run / "about.json", told)
    with pytest.raises(ValueError, match=r"about\.json"):
        payload([run])


def test_a_run_cannot_name_a_file_as_its_task(real_run):
    write_json(real_run / "about.json", {"task": "/etc/passwd.jsonl"})
    assert attention_rows(real_run, ("w1 w2",), say=lambda text: None)["prompts"][0]["text"] == "w1 w2"


def test_figures_for_print(run, capsys):
    write_json(run / "trace" / "sparse" / "trace.json", real_trace())
    main(["figures", str(run), "--format", "svg"])
    drawn = capsys.readouterr().out.split()
    names = {path.rsplit("/", 1)[1] for path in drawn}
    others = ("", "-share", "-corrupted", "-heads", "-heads-corrupted", "-components")
    figure2 = {f"figure2{other}.svg" for other in others}  # a learnt mask has no curve
    assert names == figure2 | {"figure1.svg", "figure3.svg", "figure3-components.svg", "figure4.svg"}
    assert all((run / name).read_text().lstrip().startswith("<?xml") for name in names)
