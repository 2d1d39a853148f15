"""Files that rot, data that vanishes, numbers that explode, memory that runs out, a clock that runs backwards."""

import ast
import gzip
import math
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from copying_runs import QUICK, Copying, lines, sparsify, stop_after
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.data import batches as data_module
from sparselens.data.batches import TextBatches
from sparselens.runs.checkpoints import checkpoints, load_checkpoint, save_checkpoint
from sparselens.training import engine, loop as training, measure as evaluate

SOURCE = Path(sl.__file__).parent


@pytest.fixture
def base(tmp_path):
    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    return tmp_path / "base"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path):
    """60 flips and cuts, anywhere in any file of a checkpoint: the one before is used, and the reader says so."""
    rng = random.Random(0)
    for step in (1, 2):
        save_checkpoint(tmp_path / "good", step, {"w": torch.randn(200), "b": torch.randn(3)}, {"step": step})
    for case in range(60):
        folder = tmp_path / str(case)
        shutil.copytree(tmp_path / "good", folder)
        file = rng.choice(sorted(checkpoints(folder)[0].iterdir()))
        if case % 2:
            flip(file, rng.randrange(8 * file.stat().st_size))
        else:
            file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
        _, state, complaints = load_checkpoint(folder)
        assert state["step"] == 1 and len(complaints) == 1 and "is damaged" in complaints[0], file


def test_a_checkpoint_that_lists_other_files_is_not_read(tmp_path):
    """Names in checksums.json are never followed: /dev/zero would be summed for ever."""
    save_checkpoint(tmp_path, 1, {"w": torch.ones(2)}, {"step": 1})
    (checkpoints(tmp_path)[0] / "checksums.json").write_text('{"/dev/zero": "0", "state.json": "0"}')
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        load_checkpoint(tmp_path)


def test_a_run_with_a_rotten_checkpoint_goes_on_from_the_one_before(base, tmp_path, monkeypatch):
    whole, _ = sparsify(base, tmp_path / "whole")
    stop_after(monkeypatch, 7)
    with pytest.raises(engine.Interrupted):
        sparsify(base, tmp_path / "run")
    monkeypatch.undo()
    newest = checkpoints(tmp_path / "run" / "checkpoints")[0]
    flip(newest / "state.safetensors", 8 * 5000)
    run, said = sparsify(base, tmp_path / "run", resume=True)
    assert any(f"{newest} is damaged" in text and "trying the one before" in text for text in said)
    assert lines(run.path) == lines(whole.path)


def test_a_run_without_a_whole_checkpoint_says_so(base, tmp_path, monkeypatch):
    stop_after(monkeypatch, 7)
    with pytest.raises(engine.Interrupted):
        sparsify(base, tmp_path / "run")
    monkeypatch.undo()
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        flip(path / "state.json", 40)
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        sparsify(base, tmp_path / "run", resume=True)


def test_the_state_that_a_checkpoint_calls_best_is_kept_until_another_does(base, tmp_path, monkeypatch):
    """Killed after a better state was found but before the next checkpoint: what the checkpoint speaks of is there."""
    original = engine.checkpoint
    seen = []

    def spy(stage):
        original(stage)
        if stage.constraint and stage.progress.best.step > 0:
            seen.append(stage.progress.best.step)

    monkeypatch.setattr(engine, "checkpoint", spy)
    options = {"steps": 20, "evaluate_every": 1, "checkpoint_every": 6, "density": None, "target": "100"}
    evaluated = training.Stage.evaluate

    def watch(*arguments):
        line = evaluated(*arguments)
        for path in checkpoints(tmp_path / "run" / "checkpoints"):
            step = load_checkpoint(path.parent)[1]["best"]["step"]
            assert step < 0 or (tmp_path / "run" / "best" / f"step-{step:08d}").is_dir()
        return line

    monkeypatch.setattr(training.Stage, "evaluate", watch)
    run, _ = sparsify(base, tmp_path / "run", **options)
    assert len(set(seen)) > 1, "the case needs several best states"
    assert len(checkpoints(run.path / "best")) <= 3


# ---- data ------------------------------------------------------------------------------------------------------------


