"""The walls of the house: imports point one way, there are no cycles, and the report never needs torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import make_run

import sparselens as sl

SOURCE = Path(sl.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
# From the ground up: a package may import those before it. (docs/architecture.md)
ORDER = (
    "config", "gating", "runs", "models", "data", "tasks", "training", "transcoders", "faces", "circuits",
    "attribution", "evaluation", "reporting", "serving", "live", "demo", "cli", "__main__",
)  # fmt: skip
TOP = {"__init__.py", "__main__.py", "py.typed"}
LINES, FUNCTION_LINES = 420, 80


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module of this package, whether it is only for the type checker) of every import, lazy ones included."""
    tree = ast.parse(path.read_text())
    typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for part in block.body
        for node in ast.walk(part)
    }
    package = list(path.relative_to(SOURCE).parts[:-1])
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                start = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            elif node.module and node.module.split(".")[0] == "sparselens":
                start = node.module.split(".")[1:]
            else:
                continue
            whole = ".".join(start)
            for alias in node.names:
                inside = f"{whole}.{alias.name}".lstrip(".")
                found.append((inside if inside in NAMES else whole, id(node) in typing))
        elif isinstance(node, ast.Import):
            names = [alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("sparselens.")]
            found += [(name, id(node) in typing) for name in names]
    return found


def room(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", [p for p in MODULES if p.parent != SOURCE or p.name != "__init__.py"], ids=name_of)
def test_imports_point_one_way(path):
    own = room(name_of(path))
    for target, _ in imports(path):
        assert target == "" or ORDER.index(room(target)) <= ORDER.index(own), f"{name_of(path)} imports {target}"
        assert room(target) != "demo" or own in ("demo", "cli"), "only the command line knows the demo"


def test_no_cycles():
    """Also none that lazy imports would hide. What only the type checker sees may look back."""
    edges = {name: {to for to, typing in imports(path) if to and not typing} - {name} for name, path in NAMES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, "a cycle: " + " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for to in sorted(edges.get(name, ())):
                visit(to, (*way, name))
            done.add(name)

    for name in edges:
        if name:
            visit(name, ())


def test_only_the_entrance_lies_at_the_top():
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} <= TOP
    for folder in {path.parent for path in MODULES} - {SOURCE}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text and len(text) > 40, f"{folder.name} does not say what it is for"
        assert re.search("[Ii]mports|Uses the package", text), f"{folder.name} does not say what it may import"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_fit_in_the_head(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{node.name} has {node.end_lineno - node.lineno}"


def test_the_report_and_its_figures_never_need_torch(tmp_path):
    """Every module of it is imported, a page built and the figures drawn where torch cannot be imported."""
    make_run(tmp_path / "run")
    rooms = [name for name in NAMES if room(name) == "reporting"]
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {rooms!r}:
    importlib.import_module(f"sparselens.{{name}}")
from sparselens.reporting import build_page, payload
assert len(build_page(payload(["run"]))) > 10_000
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
