"""Does the wheel install and run on other Pythons?   python tests/pythons.py python3.10 python3.12 python3.13

In a fresh environment of each: the wheel is installed, every module is compiled, and everything that does not need
torch is run. With --whole its dependencies are installed as a user would get them, torch included (gigabytes), and
every family is compared with transformers; without, only the light ones. Not part of `make test`: it needs other
Pythons and the network.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]
OWN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing but what is installed there
LIGHT = ["tyro>=0.9.30", "numpy>=2", "matplotlib>=3.9", "zstandard>=0.23", "tqdm", "filelock>=3.21", "psutil", "pyyaml",
         "huggingface_hub>=1", "safetensors>=0.6", "typing_extensions>=4.10"]  # fmt: skip
PAGE = (
    "from report_runs import make_run; from pathlib import Path; make_run(Path('run'), parts=('training','circuits'))"
)


def check(python: str, wheel: Path, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as place:

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=OWN)
            assert done.returncode == 0, f"{python}: {' '.join(command)}\n{done.stdout}\n{done.stderr}"
            return done.stdout

        run(python, "-m", "venv", "venv")
        home = next(path for path in (Path(place) / "venv" / "bin", Path(place) / "venv" / "Scripts") if path.is_dir())
        own, command = str(home / "python"), str(home / "sparselens")
        if whole:
            run(own, "-m", "pip", "install", "--quiet", str(wheel))
        else:
            run(own, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
            run(own, "-m", "pip", "install", "--quiet", *LIGHT)
        found = run(own, "-c", "import sparselens; print(sparselens.__path__[0])").strip()
        run(own, "-W", "error", "-m", "compileall", "-q", "-f", found)
        print(run(command, "--version").strip(), flush=True)
        run(command, "--help")
        run(command, "text", "--out", "text")
        run(own, "-c", f"import sys; sys.path.insert(0, {str(PROJECT / 'tests')!r}); {PAGE}")
        run(command, "report", "run")
        run(command, "figures", "run", "--format", "png")
        assert (Path(place) / "run" / "report.html").stat().st_size > 10_000
        if whole:
            run(command, "parity")


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(PROJECT)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for python in (name for name in sys.argv[1:] if name != "--whole"):
            check(python, wheel, "--whole" in sys.argv)
