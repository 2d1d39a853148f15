"""A disk that is full or may not be written to: one sentence, nothing half-written, and the run goes on afterwards."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from test_kill import check_readable, done, lines, sparsify as longer

SENTENCE = "sparselens: "


def sparsify(ground: Path, out: Path, *more) -> list:
    return longer(ground, out, "--steps", 24, *more)


def refused(child, *words: str) -> str:
    """One sentence on stderr that has these words, exit code 2."""
    last = child.said.strip().splitlines()[-1]
    assert child.code == 2 and "Traceback" not in child.said, child.said
    assert last.startswith(SENTENCE) and all(word in last for word in words), last
    return last


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def test_a_disk_that_fills_up_during_the_run(ground, tmp_path, nursery, small_disk):
    """Somebody else takes the last byte; once there is room again, the run goes on as if nothing had been."""
    whole = tmp_path / "whole"
    assert nursery.run(*sparsify(ground, whole)).code == 0
    out = small_disk.path / "run"
    child = nursery.start(*sparsify(ground, out, "--cache", tmp_path / "cache"))
    child.until(lambda: done(out) > 3)
    fill(small_disk.path)
    child.wait()
    refused(child, "No space left on device")
    check_readable(out)
    assert not [path for path in out.rglob(".*") if path.name != ".lock"], "half of a file takes room too"
    small_disk.remount("size=64m")
    last = nursery.run(*sparsify(ground, out, "--resume", "--cache", tmp_path / "cache"))
    assert last.code == 0, last.said
    assert lines(out) == lines(whole)


def test_a_disk_full_to_the_last_byte_at_the_start(ground, tmp_path, nursery, small_disk):
    fill(small_disk.path)
    refused(nursery.run(*sparsify(ground, small_disk.path / "run", "--cache", tmp_path / "cache")), "GB free")
    assert not (small_disk.path / "run").exists()


def test_a_disk_that_becomes_read_only(ground, tmp_path, nursery, small_disk):
    small_disk.remount("size=64m")
    out = small_disk.path / "run"
    child = nursery.start(*sparsify(ground, out, "--cache", tmp_path / "cache"))
    child.until(lambda: done(out) > 3)
    child.kill()
    small_disk.remount("ro")
    refused(nursery.run(*sparsify(ground, out, "--resume", "--cache", tmp_path / "cache")), "Read-only file system")
    refused(nursery.run(*sparsify(ground, small_disk.path / "new", "--cache", tmp_path / "cache")), "cannot write to")
    refused(nursery.run("figures", out), "cannot write to")
    refused(nursery.run("report", out), "cannot write to")
    check_readable(out)
    small_disk.remount("rw")
    assert nursery.run(*sparsify(ground, out, "--resume", "--cache", tmp_path / "cache")).code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; the read-only disk above is for root")
def test_a_folder_without_permission(ground, tmp_path, nursery):
    (tmp_path / "closed").mkdir(mode=0o555)
    refused(nursery.run(*sparsify(ground, tmp_path / "closed" / "run", "--cache", tmp_path / "c")), "cannot write to")


@pytest.mark.parametrize("share", [0.5, 1.5, 4.5])
def test_no_file_may_grow_beyond_a_limit(ground, tmp_path, nursery, share):
    """RLIMIT_FSIZE: at 0.5 of the weights not even the first checkpoint fits, at 1.5 no Adam moments, at 4.5 all do."""
    size = (ground / "base" / "model.safetensors").stat().st_size
    out = tmp_path / "run"
    child = nursery.run(*sparsify(ground, out), file_size=int(share * size))
    if share > 4:
        assert child.code == 0
        return
    refused(child, "could not write the checkpoint of step " + ("0" if share < 1 else "2"), "File too large")
    check_readable(out)
    assert nursery.run(*sparsify(ground, out, "--resume")).code == 0 and not list(out.rglob(".*"))


def test_the_model_itself_does_not_fit(ground, tmp_path, nursery):
    """The last thing that is written: everything before it stays, and --resume writes it."""
    out = tmp_path / "run"
    assert nursery.run(*sparsify(ground, out)).code == 0
    shutil.rmtree(out / "model")
    size = (ground / "base" / "model.safetensors").stat().st_size
    refused(nursery.run(*sparsify(ground, out, "--resume"), file_size=size // 2), f"could not write {out / 'model'}")
    assert not (out / "model").exists() and not list(out.rglob(".*"))
    assert nursery.run(*sparsify(ground, out, "--resume")).code == 0


def test_results_that_cannot_be_written(ground, tmp_path, nursery):
    """/dev/full takes nothing, and stays the device it is."""
    out = tmp_path / "run"
    assert nursery.run(*sparsify(ground, out)).code == 0
    refused(nursery.run("evaluate", out, "--json", "/dev/full"), "No space left")
    assert Path("/dev/full").is_char_device() and not Path("/dev/.full.tmp").exists()
    (tmp_path / "old.json").write_text("[1]")
    refused(nursery.run("evaluate", out, "--json", tmp_path / "old.json", file_size=1000), "File too large")
    assert (tmp_path / "old.json").read_text() == "[1]" and not list(tmp_path.glob(".*"))
    export = nursery.run("export", out, "--out", tmp_path / "model", file_size=1000)
    refused(export, f"could not write {tmp_path / 'model'}")
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob(".*"))
