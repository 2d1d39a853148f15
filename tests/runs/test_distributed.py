"""Two processes, copied (DDP) or split (FSDP2), do what one does: CPU, gloo, started by the launchers users start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import process_jobs as jobs
import pytest
import torch
from pairs import chosen
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens import cli
from sparselens.runs import distributed
from sparselens.runs.checkpoints import load_checkpoint
from sparselens.runs.run import Metrics

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CLUSTER / "one-node-8-gpus.yaml"),
    "--num_processes", "2", "--main_process_port", "0",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A base model, text whose documents differ in length, and a task."""
    model = tiny_model("llama")
    sl.save(model, tiny_tokenizer(), tmp_path / "base")
    documents = (" ".join(f"w{(i * j) % 62}" for j in range(5 + i % 37)) for i in range(300))
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    keys = ("clean", "corrupted", "answer", "wrong")
    rows = (json.dumps({key: getattr(pair, key) for key in keys}) for pair in chosen([model]).pairs)
    (tmp_path / "task.jsonl").write_text("\n".join(rows))
    return tmp_path


def launch(launcher, folder, *arguments):
    """Do these jobs in two processes; returns the launcher's exit code and what was said."""
    command = [*launcher, str(Path(jobs.__file__)), str(folder), *arguments]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout[-2000:] + done.stderr[-6000:]


def test_two_processes_with_a_model_each(folder):
    """DDP. The last job kills one of them: the launcher must come back all the same (`launch` has a timeout)."""
    for job in ("plain", "transcode", "discover"):
        jobs.JOBS[job](folder, f"one-{job}")
    names = ("plain", "transcode", "discover", "interrupted", "not_a_number")
    code, said = launch(
        TORCHRUN, folder, *(f"{name}=two-{name}" for name in names), "existing=two-plain", "crash=crash"
    )
    assert code != 0 and (folder / "crash").is_dir(), said

    same_run(folder, "one-plain", "two-plain")
    same_transcoder(folder)
    same_circuit(folder)
    resumes_on_one(folder, {"checksums.json", "state.json", "state.safetensors"})
    # A NaN in one process is discarded by both.
    assert [line["step"] for line in Metrics.read(folder / "two-not_a_number")] == [1, 2, 4, 5, 6]
    # A folder that holds a run already: one process says so, both stop.
    assert "already holds a run" in (folder / "existing-0").read_text()
    assert (folder / "existing-1").read_text() == "SystemExit(2)"
    assert load_checkpoint(folder / "crash" / "checkpoints")[1]["step"] == 0


def test_two_processes_with_half_a_model_each(folder):
    """FSDP2, through accelerate and the configuration we ship."""
    names = ("plain", "muon", "all", "transcode", "interrupted")
    for job in names:
        jobs.JOBS[job](folder, f"one-{job}")
    code, said = launch(ACCELERATE, folder, *(f"{name}=two-{name}" for name in names), "resume=one-interrupted")
    assert code == 0, said

    same_run(folder, "one-plain", "two-plain")
    # Muon orthogonalises in bf16: what the processes round differs. (AdamW's loss is 0.12 away from it.)
    close(folder / "one-muon", folder / "two-muon", to=0.03, but={"grad_norm"})
    same_run(folder, "one-all", "two-all")
    close(folder / "one-all" / "control", folder / "two-all" / "control")
    same_transcoder(folder)
    same_run(folder, "one-plain", "one-interrupted")  # begun by one process, finished by two
    resumes_on_one(folder, {"checksums.json", "state.json", "state.safetensors", "state-00001.safetensors"})
    parts_are_the_whole(folder)


def close(a: Path, b: Path, to: float = 1e-4, but: frozenset[str] | set[str] = frozenset()) -> None:
    """The numbers of every step agree."""
    lines, others = Metrics.read(a), Metrics.read(b)
    assert [line["step"] for line in lines] == [line["step"] for line in others] and lines
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for key in line.keys() - {"tokens_per_second", "lambda"} - but:
            assert other[key] == pytest.approx(line[key], abs=to), (b.name, line["step"], key)


def same_run(folder: Path, one: str, two: str) -> None:
    """Every step, the final evaluation and the exported weights."""
    close(folder / one, folder / two)
    rows = [json.loads((folder / run / "evaluation.json").read_text()) for run in (one, two)]
    for ours, theirs in zip(*rows, strict=True):
        for key in ("loss", "kl_to_base", "density", "sequences"):
            assert theirs[key] == pytest.approx(ours[key], abs=1e-4), (two, key)
    first, second = (sl.load(folder / run)[0].state_dict() for run in (one, two))
    assert first.keys() == second.keys() and any("gate_bias" in name for name in first)
    for name in first:
        torch.testing.assert_close(second[name], first[name], atol=1e-3, rtol=1e-3)


def same_transcoder(folder: Path) -> None:
    close(folder / "one-transcode", folder / "two-transcode", to=1e-3)
    ours, theirs = (json.loads((folder / f"{n}-transcode" / "results.json").read_text()) for n in ("one", "two"))
    for key in ("fvu", "l0", "replacement_loss", "used_share", "tokens"):
        assert theirs[key] == pytest.approx(ours[key], rel=1e-3), key