def documents(n: int = 60, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    texts = (" ".join(f"w{i}" for i in rng.integers(0, 62, 30)) for _ in range(n))
    return "\n<|endoftext|>\n".join(texts).encode()


def tokens(pattern, tmp_path):
    return TextBatches(
        [str(pattern)], tiny_tokenizer(), 16, cache=tmp_path / "cache", need=10**6, heldout_tokens=40, progress=False
    )


@pytest.fixture
def three_files(tmp_path, monkeypatch):
    """text/0.txt to 2.txt; `during(action)` does it after the first file has been read."""
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_bytes(documents(seed=i))
    original = data_module.read_documents

    def during(action):
        def read(path, *rest):
            yield from original(path, *rest)
            if path.name == "0.txt":
                action(tmp_path / "text")

        monkeypatch.setattr(data_module, "read_documents", read)

    return during


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        (lambda f: (f / "1.txt").unlink(), "1.txt has disappeared"),
        (lambda f: (f / "0.txt").unlink(), "0.txt changed or disappeared"),
        (lambda f: (f / "1.txt").write_bytes(b"\xff\xfe\x00" * 100), "1.txt is not UTF-8"),
        (lambda f: (f / "2.txt").write_bytes(documents(seed=9)), "2.txt changed or disappeared"),
        (lambda f: (f / "0.txt").write_bytes(documents(seed=9)), "0.txt changed or disappeared"),
        (lambda f: (f / "2.txt").rename(f / "3.txt"), "2.txt has disappeared"),
    ],
)
@pytest.mark.parametrize("lanes", [1, 16])
def test_data_that_changes_while_it_is_read(tmp_path, three_files, action, complaint, lanes, monkeypatch):
    """Refused, and nothing of it is left in the cache; with whole files again, the result is as from new ones."""
    three_files(action)
    monkeypatch.setattr(data_module, "LANES", lanes)
    if lanes > 1:  # all three are open by then
        complaint = complaint[: len("0.txt")] + " changed or disappeared"
    with pytest.raises(ValueError, match=complaint):
        tokens(tmp_path / "text" / "*.txt", tmp_path)
    monkeypatch.undo()
    assert not list((tmp_path / "cache").rglob("*.npy"))
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_bytes(documents(seed=i))
    (tmp_path / "text" / "3.txt").unlink(missing_ok=True)
    again = tokens(tmp_path / "text" / "*.txt", tmp_path)
    shutil.rmtree(tmp_path / "cache")
    assert torch.equal(again.train(0, 50)["input_ids"], tokens(tmp_path / "text", tmp_path).train(0, 50)["input_ids"])


def test_compressed_text_that_rots(tmp_path):
    """Every kind of damage in the middle of a gzip file is one sentence that names it."""
    whole = gzip.compress(documents(400))
    rng = random.Random(0)
    refused = 0
    for case in range(30):
        content = bytearray(whole)
        if case % 3 == 0:
            content = content[: rng.randrange(20, len(content))]
        else:
            content[rng.randrange(10, len(content))] ^= rng.randrange(1, 256)
        path = tmp_path / f"{case}.txt.gz"
        path.write_bytes(content)
        try:
            tokens(path, tmp_path)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused >= 29


@pytest.mark.parametrize("damage", ["cut", "header", "remove", "beyond", "index", "index-list"])
def test_a_cache_that_rots(tmp_path, damage):
    (tmp_path / "a.txt").write_bytes(documents())
    good = tokens(tmp_path / "a.txt", tmp_path)
    expected = good.train(0, 9)["labels"]
    shard, index = next(good.cache.folder.glob("train-*.npy")), good.cache.folder / "index.json"
    content = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(content[:-30])
    elif damage == "header":
        shard.write_bytes(b"\x80\x04garbage" + content)
    elif damage == "remove":
        shard.unlink()
    elif damage == "beyond":
        shard.write_bytes(content[:-40] + b"\xff" * 40)
    else:
        index.write_text('{"train": [' if damage == "index" else "[]")
    with pytest.raises(ValueError, match=r"damaged.*remove that folder"):
        batches = tokens(tmp_path / "a.txt", tmp_path)
        batches.train(0, len(batches._train))
    shutil.rmtree(good.cache.folder)
    assert torch.equal(tokens(tmp_path / "a.txt", tmp_path).train(0, 9)["labels"], expected)


