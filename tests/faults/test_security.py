"""Nothing that comes from a file is ever run: no pickle, no remote code, no eval, no shell, no archive unpacked."""

import ast
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from sample_run import PROMPT, command

import sparselens as sl
from sparselens.data.documents import find_files

SOURCE = Path(sl.__file__).parent
PROJECT = Path(__file__).parents[2]


class Bomb:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def bombs(tmp_path):
    """(pickles in every form that torch, numpy and pickle know, the place where an explosion would show)."""
    mark = tmp_path / "exploded"
    torch_file = io.BytesIO()
    torch.save({"weight": Bomb(mark)}, torch_file)
    legacy = io.BytesIO()
    torch.save({"weight": Bomb(mark)}, legacy, _use_new_zipfile_serialization=False)
    forms = {"pickle": pickle.dumps(Bomb(mark)), "torch": torch_file.getvalue(), "legacy": legacy.getvalue()}
    pickle.loads(forms["pickle"])
    assert mark.is_dir(), "the bomb must be a real one"
    mark.rmdir()
    return forms, mark


COMMANDS = {
    "model": ["discover", "base", "--task", "pairs.jsonl"],
    "run": ["export", "run", "--out", "new"],
    "transcoder": ["trace", "run", "--transcoder", "coder", "--prompt", PROMPT],
    "resume": ["sparsify", "base", "--data", "text.txt", "--out", "run", "--cache", "cache", "--length", "16",
               "--batch", "2", "--steps", "20", "--evaluate-every", "10", "--heldout-tokens", "300", "--resume"],
    "report": ["report", "run"],
}  # fmt: skip
TARGETS = [
    ("model", "base", "model.safetensors"), ("model", "base", "pytorch_model.bin"), ("model", "base", "config.json"),
    ("model", "base", "tokenizer.json"), ("run", "run/model", "model.safetensors"),
    ("transcoder", "coder/transcoder", "W_enc_0.safetensors"), ("transcoder", "coder/transcoder", "config.yaml"),
    ("resume", "run/checkpoints/step-00000020", "state.safetensors"),
    ("resume", "run/checkpoints/step-00000020", "state.json"),
    ("resume", "run/best/step-00000020", "state.safetensors"),
    ("resume", "cache/*", "train-00000.npy"), ("report", "run/attention", "prompt-0.safetensors"),
    ("report", "run/trace", "graph.safetensors"), ("report", "run", "metrics.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["pickle", "torch", "legacy"])
@pytest.mark.parametrize(("what", "folder", "name"), TARGETS, ids=lambda value: str(value))
def test_a_pickle_in_the_place_of_a_file_is_not_loaded(house, bombs, form, what, folder, name):
    forms, mark = bombs
    for place in house.glob(folder):
        (place / name).write_bytes(forms[form])
        if name == "pytorch_model.bin":
            (place / "model.safetensors").unlink()
        sums = place / "checksums.json"
        if sums.is_file():  # a checkpoint whose checksums agree with the bomb: made by an enemy, not by chance
            from sparselens.runs.checkpoints import _checksum

            sums.write_text(json.dumps({file: _checksum(place / file) for file in json.loads(sums.read_text())}))
    command(house, *COMMANDS[what])
    assert not mark.exists()


def test_pickles_beside_good_files_are_not_looked_at(house, bombs):
    forms, mark = bombs
    names = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.pkl",
             "adapter_model.bin", "vocab.pkl", "tokenizer.pkl")  # fmt: skip
    for folder in ("base", "run", "run/model", "coder", "coder/transcoder", "run/checkpoints/step-00000020"):
        for name in names:
            (house / folder / name).write_bytes(forms["torch"])
    for what in COMMANDS.values():
        assert command(house, *what, *(["--prompts", "4", "--points", "2"] if what[0] == "discover" else [])).code == 0
    assert not mark.exists()


def test_only_pickled_weights_are_refused_with_advice(house):
    (house / "base" / "model.safetensors").unlink()
    torch.save({"x": torch.ones(2)}, house / "base" / "pytorch_model.bin")
    assert "convert them to safetensors" in command(house, *COMMANDS["model"]).refused()


def test_an_adapter_with_a_pickle_is_refused(house, bombs):
    pytest.importorskip("peft")
    forms, mark = bombs
    done = command(house, *COMMANDS["resume"][:-1], "--lora", "2", "--out", "adapted", "--control")
    assert done.code == 0, done.err
    (house / "adapted/model/adapter_model.safetensors").unlink()
    (house / "adapted/model/adapter_model.bin").write_bytes(forms["torch"])
    assert "lacks adapter_model.safetensors" in command(house, "export", "adapted", "--out", "new").refused()
    assert not mark.exists()


def test_code_in_a_model_folder_is_not_run(house, tmp_path):
    """auto_map names a file with Python in it: transformers would ask; we never do."""
    mark = tmp_path / "ran"
    (house / "base" / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    for file, entries in (
        ("config.json", ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
    ):
        path = house / "base" / file
        content = path.read_text()
        for known in (True, False):
            value = json.loads(content) | {"auto_map": dict.fromkeys(entries, "evil.Evil")}
            if not known:
                value |= {"model_type": "evil", "tokenizer_class": "Evil"}
            path.write_text(json.dumps(value))
            if file == "config.json":
                plan = ["plan", "base", "--gpus", "1", "--length", "16", "--tokens-per-second", "100"]
                command(house, *plan).survived()
            command(house, "evaluate", "base", "--data", "text.txt", "--sequences", "2").survived()
            assert not mark.exists()
        path.write_text(content)


# ---- what the source may not do --------------------------------------------------------------------------------------

MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "tarfile",
    "code",
    "pty",
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("os", "system"), ("os", "popen"), ("torch", "load"), ("torch", "save"), ("yaml", "load"), ("yaml", "unsafe_load"),
    ("yaml", "full_load"), ("shutil", "unpack_archive"), ("shutil", "make_archive"), ("pandas", "read_pickle"),
    ("runpy", "run_path"),
}  # fmt: skip
# torch's object collectives pickle; what an archive unpacks may land anywhere
NAMES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "extractall", "extract"}
ARGUMENTS = {("trust_remote_code", True), ("shell", True), ("allow_pickle", True), ("weights_only", False)}


def wrong(tree: ast.AST) -> list[str]:
    """What in this code could run a stranger's bytes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in CALLS:
                found.append(function.id)
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                if (function.value.id, function.attr) in METHODS:
                    found.append(f"{function.value.id}.{function.attr}")
                if function.value.id == "subprocess" and not (node.args and isinstance(node.args[0], ast.List)):
                    found.append("subprocess without a list of arguments")
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if (node.arg, node.value.value) in ARGUMENTS:
                found.append(f"{node.arg}={node.value.value}")
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.append(node.attr)
    return found


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks"])
def test_the_source_runs_nothing_it_has_read(folder):
    files = sorted((PROJECT / folder).rglob("*.py"))
    assert files and {str(f): bad for f in files if (bad := wrong(ast.parse(f.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from dill import loads", "eval('1')", "exec(x)", "torch.load(f)", "os.system('ls')",
     "subprocess.run('ls', shell=True)", "subprocess.run(text)", "np.load(f, allow_pickle=True)", "yaml.load(f)",
     "load(f, trust_remote_code=True)", "import tarfile", "dist.broadcast_object_list(x)",
     "archive.extractall(folder)"],
)  # fmt: skip
def test_the_rule_above_can_fail(code):
    assert wrong(ast.parse(code))
    assert not wrong(ast.parse("model.eval(); np.load(f, allow_pickle=False); subprocess.run(['ls'])"))


def test_modules_that_unpickle_are_not_even_imported():
    """No command of ours loads a module whose purpose is to read pickles of others."""
    code = "import sparselens.cli, sys; print([m for m in ('dill', 'cloudpickle', 'joblib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_patterns_find_files_and_nothing_else(tmp_path, monkeypatch):
    """Devices, pipes and folders without text are not text; a loop of links ends; an archive is not unpacked."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "broken.txt").symlink_to("nowhere.txt")
    for pattern in ("*.txt", "pipe.txt", "zero.txt", "loop", "/dev/zero", "/proc/self", "**/*.txt", "broken.txt"):
        with pytest.raises(ValueError, match="no text found"):
            find_files([pattern])
    for name in ("a.tar", "a.zip", "a.tar.gz", "a.7z"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match="cannot read"):
            find_files([name])


def test_a_planted_link_is_not_written_through(house, tmp_path):
    """A Run from a stranger may hold links where we are about to write."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in (".report.html.tmp", "report.html", "page.html"):
        (house / "run" / name).symlink_to(precious)
    assert command(house, "report", "run").code == 0
    assert precious.read_text() == "precious" and not (house / "run" / "report.html").is_symlink()


def test_weights_of_other_folders_are_not_read(house):
    """An index that points out of its folder."""
    index = {"metadata": {}, "weight_map": {"transformer.wte.weight": "../run/model/model.safetensors"}}
    (house / "base" / "model.safetensors").rename(house / "elsewhere.safetensors")
    (house / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    command(house, *COMMANDS["model"]).refused()


# ---- dependencies ----------------------------------------------------------------------------------------------------


def test_dependencies_are_ranged_for_users_and_pinned_for_ci():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = re.search(r"\[(.*)\]", next(one for one in extras["dev"] if one.startswith("sparselens[")))[1].split(",")
    pins = {}
    for line in (PROJECT / "constraints.txt").read_text().split():
        name, _, version = line.partition("==")
        assert re.fullmatch(r"[0-9][0-9A-Za-z.+]*", version), line
        pins[name.lower().replace("_", "-")] = version
    groups = {"": project["dependencies"]} | extras
    for group, some in groups.items():
        for one in some:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?(>=[0-9.]+(,<[0-9.]+)?)?", one)
            assert match and (match[2] or match[1] == "sparselens"), f"{one}: expected name>=version"
            if group in ("", "dev", *tested) and match[1] != "sparselens":
                assert match[1].lower().replace("_", "-") in pins, f"{one} is not pinned in constraints.txt"


def test_through_the_real_executable(house):
    """A handful as a user types them: the same exit codes and sentences, whatever is imported before."""
    script = shutil.which("sparselens", path=str(Path(sys.executable).parent))
    cases = [(["report", "nothing"], b"is not a Run"), (["demo", "--seed", "x"], b"--seed"),
             (["trace", "base", "--transcoder", "coder", "--prompt", b"w1 \xff"], b"not valid text")]  # fmt: skip
    for arguments, words in cases:
        start = [script] if script else [sys.executable, "-m", "sparselens"]
        done = subprocess.run([*start, *arguments], cwd=house, capture_output=True)
        assert done.returncode == 2 and words in done.stderr and b"Traceback" not in done.stderr, done.stderr
        assert not done.stdout
