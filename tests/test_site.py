"""The documentation as a site, the notebooks, and what other machines run: built, run, compared."""

import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import yaml
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens import tasks

PROJECT = Path(__file__).parents[1]
NOTEBOOKS = PROJECT / "docs" / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))
import make  # noqa: E402

SOURCES = [path.stem for path in make.sources()]


@pytest.mark.parametrize("name", SOURCES)
def test_a_notebook_is_what_its_source_says(name):
    source = (NOTEBOOKS / f"{name}.py").read_text()
    assert (NOTEBOOKS / f"{name}.ipynb").read_text() == make.notebook(source), "run python docs/notebooks/make.py"
    kinds = [kind for kind, _ in make.cells(source)]
    assert kinds[0] == "markdown" and "code" in kinds


def run_notebook(name, capsys):
    """Every cell of code, in order, in one place; what it printed."""
    matplotlib.use("Agg")
    names: dict = {"__name__": name}
    for number, (kind, text) in enumerate(make.cells((NOTEBOOKS / f"{name}.py").read_text())):
        if kind == "code":
            exec(compile(text, f"{name}, cell {number}", "exec"), names)
    return names, capsys.readouterr().out


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks.names()
    monkeypatch.setattr(tasks.registry, "_REGISTRY", tasks.registry._REGISTRY.copy())
    return tmp_path


def test_ten_minutes_on_a_tiny_model(place, capsys):
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), "gpt2")
    names, said = run_notebook("ten_minutes", capsys)
    assert names["left"] < names["edges"] and names["page"].is_file() and "edges are left" in said


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ioi", "your_own"])
def test_notebooks_on_real_weights(name, place, shared, capsys, monkeypatch):
    (place / "gpt2").symlink_to(shared / "models" / "stories15m")
    few = {"points": 5, "scope": "prompt", "random_control": False}  # what they show takes minutes on a busy core
    for verb, less in (
        ("circuits.discover.discover", few),
        ("circuits.compare.compare", few),
        ("training.sparsify.sparsify", {"steps": 4, "evaluate_every": 4, "heldout_tokens": 1024}),
    ):
        real = getattr(sl, verb.split(".")[-1])
        monkeypatch.setattr(f"sparselens.{verb}", lambda *a, real=real, less=less, **o: real(*a, **o | less))
    names, said = run_notebook(name, capsys)
    if name == "ioi":
        assert "fewer edges" in said and names["circuit"].results["readings"]["removed"]["n_edges"] > 1000
    else:
        assert "at least 4 are needed" in said and "edges between components" in said and "36 gates" in said


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, str(PROJECT / "docs" / "make_site.py"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    api = (tmp_path / "site" / "docs" / "api.html").read_text()
    for name in sl.__all__:
        assert f"sl.{name}" in api, name
    scale = (tmp_path / "site" / "docs" / "scale.html").read_text()
    assert "<li>FSDP2 gathers fp32" in scale, "a list right under a paragraph is a list, as on GitHub"
    assert "ten_minutes.ipynb" in (tmp_path / "site" / "docs" / "notebooks.html").read_text()
    for page in (PROJECT / "docs").glob("*.md"):
        assert (tmp_path / "site" / "docs" / f"{page.stem}.html").is_file()


def test_the_site_refuses_a_link_that_leads_nowhere(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_site", PROJECT / "docs" / "make_site.py")
    make_site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_site)
    monkeypatch.setattr(make_site, "reference", lambda: "# Reference\n\n[nowhere](nowhere.md)\n")
    with pytest.raises(BaseException, match="warning"):
        make_site.build(tmp_path / "site")


def test_github_runs_what_ci_runs():
    workflow = yaml.safe_load((PROJECT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert any(".ci/run" in step for step in steps)
    assert any("docs/make_site.py" in step for step in steps)
    pythons = workflow["jobs"]["installs"]["strategy"]["matrix"]
    assert set(pythons["python"]) == {"3.10", "3.11", "3.12", "3.13"}
    assert {re.sub("-latest", "", system) for system in pythons["os"]} == {"ubuntu", "macos", "windows"}
    assert workflow["permissions"] == {"contents": "read"}
