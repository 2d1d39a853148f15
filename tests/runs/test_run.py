"""The Run directory: atomic, locked, refusing what is not its own, surviving damage."""

import json
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from sparselens.models.loading import load
from sparselens.runs.checkpoints import checkpoints, load_checkpoint, save_checkpoint
from sparselens.runs.run import Metrics, Run, whole_folder, write_json


def test_create_refuse_resume(tmp_path):
    run = Run.create(tmp_path / "run", "sparsify", {"steps": 5})
    run.unlock()
    with pytest.raises(ValueError, match="already holds a run"):
        Run.create(tmp_path / "run", "sparsify", {"steps": 5})
    with pytest.raises(ValueError, match=r"another run \(steps: 5 -> 6\)"):
        Run.create(tmp_path / "run", "sparsify", {"steps": 6}, resume=True)
    Run.create(tmp_path / "run", "sparsify", {"steps": 5}, resume=True).unlock()


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not empty"):
        Run.create(tmp_path, "sparsify", {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="is a file"):
        Run.create(tmp_path / "thesis.txt", "sparsify", {})
    with pytest.raises(ValueError, match="nothing to resume"):
        Run.create(tmp_path / "new", "sparsify", {}, resume=True)
    with pytest.raises(ValueError, match="is not a Run"):
        Run(tmp_path)


def test_two_writers_are_refused(tmp_path):
    run = Run.create(tmp_path / "run", "sparsify", {})
    code = f"from sparselens.runs.run import Run; Run.create({str(tmp_path / 'run')!r}, 'sparsify', {{}}, resume=True)"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another process is writing" in second.stderr
    run.unlock()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_every_module_imports_where_there_is_no_fcntl():
    """As on Windows: what only Unix has may not be imported by ours (torch's and transformers' own imports know)."""
    code = textwrap.dedent("""
        import builtins, importlib, pkgutil
        theirs = builtins.__import__

        def ours(name, globals=None, *rest, **more):
            if (globals or {}).get("__name__", "").startswith("sparselens"):
                assert name not in {"fcntl", "resource", "pwd", "grp", "termios"}, (globals["__name__"], name)
            return theirs(name, globals, *rest, **more)

        builtins.__import__ = ours
        import sparselens
        names = [module.name for module in pkgutil.walk_packages(sparselens.__path__, "sparselens.")]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        assert len(names) > 80
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_damaged_record_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"kind": ')
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        Run(tmp_path)


def test_write_json_leaves_the_old_file_when_the_disk_is_full(tmp_path):
    write_json(tmp_path / "a.json", {"old": True})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(OSError):
            write_json(tmp_path / "a.json", {"new": "x" * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": True}


def test_metrics_forget_what_came_after_the_checkpoint(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(1, 6):
        metrics.log({"step": step, "loss": 1.0 / step})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a crash
    metrics = Metrics(tmp_path, after_step=3)
    metrics.log({"step": 4, "loss": 9.0})
    metrics.close()
    assert [line["step"] for line in Metrics.read(tmp_path)] == [1, 2, 3, 4]


def state(step):
    return {"w": torch.full((100,), float(step))}, {"step": step}


def test_newest_whole_checkpoint_wins(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, *state(step))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000002"]
    tensors, saved, complaints = load_checkpoint(tmp_path)
    assert saved["step"] == 3 and tensors["w"][0] == 3 and not complaints


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "json"])
def test_damaged_checkpoint_falls_back_and_says_so(tmp_path, damage):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, *state(step))
    newest = checkpoints(tmp_path)[0]
    file = newest / ("state.json" if damage == "json" else "state.safetensors")
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-10])
    elif damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "remove":
        file.unlink()
    else:
        file.write_text("{}")
    _, saved, complaints = load_checkpoint(tmp_path)
    assert saved["step"] == 1 and "damaged" in complaints[0]


def test_all_checkpoints_damaged_is_an_error(tmp_path):
    save_checkpoint(tmp_path, 1, *state(1))
    (checkpoints(tmp_path)[0] / "state.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path / "elsewhere") is None


def test_full_disk_keeps_the_checkpoint_before(tmp_path):
    save_checkpoint(tmp_path, 1, *state(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        with pytest.raises(OSError, match=r"could not write the checkpoint of step 2.*kept step-00000001"):
            save_checkpoint(tmp_path, 2, *state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001"]
    assert load_checkpoint(tmp_path)[1]["step"] == 1


def test_a_state_written_after_resuming_is_kept_and_the_abandoned_later_ones_go(tmp_path):
    save_checkpoint(tmp_path, 350, *state(350), keep=1)
    save_checkpoint(tmp_path, 300, *state(300), keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000300"]


def test_a_run_recorded_before_a_setting_existed_is_the_same_run(tmp_path):
    now = {"training": {"lr": 1.0, "optimizer": "adamw"}}
    Run.create(tmp_path / "run", "sparsify", {"training": {"lr": 1.0}}, False).unlock()
    Run.create(tmp_path / "run", "sparsify", now, True).unlock()
    with pytest.raises(ValueError, match="another run"):
        Run.create(tmp_path / "run", "sparsify", {"training": {"lr": 1.0, "optimizer": "muon"}}, True)


def test_what_differs_is_named_by_its_leaf(tmp_path):
    Run.create(
        tmp_path / "run", "sparsify", {"model": "m", "training": {"optimizer": "adamw", "steps": 50}}, False
    ).unlock()
    with pytest.raises(ValueError, match=r"another run \(training\.steps: 50 -> 60\)"):
        Run.create(tmp_path / "run", "sparsify", {"model": "m", "training": {"optimizer": "adamw", "steps": 60}}, True)


def test_a_transcoder_is_not_an_unfinished_model(tmp_path):
    for kind, sentence in (("transcode", "holds a transcoder, not a model"), ("sparsify", "no model yet.*--resume")):
        Run.create(tmp_path / kind, kind, {}, False).unlock()
        with pytest.raises(ValueError, match=sentence):
            load(tmp_path / kind)


def test_a_folder_killed_between_its_two_names_comes_back(tmp_path):
    """The new one is whole before the old one makes way; killed just there, the old one is not lost."""
    run = Run.create(tmp_path / "run", "features", {})
    with whole_folder(run.path / "progress") as fresh:
        fresh.mkdir()
        (fresh / "state.json").write_text("1")

    def killed(self, target):
        if self.name == ".progress.tmp":
            os._exit(9)
        return os.rename(self, target)

    pid = os.fork()
    if not pid:
        Path.rename = killed
        with whole_folder(run.path / "progress") as fresh:
            fresh.mkdir()
            (fresh / "state.json").write_text("2")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not (run.path / "progress").exists()
    run.unlock()
    Run.create(tmp_path / "run", "features", {}, resume=True).unlock()
    assert (run.path / "progress" / "state.json").read_text() == "1"
    assert sorted(path.name for path in run.path.iterdir()) == ["progress", "run.json"]
