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
from .sections import Payload, Section, asset, sections

IMPORT = re.compile(r"^import\s[^;]*?from\s+\"\./([\w.]+)\";\n", re.M)
BEYOND = re.compile(r"[^\x00-\x7f]")
DEFINED = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", re.M)


def write_page(value: Payload, path: str | Path) -> Path:
    """Write the page of a `payload` to a file, whole or not at all."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the page a file name, such as {path / 'report.html'}")
    write_bytes(path, build_page(value).encode("ascii"))
    return path


def only(name: str, first: bool = False) -> dict[str, Section]:
    """One section alone, or (first) all of them with that one at the top."""
    chosen = {name: sections()[name]}
    return chosen | sections() if first else chosen


def build_page(value: Payload, shown: dict[str, Section] | None = None) -> str:
    """The page of a `payload`, ASCII only. shown: its sections; default: those of the report."""
    shown = shown or sections()
    # ASCII only: other characters, which only occur in strings and comments, become escapes.
    style = BEYOND.sub(lambda c: f"\\{ord(c[0]):x} ", asset("style.css"))
    script = BEYOND.sub(lambda c: json.dumps(c[0])[1:-1], joined_scripts(shown))
    policy = [
        "default-src 'none'", f"script-src 'sha256-{_hash(script)}'", f"style-src 'sha256-{_hash(style)}'",
        "img-src data: blob:", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'",
    ]  # fmt: skip
    if value.get("live") or value.get("studio"):
        policy.append("connect-src 'self'")  # only the served page asks its own server whether something is new
    # Titles as markup that shows them, ASCII only.
    titles = {n: html.escape(one.title).encode("ascii", "xmlcharrefreplace").decode() for n, one in shown.items()}
    parts = {
        "POLICY": "; ".join(policy), "STYLE": style, "SCRIPT": script, "DATA": embed(value),
        "LINKS": "\n    ".join(f'<a href="#{name}">{title}</a>' for name, title in titles.items()),
        "SECTIONS": "\n  ".join(f'<section id="{n}" aria-labelledby="{n}-title"></section>' for n in shown),
    }  # fmt: skip
    # One pass: nothing that was put in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("template.html"))


def embed(value: Any) -> str:
    """JSON that is inert inside a <script> element, whatever text it holds."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def scripts(shown: dict[str, Section] | None = None) -> dict[str, str]:
    """Every script of the page by its name, each after those it imports: the sections' own, then main.js."""
    found: dict[str, str] = {}
    seen = set()

    def add(name: str, text: str) -> None:
        seen.add(name)
        for needed in IMPORT.findall(text):
            if needed not in seen:
                add(needed, asset(needed))
        found[name] = text

    for name, section in (shown or sections()).items():
        add(f"{name}.js", section.source())
    add("main.js", asset("main.js"))
    return found


def joined_scripts(shown: dict[str, Section] | None = None) -> str:
    """All modules as one, in order."""
    parts, homes = [], dict[str, str]()
    for name, text in scripts(shown).items():
        text = IMPORT.sub("", text)
        if re.search(r"^\s*import\b", text, re.M):
            raise ValueError(f'{name}: import lines must have the form: import {{ a, b }} from "./file.js";')
        for defined in DEFINED.findall(text):
            if homes.setdefault(defined, name) != name:
                raise ValueError(f"{name}: there is a {defined} in {homes[defined]} already; call it something else")
        parts.append(f"// ---- {name}\n" + re.sub(r"^export (?=const|let|function|async|class)", "", text, flags=re.M))
    return "\n" + "\n".join(parts)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
