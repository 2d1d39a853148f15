import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fork_server import Nursery
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes started here
TEXT = "\n<|endoftext|>\n".join(" ".join(f"w{(i * j + j) % 62}" for j in range(40)) for i in range(200))


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    nursery = Nursery(tmp_path_factory.mktemp("logs"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def ground(tmp_path_factory) -> Path:
    """A tiny model and some text, never written to by a test."""
    folder = tmp_path_factory.mktemp("ground")
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), folder / "base")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield Disk(place)
    subprocess.run(["umount", place], check=True)


class Disk:
    def __init__(self, path: Path):
        self.path = path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """One of everything, never written to by a test."""
    from sample_run import build

    folder = tmp_path_factory.mktemp("built")
    build(folder)
    return folder


@pytest.fixture
def house(built, tmp_path) -> Path:
    """A copy to damage."""
    folder = tmp_path / "house"
    shutil.copytree(built, folder)
    record = folder / "run" / "run.json"
    record.write_text(record.read_text().replace(str(built), str(folder)))  # it names its cache
    return folder
