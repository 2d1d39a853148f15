"""What is installed is what was written: wheel and sdist, Pythons, paths on other systems, what the README promises."""

import ast
import functools
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path, PureWindowsPath

import pytest
import tomllib
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.data import sample
from sparselens.data.documents import read_documents
from sparselens.evaluation import parity
from sparselens.models import access

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src" / "sparselens"
CONFIG = tomllib.loads((PROJECT / "pyproject.toml").read_text())
# New in Python 3.11; we support 3.10. (module, name)
TOO_NEW = {
    "typing": {"NotRequired", "Required", "Self", "Never", "Unpack", "TypeVarTuple", "LiteralString", "assert_never"},
    "asyncio": {"timeout", "TaskGroup", "Runner"}, "hashlib": {"file_digest"}, "contextlib": {"chdir"},
    "datetime": {"UTC"}, "enum": {"StrEnum"}, "tomllib": {"*"},
}  # fmt: skip
NOT_ON_WINDOWS = {"fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist) from a copy of the project, so that nothing is left in it."""
    folder = tmp_path_factory.mktemp("build")
    parts = ("pyproject.toml", "README.md", "LICENSE")
    for part in parts:
        shutil.copy(PROJECT / part, folder / part)
    shutil.copytree(SOURCE, folder / "src" / "sparselens", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta as b; print(b.build_wheel('.')); print(b.build_sdist('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [line for line in done.stdout.splitlines() if line.endswith((".whl", ".tar.gz"))]
    return folder / names[-2], folder / names[-1]


def test_the_wheel_has_everything_and_runs(built, tmp_path):
    wheel, _ = built
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    files = {
        path.relative_to(tmp_path / "site" / "sparselens") for path in (tmp_path / "site" / "sparselens").rglob("*")
    }
    wanted = {path.relative_to(SOURCE) for path in SOURCE.rglob("*") if "__pycache__" not in path.parts}
    assert not wanted - files, "not in the wheel"
    assert "py3-none-any" in wheel.name, "pure Python: one wheel for Linux, macOS and Windows"
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import sparselens; assert sparselens.__path__[0].startswith(sys.path[0])\n"
        "from sparselens.cli import main; main(['text', '--out', 'text'])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "text" / "stories.jsonl.zst").is_file(), done.stderr


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    shutil.unpack_archive(built[1], tmp_path)
    (folder,) = tmp_path.iterdir()
    code = "from setuptools import build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(next(folder.glob("*.whl")), tmp_path / "again", "zip")
    shutil.unpack_archive(built[0], tmp_path / "first", "zip")
    again, first = (
        {
            p.relative_to(tmp_path / name).as_posix(): p.read_bytes()
            for p in (tmp_path / name / "sparselens").rglob("*.*")
        }
        for name in ("again", "first")
    )
    assert again == first


def test_the_oldest_python_is_the_one_we_claim():
    """No name that Python 3.10 lacks, in any module. (Syntax: mypy reads everything as 3.10.)"""
    assert CONFIG["project"]["requires-python"] == ">=3.10" and CONFIG["tool"]["mypy"]["python_version"] == "3.10"
    found = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 10))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in TOO_NEW:
                found += [(path.name, alias.name) for alias in node.names if alias.name in TOO_NEW[node.module]]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in TOO_NEW:
                found += [(path.name, node.attr)] * (node.attr in TOO_NEW[node.value.id])
            elif isinstance(node, ast.Import):
                found += [
                    (path.name, alias.name) for alias in node.names if alias.name in TOO_NEW and alias.name == "tomllib"
                ]
    assert not found


def test_nothing_is_imported_that_other_systems_lack():
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, name) for name in names if name.split(".")[0] in NOT_ON_WINDOWS]
    assert not found


