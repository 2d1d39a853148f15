"""Tries to break the studio: other hosts, other pages, guessed addresses, paths, floods, clients with no manners."""

import http.client
import json
import os
import random
import re
import socket
import sys
import threading
import time

import pytest
from studio_run import JSON, PROMPT, TOKEN, make_studio_run, served

from sparselens.live import server as server_module
from sparselens.live.app import JOBS, VERBS
from sparselens.live.server import listen

GOOD = {"role": "sparse", "text": PROMPT, "answer": 9}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_studio_run(tmp_path_factory.mktemp("studio") / "run")


@pytest.fixture(scope="module")
def studio(run):
    with served(run) as one:
        one.ready()
        yield one


def talk(studio, method="POST", path=f"/{TOKEN}/api/look", body=None, **headers):
    sent = json.dumps({"text": PROMPT}) if body is None and method == "POST" else body
    headers = (JSON if method == "POST" else {}) | {name.replace("_", "-"): value for name, value in headers.items()}
    return studio.request(method, path, sent, headers)


# ---- who may ask ----


def test_it_listens_on_this_machine_only(studio):
    assert studio.socket.getsockname()[0] == "127.0.0.1"
    found = listen(0)
    assert found.getsockname()[0] == "127.0.0.1"
    found.close()
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with pytest.raises(OSError), socket.create_connection((address, studio.port), timeout=2):
            pass


@pytest.mark.parametrize(
    "path",
    ["/", "/api/status", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/api/status", f"//{TOKEN}/", f"/{TOKEN}", f"/{TOKEN.upper()}/",
     "/favicon.ico", f"/{TOKEN}/../", f"/x/../{TOKEN}/", f"/%2e%2e/{TOKEN}/", f"/{TOKEN}/api/../api/status",
     f"/{TOKEN}/run.json", f"/{TOKEN}/model/config.json", f"/{TOKEN}/..%2f..%2fetc%2fpasswd", f"/{TOKEN}/api/"],
)  # fmt: skip
def test_without_its_exact_address_there_is_nothing(studio, path):
    status, headers, content = talk(studio, "GET", path)
    assert status in (400, 404, 405) and b"sparse" not in content and "location" not in headers


def test_tokens_are_random_and_long(monkeypatch, tmp_path):
    (tmp_path / "run.json").write_text('{"kind": "sparsify", "config": {}}')
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    said = []
    for _ in range(3):
        server_module.studio(tmp_path, 0, browser=False, say=said.append)
    tokens = {re.search(r":\d+/([\w-]+)/", text)[1] for text in said}
    assert len(tokens) == 3 and all(len(token) >= 32 for token in tokens)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:{port}", "0.0.0.0:{port}", "", "127.0.0.1"]
)
def test_rebinding_is_refused(studio, host):
    """A page of evil.example whose name points here sends its own name as Host."""
    for method, path in (("GET", f"/{TOKEN}/"), ("GET", f"/{TOKEN}/api/status"), ("POST", f"/{TOKEN}/api/look")):
        status, _, content = talk(studio, method, path, Host=host.format(port=studio.port))
        assert status in (400, 403) and PROMPT.encode() not in content


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "https://127.0.0.1:{port}"},
     {"Origin": "http://127.0.0.1:1"}, {"Origin": "http://localhost:{port}"}, {"Sec_Fetch_Site": "cross-site"},
     {"Sec_Fetch_Site": "same-site"}],
)  # fmt: skip
def test_other_pages_may_not_ask(studio, headers):
    headers = {name: value.format(port=studio.port) for name, value in headers.items()}
    assert talk(studio, **headers)[0] == 403
    assert talk(studio, "GET", f"/{TOKEN}/api/status", **headers)[0] == 403
    assert talk(studio, Origin=f"http://127.0.0.1:{studio.port}", Sec_Fetch_Site="same-origin")[0] == 200


def test_forms_and_preflights_get_nowhere(studio):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, _, _ = studio.request("POST", f"/{TOKEN}/api/look", json.dumps(GOOD), {"Content-Type": kind})
        assert status == 415
    status, headers, _ = talk(studio, "OPTIONS", Origin="http://evil.example")
    assert status == 405 and not any(name.lower().startswith("access-control") for name in headers)
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "POST"):
        assert talk(studio, method, f"/{TOKEN}/")[0] in (400, 405)
    assert talk(studio, "GET")[0] == 405


def test_every_answer_has_safe_headers_and_the_page_a_strict_policy(studio):
    for method, path in (("GET", f"/{TOKEN}/"), ("GET", "/nothing"), ("POST", f"/{TOKEN}/api/look")):
        _, headers, content = talk(studio, method, path)
        for name, value in server_module.HEADERS.items():
            assert headers[name] == value
        assert "server" not in headers
        if path == f"/{TOKEN}/":
            policy = re.search(rb'Content-Security-Policy" content="([^"]*)"', content)[1].decode()
            rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
            assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
            assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["script-src"])
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            assert TOKEN.encode() not in content, "the address is not in the page: a saved page gives nothing away"


