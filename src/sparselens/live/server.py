"""The studio's server: on this machine only, for whoever has its address, and for nothing else.

- Listens on 127.0.0.1. The address holds a random token; without it every path is 404.
- Host must be this machine's own name (a web page that points its name here is refused), Origin the page's own.
- Bodies are JSON of at most 64 KiB and arrive within 10 s; answers are taken within 30 s; 64 connections at once.
- No path, name or text from a request is ever opened, run or shown as markup.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..runs.run import Run, one_line
from .app import JOBS, QUICK, VERBS, Studio
from .worker import Busy

MOST_BYTES = 64 * 1024
ARRIVES, ANSWERED, TAKEN = 10.0, 25.0, 30.0  # seconds for a request to arrive, to be answered, to be done with
CONNECTIONS = 64
MODEL_FILES = ("config.json", "adapter_config.json", "delta.json")  # one of them is in every folder sl.load reads
HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page's own, much stricter one stands in the page
}  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def make_app(studio: Studio, token: str) -> Any:
    """The ASGI application."""
    from anyio import fail_after
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    async def page(request: Request) -> Response:
        check(request, token)
        return HTMLResponse(await asyncio.to_thread(studio.page))

    async def status(request: Request) -> Response:
        check(request, token)
        return JSONResponse(studio.status())

    async def kept(request: Request) -> Response:
        check(request, token)
        return JSONResponse(studio.kept())

    async def ask(request: Request) -> Response:
        check(request, token)
        verb = request.path_params["verb"]
        if verb not in VERBS and verb not in JOBS and verb != "cancel":
            raise Refused(404, "there is no such question")
        body = await body_of(request)
        if verb == "cancel":
            return JSONResponse(studio.cancel(body))
        studio.check_ready()
        # A job only begins here, but its question is read by the tokenizer: in the thread that owns the models, too.
        work = studio.start if verb in JOBS else studio.answer
        answer = studio.worker.ask(lambda: work(verb, body), quick=verb in QUICK)
        try:
            with fail_after(ANSWERED):
                return JSONResponse(await asyncio.wrap_future(answer))
        except TimeoutError:
            raise Refused(503, "other work takes long; ask again in a moment") from None
        finally:
            answer.cancel()  # whoever asked may have gone

    async def refuse(request: Request, error: Exception) -> Response:
        status_code = error.status if isinstance(error, Refused) else 503 if isinstance(error, Busy) else 400
        return JSONResponse({"error": one_line(error, 400)}, status_code)

    async def broken(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"something went wrong: {one_line(error, 300)}"}, 500)

    routes = [
        Route("/{token}/", page, methods=["GET"]),
        Route("/{token}/api/status", status, methods=["GET"]),
        Route("/{token}/api/kept", kept, methods=["GET"]),
        Route("/{token}/api/{verb}", ask, methods=["POST"]),
    ]
    handlers: Any = {Refused: refuse, ValueError: refuse, Exception: broken}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would repeat a Host that was not checked
    return guarded(app)


async def body_of(request: Any) -> dict[str, Any]:
    """A request's JSON object."""
    from anyio import fail_after

    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refused(415, "expected application/json")
    content = b""
    try:
        with fail_after(ARRIVES):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BYTES:
                    raise Refused(413, f"a request has at most {MOST_BYTES} bytes")
    except TimeoutError:
        raise Refused(408, "the request took too long to arrive") from None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise Refused(400, "expected JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "expected a JSON object")
    return found


def check(request: Any, token: str) -> None:
    """Refuses whoever is not the studio's own page, on this machine, with its address."""
    host = request.headers.get("host", "")
    if host.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
        raise Refused(403, "this server answers to 127.0.0.1 only")
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        raise Refused(403, "only the studio's own page may ask")
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Refused(403, "only the studio's own page may ask")
    if not hmac.compare_digest(request.path_params["token"].encode(), token.encode()):
        raise Refused(404, "not here")


def guarded(app: Any) -> Any:
    """The application with safe headers on every answer and an end to every request."""

    from anyio import fail_after

    async def run(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def careful(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            with fail_after(TAKEN):
                await app(scope, receive, careful)
        except TimeoutError:
            transport = scope.get("extensions", {}).get("sparselens.close")
            if transport is not None:
                transport()

    return run


def protocol() -> type:
    """uvicorn's HTTP protocol, for clients that say nothing, or say it one byte at a time, or do not listen."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._late = self.loop.call_later(ARRIVES, self._give_up)
            # A client that does not read must not make us hold its answers: what lies in the buffer is bounded.
            transport.set_write_buffer_limits(high=256 * 1024)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before and self.cycle is not None:
                self._late.cancel()
                scope: Any = self.scope
                scope.setdefault("extensions", {})["sparselens.close"] = self.transport.abort
                self._late = self.loop.call_later(ARRIVES + TAKEN, self._give_up)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._late.cancel()
            if not self.transport.is_closing():
                self._late = self.loop.call_later(ARRIVES, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            super().connection_lost(exc)

        def _give_up(self) -> None:
            self.transport.abort()

    return Impatient


def listen(port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port}: expected a number from 0 to 65535")
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen(CONNECTIONS)  # the browser may be there before the server
    except OSError as error:
        found.close()
        raise ValueError(f"cannot listen on port {port} ({error.strerror}); choose another with --port") from None
    return found


def make_server(studio: Studio, token: str) -> Any:
    """A uvicorn server; run it with `server.run([listen(port)])`."""
    import uvicorn

    config = uvicorn.Config(
        make_app(studio, token), http=protocol(), ws="none", lifespan="off", log_level="critical", access_log=False,
        limit_concurrency=CONNECTIONS, timeout_keep_alive=5, timeout_graceful_shutdown=2, server_header=False,
        h11_max_incomplete_event_size=16 * 1024, backlog=64, loop="asyncio",
    )  # fmt: skip
    return uvicorn.Server(config)


def studio(
    run: "str | Path | Run | None", port: int = 8766, *, browser: bool = True, say: Callable[[str], None] = print,
    prepare: Callable[[Callable[[str], None]], Path] | None = None,
) -> None:  # fmt: skip
    """A live page over a Run (or a model's name or folder) on this machine, until Ctrl-C.

    port: 0 takes any free one. browser: open it. prepare: makes the Run, where none is named.
    """
    check_extra()
    if isinstance(run, str | Path):
        _check_named(str(run))
    # Threads of one computation sleep while they wait for each other, as long as torch is not there yet. Spinning, they
    # keep the cores from the browser and from each other: with other work beside, a pass took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    at, token = listen(port), secrets.token_urlsafe(24)
    live = Studio(run, prepare)
    address = f"http://127.0.0.1:{at.getsockname()[1]}/{token}/"
    say(f"{address}   (Ctrl-C stops it)")
    if browser:
        webbrowser.open(address)
    try:
        make_server(live, token).run([at])
    finally:
        live.worker.stop()
        at.close()


def _check_named(source: str) -> None:
    """What can be told without torch is an error now, not in the page."""
    path = Path(source)
    if path.is_dir() and not any((path / name).is_file() for name in MODEL_FILES):
        Run(path)  # neither a Run nor a model
    if not path.exists() and (path.is_absolute() or source.startswith(".") or source.count("/") > 1):
        raise ValueError(f"{source} does not exist; expected a Run, a model's folder or a Hugging Face name")


def check_extra() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError("the studio needs two small packages: pip install 'sparselens[studio]'") from None