def test_text_that_disappears_during_training_is_not_missed(base, tmp_path, monkeypatch):
    """Tokens are cached before the first step: a run needs its text no more, and its cache only as long as it runs."""
    (tmp_path / "a.txt").write_bytes(documents(200))
    original = training.Stage.describe

    def describe(*arguments):
        (tmp_path / "a.txt").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        return original(*arguments)

    monkeypatch.setattr(training.Stage, "describe", describe)
    options = {k: v for k, v in QUICK.items() if k != "slack"}
    run = sl.sparsify(
        base, str(tmp_path / "a.txt"), tmp_path / "run", show_progress=False, say=lambda text: None, length=16,
        heldout_tokens=300, cache=tmp_path / "cache", **options,
    )  # fmt: skip
    assert len(lines(run.path)) == QUICK["steps"]


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_gradient_is_discarded(base, tmp_path, monkeypatch, bad):
    """The loss is fine; one element of one gradient is not. The step is left out, the weights never see it."""
    original = training.loss_and_density
    calls = []

    def poisoned(stage, batch, seed, sample):
        calls.append(1)
        if len(calls) == 6:
            weight = next(p for p in stage.model.parameters() if p.requires_grad)
            handle = weight.register_hook(lambda g: (handle.remove(), g.index_fill(0, torch.tensor([0]), bad))[1])
        return original(stage, batch, seed, sample)

    monkeypatch.setattr(training, "loss_and_density", poisoned)
    run, said = sparsify(base, tmp_path / "run")
    assert sum("the update was discarded" in text for text in said) == 1
    assert [line["step"] for line in lines(run.path)] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert all(torch.isfinite(p).all() for p in sl.load(run.path)[0].parameters())


# ---- memory ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: not enough memory"),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": MemoryError(),
}


def starve(monkeypatch, most: int, error: BaseException, only_call: int | None = None, where=training) -> list[int]:
    """Forward passes of more than `most` sequences run out of memory; returns the sizes that were tried."""
    original = where.forward
    sizes = []

    def forward(model, batch, **options):
        sizes.append(len(batch["labels"]))
        if sizes[-1] > most and (only_call is None or len(sizes) == only_call):
            raise error
        return original(model, batch, **options)

    monkeypatch.setattr(where, "forward", forward)
    return sizes


