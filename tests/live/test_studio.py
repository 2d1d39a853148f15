"""A studio asked over its own server: answers, jobs with progress and cancel, and what is kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from pairs import chosen
from studio_run import PROMPT, TOKEN, make_studio_run, served
from tiny_models import tiny_tokenizer

import sparselens as sl
from sparselens.live.models import log_odds
from sparselens.live.passes import full_pass
from sparselens.live.session import Session
from sparselens.live.worker import Busy, Cancelled, Worker
from sparselens.models.loading import load
from sparselens.reporting.sections.attribution import read_trace
from sparselens.runs.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_studio_run(tmp_path_factory.mktemp("studio") / "run")


@pytest.fixture(scope="module")
def studio(run):
    with served(run) as one:
        one.ready()
        yield one


def question(role="sparse", answer=9, **more):
    return {"role": role, "text": PROMPT, "answer": answer, **more}


# ---- answers ----


def test_look_is_what_every_model_says(studio, run):
    found = studio.ask("look", {"text": PROMPT})
    assert list(found["models"]) == ["dense", "control", "sparse"] and found["tokens"][-1] == "w9"
    ids = torch.tensor([[0, *(int(word[1:]) + 2 for word in PROMPT.split())]])
    for role, place in (("dense", "base/model"), ("sparse", "model")):
        with torch.no_grad():
            p = load(run / place)[0](ids).logits[0, -1].softmax(-1)
        best = found["models"][role]["next"][0]
        assert best["id"] == int(p.argmax()) and best["p"] == pytest.approx(float(p.max()), abs=1e-5)


def test_generating_one_token_is_asking_with_one_more(studio):
    first = studio.ask("look", {"text": PROMPT})["models"]["sparse"]["next"][0]
    more = studio.ask("look", {"text": PROMPT, "more": [first["id"]]})
    assert more["tokens"][-1] == first["text"]
    typed = studio.ask("look", {"text": f"{PROMPT} {first['text']}"})
    assert more["models"]["sparse"]["next"] == typed["models"]["sparse"]["next"]


def test_touching_a_feature_moves_the_answer(studio):
    features = studio.ask("active", question())["features"]
    assert features and all(row["kind"] == "feature" for row in features)
    top = features[0]
    place = [top["layer"], top["position"], top["feature"]]
    same = studio.ask("touch", question(scaled=[[*place, 1]]))
    assert same["after"] == pytest.approx(same["before"], abs=1e-3) and same["predicted"] == pytest.approx(0, abs=1e-3)
    gone = studio.ask("touch", question(scaled=[[*place, 0]]))
    assert abs(gone["after"] - gone["before"]) > 1e-4
    little = studio.ask("touch", question(scaled=[[*place, 0.999]]))
    assert little["predicted"] == pytest.approx(gone["predicted"] / 1000, rel=0.05, abs=1e-5)


def test_a_gate_tells_which_features_opened_it(studio):
    layer, head, query, key, _ = studio.ask("effects", question())["edges"][0]
    found = studio.ask("opened", question(edge=[layer, head, query, key]))
    total = sum(term["term"] for term in found["terms"]) + found["rest"]
    assert total == pytest.approx(found["logit"], rel=1e-3, abs=1e-3)
    assert found["margin"] > 0, "an edge that matters is open"


def test_a_dense_model_has_no_margins(studio):
    sparse, dense = (studio.ask("maps", {"text": PROMPT, "role": role}) for role in ("sparse", "dense"))
    assert "margin" in sparse and "margin" not in dense and "weights" in dense


# ---- jobs ----


def sentences(run):
    pair = chosen([load(run / "model")[0]]).pairs[0]
    return {"clean": pair.clean, "corrupted": pair.corrupted, "answer": pair.answer, "wrong": pair.wrong}


def test_discover_on_two_typed_sentences(studio, run):
    asked = {"role": "sparse", **sentences(run)}
    job = studio.ask("discover", asked)
    ended = studio.ended(job["number"])
    if ended["state"] == "failed":  # attention may hinder a random model; then it says so
        assert "attention does not help" in ended["message"]
        pytest.skip(ended["message"])
    found = studio.ask("kept")["kept"][-1]
    assert ended["state"] == "done" and found["kind"] == "circuit" and found["id"]
    assert 0 < found["n_edges"] <= found["n_possible"] and found["n_edges"] == ended["result"]["n_edges"]
    # Closing all others, by what a person would do: mask them in the model, one pass.
    models = studio.studio.models
    member = models.member("sparse")
    ids = models.ids("sparse", asked["clean"])
    mask = torch.zeros_like(member.mask(len(ids), models_changes()))
    for *place, _ in found["edges"]:
        mask[tuple(place)] = 1
    right, wrong = (tiny_tokenizer().convert_tokens_to_ids(asked[name].strip()) for name in ("answer", "wrong"))

    def margin(mask):
        log_p = member.log_p(full_pass(member.decoder, member.embed(ids), mask), [-1])[0].detach()
        return float(log_p[right] - log_p[wrong])

    whole, nothing = margin(None), margin(torch.zeros_like(mask))
    assert found["whole"] == pytest.approx(whole, abs=1e-3) and found["nothing"] == pytest.approx(nothing, abs=1e-3)
    assert found["effect"] == pytest.approx((margin(mask) - nothing) / (whole - nothing), abs=1e-3)


def models_changes():
    from sparselens.live.models import Changes

    return Changes()


def test_sentences_of_different_length_are_refused_in_words(studio):
    bad = {"role": "dense", "clean": PROMPT, "corrupted": "w1", "answer": " w4", "wrong": ""}
    ended = studio.ended(studio.ask("discover", bad)["number"])
    assert ended["state"] == "failed" and "cannot be compared" in ended["message"]


def test_trace_joins_the_run_with_progress(studio, run):
    before = studio.request("GET", f"/{TOKEN}/")[2]
    job = studio.ask("trace", question())
    ended = studio.ended(job["number"])
    assert ended["state"] == "done" and ended["of"] > 0 and ended["done"] > 0, ended
    rows = read_trace(run / ended["result"]["folder"] / "trace.json")
    assert rows["target"][0]["token"] == 9 and rows["tokens"][-1] == "w9" and "main" in rows
    assert studio.request("GET", f"/{TOKEN}/")[2] != before, "the page has the trace"


def test_questions_are_let_through_while_a_trace_is_measured(studio, monkeypatch):
    step, measured = studio.studio.worker.step, []

    def heard(done, of):
        if done == of:  # the graph has grown: what comes now are interventions
            measured.append(1)
        step(done, of)

    monkeypatch.setattr(studio.studio.worker, "step", heard)
    job = studio.ask("trace", question())
    assert studio.ended(job["number"])["state"] == "done"
    assert len(measured) > 20, "before every cut and every check, not once behind them all"


def test_a_trace_can_be_cancelled_and_leaves_nothing(studio, run, monkeypatch):
    folders = sorted(run.glob("trace*"))
    step, reached = studio.studio.worker.step, threading.Event()

    def slow(done, of):
        reached.set()
        time.sleep(0.2)
        step(done, of)

    monkeypatch.setattr(studio.studio.worker, "step", slow)
    job = studio.ask("trace", question("dense"))
    assert reached.wait(30)
    studio.ask("cancel", {"number": job["number"]})
    assert studio.ended(job["number"])["state"] == "cancelled"
    assert sorted(run.glob("trace*")) == folders
    assert studio.ask("look", {"text": PROMPT}), "and it answers again"


def test_questions_are_answered_while_a_job_runs():
    worker, seen, hold = Worker(), [], threading.Event()

    def work(job):
        for i in range(200):
            worker.step(i, 200)
            seen.append(i)
            hold.wait(0.01)
        return "whole"

    job = worker.start("long", work)
    assert worker.ask(lambda: threading.current_thread().name).result(5) == "studio"
    assert job.state == "running" and len(seen) < 200
    hold.set()
    while job.state == "running":
        time.sleep(0.01)
    assert job.result == "whole" and worker.finished == 1
    worker.stop()


def test_a_quick_question_is_answered_in_the_middle_of_a_slow_one():
    worker, order, begun = Worker(), [], threading.Event()

    def slow():
        begun.set()
        time.sleep(0.2)  # meanwhile both others come in
        worker.pause()
        order.append("slow")

    first = worker.ask(slow)
    begun.wait(5)
    second = worker.ask(lambda: order.append("another slow one"))
    third = worker.ask(lambda: order.append("quick"), quick=True)
    for answer in (first, second, third):
        answer.result(5)
    assert order == ["quick", "slow", "another slow one"]
    worker.stop()


def test_typing_on_does_not_wait_for_the_edges_of_what_was_typed(studio, monkeypatch):
    """Between two blocks of a gradient, the next look is answered."""
    models, looked = studio.studio.models, []
    pause, hold = models.pause, threading.Event()

    def slowly():
        hold.wait(10)
        pause()
        looked.append(done.is_set())

    done = threading.Event()
    monkeypatch.setattr(models, "pause", slowly)
    edges = threading.Thread(target=studio.ask, args=("effects", question(answer=11)))
    edges.start()
    time.sleep(0.2)
    look = threading.Thread(target=lambda: (studio.ask("look", {"text": PROMPT + " w8"}), done.set()))
    look.start()
    time.sleep(0.3)
    hold.set()
    look.join(10)
    edges.join(10)
    assert done.is_set() and len(looked) >= 2, "the gradient paused, block by block, and went on"


def test_too_much_is_refused_not_remembered():
    worker, hold = Worker(), threading.Event()
    worker.ask(hold.wait)
    time.sleep(0.1)
    with pytest.raises(Busy):
        for _ in range(200):
            worker.ask(lambda: None)
    with pytest.raises(Busy):
        for _ in range(20):
            worker.start("job", lambda job: None)
    waiting = worker.latest[0]
    worker.cancel(waiting.number)
    assert waiting.state == "cancelled"
    assert worker.start("job", lambda job: None).state == "waiting", "a cancelled job gives its place back"
    with pytest.raises(Busy):
        worker.start("job", lambda job: None)
    hold.set()
    worker.stop()


def test_a_cancelled_question_is_not_computed_and_a_broken_one_breaks_nothing():
    worker, hold, ran = Worker(), threading.Event(), []
    worker.ask(hold.wait)
    gone = worker.ask(lambda: ran.append(1))
    assert gone.cancel()
    broken = worker.ask(lambda: 1 / 0)
    hold.set()
    with pytest.raises(ZeroDivisionError):
        broken.result(5)
    assert worker.ask(lambda: ran).result(5) == []
    job = worker.start("job", lambda job: (_ for _ in ()).throw(Cancelled()))
    while job.state in ("waiting", "running"):
        time.sleep(0.01)
    assert job.state == "cancelled"
    worker.stop()


# ---- what is kept ----


def test_an_experiment_is_measured_again_when_it_is_kept(studio, run):
    layer, head, query, key, _ = studio.ask("effects", question())["edges"][0]
    changed = question(closed=[[layer, head, query, key]], p_after=0.5, after=99.0)
    measured = studio.ask("touch", changed)
    kept = studio.ask("keep", changed)["kept"][-1]
    assert kept["kind"] == "experiment" and kept["p_after"] == measured["p_after"] != 0.5
    assert json.loads((run / "studio/session.json").read_text())["kept"][-1] == kept
    left = studio.ask("remove", {"id": kept["id"]})["kept"]
    assert kept["id"] not in [row["id"] for row in left]
    assert "not kept any more" in studio.ask("remove", {"id": kept["id"]}, 400)["error"]


def test_the_report_shows_what_was_kept(studio, run):
    studio.ask("keep", question(silenced=[[1, 2]]))
    told = studio.ask("export", {})
    assert (run / told["file"]).is_file()
    page = (run / told["file"]).read_text()
    assert '"kind": "experiment"' in page or '"kind":"experiment"' in page


def test_two_studios_on_one_run_lose_nothing_of_each_other(tmp_path):
    (tmp_path / "run.json").write_text('{"kind": "sparsify", "config": {}}')
    one, two = Session(Run(tmp_path)), Session(Run(tmp_path))

    def many(session, name):
        for i in range(30):
            session.keep("experiment", {"says": f"{name}{i}"})

    threads = [threading.Thread(target=many, args=pair) for pair in ((one, "a"), (two, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = Session(Run(tmp_path)).kept
    assert sorted(row["says"] for row in kept) == sorted(f"{n}{i}" for n in "ab" for i in range(30))
    two.remove(kept[0]["id"])
    assert len(Session(Run(tmp_path)).kept) == 59


def test_a_damaged_session_is_an_error_not_a_loss(tmp_path):
    (tmp_path / "run.json").write_text('{"kind": "sparsify", "config": {}}')
    (tmp_path / "studio").mkdir()
    (tmp_path / "studio/session.json").write_text('{"kept": 3}')
    with pytest.raises(ValueError, match="damaged"):
        Session(Run(tmp_path))
    assert (tmp_path / "studio/session.json").read_text() == '{"kept": 3}'


KILLED = """
import sys, threading
sys.path[:0] = {paths!r}
from studio_run import Served
one = Served({run!r})
print(one.port, flush=True)
threading.Event().wait()
"""


def test_a_killed_server_loses_nothing_that_was_kept(tmp_path):
    """Killed again and again while it keeps: what it had answered is there, and the file is always whole."""
    run = make_studio_run(tmp_path / "run")
    code = KILLED.format(paths=[p for p in sys.path if p], run=str(run))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    from studio_run import Served

    talk = Served.__new__(Served)
    talk.port = int(process.stdout.readline())
    answered = []

    def keep():
        talk.ready()
        for i in range(1000):
            try:
                answered.append(talk.ask("keep", question(answer=i % 60, silenced=[[0, 0]]))["kept"][-1]["id"])
            except (OSError, ConnectionError, AssertionError):
                return
            except Exception:
                return

    thread = threading.Thread(target=keep)
    thread.start()
    while len(answered) < 5 and thread.is_alive():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    thread.join(10)
    kept = [row["id"] for row in Session(Run(run)).kept]
    assert len(answered) >= 5 and kept[: len(answered)] == answered


# ---- what it is started on ----


def test_the_demos_run_takes_sums_and_answers_at_its_last_tokens(tmp_path):
    """As `sparselens demo` leaves it, but untrained: people type 36+28, answers stand where the question marks do."""
    from report_runs import make_run

    from sparselens.demo.addition import make_model
    from sparselens.demo.walk import ABOUT

    run = make_run(tmp_path / "run", n_layers=4, n_heads=4, parts=("training",))
    model, tokenizer = make_model(0)
    sl.save(model, tokenizer, run / "base/model")
    sl.add_gates(model, sl.Gate(bias=1.0))
    sl.save(model, tokenizer, run / "model")
    (run / "about.json").write_text(json.dumps(ABOUT))
    with served(run) as one:
        assert one.ready()["filled"] == 5
        found = one.ask("look", {"text": "36+28"})
        assert "".join(found["tokens"]) == "36+28=?????"
        ids = torch.tensor([one.studio.models.ids("dense", "36+28")])
        with torch.no_grad():
            theirs = load(run / "base/model")[0](ids).logits[0].softmax(-1)
        said = found["models"]["dense"]["probability"]
        assert said[-5:] == pytest.approx(theirs[-5:].max(-1).values.tolist(), abs=1e-5) and said[:-5] == [0.0] * 6
        body = {"role": "sparse", "text": "36+28", "answer": 6, "position": 9}
        assert one.ask("touch", body | {"closed": [[0, 0, 9, 1]]})["predicted"] is not None
        assert "36+28" in one.ask("look", {"text": "hello"}, 400)["error"], "says what a prompt looks like"


@pytest.mark.shared
def test_a_real_model_answers(shared):
    """stories15m, dense only: the likeliest words are transformers' own, and closing edges changes them as measured."""
    with served(str(shared / "models/stories15m")) as one:
        one.ready(120)
        text = "Once upon a time, there was a little girl named"
        found = one.ask("look", {"text": text})
        model, _ = load(shared / "models/stories15m")
        ids = torch.tensor([one.studio.models.ids("dense", text)])
        with torch.no_grad():
            p = model.float()(ids).logits[0, -1].softmax(-1)
        best = found["models"]["dense"]["next"][0]
        assert best["id"] == int(p.argmax()) and best["p"] == pytest.approx(float(p.max()), abs=1e-4)
        body = {"role": "dense", "text": text, "answer": best["id"]}
        edges = one.ask("effects", body)["edges"]
        signs = 0
        for *edge, effect in edges[:10]:
            touched = one.ask("touch", body | {"closed": [edge]})
            assert touched["predicted"] == pytest.approx(effect, rel=1e-3, abs=1e-4)
            signs += (touched["after"] - touched["before"]) * effect > 0
        assert signs >= 8, "on a real dense model first order tells the direction"


