"""The page of a Run that is still going on: built when asked for, reloaded by the browser when the Run changes."""

from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..reporting import build_page, payload
from ..runs.run import Run, reading
from .publish import look

Say = Callable[[str], None]
WATCHED = ("*.json", "*.jsonl", "*/*.json", "*/*.jsonl", "*/*/*.json")


def serve(runs: Sequence[Path], port: int = 8765, prompts: Sequence[str] = (), say: Say = print) -> None:
    """Serve the report on this machine only, until Ctrl-C. Port 0 takes any free one."""
    for run in runs:
        with reading(run):
            look(Run(run), prompts, say)
    server = make_server(runs, port)
    say(f"http://127.0.0.1:{server.server_address[1]}/   (Ctrl-C stops it)")
    try:
        server.serve_forever()
    finally:
        server.server_close()


def make_server(runs: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port}: expected a number from 0 to 65535")
    payload(runs)  # a folder that is no Run is an error now, not a page of errors later
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, runs))
    except OSError as error:
        raise ValueError(f"cannot listen on port {port} ({error.strerror}); choose another with --port") from None


def stamp(runs: Sequence[Path]) -> str:
    """Changes whenever a file that the page shows does."""
    files = {file for run in runs for pattern in WATCHED for file in Path(run).glob(pattern)}
    states = [(file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(files) if file.is_file()]
    return f"{hash(tuple(states)) & 0xFFFFFFFFFFFF:x}"


class Handler(BaseHTTPRequestHandler):
    """`/` is the page, `/stamp` says whether it is still the newest."""

    def __init__(self, runs: Sequence[Path], *arguments: Any):
        self.runs = runs
        super().__init__(*arguments)

    def do_GET(self) -> None:
        # Only this machine's own name: a page on the web that points its name here must not read the Run.
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in ("127.0.0.1", "localhost"):
            self._answer(403, "text/plain", b"this server answers to 127.0.0.1 only\n")
        elif self.path == "/stamp":
            self._answer(200, "text/plain", stamp(self.runs).encode())
        elif self.path in ("/", "/index.html"):
            try:
                page = build_page({**payload(self.runs, live=True), "stamp": stamp(self.runs)})
                self._answer(200, "text/html; charset=utf-8", page.encode("ascii"))
            except (ValueError, OSError) as error:
                self._answer(500, "text/plain; charset=utf-8", f"sparselens: {error}\n".encode())
        else:
            self._answer(404, "text/plain", b"only / is here\n")

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a request every two seconds is not news."""