def same_circuit(folder: Path) -> None:
    ours, theirs = (json.loads((folder / f"{n}-discover").read_text()) for n in ("one", "two"))
    scores = torch.tensor(ours["scores"], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(theirs["scores"], dtype=torch.float64), scores, atol=1e-6, rtol=1e-4)
    assert ours.keys() == theirs.keys() and scores.abs().max() > 0.01
    assert theirs["leading"] == ours["leading"]
    for name, row in ours["readings"].items():
        other = theirs["readings"][name]
        assert other["curve"]["effect"] == pytest.approx(row["curve"]["effect"], abs=1e-4), name
        assert other["edges_at"] == row["edges_at"] and other["ranking" if "ranking" in row else "scope"], name
    ours, theirs = (found["readings"]["components"] for found in (ours, theirs))
    for key in ("edges_at", "n_prompts", "m_model"):
        assert theirs[key] == pytest.approx(ours[key]), key
    for key in ("curve", "random"):
        assert theirs[key]["effect"] == pytest.approx(ours[key]["effect"], abs=1e-4), key


def resumes_on_one(folder: Path, files: set[str]) -> None:
    """The signal reached one process alone; both stopped after the same step, and one goes on."""
    run = folder / "two-interrupted"
    assert [line["step"] for line in Metrics.read(run)] == list(range(1, 8))
    assert {path.name for path in (run / "checkpoints" / "step-00000007").iterdir()} == files
    jobs.sparsify(folder, run.name, resume=True)
    same_run(folder, "one-plain", run.name)


def parts_are_the_whole(folder: Path) -> None:
    """Put together, what two processes wrote has the shapes of what one wrote; every part has its checksum."""
    place = folder / "two-plain" / "checkpoints"
    whole, parts = load_checkpoint(folder / "one-plain" / "checkpoints")[0], load_checkpoint(place)[0]
    assert whole.keys() == parts.keys() and len(whole) > 10
    assert all(whole[name].shape == parts[name].shape for name in whole)
    part = place / "step-00000020" / "state-00001.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _, state, complaints = load_checkpoint(place)
    assert state["step"] == 16 and part.name in complaints[0]


def test_who_takes_what(monkeypatch):
    """All items once, the same number of rounds for everybody."""
    for count, at_once, world in ((32, 8, 1), (5, 8, 2), (7, 2, 3), (1, 4, 4), (16, 4, 2)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        taken, lengths = [], set()
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            mine = list(distributed.rounds(count, at_once))
            lengths.add(len(mine))
            taken += [i for first, n in mine for i in range(first, first + n)]
        assert sorted(taken) == list(range(count)) and len(lengths) == 1


@pytest.mark.parametrize(
    ("batch", "micro", "sentence"), [(6, None, "4 processes"), (8, 4, "micro_batch=4"), (3, None, "multiple of 4")]
)
def test_a_batch_that_cannot_be_shared_is_refused(batch, micro, sentence, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=sentence):
        distributed.micro_batch(batch, micro)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [("FSDP_VERSION", "1", "fsdp_version: 2"), ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params")],
)
def test_what_fsdp_cannot_do_here_is_refused(name, value, sentence, monkeypatch):
    for key, usual in {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", name: value}.items():
        monkeypatch.setenv(key, usual)
    with pytest.raises(ValueError, match=sentence):
        distributed.start()


SCALE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
COMMANDS = [line.strip() for line in SCALE.splitlines() if line.startswith(("    accelerate launch", "    torchrun"))]
FEW = {
    "sparsify": "--steps 1 --batch 2 --length 16 --heldout-tokens 300 --cache cache",
    "transcode": "--steps 1 --batch 2 --length 16 --heldout-tokens 300 --cache cache --features 8 --k 2",
    "discover": "--prompts 10 --readings removed components --steps 3 --points 6 --no-random-control",
}


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[-6])
def test_the_commands_of_the_page_run_and_say_how_many_processes_they_found(folder, line):
    """As they stand in docs/scale.md, with a model of ours, and two processes for eight."""
    verb = next(word for word in line.split() if word in FEW)
    line = (
        line.replace("examples/", f"{CLUSTER.parent}/")
        .replace("MODEL", "base")
        .replace("--data ...", "--data text.txt")
    )
    line = line.replace("--out ...", "--out out").replace("--task ioi", "--task task.jsonl")
    line = line.replace("8-gpus.yaml", "8-gpus.yaml --num_processes 2 --main_process_port 0", 1)
    line = line.replace("--nproc-per-node 8", "--standalone --nproc-per-node 2").replace(
        "--multi_gpu", "--multi_gpu --main_process_port 0"
    )
    launcher, *rest = f"{line} {FEW[verb]}".split()
    module = {"accelerate": ["accelerate.commands.launch"], "torchrun": ["torch.distributed.run"]}[launcher]
    command = [sys.executable, "-m", *module, *(rest[1:] if launcher == "accelerate" else rest)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("2 processes") == 1 and (folder / "out").is_dir(), done.stdout


def test_the_page_has_those_commands():
    assert {word for line in COMMANDS for word in line.split() if word in FEW} == set(FEW)


def test_other_commands_refuse_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", "nowhere"])
    assert stopped.value.code == 2 and "without a launcher" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_the_configurations(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.distributed_type in ("FSDP", "MULTI_GPU") and config.num_processes % 8 == 0
    if config.distributed_type == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2 and not config.fsdp_config["fsdp_offload_params"]


def test_the_slurm_script_is_a_script():
    subprocess.run(["bash", "-n", str(CLUSTER / "several-nodes.slurm")], check=True)