def test_a_model_alone_has_a_studio_without_a_run(run):
    with served(str(run / "base" / "model")) as one:
        told = one.ready()
        assert list(told["models"]) == ["dense"] and told["run"] is None
        assert one.ask("touch", question("dense", closed=[[0, 0, 3, 1]]))["predicted"]
        assert one.ask("keep", question("dense", silenced=[[0, 0]]))["kept"], "in memory"
        assert "no Run" in one.ask("export", {}, 400)["error"]
        assert "no transcoder" in one.ask("trace", question("dense"), 400)["error"]


def test_a_run_that_must_be_made_first_shows_its_progress(run):
    go, said = threading.Event(), "step 3 of 9"

    def prepare(say):
        say(said)
        assert go.wait(30)
        return run

    with served(None, prepare) as one:
        end = time.monotonic() + 20
        while one.ask("status")["message"] != said:
            assert time.monotonic() < end
        assert b"sparselens" in one.request("GET", f"/{TOKEN}/")[2]
        assert said in one.ask("look", {"text": PROMPT}, 400)["error"], "refused at once, in words"
        go.set()
        assert one.ready()["run"] == run.name
        assert b'id="summary"' in one.request("GET", f"/{TOKEN}/")[2]


@pytest.mark.parametrize("code", [0, 3])
def test_the_demo_is_made_by_a_process_of_its_own(code, monkeypatch, tmp_path):
    from sparselens.cli.pages import _make_demo

    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nprintf 'step 1\\rstep 2\\n'\necho \"$@\"\nexit {code}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    said = []
    if code:
        with pytest.raises(ValueError, match="the demo could not be made"):
            _make_demo(tmp_path / "demo", said.append)
    else:
        assert _make_demo(tmp_path / "demo", said.append) == tmp_path / "demo"
    assert [text.rpartition(": ")[2] for text in said] == [
        "step 1", "step 2", f"-m sparselens demo --out {tmp_path / 'demo'}"
    ]  # fmt: skip


