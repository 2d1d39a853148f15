"""The notebooks beside this file, from their plain sources:   python docs/notebooks/make.py

A source is Python with `# %%` before a cell of code and `# %% [markdown]` before one of text, which editors run cell by
cell as well. Edit the source, then make the notebook; a test keeps the two the same.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells(source: str) -> list[tuple[str, str]]:
    """(markdown or code, text) of every cell."""
    parts = CELL.split(source)[1:]
    kinds, texts = parts[::2], [text.strip("\n") for text in parts[1::2]]
    return [
        ("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE)) if kind else ("code", text)
        for kind, text in zip(kinds, texts, strict=True)
    ]


def notebook(source: str) -> str:
    """The same as an .ipynb file, nothing run yet."""
    made = []
    for number, (kind, text) in enumerate(cells(source)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append(cell | ({} if kind == "markdown" else {"execution_count": None, "outputs": []}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def sources() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.py") if path.name != Path(__file__).name)


if __name__ == "__main__":
    for path in sources():
        path.with_suffix(".ipynb").write_text(notebook(path.read_text(encoding="utf-8")), encoding="utf-8")
