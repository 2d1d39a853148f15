"""The report: rows of a Run -> one HTML page that opens from disk, offline, and lets you look around. No torch.

1. rows.py reads the Run and puts what the page shows into one JSON value (`payload`), section by section:
   overview.py (summary), history.py (training), looks of attention.py, circuit_rows.py, trace_rows.py.
2. page.py puts template, style, scripts and that value into one file, with a Content-Security-Policy that names them by
   hash and allows nothing else: no request ever leaves the page.
3. serve.py shows the page of a Run that is still going on and reloads it when the Run's files change.

What came from a prompt, a tokenizer, a name or a file is data on the page, never markup.
"""

from .page import build_page, write_page
from .rows import payload
from .serve import serve

__all__ = ["build_page", "payload", "serve", "write_page"]
