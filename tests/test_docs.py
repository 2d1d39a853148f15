"""Pages that can be run are run: every python block under a line `<!-- runs -->`, in order, in an empty folder."""

import re
from pathlib import Path

import pytest

from sparselens import tasks
from sparselens.data import registry
from sparselens.models import architectures as sites

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ["concepts.md", "extending.md"]
BLOCK = re.compile(r"^<!-- runs -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch):
    text = (DOCS / page).read_text()
    monkeypatch.chdir(tmp_path)
    tasks.names()  # registers the built-in ones, which happens once in a process
    # Pages register families and tasks; other tests must not see them.
    monkeypatch.setattr(sites, "ARCHITECTURES", sites.ARCHITECTURES.copy())
    monkeypatch.setattr(tasks.registry, "_REGISTRY", tasks.registry._REGISTRY.copy())
    monkeypatch.setattr(registry, "_MAKERS", registry._MAKERS.copy())
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("<!-- runs -->") > 0, "a marker without a python block right under it"
    names: dict = {"__name__": page}
    for block in blocks:
        first = text[: block.start(1)].count("\n")
        # Empty lines in front make line numbers in a traceback those of the page.
        exec(compile("\n" * first + block[1], str(DOCS / page), "exec"), names)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to what is not there: {broken}"