def test_triton_is_imported_by_its_kernels_alone():
    """macOS and Windows have none."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, sparselens as sl; from tiny_models import tiny_model\n"
        "sl.add_gates(tiny_model('llama'))(torch.arange(9)[None]); [getattr(sl, name) for name in sl.__all__]"
    )
    options = {"capture_output": True, "text": True, "cwd": Path(__file__).parent}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0, done.stderr


def test_what_we_write_has_names_that_windows_allows(tmp_path):
    """Files of a Run and of the package: no reserved name or character, no two that differ in case alone."""
    from report_runs import make_run

    make_run(tmp_path / "run")
    for root in (tmp_path / "run", SOURCE):
        paths = [p.relative_to(root) for p in root.rglob("*") if "__pycache__" not in p.parts]
        assert len({str(path).lower() for path in paths}) == len(paths)
        for path in paths:
            assert not PureWindowsPath(path).is_reserved() and not re.search(r'[<>:"|?*\\]|[ .]$', path.name), path


def test_a_machine_without_git_and_a_strangers_repository(built, tmp_path, monkeypatch):
    """The record says which commit of ours made a Run, or none: never the commit of whoever has installed us."""
    from sparselens.runs.run import provenance

    shutil.unpack_archive(built[0], tmp_path / "site", "zip")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    code = "from sparselens.runs.run import provenance; print(provenance()['commit'])"
    options = {"capture_output": True, "text": True, "cwd": tmp_path / "site"}
    assert subprocess.run([sys.executable, "-c", code], **options).stdout.strip() == "None"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["commit"] is None


def test_text_to_try_with(tmp_path, capsys):
    main(["text", "--out", str(tmp_path / "text")])
    documents = [text for text, _ in read_documents(tmp_path / "text" / "stories.jsonl.zst")]
    assert len(documents) > 500 and sum(len(text.split()) for text in documents) > 80_000
    assert "documents" in capsys.readouterr().out and len(set(documents)) == len(documents)


def words_of(folder: Path) -> list[str]:
    found = [text for path in sorted(folder.glob("sampled-*.jsonl.zst")) for text, _ in read_documents(path)]
    return [word for text in found for word in text.split()]


def test_text_of_a_models_own(tmp_path):
    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    asked = ["text", "--model", str(tmp_path / "base"), "--tokens", "400", "--length", "24"]
    main([*asked, "--out", str(tmp_path / "text")])
    words = words_of(tmp_path / "text")
    assert len(words) > 200 and all(re.fullmatch(r"w\d+", word) for word in words)


def test_sampling_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    monkeypatch.setattr(sample, "TOKENS_PER_FILE", 200)
    ask = functools.partial(sl.write_text, model=tmp_path / "base", tokens=500, length=24, say=lambda text: None)
    whole = ask(tmp_path / "whole")
    assert whole.name == "sampled-00000.jsonl.zst" and len(list((tmp_path / "whole").glob("*.zst"))) == 3

    made = sample.Sampler.documents

    def killed(self, tokens, seed, name):
        if name == "file 2 of 3":
            raise KeyboardInterrupt
        return made(self, tokens, seed, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sample.Sampler, "documents", killed)
        ask(tmp_path / "text")
    first = tmp_path / "text" / whole.name
    before = first.stat().st_mtime_ns
    ask(tmp_path / "text")
    assert words_of(tmp_path / "text") == words_of(tmp_path / "whole"), "the same text as without the kill"
    assert first.stat().st_mtime_ns == before, "what was there is not made again"
    said = []
    ask(tmp_path / "text", say=said.append)
    assert "already" in said[0]
    with pytest.raises(ValueError, match="other settings"):
        ask(tmp_path / "text", seed=1)
    with pytest.raises(ValueError, match="other settings"):
        ask(tmp_path / "text", tokens=900)


def test_step_two_of_the_readme_works_literally(tmp_path, monkeypatch):
    """`text`, then the README's own line, with a tiny model in gpt2's place and a few short steps."""
    readme = (PROJECT / "README.md").read_text()
    assert "sparselens text --out text" in readme
    line = next(line for line in readme.splitlines() if line.startswith("sparselens sparsify gpt2"))
    monkeypatch.chdir(tmp_path)
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), "gpt2")
    main(["text", "--out", "text"])
    few = ["--steps", "2", "--batch", "2", "--length", "16", "--heldout-tokens", "300"]
    main([part.strip("'") for part in line.split("#")[0].split()[1:]] + few)
    assert (tmp_path / "runs" / "gpt2" / "control" / "model").is_dir()


def test_the_command_is_where_the_readme_says():
    readme, makefile = (PROJECT / "README.md").read_text(), (PROJECT / "Makefile").read_text()
    assert ".venv/bin/sparselens" in readme and "VENV := .venv" in makefile
    assert CONFIG["project"]["scripts"]["sparselens"] == "sparselens.cli:main"
    script = Path(sys.executable).with_name("sparselens")
    if not script.is_file():
        pytest.skip("not installed in this environment")
    done = subprocess.run([str(script), "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and sl.__version__ in done.stdout


# ---- parity ----------------------------------------------------------------------------------------------------------


def test_every_family_is_the_same_as_in_transformers(capsys, tmp_path):
    main(["parity", "--json", str(tmp_path / "rows.json")])
    said = capsys.readouterr().out
    from sparselens.models.architectures import ARCHITECTURES

    assert all(name in said for name in ARCHITECTURES) and (tmp_path / "rows.json").is_file()


@pytest.mark.parametrize("column", parity.COLUMNS)
def test_parity_notices_a_difference(monkeypatch, column):
    real = parity.differences
    monkeypatch.setattr(parity, "differences", lambda name, model: real(name, model) | {column: 2e-4})
    with pytest.raises(ValueError, match="not the same as in transformers: olmo"):
        parity.parity(["olmo"], say=lambda text: None)


def test_parity_measures_what_it_says(monkeypatch):
    """Gates that are not all open, or a model that pads otherwise, show in their own column."""
    monkeypatch.setattr(parity, "OPEN", sl.Gate(bias=0.0))
    row = parity.differences("llama", parity.random_model("llama"))
    assert row["dense"] < 1e-5 and min(row["open"], row["cached"], row["padded"]) > 1e-2


@pytest.mark.parametrize("package", access.TESTED)
def test_other_versions_are_refused_or_warned_about(package, monkeypatch):
    oldest, newest = access.TESTED[package]
    real = metadata.version
    for number, outcome in (("1.9", pytest.raises(ValueError, match="too old")), ("99.0", pytest.warns(match="newer"))):
        monkeypatch.setattr(access, "version", lambda name, n=number: n if name == package else real(name))
        access.check_versions.cache_clear()
        with outcome:
            sl.add_gates(tiny_model("llama"))
    for number in (oldest, f"{newest}.7+cpu"):
        monkeypatch.setattr(access, "version", lambda name, n=number: n if name == package else access.TESTED[name][0])
        access.check_versions.cache_clear()
        access.check_versions()
    access.check_versions.cache_clear()


def test_versions_that_were_tested_are_in_the_docs():
    """docs/install.md names what constraints.txt pins, and the oldest that pyproject allows."""
    page = (PROJECT / "docs" / "install.md").read_text()
    pins = dict(line.split("==") for line in (PROJECT / "constraints.txt").read_text().split())
    for package in ("torch", "transformers"):
        assert pins[package] in page, f"{package} {pins[package]}"
        oldest = next(d for d in CONFIG["project"]["dependencies"] if d.startswith(package)).split(">=")[1]
        assert oldest in page
    assert metadata.version("torch").split("+")[0] == pins["torch"] or sys.prefix == sys.base_prefix
