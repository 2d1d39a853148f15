"""The documentation as a site:   python docs/make_site.py [FOLDER]   (build/site; needs the extra `docs`)

The pages are those of docs/ as they lie here, the README in front, and a reference made from the docstrings of every
public name. They are copied beside results/ and examples/, so that the links that work here work there. A warning is an
error: a link that leads nowhere, a page that is in no menu.
"""

import inspect
import logging
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import sparselens as sl

PROJECT = Path(__file__).parents[1]
MENU: dict[str, list[str]] = {
    "Begin": ["README.md", "docs/install.md", "docs/concepts.md", "docs/notebooks.md", "docs/faq.md"],
    "Use": [
        "docs/sparsify.md",
        "docs/circuits.md",
        "docs/transcoders.md",
        "docs/tracing.md",
        "docs/report.md",
        "docs/studio.md",
    ],
    "Know": ["docs/results.md", "docs/limits.md", "docs/scale.md", "docs/kernels.md", "docs/other_tools.md"],
    "Build on": ["docs/api.md", "docs/extending.md", "docs/architecture.md", "CONTRIBUTING.md"],
    "Look up": ["CHANGELOG.md", "docs/LOG.md"],
}
THEME = {
    "name": "material", "font": False, "palette": {"scheme": "default", "primary": "teal"},
    "features": ["navigation.sections", "navigation.top", "content.code.copy"],
}  # fmt: skip
EXTENSIONS = ["tables", "toc", "admonition", "pymdownx.superfences", "pymdownx.highlight", "md_in_html"]
LINKS = dict.fromkeys(("not_found", "anchors", "unrecognized_links", "absolute_links"), "warn")
GROUPS = {
    "Models": ["load", "save", "push", "export", "add_gates", "Gate", "gated_attention"],
    "Make sparse, and measure": ["sparsify", "plan", "evaluate", "write_text", "Run"],
    "Circuits": ["discover", "compare", "Search", "Circuit"],
    "Features": ["transcode", "Transcoder", "trace", "Graph"],
    "Show": ["report", "studio"],
    "Of your own": ["Task", "Pair", "register_task", "register_data", "Architecture", "register_architecture"],
}


SHORT = re.compile(r"\b(sparselens|collections|pathlib|torch|transformers|numpy|typing)\.([a-z_]+\.)*")
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def reference() -> str:
    """Every public name with its signature and docstring, as Markdown."""
    lines = [
        "# Reference",
        "",
        "Everything is in `import sparselens as sl`. Settings by name are those of the classes they name.",
    ]
    named = [name for names in GROUPS.values() for name in names]
    rest = [name for name in sl.__all__ if name not in named]
    for title, names in ({**GROUPS, "More": rest} if rest else GROUPS).items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += _entry(f"sl.{name}", getattr(sl, name), "###")
            if inspect.isclass(getattr(sl, name)):
                for key, member in vars(getattr(sl, name)).items():
                    member = getattr(member, "__func__", member)
                    if inspect.isfunction(member) and not key.startswith("_") and member.__doc__:
                        lines += _entry(f"{name}.{key}", member, "####")
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any, heading: str) -> list[str]:
    signature = SHORT.sub("", str(inspect.signature(value)))
    if len(signature) > 80:  # a line for every argument
        found = list(inspect.signature(value).parameters.values())
        named = next((i for i, one in enumerate(found) if one.kind is one.KEYWORD_ONLY), None)
        inside = [str(one) for one in found]
        if named is not None and not any(one.kind is one.VAR_POSITIONAL for one in found):
            inside.insert(named, "*")
        signature = SHORT.sub("", "(\n    " + ",\n    ".join(inside) + ",\n)")
    text = inspect.cleandoc(value.__doc__ or "")
    lines = ["", f"{heading} {name}", "", "```python", f"{name}{signature}", "```", "", "```text", text, "```"]
    return lines if len(text) > 10 else lines[:-4]


def notebooks() -> str:
    """The notebooks as one page, from their sources."""
    sys.path.insert(0, str(PROJECT / "docs" / "notebooks"))
    import make

    lines = ["# Notebooks", "", "They run from top to bottom; tests run them on small models.", ""]
    for path in make.sources():
        made = make.cells(path.read_text(encoding="utf-8"))
        lines += [f"## {made[0][1].splitlines()[0].lstrip('# ')}", ""]
        lines += [
            f"[{path.stem}.ipynb](notebooks/{path.stem}.ipynb), [the same as plain Python](notebooks/{path.name})",
            "",
        ]
        lines += [re.sub(r"^#.*\n+", "", made[0][1]), ""]
        for kind, text in made[1:]:
            lines += [re.sub(r"^## ", "### ", text), ""] if kind == "markdown" else ["```python", text, "```", ""]
    return "\n".join(lines)


def stage(folder: Path) -> None:
    """What the site is made of, laid out as it lies here."""
    for name in ("docs", "results", "examples"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "make_site.py"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"):
        shutil.copy(PROJECT / name, folder / name)
    (folder / "site.css").write_text(
        ".md-typeset pre > code { white-space: pre-wrap; }\n.md-grid { max-width: 84rem; }\n"
    )
    (folder / "docs" / "api.md").write_text(reference(), encoding="utf-8")
    (folder / "docs" / "notebooks.md").write_text(notebooks(), encoding="utf-8")
    for page in sorted(folder.rglob("*.md")):  # as GitHub reads them, so does the site
        text = LINK.sub(partial(_to_list, page.parent), page.read_text("utf-8"))
        page.write_text(_apart(text), encoding="utf-8")


def _apart(text: str) -> str:
    """With an empty line between a paragraph and the list right under it."""
    lines, code = [""], False
    for line in text.splitlines():
        code ^= line.startswith("```")
        before = lines[-1]
        starts = re.match(r"(-|\d+\.) ", line) and before and not re.match(r"(-|\d+\.) |\s", before)
        lines += ["", line] if starts and not code else [line]
    return "\n".join(lines[1:]) + "\n"


def _to_list(folder: Path, link: re.Match[str]) -> str:
    """A link to a folder, which a site does not show, becomes one to a list of its files."""
    target = folder / link[1]
    if "://" in link[1] or not target.is_dir():
        return link[0]
    names = [path.name for path in sorted(target.iterdir()) if path.is_file() and path.name != "index.md"]
    lines = [f"# {target.name}", "", *(f"- [{name}]({name})" for name in names)]
    (target / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"]({link[1]}/index.md)"


def build(out: Path) -> None:
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    logging.getLogger("mkdocs").addHandler(logging.StreamHandler())  # which says what is wrong, and where
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "pages"
        stage(folder)
        (Path(place) / "mkdocs.yml").write_text("site_name: sparselens\n")
        config = load_config(
            config_file=str(Path(place) / "mkdocs.yml"), docs_dir=str(folder), site_dir=str(out.resolve()), strict=True,
            use_directory_urls=False, nav=[{title: pages} for title, pages in MENU.items()],
            theme=THEME, extra_css=["site.css"], markdown_extensions=EXTENSIONS, validation={"links": LINKS},
            not_in_nav="results/\nexamples/\ndocs/notebooks/\n",
        )  # fmt: skip
        mkdocs_build(config)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else PROJECT / "build" / "site"))
