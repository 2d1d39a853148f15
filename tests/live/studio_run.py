"""A Run with a tiny pair of real (random) models and their transcoders, and a studio served from it."""

import http.client
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from report_runs import make_run
from tiny_models import tiny_tokenizer
from tracing_setup import biased_model

import sparselens as sl
from sparselens.live.app import Studio
from sparselens.live.server import listen, make_server
from sparselens.transcoders.transcoder import Transcoder

PROMPT = "w3 w5 w8 w13 w21 w3 w9"
TOKEN = "t" * 32
JSON = {"Content-Type": "application/json"}


def make_studio_run(folder: Path, family: str = "llama", parts: tuple[str, ...] = ("training",)) -> Path:
    """Base, control and sparse model: two layers of four heads, 64 words."""
    import torch

    run = make_run(folder, n_layers=2, n_heads=4, parts=parts)
    for place, gated in (("base/model", False), ("control/model", False), ("model", True)):
        sl.save(biased_model(family, gated, torch.float32), tiny_tokenizer(), run / place)
    for role, seed in (("dense", 0), ("sparse", 1)):
        made = run / "transcoders" / role
        Transcoder.random(2, 48, 32, seed=seed).save(made)
        (made / "results.json").write_text("{}")
    (run / "about.json").write_text(json.dumps({"name": "The tiny model", "prompts": [PROMPT]}))
    return run


class Served:
    """A studio on a port of its own, and what to ask it with."""

    def __init__(self, source, prepare=None):
        self.studio = Studio(source, prepare)
        self.socket = listen(0)
        self.port = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/{TOKEN}/"
        self.server = make_server(self.studio, TOKEN)
        self.server.install_signal_handlers = lambda: None
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.studio.worker.stop()
        self.thread.join(10)
        self.socket.close()

    def request(self, method, path, body=None, headers=None, timeout=30):
        """(status, headers, what came back as bytes)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def ask(self, verb, body=None, status=200):
        method = "GET" if body is None else "POST"
        sent = None if body is None else json.dumps(body)
        found, _, content = self.request(method, f"/{TOKEN}/api/{verb}", sent, {} if body is None else JSON)
        assert found == status, (found, content[:500])
        return json.loads(content)

    def ready(self, seconds=60):
        end = time.monotonic() + seconds
        while (told := self.ask("status"))["state"] == "preparing":
            assert time.monotonic() < end, told
            time.sleep(0.05)
        assert told["state"] == "ready", told
        return told

    def ended(self, number, seconds=60):
        """The job's row, when it has come to an end."""
        end = time.monotonic() + seconds
        while True:
            job = next(job for job in self.ask("status")["jobs"] if job["number"] == number)
            if job["state"] not in ("waiting", "running"):
                return job
            assert time.monotonic() < end, job
            time.sleep(0.05)


@contextmanager
def served(source, prepare=None):
    one = Served(source, prepare)
    try:
        yield one
    finally:
        one.stop()
