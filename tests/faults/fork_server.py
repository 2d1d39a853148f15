"""A process that has imported everything and forks a real one per command: to be killed, starved, or left to finish.

Starting Python, torch and transformers takes seconds; a fork takes none. Requests are JSON lines on stdin:
    {"run": [arguments], "log": file, "file_size": bytes or null, "memory": bytes more than now or null,
     "environment": {...}}   -> the process' number
    {"wait": number}   -> its exit code (negative: the signal it died of)
    {"poll": number}   -> the same, or null while it runs
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path


class Nursery:
    """The test's side of it."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *arguments, file_size: int | None = None, memory: int | None = None, **environment: str) -> "Child":
        self.count += 1
        log = self.folder / f"{self.count}.log"
        log.touch()  # a child killed in its first moment has said nothing, which can be read, too
        request = {"log": str(log), "file_size": file_size, "memory": memory, "environment": environment}
        return Child(self, self._ask(run=[str(argument) for argument in arguments], **request), log)

    def run(self, *arguments, **limits) -> "Child":
        child = self.start(*arguments, **limits)
        child.wait()
        return child

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Child:
    def __init__(self, nursery: Nursery, pid: int, log: Path):
        self.nursery, self.pid, self.log = nursery, pid, log
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.nursery._ask(poll=self.pid)
        return self.code

    def wait(self) -> int:
        if self.code is None:
            self.code = self.nursery._ask(wait=self.pid)
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, 9)
        assert self.wait() == -9, f"it had ended by itself with {self.code}: {self.said}"

    def until(self, condition, seconds: float = 60.0):
        """Wait for it; an assertion if the process ends first."""
        deadline, looks = time.monotonic() + seconds, 0
        while not (found := condition()):
            looks += 1
            if looks % 20 == 0:
                assert self.poll() is None, f"ended with {self.code} too early: {self.said}"
                assert time.monotonic() < deadline, f"nothing happened within {seconds} s: {self.said}"
            time.sleep(0.0005)
        return found

    @property
    def said(self) -> str:
        return self.log.read_text()


def serve() -> None:
    import accelerate  # noqa: F401
    import torch
    import tqdm  # noqa: F401

    from sparselens import cli
    from sparselens.transcoders import transcode as transcoding  # noqa: F401

    torch.set_num_threads(1)
    requests = sys.stdin.buffer.raw  # nothing of the next request may sit in a buffer that a fork would copy
    pending = b""
    while block := requests.read(1 << 16):
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            answer = json.dumps(_answer(json.loads(line), cli.main))
            os.write(1, answer.encode() + b"\n")


def _answer(request, main):
    if "run" in request:
        pid = os.fork()
        if pid == 0:
            _become(request, main)
        return pid
    number = request.get("wait", request.get("poll"))
    found, status = os.waitpid(number, 0 if "wait" in request else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(request, main) -> None:
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["file_size"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
        if request["memory"] is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + request["memory"]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        os.environ.update(request["environment"])
        main(request["run"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


if __name__ == "__main__":
    serve()