# ---- what may be asked ----


def test_bodies_are_small_json_objects(studio):
    big = json.dumps({"text": "w1 " * 30_000})
    assert talk(studio, body=big)[0] == 413
    for body in ("", "{", "[]", "3", "null", "[" * 60_000, '{"text": 1e999}', "\xff\xfe"):
        status, _, content = talk(studio, body=body.encode("utf-8", "surrogateescape"))
        assert status == 400 and json.loads(content)["error"], body


def test_a_body_without_end_is_cut_off(studio):
    connection = socket.create_connection(("127.0.0.1", studio.port), timeout=5)
    lines = (f"POST /{TOKEN}/api/look HTTP/1.1", f"Host: 127.0.0.1:{studio.port}", "Content-Type: application/json",
             "Transfer-Encoding: chunked")  # fmt: skip
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
    for _ in range(40):
        connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    connection.close()
    assert talk(studio)[0] == 200


def test_no_path_from_a_request_is_opened(studio, run):
    """Everything a request can hold is set to a file's name; an audit hook hears of every file that is opened."""
    bait = run.parent / "bait-7c1d.json"
    bait.write_text("{}")
    opened = []

    def hook(event, arguments):
        if event in ("open", "os.listdir", "os.scandir", "subprocess.Popen", "os.system") and "bait-7c1d" in str(
            arguments[0]
        ):
            opened.append(arguments)

    sys.addaudithook(hook)
    names = ("role", "text", "target", "answer", "wrong", "clean", "corrupted", "id", "closed", "more", "position")
    for path in (str(bait), "../bait-7c1d.json", f"file://{bait}", "bait-7c1d.json"):
        for verb in (*VERBS, *JOBS, "cancel", "bait-7c1d.json"):
            if verb == "export":
                continue  # it takes nothing from the request
            for body in (dict.fromkeys(names, path), GOOD | {"text": path, "target": path, "clean": path}):
                assert talk(studio, path=f"/{TOKEN}/api/{verb}", body=json.dumps(body))[0] in (200, 400, 404)
    time.sleep(0.5)
    assert not opened
    with bait.open():  # the hook does hear
        assert opened


def test_prompts_are_data(studio):
    hostile = "</script><img src=x onerror=alert(1)> {{SCRIPT}} %s ${x} `id`"
    found = studio.ask("look", {"text": hostile})
    assert found["text"] == hostile
    kept = studio.ask("keep", GOOD | {"text": hostile, "silenced": [[0, 0]]})["kept"][-1]
    assert kept["text"] == hostile
    page = talk(studio, "GET", f"/{TOKEN}/")[2]
    assert b"<img src=x" not in page and page.count(b"</script>") == page.count(b"<script")
    studio.ask("remove", {"id": kept["id"]})


# ---- too much ----


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


VALUES = (
    None, True, 0, -1, 3, 2**31, 10**40, 1.5, float("nan"), float("inf"), "", "sparse", "dense", "x" * 5000, PROMPT,
    "\u0000", "\u2028", "a\ud800", [], [[]], [0, 1, 2, 3], [[0, 1, 2, 1]], [[0, 0, 0, 99]], [[1, 2]], [[-1, 0]], {},
    {"a": 1}, [[[[[]]]]], [[0, 0, 0, 0.5]] * 500, list(range(300)),
)  # fmt: skip
FIELDS = ("role", "text", "answer", "position", "more", "closed", "silenced", "scaled", "edge", "clean", "corrupted",
          "wrong", "id", "number")  # fmt: skip


def fuzzed(rng):
    verb = rng.choice([*(verb for verb in VERBS if verb not in ("export", "keep")), *JOBS, "cancel", "x", "..", ""])
    body = dict(GOOD) if rng.random() < 0.7 else {}
    for name in rng.sample(FIELDS, rng.randint(1, 4)):
        body[name] = rng.choice(VALUES)
    text = json.dumps(body)
    if rng.random() < 0.15:  # broken on the way
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "}", '"', "\\", "\x00", "9" * 30]) + text[at + rng.randint(0, 3) :]
    method = rng.choice(["POST"] * 12 + ["GET", "PUT", "HEAD"])
    return method, f"/{TOKEN}/api/{verb}", text