def close(a: list[dict], b: list[dict]) -> None:
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for one, two in zip(a, b, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() & {"loss", "density", "grad_norm", "heldout_loss"}:
            assert one[name] == pytest.approx(two[name], rel=2e-4, abs=1e-6), (one["step"], name)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(base, tmp_path, monkeypatch, error):
    """Sampled gates included: a sequence draws the same ones wherever the batch is cut."""
    whole, _ = sparsify(base, tmp_path / "whole", batch=8)
    sizes = starve(monkeypatch, 2, error)
    run, said = sparsify(base, tmp_path / "run", batch=8)
    assert sizes[:7] == [8, 4, 2, 2, 2, 2, 2] and set(sizes[3:]) == {2}, "once is enough"
    assert [text for text in said if "not enough memory" in text] == [
        "step 1: not enough memory for 8 sequences at once; going on with 4 at a time, and still 8 per step "
        "(--micro-batch 4 would do so from the start)",
        "step 1: not enough memory for 4 sequences at once; going on with 2 at a time, and still 8 per step "
        "(--micro-batch 2 would do so from the start)",
    ]
    close(lines(run.path), lines(whole.path))


def test_out_of_memory_in_the_middle_of_a_step_drops_half_a_gradient(base, tmp_path, monkeypatch):
    """The second of three parts fails: what the first left in the gradients must not count twice."""
    whole, _ = sparsify(base, tmp_path / "whole", batch=6)
    starve(monkeypatch, 1, ERRORS["gpu"], only_call=8)  # steps of 3: the second part of the third step
    run, said = sparsify(base, tmp_path / "run", batch=6, micro_batch=2)
    assert sum("going on with 1 at a time, and still 6" in text for text in said) == 1
    close(lines(run.path), lines(whole.path))


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_out_of_memory_while_evaluating(base, tmp_path, monkeypatch, error):
    """Evaluation makes logits of two models at once: it can fail where training did not."""
    whole, _ = sparsify(base, tmp_path / "whole", batch=8)
    sizes = starve(monkeypatch, 3, error, where=evaluate)
    run, _ = sparsify(base, tmp_path / "run", batch=8)
    assert sizes[:3] == [8, 4, 2] and 1 not in sizes
    close(lines(run.path), lines(whole.path))
    for one, two in zip(run.read("evaluation.json"), whole.read("evaluation.json"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5) and one["density"] == two["density"]


def test_evaluating_not_even_one_sequence(base, tmp_path, monkeypatch):
    starve(monkeypatch, 0, ERRORS["gpu"], where=evaluate)
    with pytest.raises(torch.OutOfMemoryError):
        sparsify(base, tmp_path / "run")


def test_not_even_one_sequence_fits(base, tmp_path, monkeypatch):
    starve(monkeypatch, 0, ERRORS["cpu"])
    with pytest.raises(ValueError, match=r"not enough memory for a single sequence of 16 tokens.*--length"):
        sparsify(base, tmp_path / "run")
    monkeypatch.undo()
    sparsify(base, tmp_path / "run", resume=True)


def test_other_errors_are_not_mistaken_for_it(base, tmp_path, monkeypatch):
    starve(monkeypatch, 2, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        sparsify(base, tmp_path / "run")


def test_out_of_memory_in_a_real_process(ground, tmp_path, nursery):
    """A process that may have 100 MB more than at its start, and a batch that takes more."""

    def command(name):
        sizes = ["--length", 16, "--batch", 1024, "--micro-batch", 1024, "--steps", 2, "--heldout-tokens", 300]
        places = ["--data", ground / "text.txt", "--cache", tmp_path / "cache", "--out", tmp_path / name]
        return ["sparsify", ground / "base", *places, *sizes]

    assert nursery.run(*command("whole")).code == 0
    starved = nursery.run(*command("starved"), memory=100 << 20)
    assert starved.code == 0 or (starved.code == 2 and "Traceback" not in starved.said), starved.said
    if starved.code:  # what is left of the address space is in pieces, too small for reading the result back
        assert nursery.run(*command("starved"), "--resume").code == 0
    assert "not enough memory for 1024 sequences at once" in starved.said and "still 1024 per step" in starved.said
    for a, b in zip(lines(tmp_path / "starved"), lines(tmp_path / "whole"), strict=True):
        # packed documents: the density of a batch is the mean over its parts
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["density"] == pytest.approx(b["density"], rel=1e-2)


@pytest.mark.gpu
def test_out_of_memory_on_a_real_gpu(base, tmp_path):
    """Six tenths of what the batch needs at once are enough for parts of it."""

    class Wide(Copying):
        length = 64

        def _make(self, numbers, offset):
            return {name: value.repeat(1, 4) for name, value in super()._make(numbers, offset).items()}

    def run(out):
        said = []
        options = QUICK | {"batch": 4096, "steps": 3, "checkpoint_every": 3, "evaluate_every": 3}
        found = sl.sparsify(base, Wide(), out, show_progress=False, say=said.append, precision="fp32", **options)
        return lines(found.path), said

    torch.cuda.reset_peak_memory_stats()  # of the tests before this one
    whole, _ = run(tmp_path / "whole")
    need = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * need / torch.cuda.get_device_properties(0).total_memory)
    try:
        parts, said = run(tmp_path / "run")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("going on with 2048 at a time, and still 4096 per step" in text for text in said)
    close(parts, whole)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_runs_backwards(base, tmp_path, monkeypatch):
    whole, _ = sparsify(base, tmp_path / "whole")
    start, calls = time.time(), []
    monkeypatch.setattr(time, "time", lambda: calls.append(1) or start - 3600 * len(calls))
    monkeypatch.setattr("tqdm.std.time", time.time)
    said = []
    run = sl.sparsify(base, Copying(), tmp_path / "run", say=said.append, **QUICK)  # with its progress bar
    assert calls, "the case needs somebody who looks at the clock"
    assert lines(run.path) == lines(whole.path)
    assert 0 < run.read("summary.json")["minutes"] < 60
    monkeypatch.undo()
    sl.report(run.path, say=said.append)
    assert (run.path / "report.html").is_file()


def test_nothing_in_the_source_asks_what_time_it_is():
    """Durations come from a monotonic clock; nothing depends on the date."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("time", "time"), ("datetime", "now")}, path
