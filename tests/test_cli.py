"""The command line as a user meets it: fast help, one-sentence errors, JSON that others can read."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens import tasks
from sparselens.cli import main

TEXT = "\n<|endoftext|>\n".join(" ".join(f"w{(i * j + j) % 62}" for j in range(40)) for i in range(200))


def run_cli(*arguments):
    return subprocess.run([sys.executable, "-m", "sparselens", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("code", ["import sparselens", "import sparselens.cli"])
def test_import_is_instant_and_light(code):
    began = time.perf_counter()
    check = code + "; import sys; print(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False", "heavy modules must be imported where they are used"
    assert time.perf_counter() - began < 5, "about 0.3 s on an idle machine"


def test_help_teaches():
    result = run_cli("sparsify", "--help")
    assert result.returncode == 0
    for word in ("--data", "--control", "--tolerance", "--lora", "--resume", "(default:"):
        assert word in result.stdout


PROMISED = [
    "load", "save", "add_gates", "push", "Gate", "gated_attention", "sparsify", "discover", "compare", "transcode",
    "trace", "evaluate", "plan", "report", "studio", "export", "Run", "Circuit", "Graph", "Transcoder", "Task", "Pair",
    "register_task", "register_data", "register_architecture",
]  # fmt: skip


def test_public_names():
    assert set(PROMISED) <= set(sl.__all__) <= set(dir(sl))
    for name in sl.__all__:
        found = getattr(sl, name)
        assert callable(found) and len(found.__doc__ or "") > 20, f"{name} does not say what it gives you"
        assert not (Path(sl.__file__).parent / name).is_dir(), f"importing the package {name} would hide the function"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sl.nonsense


def test_the_demo_is_known_without_torch():
    """`--task addition` works because the task is registered when the program starts."""
    check = (
        "from sparselens import register_task, cli, tasks; import sys; tasks.find('addition');"
        "print(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


STRANGER = '''
import sparselens as sl

@sl.register_task("again")
def again(rng, words):
    """The last word once more: untrained models with tied embeddings can do that."""
    before, word, other = rng.sample([f"w{i}" for i in range(62)], 3)
    return sl.Pair(f"{before} {word}", f"{before} {other}", f" {word}", f" {other}")
'''


def test_a_stranger_adds_a_task_in_one_file(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "strangers_task.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tasks.registry, "_REGISTRY", tasks.registry._REGISTRY.copy())  # other tests must not see it
    __import__("strangers_task")
    small = ["--prompts", "8", "--points", "4", "--steps", "2", "--no-random-control"]
    small += ["--readings", "removed", "components"]
    main(["discover", str(base), "--task", "again", "--out", str(tmp_path / "found"), *small])
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    assert results["task"] == "again" and (tmp_path / "found" / "circuit.json").is_file()
    with pytest.raises(SystemExit):
        main(["discover", str(base), "--task", "agian"])
    assert "expected one of addition, again" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def base(tmp_path):
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "base"


def arguments(base, *more):
    folder = base.parent
    sizes = ["--length", "16", "--batch", "2", "--steps", "6", "--evaluate-every", "3"]
    places = ["--data", str(folder / "text.txt"), "--out", str(folder / "run"), "--cache", str(folder / "cache")]
    return ["sparsify", str(base), *places, *sizes, *more]


def test_sparsify_then_evaluate(base, tmp_path, capsys):
    main(arguments(base, "--control", "--heldout-tokens", "300"))
    assert "control" in capsys.readouterr().out
    main(["evaluate", str(tmp_path / "run"), "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == ["base", "control", "sparse"]
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    for row, before in zip(rows, written, strict=True):
        assert row["loss"] == pytest.approx(before["loss"], rel=1e-5), "same held-out text, same number"
        assert row["density"] == pytest.approx(before["density"])
    assert len(rows[2]["density_per_layer"]) == 2 and rows[2]["edges_per_query"] > 0
    (tmp_path / "other.txt").write_text(TEXT[::-1].replace("w", "w "))
    main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "other.txt"), "--json", str(tmp_path / "o.json")])
    other = json.loads((tmp_path / "o.json").read_text())
    assert other[0]["loss"] != pytest.approx(rows[0]["loss"])
    main(["evaluate", str(tmp_path / "run"), "--behaviour", str(tmp_path / "said")])
    said = json.loads((tmp_path / "said" / "behaviour.json").read_text())
    assert said["models"] == ["base", "control", "sparse"] and len(said["prompts"]) == 50
    assert said["text"]["control"]["loss"] == pytest.approx(rows[1]["loss"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: "w1 w2 w3\n<|endoftext|>\n" + text, id="a document in front moves the others"),
        pytest.param(lambda text: text.replace("w1 ", "w10 ", 1), id="as many tokens as before"),
    ],
)
def test_text_that_changed_is_not_measured_as_held_out(base, tmp_path, capsys, change):
    main(arguments(base, "--heldout-tokens", "300"))
    text = tmp_path / "text.txt"
    text.write_text(change(text.read_text()))
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", str(tmp_path / "run")])
    assert exit_.value.code == 2 and "has changed since" in capsys.readouterr().err
    main(["evaluate", str(tmp_path / "run"), "--data", str(text)])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (["--data", "nothing/*.txt"], "no text found"),
        (["--target", "low"], "expected base, control or a number"),
        (["--micro-batch", "5"], "does not divide"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_two(base, tmp_path, change, complaint, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments(base, *change))
    errors = capsys.readouterr().err
    assert exit_.value.code == 2 and complaint in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors and not (tmp_path / "run").exists()


def test_bench_needs_a_gpu_and_says_so(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "kernels", "--quick"])
    assert exit_.value.code == 2 and "found no CUDA device" in capsys.readouterr().err


def test_unknown_model_and_run(tmp_path, capsys):
    (tmp_path / "x.txt").write_text(TEXT)
    for bad in (["sparsify", "no/model", "--data", str(tmp_path / "x.txt"), "--out", "o"], ["evaluate", str(tmp_path)]):
        with pytest.raises(SystemExit) as exit_:
            main(bad)
        assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert "no model found at 'no/model'" in errors and "is not a Run" in errors


WRONG = {
    "discover m --task nonsense": "unknown task 'nonsense'",
    "discover m --task nothing.jsonl": "no such file: nothing.jsonl",
    "discover m --out file": "file is a file",
    "discover m --json used": "used is a folder",
    "discover m --readings nonsense": "nonsense",
    "compare m m --tasks ioi nonsense": "unknown task 'nonsense'",
    "compare m m --out file": "file is a file",
    "plan m --tasks nonsense": "unknown task 'nonsense'",
    "evaluate m --data file.txt --behaviour said --tasks nonsense": "unknown task 'nonsense'",
    "evaluate m": "there is nothing to evaluate 'm' on",
    "trace m --transcoder nothing --prompt p": "no transcoder in nothing",
    "features nothing --data file.txt": "no transcoder in nothing",
    "sparsify m --data file.txt --out used": "used is not empty",
    "sparsify m --data file.txt --out new --resume": "nothing to resume",
    "sparsify m --data nothing.txt --out new": "nothing.txt",
    "sparsify m --data file.txt --heldout nothing.txt --out new": "nothing.txt",
    "transcode m --data file.txt --out used": "used is not empty",
    "trace m --transcoder t --prompt p --out file": "file is a file",
    "export used --out used": "used exists already",
    "figures nothing": "nothing",
}


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """(command, what it said) of every wrong command, from a process in which importing torch is an error."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "used").mkdir()
    (folder / "used" / "something").write_text("")
    (folder / "file").write_text("")
    (folder / "file.txt").write_text("some text")
    code = """
import contextlib, io, json, sys, time
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from sparselens.cli import main
said = {}
for command in json.load(sys.stdin):
    err, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit, ImportError):
        main(command.split())
    said[command] = [err.getvalue(), time.perf_counter() - began]
print(json.dumps(said))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(list(WRONG)), cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_argument_is_answered_before_torch_is_imported(without_torch, command):
    said, seconds = without_torch[command]
    assert WRONG[command] in " ".join(said.replace("│", " ").split()) and seconds < 5