def test_a_thousand_fuzzed_requests(studio):
    rng, counted = random.Random(0), dict[int, int]()
    for _ in range(1000):
        method, path, text = fuzzed(rng)
        status, _, content = studio.request(method, path, text, JSON)
        counted[status] = counted.get(status, 0) + 1
        assert status in (200, 400, 404, 405, 413, 503), (status, path, text[:300], content[:300])
        if status in (400, 503) and method == "POST":
            error = json.loads(content)["error"]
            assert 5 < len(error) <= 400 and "Traceback" not in error, error
    assert counted[200] > 50 and counted[400] > 200, counted
    for job in studio.ask("status")["jobs"]:
        studio.ask("cancel", {"number": job["number"]})
    assert studio.ask("look", {"text": PROMPT})["models"]


def test_memory_stays_flat_over_five_hundred_prompts(studio):
    rng = random.Random(1)

    def ask_many(n):
        for _ in range(n):
            text = " ".join(f"w{rng.randrange(60)}" for _ in range(rng.randint(3, 30)))
            body = {"role": "sparse", "text": text, "answer": rng.randrange(60)}
            studio.ask("look", {"text": text})
            studio.ask("maps", body)
            studio.ask("effects", body)
            studio.ask("touch", body | {"closed": [[0, 0, 2, 1]]})

    ask_many(60)
    before = resident()
    ask_many(500)
    assert resident() - before < 30e6, f"{(resident() - before) / 1e6:.1f} MB more"


def test_twenty_tabs_at_once(studio):
    failed, busy, answered = [], [], []

    def tab(number):
        rng = random.Random(number)
        try:
            assert talk(studio, "GET", f"/{TOKEN}/")[0] == 200
            for _ in range(6):
                text = " ".join(f"w{rng.randrange(60)}" for _ in range(12))
                status, _, content = talk(studio, body=json.dumps({"text": text}))
                (answered if status == 200 else busy).append(status)
                if status == 200:
                    assert json.loads(content)["text"] == text, "everybody's own answer"
                assert talk(studio, "GET", f"/{TOKEN}/api/status")[0] == 200
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=tab, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed[:3]
    assert len(answered) >= 100 and set(busy) <= {503}


def test_clients_that_send_or_read_one_byte_a_second(studio, monkeypatch):
    """Thirty of each kind, all at once: it stays answerable, and they are thrown out."""
    before, slow = resident(), []
    try:
        for _ in range(15):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", studio.port))
            reader.sendall(f"GET /{TOKEN}/ HTTP/1.1\r\nHost: 127.0.0.1:{studio.port}\r\n\r\n".encode())
            sender = socket.create_connection(("127.0.0.1", studio.port))
            sender.sendall(b"POST ")
            body = socket.create_connection(("127.0.0.1", studio.port))
            lines = (f"POST /{TOKEN}/api/look HTTP/1.1", f"Host: 127.0.0.1:{studio.port}",
                     "Content-Type: application/json", "Content-Length: 5000")  # fmt: skip
            body.sendall("\r\n".join(lines).encode() + b"\r\n\r\n{")
            slow += [("read", reader), ("send", sender), ("send", body)]
        begun, worst, gone = time.monotonic(), 0.0, set()
        while time.monotonic() - begun < 14 and len(gone) < 30:
            for i, (kind, client) in enumerate(slow):
                try:
                    if kind == "read":
                        client.recv(1)
                    else:
                        client.sendall(b" ")
                        client.setblocking(False)
                        if client.recv(100) is not None:  # an answer 408, or the end
                            gone.add(i)
                        client.setblocking(True)
                except BlockingIOError:
                    client.setblocking(True)
                except OSError:
                    gone.add(i)
            asked = time.monotonic()
            assert studio.ask("look", {"text": PROMPT})["models"]
            worst = max(worst, time.monotonic() - asked)
            time.sleep(1)
        assert worst < 2, worst
        assert len([i for i in gone if slow[i][0] == "send"]) == 30, "slow senders are thrown out within 14 s"
        assert resident() - before < 80e6
    finally:
        for _, client in slow:
            client.close()


def test_more_connections_than_it_takes_do_not_stop_it(studio):
    held = [socket.create_connection(("127.0.0.1", studio.port)) for _ in range(90)]
    time.sleep(0.3)
    for client in held:
        client.close()
    end = time.monotonic() + 5
    while True:
        try:
            assert studio.ask("look", {"text": PROMPT})
            break
        except (AssertionError, OSError, http.client.HTTPException):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_tab_closed_mid_work_loses_nothing(studio):
    kept = studio.ask("keep", GOOD | {"silenced": [[0, 1]]})["kept"]
    job = studio.ask("trace", GOOD)
    for _ in range(10):
        connection = http.client.HTTPConnection("127.0.0.1", studio.port)
        connection.request("POST", f"/{TOKEN}/api/look", json.dumps({"text": PROMPT}), JSON)
        connection.close()
    assert studio.ended(job["number"])["state"] == "done"
    assert studio.ask("kept")["kept"][: len(kept)] == kept