def test_what_cannot_be_opened_is_said(tmp_path):
    (tmp_path / "run.json").write_text('{"kind": "sparsify", "config": {}}')
    with served(tmp_path) as one:
        end = time.monotonic() + 30
        while (told := one.ask("status"))["state"] == "preparing":
            assert time.monotonic() < end
        assert told["state"] == "failed" and "no model yet" in told["message"]


def test_the_command_and_the_function_start_the_same(monkeypatch, tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"kind": "sparsify", "config": {}}')
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    from sparselens.cli import main

    main(["studio", str(tmp_path), "--port", "0"])
    sl.studio(sl.Run(tmp_path), 0)
    sl.studio(str(tmp_path), 0, browser=False)
    printed = capsys.readouterr().out
    assert len(opened) == 2 and all(address.startswith("http://127.0.0.1:") for address in opened)
    assert all(address in printed for address in opened) and printed.count("http://127.0.0.1:") == 3
    main(["studio", str(tmp_path), "--port", "0", "--no-browser"])
    assert len(opened) == 2


@pytest.mark.parametrize(("arguments", "why"), [(["--port", "99999"], "port"), (["nowhere/at/all"], "nowhere")])
def test_bad_arguments_are_one_sentence(arguments, why, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    from sparselens.cli import main

    with pytest.raises(SystemExit) as end:
        main(["studio", "--no-browser", *arguments])
    assert end.value.code == 2 and why in capsys.readouterr().err


def test_without_its_packages_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ValueError, match=r"pip install 'sparselens\[studio\]'"):
        sl.studio(tmp_path, browser=False)


def test_log_odds_keep_their_digits_where_the_model_is_sure():
    sure = torch.tensor([20.0, 0.0]).log_softmax(0)
    assert float(log_odds(sure, 0)) == pytest.approx(20, rel=1e-5)
