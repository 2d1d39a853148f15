"""Template + style + scripts + rows -> one HTML file that needs nothing else.

1. Scripts are ordinary ES modules; here they are joined in the order of SCRIPTS, their import lines and `export` words
   removed, into one inline module. Names at the top level are therefore unique over all files (checked by a test).
2. Rows go into a <script type="application/json"> as pure ASCII: every `<`, every character beyond ASCII and every lone
   surrogate is a \\u escape, so nothing in them can end the element or be markup.
3. The Content-Security-Policy allows the one script and the one style by their hashes, pictures from data: and blob:,
   and nothing else. Text reaches the page as text nodes only; `require-trusted-types-for` makes the browser enforce it.
"""

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..runs.run import write_bytes

SCRIPTS = (
    "dom.js", "data.js", "palette.js", "scene.js", "download.js", "axes.js", "summary.js", "charts.js", "training.js",
    "maps.js", "token_reads.js", "head.js", "flow.js", "attention.js", "curves.js", "size_slider.js",
    "circuit_graph.js", "token_edges.js", "heads.js", "circuits.js", "head_shares.js", "intervention_plot.js",
    "trace_picture.js", "attribution.js", "main.js",
)  # fmt: skip
IMPORT = re.compile(r"^import\s[^;]*?from\s+\"\./[\w.]+\";\n", re.M)


def write_page(value: dict[str, Any], path: str | Path) -> Path:
    """Write the page of a `payload` to a file, whole or not at all."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the page a file name, such as {path / 'report.html'}")
    write_bytes(path, build_page(value).encode("ascii"))
    return path


def build_page(value: dict[str, Any]) -> str:
    """The page of a `payload`, ASCII only."""
    style, script = ascii_css(asset("style.css")), ascii_js(joined_scripts())
    policy = {
        "default-src": "'none'",
        "script-src": f"'sha256-{_hash(script)}'",
        "style-src": f"'sha256-{_hash(style)}'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }
    if value.get("live"):
        policy["connect-src"] = "'self'"  # only the served page asks its own server whether something is new
    parts = {
        "POLICY": "; ".join(f"{name} {allowed}" for name, allowed in policy.items()),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embed(value),
    }
    # One pass: nothing that was put in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("template.html"))


def embed(value: Any) -> str:
    """JSON that is inert inside a <script> element, whatever text it holds."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def joined_scripts() -> str:
    """All modules as one, in order."""
    parts = []
    for name in SCRIPTS:
        text = IMPORT.sub("", asset(name))
        if re.search(r"^\s*import\b", text, re.M):
            raise ValueError(f'{name}: import lines must have the form: import {{ a, b }} from "./file.js";')
        parts.append(f"// ---- {name}\n" + re.sub(r"^export (?=const|let|function|async|class)", "", text, flags=re.M))
    return "\n" + "\n".join(parts)


def ascii_js(text: str) -> str:
    """Characters beyond ASCII as \\u escapes: they only occur in strings and comments."""
    return "".join(c if ord(c) < 128 else "".join(f"\\u{unit:04x}" for unit in _utf16(c)) for c in text)


def ascii_css(text: str) -> str:
    return "".join(c if ord(c) < 128 else f"\\{ord(c):x} " for c in text)


def _utf16(character: str) -> list[int]:
    content = character.encode("utf-16-le")
    return [int.from_bytes(content[i : i + 2], "little") for i in range(0, len(content), 2)]


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
