"""One way to call everything: any verb takes a name, a path, a Run, a model or (model, tokenizer), and its settings by
name; what is of the wrong kind is answered with a sentence; objects show themselves in one line and as a picture."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from copying_runs import sparsify
from report_runs import make_run
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import COMMANDS, main, overview
from sparselens.config import Search, Sparsify, Text, Trace, Transcode
from sparselens.models.loading import is_gated, resolve
from sparselens.runs import distributed
from sparselens.runs.pictures import LEFT
from sparselens.tasks import names as task_names, registry

SMALL = {"prompts": 8, "points": 4, "readings": "components", "method": "eap", "random_control": False}


@pytest.fixture(autouse=True)
def again(monkeypatch):
    """A task that untrained models with tied embeddings can do."""
    task_names()
    monkeypatch.setattr(registry, "_REGISTRY", registry._REGISTRY.copy())

    @sl.register_task("again")
    def again(rng, words):
        before, word, other = rng.sample([f"w{i}" for i in range(62)], 3)
        return sl.Pair(f"{before} {word}", f"{before} {other}", f" {word}", f" {other}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), folder / "base")
    sparsify(folder / "base", folder / "run", steps=2)
    sl.Transcoder.random(2, 16, 32).save(folder / "coder")
    return folder


def quiet(text):
    pass


WAYS = {
    "a path as text": lambda folder: str(folder / "base"),
    "a path": lambda folder: folder / "base",
    "a Run": lambda folder: sl.Run(folder / "run"),
    "a Run's path": lambda folder: folder / "run",
    "(model, tokenizer)": lambda folder: sl.load(folder / "base"),
    "a model that knows where it came from": lambda folder: sl.load(folder / "base")[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_discover_takes_every_way_to_a_model(folder, way):
    circuit = sl.discover(WAYS[way](folder), task="again", say=quiet, **SMALL)
    assert circuit.results["readings"]["components"]["n_prompts"] == 8


@pytest.mark.parametrize("way", WAYS)
def test_compare_takes_the_same_and_the_same_settings(folder, way):
    result = sl.compare(WAYS[way](folder), folder / "run", "again", say=quiet, **SMALL)
    row = result["tasks"]["again"]["models"]["dense"]
    assert row["readings"]["components"]["n_prompts"] == 8 and row["settings"]["points"] == 4


@pytest.mark.parametrize("way", WAYS)
def test_trace_evaluate_and_plan_take_the_same(folder, way, tmp_path):
    source = WAYS[way](folder)
    graph = sl.trace(source, folder / "coder", "w3 w5 w8", budget=4)
    assert graph.tokens[-1].strip() == "w8"
    (tmp_path / "text.txt").write_text("\n".join(" ".join(f"w{i * j % 62}" for j in range(90)) for i in range(30)))
    options = {"data": tmp_path / "text.txt", "sequences": 2, "say": quiet}
    if "Run" not in way:
        assert sl.evaluate(source, **options)[0]["sequences"] == 2
    assert sl.plan(source, gpus=0, steps=2, batch=2, length=16, tokens_per_second=10.0).parameters > 0


def test_a_tokenizer_may_be_of_no_use_but_is_asked_for_where_it_is(folder):
    lonely = tiny_model("gpt2")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        sl.discover(lonely, task="again", say=quiet, **SMALL)


WRONG = {
    "discover(3)": lambda folder: sl.discover(3),
    "discover(None)": lambda folder: sl.discover(None),
    "discover((path, path))": lambda folder: sl.discover((folder, folder)),
    "discover(a layer)": lambda folder: sl.discover(torch.nn.Linear(2, 2)),
    "compare(3, path)": lambda folder: sl.compare(3, folder / "base"),
    "compare(path, Circuit)": lambda folder: sl.compare(folder / "base", {}),
    "compare(control=3)": lambda folder: sl.compare(folder / "base", folder / "run", control=3),
    "sparsify(3)": lambda folder: sl.sparsify(3, data="x.txt", out=folder / "new"),
    "sparsify(data=3)": lambda folder: sl.sparsify(folder / "base", data=3, out=folder / "new"),
    "transcode(3)": lambda folder: sl.transcode(3, data="x.txt", out=folder / "new"),
    "trace(3)": lambda folder: sl.trace(3, folder / "coder", "w1"),
    "trace(coder=3)": lambda folder: sl.trace(folder / "base", 3, "w1"),
    "trace(prompt=3)": lambda folder: sl.trace(folder / "base", folder / "coder", 3),
    "evaluate(3)": lambda folder: sl.evaluate(3),
    "plan(3)": lambda folder: sl.plan(3),
    "load(3)": lambda folder: sl.load(3),
    "load(dtype)": lambda folder: sl.load(folder / "base", dtype="float12"),
    "save(path)": lambda folder: sl.save(folder / "base", None, folder / "new"),
    "save(without tokenizer)": lambda folder: sl.save(tiny_model("gpt2"), folder / "new", None),
    "add_gates(path)": lambda folder: sl.add_gates(folder / "base"),
    "add_gates(gate=0)": lambda folder: sl.add_gates(tiny_model("gpt2"), 0.0),
    "report(model)": lambda folder: sl.report(tiny_model("gpt2")),
    "export(3)": lambda folder: sl.export(3, folder / "new"),
    "Run(3)": lambda folder: sl.Run(3),
    "prompts='8'": lambda folder: sl.discover(folder / "base", task="again", prompts="8"),
    "prompts=8.5": lambda folder: sl.compare(folder / "base", folder / "run", "again", prompts=8.5),
    "promts=8": lambda folder: sl.discover(folder / "base", task="again", promts=8),
    "steps='many'": lambda folder: sl.sparsify(folder / "base", data="x.txt", out=folder / "new", steps="many"),
    "task=3": lambda folder: sl.discover(folder / "base", task=3),
    "register_architecture(3)": lambda folder: sl.plan(folder / "base", stepz=3),
}


@pytest.mark.parametrize("call", WRONG)
def test_what_is_of_the_wrong_kind_is_answered_with_a_sentence(folder, call):
    with pytest.raises(ValueError, match=r"expected|is no model|did you mean|unknown|one of") as refused:
        WRONG[call](folder)
    assert "\n" not in str(refused.value)


def test_a_setting_that_does_not_exist_is_guessed(folder):
    for call in (sl.discover, lambda model, **o: sl.compare(model, model, **o)):
        with pytest.raises(ValueError, match="'promts'; did you mean 'prompts'"):
            call(folder / "base", promts=8)


def test_single_values_need_no_tuple():
    assert Search(readings="removed").readings == ("removed",)
    assert Search(readings=["removed", "heads"]).readings == ("removed", "heads")
    assert Text(heldout="a.txt").heldout == ("a.txt",)
    for settings in (Search, Text, Trace, Transcode, Sparsify):
        settings()


def test_gates_need_no_settings():
    model = sl.add_gates(tiny_model("llama"))
    assert is_gated(model)


def test_half_precision_is_cast_with_a_line_and_stays_as_it_was(folder):
    model, tokenizer = sl.load(folder / "run", dtype="bfloat16")
    for call in (
        lambda say: sl.discover((model, tokenizer), task="again", say=say, **SMALL),
        lambda say: sl.evaluate((model, tokenizer), behaviour=folder / "said", say=say),
        lambda say: sl.compare((model, tokenizer), (model, tokenizer), "again", say=say, **SMALL),
    ):
        said: list[str] = []
        call(said.append)
        assert any("is in bfloat16; a copy of it in float32 is used" in line for line in said)
    assert next(model.parameters()).dtype == torch.bfloat16
    plain: list[str] = []
    cast, _ = resolve(sl.load(folder / "run"), say=plain.append)
    assert not plain and next(cast.parameters()).dtype == torch.float32


# ---- how objects show themselves -------------------------------------------------------------------------------------


def shown(value):
    line, page = repr(value), value._repr_html_()
    assert "\n" not in line and 10 < len(line) < 220 and " object at 0x" not in line
    assert line.split("(")[0] == type(value).__name__
    tree = ET.fromstring(page)  # well-formed, so nothing in it escaped
    pictures = [one for one in tree.iter() if one.tag.endswith(("svg", "img"))]
    assert pictures and "<script" not in page
    return line, page


def test_a_run_shows_its_losses_and_its_figure(folder, tmp_path):
    line, page = shown(sl.Run(folder / "run"))
    assert "sparse loss" in line and "edges open" in line and "<polyline" in page
    run = sl.Run(make_run(tmp_path / "drawn"))
    (tmp_path / "drawn" / "figure1.png").write_bytes(b"\x89PNG")
    assert "data:image/png;base64" in shown(run)[1]


def test_a_circuit_shows_its_curve_and_its_heads(folder):
    options = SMALL | {"readings": ("removed", "components")}
    circuit = sl.discover(folder / "base", task="again", say=quiet, **options)
    line, page = shown(circuit)
    assert "again" in line and "edges" in line and "<polyline" in page and "layer" in page
    assert shown(sl.Circuit.from_mib(circuit.to_mib()))


def test_a_graph_shows_its_nodes_and_words(folder):
    graph = sl.trace(folder / "base", folder / "coder", "w3 w5 <b>", budget=8)
    line, page = shown(graph)
    assert "nodes" in line and page.count("<circle") > 3 and "w5" in page
    assert f"<circle cx='{LEFT:.1f}'" in page, "above the first word, too"


def test_a_transcoder_shows_what_writes_where():
    for cross_layer in (True, False):
        assert "<rect" in shown(sl.Transcoder.random(3, 8, 16, cross_layer=cross_layer))[1]


# ---- the command line ------------------------------------------------------------------------------------------------


def test_version_and_overview(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    said = capsys.readouterr().out
    assert done.value.code == 0 and re.match(
        r"sparselens 0\.\d+\.\d+ \(Python 3\.\d+\.\d+, torch 2.*transformers", said
    )
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 2
    text = overview()
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in COMMANDS)
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert "Make a model sparse" in titles and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_help_speaks_of_what_is_given(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for noise in ("(default: )", "(default: None)", "STR STR", "[STR [STR", "{None}|STR", "{None}|PATH"):
        assert noise not in text, noise


def test_where_to_compute_is_a_choice(folder, capsys, monkeypatch):
    wanted = ["discover", str(folder / "base"), "--task", "again", "--prompts", "8", "--readings", "removed"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # as if there were a GPU to leave alone
        assert distributed.device() == "cuda"
        try:
            main([*wanted, "--device", "cpu"])
            assert distributed.device() == "cpu"
        finally:
            distributed.choose_device(None)
    for device, complaint in (("gpu", "expected cpu, cuda"), ("cuda:7", "leave out --device")):
        if device != "gpu" and torch.cuda.device_count() > 7:
            continue
        with pytest.raises(SystemExit) as refused:
            main([*wanted, "--device", device])
        assert refused.value.code == 2 and complaint in " ".join(capsys.readouterr().err.split())
    distributed.choose_device(None)


def test_training_leaves_a_gpu_alone_that_was_not_chosen(folder, tmp_path, monkeypatch):
    """As if there were one: anything that goes there all the same is an error here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    distributed.choose_device("cpu")
    try:
        run, _ = sparsify(folder / "base", tmp_path / "run", steps=2)
    finally:
        distributed.choose_device(None)
    assert run.read("summary.json")["peak_gib"] is None
