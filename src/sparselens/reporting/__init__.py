"""The report: rows of a Run -> one HTML page that opens from disk, offline, and lets you look around. No torch.

1. sections/ reads the Run and puts what the page shows into one JSON value (`payload`): one module of it and one
   script of assets/ per section. `register` adds yours.
2. page.py puts template, style, scripts and that value into one file, with a Content-Security-Policy that names them by
   hash and allows nothing else: no request ever leaves the page.
3. figures/ draws the figures for print from the same rows.

What came from a prompt, a tokenizer, a name or a file is data on the page, never markup.
"""

from .page import build_page, write_page
from .sections import Section, payload, register

__all__ = ["Section", "build_page", "payload", "register", "write_page"]
