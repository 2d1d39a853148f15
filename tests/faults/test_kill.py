"""kill -9 at any moment costs nothing but time, and two processes never write to one Run."""

import random
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sparselens.runs.checkpoints import load_checkpoint
from sparselens.runs.run import Metrics, Run, read_json

STEPS = 60
TIMES = ("tokens_per_second", "seconds", "minutes")


def sparsify(ground: Path, out: Path, *more) -> list:
    sizes = ["--length", 16, "--batch", 2, "--steps", STEPS, "--heldout-tokens", 300]
    # With weights that decay the control is trained, too.
    often = ["--evaluate-every", 5, "--checkpoint-every", 2, "--control", "--weight-decay", 0.01]
    places = ["--data", ground / "text.txt", "--cache", out.parent / "cache", "--out", out]
    return ["sparsify", ground / "base", *places, *sizes, *often, *more]


def lines(folder: Path) -> list[dict]:
    if not (folder / "metrics.jsonl").is_file():
        return []
    return [{k: v for k, v in line.items() if k not in TIMES} for line in Metrics.read(folder)]


def done(out: Path) -> int:
    """Steps of control and sparse model that are on record."""
    count = 0
    for folder in (out / "control", out):
        try:
            count += (folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            continue
    return count


def half_written(out: Path, *names: str) -> bool:
    return any(any(folder.glob(name)) for folder in (out, out / "control") for name in names)


def check_readable(out: Path) -> None:
    """Whatever the moment: the Run opens, every file under its own name is whole, there is a state to go on from."""
    if not (out / "run.json").is_file():
        return
    Run(out)
    for path in out.rglob("*.json"):
        if not any(part.startswith(".") for part in path.relative_to(out).parts) and "step-" not in str(path):
            read_json(path)
    for folder in (out, out / "control"):
        load_checkpoint(folder / "checkpoints")
        load_checkpoint(folder / "best")
        lines(folder)


def newest(folder: Path) -> int:
    found = [int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")]
    return max(found, default=0)


def plan(rng: random.Random) -> list[tuple[int, str]]:
    """25 moments: (steps that must be on record, what to wait for then)."""
    points = sorted(rng.sample(range(1, 2 * STEPS - 6), 20))
    wishes = ["step"] * 12 + ["checkpoint"] * 8
    rng.shuffle(wishes)
    moments = [*zip(points, wishes, strict=True), (STEPS, "model"), (2 * STEPS, "model")]
    return [(0, "start")] * 3 + sorted(moments)


def test_killed_25_times_in_one_run(ground, tmp_path, nursery):
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert nursery.run(*sparsify(ground, whole)).code == 0
    rng = random.Random(0)
    caught = resumed = 0
    moments = plan(rng)
    for steps, what in moments:
        resume = ["--resume"] if out.is_dir() else []
        saved = {name: newest(folder) for name, folder in (("control", out / "control"), ("sparse", out))}
        child = nursery.start(*sparsify(ground, out, *resume))
        child.until(lambda steps=steps: done(out) >= steps)
        if what == "start":
            time.sleep(rng.uniform(0, 0.3))
        elif what == "step":
            time.sleep(rng.uniform(0, 0.03))
        elif what == "checkpoint":
            child.until(lambda: half_written(out, "checkpoints/.step-*.tmp", "best/.step-*.tmp"))
        else:
            child.until(lambda: half_written(out, ".model.tmp"))
        child.kill()
        caught += half_written(out, "checkpoints/.*", "best/.*", ".model.*")
        check_readable(out)
        for name, first in re.findall(r"(control|sparse): +\d+%\|[^|]*\| (\d+)/", child.said)[:1]:
            assert int(first) == saved[name], f"went on from step {first} of {name}, not from {saved[name]}"
            resumed += saved[name] > 0
    assert len(moments) == 25 and resumed > 15
    assert caught >= 4, f"only {caught} kills fell into the writing of a folder"
    last = nursery.run(*sparsify(ground, out, "--resume"))
    assert last.code == 0, last.said
    assert lines(out) == lines(whole) and lines(out / "control") == lines(whole / "control")
    assert len(lines(out)) == STEPS
    without_names = [[{k: v for k, v in row.items() if k != "name"} for row in Run(o).read("evaluation.json")]
                     for o in (out, whole)]  # fmt: skip
    assert without_names[0] == without_names[1]
    for name in ("model/model.safetensors", "control/model/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == sorted(p.relative_to(whole) for p in whole.rglob("*"))
    assert not list(out.rglob(".*")) and not list((tmp_path / "cache").rglob(".*")), "something was left behind"


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    """Also what no later step would overwrite: the checkpoint of a Ctrl-C at an odd step, half of a model."""
    Run.create(tmp_path / "run", "sparsify", {}).unlock()
    left = ["checkpoints/.step-00000033.tmp/state.json", ".model.tmp/config.json", ".model.old/config.json",
            ".summary.json.tmp", "control/.metrics.jsonl.tmp"]  # fmt: skip
    kept = ["checkpoints/step-00000030/state.json", "notes.tmp", "model/.hidden", "control/metrics.jsonl"]
    for name in left + kept:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("x")
    Run.create(tmp_path / "run", "sparsify", {}, resume=True).unlock()
    found = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert found == {*kept, "run.json"}


@pytest.mark.parametrize("leftover", [[], [".lock"], [".lock", ".run.json.tmp"]], ids=str)
def test_killed_before_the_first_file_was_whole(tmp_path, leftover):
    """Nothing is lost by starting over, with --resume or without."""
    for resume in (False, True):
        folder = tmp_path / str(resume)
        folder.mkdir()
        for name in leftover:
            (folder / name).write_text("")
        Run.create(folder, "sparsify", {}, resume=resume).unlock()
        assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_transcode_is_killed_too(ground, tmp_path, nursery):
    def command(out, *more):
        sizes = ["--length", 16, "--batch", 2, "--steps", 40, "--features", 32, "--k", 4, "--heldout-tokens", 300]
        often = ["--checkpoint-every", 2, "--evaluate-every", 10, "--normalise-over", 1]
        places = ["--data", ground / "text.txt", "--cache", tmp_path / "cache", "--out", out]
        return ["transcode", ground / "base", *places, *sizes, *often, *more]

    whole, out = tmp_path / "whole", tmp_path / "run"
    assert nursery.run(*command(whole)).code == 0
    rng = random.Random(1)
    for steps in sorted(rng.sample(range(38), 6)):
        child = nursery.start(*command(out, *(["--resume"] if out.is_dir() else [])))
        child.until(lambda steps=steps: done(out) >= steps)
        time.sleep(rng.uniform(0, 0.02))
        child.kill()
        check_readable(out)
    last = nursery.run(*command(out, "--resume"))
    assert last.code == 0, last.said
    assert lines(out) == lines(whole) and not list(out.rglob(".*"))
    for file in sorted((whole / "transcoder").glob("*.safetensors")):
        assert (out / "transcoder" / file.name).read_bytes() == file.read_bytes()


def test_the_second_process_is_refused_and_a_killed_one_leaves_no_lock(ground, tmp_path, nursery):
    out = tmp_path / "run"
    first = nursery.start(*sparsify(ground, out))
    first.until(lambda: done(out) > 2)
    for more in ([], ["--resume"]):
        second = nursery.run(*sparsify(ground, out, *more))
        assert second.code == 2 and "Traceback" not in second.said
        assert ("already holds a run" if not more else "another process is writing to") in second.said
    first.kill()
    assert (out / ".lock").exists(), "nobody could tidy up"
    assert nursery.run(*sparsify(ground, out, "--resume")).code == 0
    assert len(lines(out)) == STEPS and not (out / ".lock").exists()


def test_started_at_the_same_moment_one_wins(ground, tmp_path, nursery):
    out = tmp_path / "run"
    children = [nursery.start(*sparsify(ground, out)) for _ in range(4)]
    # The winner has 120 steps to do: time for the others to come to the lock, however busy the machine is.
    deadline = time.monotonic() + 60
    while sum(child.poll() is not None for child in children) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    running = [child for child in children if child.poll() is None]
    assert len(running) == 1, [child.said for child in children]
    running[0].kill()
    children = [nursery.start(*sparsify(ground, out, "--resume")) for _ in range(4)]  # only the lock decides here
    assert sorted(child.wait() for child in children) == [0, 2, 2, 2], [child.said for child in children]
    assert len(lines(out)) == STEPS and len(lines(out / "control")) == STEPS


def test_one_cache_for_several_runs(tmp_path):
    """Four processes tokenise the same text into the same cache, twenty times over: one does it, the others wait."""
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join("w1 w2 w3 " * 20 for _ in range(60)))
    code = textwrap.dedent(f"""
        import hashlib, pathlib, time
        from sparselens.data import batches as data
        data.SHARD = 200

        class Words:
            bos_token_id = eos_token_id = 0
            def get_vocab(self): return {{"w": 0}}
            def __len__(self): return 10
            def __call__(self, texts, **options):
                return {{"input_ids": [[1 + len(word) for word in text.split()] for text in texts]}}

        folder = pathlib.Path({str(tmp_path)!r})
        for number in range(20):
            (folder / "here").mkdir(exist_ok=True)
            mine = folder / "here" / f"{{number}}-{{time.monotonic_ns()}}"
            mine.touch()
            deadline = time.monotonic() + 20
            while len(list((folder / "here").glob(f"{{number}}-*"))) < 4:
                assert time.monotonic() < deadline, "another one has failed"
            cache = data.TokenCache.build([str(folder / "a.txt")], Words(), folder / f"cache{{number}}", need=10**6,
                                          heldout=100, progress=False)
            shards = cache.shards("train") + cache.shards("heldout")
            print(len(shards), hashlib.sha256(b"".join(shard.tobytes() for shard in shards)).hexdigest())
    """)
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert len(said) == 1 and len(set(said.pop().split("\n")) - {""}) == 1, "every cache is the same"
    assert not list(tmp_path.rglob(".*"))


def test_one_process_of_two_is_killed(ground, tmp_path, nursery):
    """The other one ends, too, in a sentence and not after hours; the run goes on where its last checkpoint was."""
    out, options = tmp_path / "run", ["--steps", 24, "--batch", 4]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pair = [
        nursery.start(*sparsify(ground, out, *options), RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in (0, 1)
    ]
    pair[0].until(lambda: done(out) > 5)
    began = time.monotonic()
    pair[1].kill()
    assert pair[0].wait() not in (0, -9) and time.monotonic() - began < 30
    assert "Traceback" not in pair[0].said and "sparselens: " in pair[0].said, pair[0].said
    check_readable(out)
    last = nursery.run(*sparsify(ground, out, *options, "--resume"))
    assert last.code == 0, last.said
    assert [line["step"] for line in lines(out)] == list(range(1, 25)) and not list(out.rglob(".*"))


@pytest.mark.parametrize("wait", [True, False])
def test_the_lock_holds_while_its_file_comes_and_goes(tmp_path, wait):
    """Four processes take and give back the lock as fast as they can; a marker shows if two ever have it at once."""
    code = textwrap.dedent(f"""
        import os, pathlib, sys
        from sparselens.runs.run import give_back, take_lock
        folder = pathlib.Path({str(tmp_path)!r})
        taken = 0
        for _ in range(2000):
            lock = take_lock(folder / ".lock", wait={wait})
            if lock is None:
                continue
            taken += 1
            marker = os.open(folder / "marker", os.O_CREAT | os.O_EXCL)  # fails if another one is inside
            os.close(marker)
            os.unlink(folder / "marker")
            give_back(lock)
        print(taken)
    """)
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    taken = [int(process.communicate()[0] or -1) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert all(count == 2000 for count in taken) if wait else sum(taken) > 100
