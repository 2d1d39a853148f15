"""Template + style + scripts + rows -> one HTML file that needs nothing else.

1. Scripts are ordinary ES modules, one per section and what those import; here they are joined, each after what it
   imports, without their import lines and `export` words, into one inline module. Names at the top level are therefore
   unique over all files.
2. Rows go into a <script type="application/json"> as pure ASCII: every `<`, every character beyond ASCII and every lone
   surrogate is a \\u escape, so nothing in them can end the element or be markup.
3. The Content-Security-Policy allows the one script and the one style by their hashes, pictures from data: and blob:,
   and nothing else. Text reaches the page as text nodes only; `require-trusted-types-for` makes the browser enforce it.
"""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

from ..runs.run import write_bytes
from .sections import asset, sections

IMPORT = re.compile(r"^import\s[^;]*?from\s+\"\./([\w.]+)\";\n", re.M)
DEFINED = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", re.M)


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
        "LINKS": "\n    ".join(f'<a href="#{name}">{_text(one.title)}</a>' for name, one in sections().items()),
        "SECTIONS": "\n  ".join(
            f'<section id="{name}" aria-labelledby="{name}-title"></section>' for name in sections()
        ),
    }
    # One pass: nothing that was put in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("template.html"))


def embed(value: Any) -> str:
    """JSON that is inert inside a <script> element, whatever text it holds."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def scripts() -> dict[str, str]:
    """Every script of the page by its name, each after those it imports: the sections' own, then main.js."""
    found: dict[str, str] = {}
    seen = set()

    def add(name: str, text: str) -> None:
        seen.add(name)
        for needed in IMPORT.findall(text):
            if needed not in seen:
                add(needed, asset(needed))
        found[name] = text

    for name, section in sections().items():
        add(f"{name}.js", section.source())
    add("main.js", asset("main.js"))
    return found


def joined_scripts() -> str:
    """All modules as one, in order."""
    parts, homes = [], dict[str, str]()
    for name, text in scripts().items():
        text = IMPORT.sub("", text)
        if re.search(r"^\s*import\b", text, re.M):
            raise ValueError(f'{name}: import lines must have the form: import {{ a, b }} from "./file.js";')
        for defined in DEFINED.findall(text):
            if homes.setdefault(defined, name) != name:
                raise ValueError(f"{name}: there is a {defined} in {homes[defined]} already; call it something else")
        parts.append(f"// ---- {name}\n" + re.sub(r"^export (?=const|let|function|async|class)", "", text, flags=re.M))
    return "\n" + "\n".join(parts)


def _text(words: str) -> str:
    """Words as markup that shows them, ASCII only."""
    return html.escape(words).encode("ascii", "xmlcharrefreplace").decode()


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
