"""The training loop on a real (tiny) task: resume is exact, NaNs are survived, Ctrl-C loses nothing."""

import json
import math
import signal
import subprocess
import sys
import time

import pytest
import torch
from copying_runs import QUICK, Copying, lines, sparsify, stop_after
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.config import Gate, Sparsify, Training
from sparselens.evaluation.side_by_side import evaluate
from sparselens.models.architectures import base_model
from sparselens.models.loading import add_gates, gate_biases, is_gated
from sparselens.runs.run import Metrics, Run
from sparselens.training import engine, head, loop as training
from sparselens.training.copies import start_within_reach, trainable
from sparselens.training.measure import measure
from sparselens.training.sparsify import _target, overridden


@pytest.fixture
def base(tmp_path):
    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    return tmp_path / "base"


def test_end_to_end_with_control(base, tmp_path):
    run, said = sparsify(base, tmp_path / "run", control=True, steps=30)
    rows = run.read("evaluation.json")
    assert [row["kind"] for row in rows] == ["base", "control", "sparse"]
    for row in rows:
        assert row.keys() >= {"name", "kind", "loss", "kl_to_base", "density", "density_per_layer", "edges_per_query"}
    assert rows[0]["kl_to_base"] == pytest.approx(0, abs=1e-6) and rows[1]["kl_to_base"] > 0
    assert 0 < rows[2]["density"] < 0.9 and rows[0]["density"] == rows[1]["density"] == 1
    assert "2 layers x 4 heads" in said[0] and "dense control, then the sparse model" in said[0]
    assert "control" in said[-2] and "sparse" in said[-2]
    assert len(lines(run.path)) == 30 and len(lines(run.path / "control")) == 30
    model, tokenizer = sl.load(run.path)
    assert is_gated(model) and len(tokenizer) == 64
    measured = measure(model, Copying(), 8, 24)
    assert measured.density == pytest.approx(rows[2]["density"]) and measured.loss == pytest.approx(rows[2]["loss"])


def test_a_budget_of_edges_per_head_and_query(base, tmp_path):
    run, said = sparsify(base, tmp_path / "run", edges=0.9, steps=30, bias_lr=0.3)
    found = lines(run.path)
    assert all("edges_per_query" in line and "density" not in line for line in found)
    assert any("at most 0.9 edges per head and query" in text for text in said)
    kept = [line["heldout_edges_per_query"] for line in found if "heldout_edges_per_query" in line]
    sparse = run.read("evaluation.json")[-1]
    assert min(kept) < kept[0] and sparse["edges_per_query"] == pytest.approx(
        sparse["density"] * (Copying.length + 1) / 2
    )
    with pytest.raises(ValueError, match="edges=0"):
        sparsify(base, tmp_path / "none", edges=0.0)


def test_a_budget_of_edges_that_is_missed_says_so_in_edges(base, tmp_path):
    _, said = sparsify(base, tmp_path / "run", edges=0.01, steps=2)
    missed = next(text for text in said if "was not reached" in text)
    assert missed.startswith("The budget of 0.01 edges per head and query was not reached")
    assert "keep more edges (--edges)" in missed and "edges per head and query; it was kept" in missed


def test_a_run_on_sequences_made_in_python_can_be_measured(base, tmp_path, monkeypatch):
    """It does not know where its text is, and says so; other text serves."""
    monkeypatch.chdir(tmp_path)  # the text's tokens are kept beside whoever asks
    run, _ = sparsify(base, tmp_path / "run")
    with pytest.raises(ValueError, match="give some with --data"):
        evaluate(run.path, say=lambda text: None)
    (tmp_path / "text.txt").write_text(
        "\n<|endoftext|>\n".join(" ".join(f"w{i + j}" for j in range(20)) for i in range(40))
    )
    rows = evaluate(run.path, data=[str(tmp_path / "text.txt")], say=lambda text: None)
    assert [row["kind"] for row in rows] == ["base", "sparse"] and all(math.isfinite(row["loss"]) for row in rows)


@pytest.mark.parametrize("family, dropout", [("gpt2", "attn_pdrop"), ("llama", "attention_dropout")])
def test_neither_control_nor_sparse_model_trains_with_dropout(family, dropout):
    config = tiny_model(family).config
    setattr(config, dropout, 0.5)
    model = type(tiny_model(family))(config)
    ids = torch.randint(0, 60, (2, 16))
    noisy = [model.train()(ids).logits for _ in range(2)]
    assert not torch.equal(*noisy), "the case needs a model with dropout"
    ready = trainable(model, Training()).train()
    assert torch.equal(ready(ids).logits, ready(ids).logits)


def test_a_control_that_the_base_teaches_is_the_base(base, tmp_path):
    """KL to itself is 0 and so is its gradient: it is not trained, unless weights decay."""
    run, said = sparsify(base, tmp_path / "run", control=True, loss="kl")
    assert len(lines(run.path)) == 12 and not (run.path / "control/metrics.jsonl").exists()
    assert any("it is the base, not trained" in text for text in said)
    assert "training the sparse model:" in said[0]
    for a, b in zip(sl.load(base)[0].parameters(), sl.load(run.path / "control/model")[0].parameters(), strict=True):
        assert torch.equal(a, b)
    base_row, control, sparse = run.read("evaluation.json")
    assert control["loss"] == base_row["loss"] and control["kl_to_base"] == 0 < sparse["kl_to_base"]
    decayed, _ = sparsify(base, tmp_path / "decayed", control=True, loss="kl", weight_decay=0.1)
    assert len(lines(decayed.path / "control")) == 12


def test_control_sees_the_same_data_and_starts_from_the_same_weights(base, tmp_path):
    """With gates wide open, the first step of the sparse model is the first step of its control."""
    run, _ = sparsify(base, tmp_path / "run", control=True, gate=sl.Gate(bias=1e4))
    sparse, control = lines(run.path), lines(run.path / "control")
    assert sparse[0]["loss"] == pytest.approx(control[0]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": 2}, {"micro_batch": 2}, {"optimizer": "muon"}, {"density": None, "loss": "kl", "target": "base"}],
    ids=str,
)
def test_resume_is_bit_identical(base, tmp_path, options, monkeypatch):
    """Interrupted after step 7 and resumed: every metric of every step equals the uninterrupted run's."""
    whole, _ = sparsify(base, tmp_path / "whole", **options)
    stop_after(monkeypatch, 7)
    with pytest.raises(engine.Interrupted, match="after step 7 of 12"):
        sparsify(base, tmp_path / "parts", **options)
    monkeypatch.undo()
    parts, _ = sparsify(base, tmp_path / "parts", resume=True, **options)
    assert lines(parts.path) == lines(whole.path)
    assert [r["loss"] for r in parts.read("evaluation.json")] == [r["loss"] for r in whole.read("evaluation.json")]


def test_a_budget_trains_on_kl_and_is_judged_by_what_text_costs(base, tmp_path):
    """The default. KL chooses the state; whether the target is met is a matter of cross-entropy."""
    # 8 sequences are all that may steer: nothing to pair.
    options = dict(loss="kl", density=0.3, evaluate_sequences=8, steps=80, batch=8, evaluate_every=10, bias_lr=0.1)
    run, said = sparsify(base, tmp_path / "run", **options)
    summary, evaluated = run.read("summary.json"), [line for line in lines(run.path) if "heldout_loss" in line]
    costs = {line["step"]: line["heldout_cross_entropy"] for line in evaluated}
    within = [line for line in evaluated if line["heldout_density"] <= 0.3]
    assert summary["best_step"] == min(within, key=lambda line: line["heldout_loss"])["step"]
    assert summary["target_of"] == "held-out loss" and "trained on KL to base" in said[1]
    assert summary["met"] == (costs[summary["best_step"]] <= summary["target"])
    base_loss = measure(sl.load(base)[0], Copying(), 0, 8).loss
    assert summary["target"] == pytest.approx(base_loss + 0.01, abs=1e-5)
    assert all(line["heldout_loss"] < 1 < line["heldout_cross_entropy"] for line in evaluated)
    strict, _ = sparsify(base, tmp_path / "strict", target="0.5", **options)  # no KL is as large, every loss is larger
    assert summary["met"] and not strict.read("summary.json")["met"]


@pytest.mark.parametrize("options", [{}, {"lora": 2, "gradient_checkpointing": True, "loss": "kl"}], ids=str)
def test_compiled_blocks_follow_the_plain_ones(base, tmp_path, options, monkeypatch):
    """Traced by dynamo, without generating code, which would take a minute; and plain blocks again afterwards."""
    plain, _ = sparsify(base, tmp_path / "plain", steps=4, **options)
    whole, calls = torch.nn.Module.compile, []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: calls.append(self) or whole(self, backend="eager"))
    fused, _ = sparsify(base, tmp_path / "fused", steps=4, compile="yes", **options)
    assert len(calls) == (2 if "loss" not in options else 4), "the teacher's blocks, too"
    assert all(block._compiled_call_impl is None for block in calls)
    for a, b in zip(lines(plain.path), lines(fused.path), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["density"] == pytest.approx(b["density"], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"lora": 2, "gradient_checkpointing": True, "loss": "kl"}], ids=str)
def test_losses_in_stretches_follow_the_whole_ones(base, tmp_path, options, monkeypatch):
    """As on a GPU: a few tokens' logits at a time, in training and when measuring; and plain heads again afterwards."""
    plain, _ = sparsify(base, tmp_path / "plain", steps=4, **options)
    used, known = [], []
    monkeypatch.setattr(head, "MOST_LOGITS", 7 * 64)
    inside = training.faster

    def faster(models, *rest):
        known.append(all(base_model(model) in head._plain for model in models))
        return inside(models, *rest)

    monkeypatch.setattr(training, "faster", faster)
    monkeypatch.setattr(training, "stretched_loss", lambda *args: used.append(args[1]) or head.stretched_loss(*args))
    parts, _ = sparsify(base, tmp_path / "parts", steps=4, **options)
    assert len(used) == 4 and all("forward" not in vars(one) for one in used)
    assert known == [True], "heads are tried before anything is compiled: two tokens are another shape"
    for a, b in zip(lines(plain.path), lines(parts.path), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["density"] == pytest.approx(b["density"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    for a, b in zip(plain.read("evaluation.json"), parts.read("evaluation.json"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["exact"] == b["exact"]
        assert a["top1_agreement"] == pytest.approx(b["top1_agreement"], abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["no", "yes"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_follows_the_cpu(base, tmp_path, optimizer, compile, monkeypatch):
    """With all that is only switched on there: fused kernel and losses, padded heads, compiled blocks."""
    options = QUICK | dict(steps=4, optimizer=optimizer, loss="kl", precision="fp32")
    monkeypatch.setattr(head, "MULTIPLE", 48)
    fast, _ = sparsify(base, tmp_path / "gpu", **options, compile=compile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    slow, _ = sparsify(base, tmp_path / "cpu", **options)
    for a, b in zip(lines(slow.path), lines(fast.path), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.03)
        assert a["density"] == pytest.approx(b["density"], rel=0.03)


@pytest.mark.gpu
def test_muon_resumes_on_a_gpu(base, tmp_path, monkeypatch):
    whole, _ = sparsify(base, tmp_path / "whole", optimizer="muon")
    stop_after(monkeypatch, 7)
    with pytest.raises(engine.Interrupted, match="after step 7 of 12"):
        sparsify(base, tmp_path / "parts", optimizer="muon")
    monkeypatch.undo()
    parts, _ = sparsify(base, tmp_path / "parts", optimizer="muon", resume=True)
    for a, b in zip(lines(whole.path), lines(parts.path), strict=True):
        assert a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], rel=1e-2)


def test_gradient_checkpointing_follows_the_plain_run(base, tmp_path):
    """Recomputed gates are the same gates, so losses and densities are the same."""
    plain, _ = sparsify(base, tmp_path / "plain")
    again, _ = sparsify(base, tmp_path / "again", gradient_checkpointing=True)
    for a, b in zip(lines(plain.path), lines(again.path), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["density"] == pytest.approx(b["density"], rel=1e-4)


def test_a_batch_in_parts_reports_the_same(base, tmp_path):
    whole, _ = sparsify(base, tmp_path / "whole", steps=2)
    parts, _ = sparsify(base, tmp_path / "parts", steps=2, micro_batch=2)
    assert whole.record["config"]["training"]["batch"] > 2
    for a, b in zip(lines(whole.path), lines(parts.path), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["density"] == pytest.approx(b["density"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(("micro", "batch", "next_one"), [(8, 8, 4), (6, 12, 3), (5, 5, 1), (7, 21, 3), (2, 2, 1)])
def test_where_memory_is_short_the_next_half_divides_the_batch(tmp_path, micro, batch, next_one):
    said = []
    settings = Training(steps=5, batch=batch)
    stage = training.Stage("x", tiny_model("llama"), Copying(), tmp_path, settings, micro=micro, say=said.append)
    assert training.smaller(stage) == next_one and f"going on with {next_one} at a time" in said[0]


def test_bf16_trains_fp32_master_weights(base, tmp_path):
    run, _ = sparsify(base, tmp_path / "run", precision="bf16")
    full, _ = sparsify(base, tmp_path / "full", precision="fp32")
    assert all(p.dtype == torch.float32 for p in sl.load(run.path)[0].parameters())
    a, b = lines(run.path)[0]["loss"], lines(full.path)[0]["loss"]
    assert a == pytest.approx(b, rel=0.02) and a != b


def test_nothing_is_asked_for_behind_the_last_step(monkeypatch, tmp_path):
    """A GPU makes the next step's sequences ahead; whose are in Python may have no more than the steps take."""
    asked = []

    class Ends(Copying):
        def train(self, start, count):
            asked.append((start, count))
            raise IndexError("no such sequences")

    settings = Training(steps=5, batch=4)
    stage = training.Stage("x", tiny_model("llama"), Ends(), tmp_path, settings, micro=2)
    monkeypatch.setattr(training.distributed, "device", lambda: "cuda")
    stage.progress.step, stage.progress.data = 4, 16
    stage.meanwhile()
    assert not asked
    stage.progress.step, stage.progress.data = 3, 12
    with pytest.raises(IndexError):
        stage.meanwhile()
    assert asked == [(16, 2)]


def test_sequences_made_on_the_gpu_stay_there(monkeypatch, tmp_path):
    """PyTorch pins no memory but the host's."""

    class OnGpu:
        is_cuda = True

    class There(Copying):
        def train(self, start, count):
            return {"input_ids": OnGpu()}

    stage = training.Stage("x", tiny_model("llama"), There(), tmp_path, Training(steps=5, batch=4), micro=2)
    monkeypatch.setattr(training.distributed, "device", lambda: "cuda")
    stage.meanwhile()
    assert stage.ahead[0] == (4, 2) and isinstance(stage.ahead[1]["input_ids"], OnGpu)


def test_learning_by_heart_is_noticed(base, tmp_path):
    """A handful of training sequences over and over: held-out loss parts from training loss, and the run says so."""

    class Few(Copying):
        def train(self, start, count):
            return self._make((i % 4 for i in range(start, start + count)), 0)

    said = []
    options = QUICK | {"steps": 150, "lr": 5e-3, "evaluate_every": 10, "target": "100"}
    sl.sparsify(base, Few(), tmp_path / "run", show_progress=False, say=said.append, **options)
    assert sum("learnt by heart" in text for text in said) == 1


def test_interrupted_control_is_resumed_too(base, tmp_path, monkeypatch):
    whole, _ = sparsify(base, tmp_path / "whole", control=True)
    stop_after(monkeypatch, 6)
    with pytest.raises(engine.Interrupted):
        sparsify(base, tmp_path / "parts", control=True)
    monkeypatch.undo()
    parts, _ = sparsify(base, tmp_path / "parts", control=True, resume=True)
    assert lines(parts.path / "control") == lines(whole.path / "control") and lines(parts.path) == lines(whole.path)


def test_resume_of_a_finished_run_trains_nothing(base, tmp_path):
    run, _ = sparsify(base, tmp_path / "run")
    before = (run.path / "metrics.jsonl").read_text()
    sparsify(base, tmp_path / "run", resume=True)
    assert (run.path / "metrics.jsonl").read_text() == before


def poison(monkeypatch, steps, weights=False):
    """Make the loss NaN at these calls; optionally ruin a weight as well."""
    original = training.loss_and_density
    calls = []

    def bad(stage, batch, seed, sample):
        loss, density = original(stage, batch, seed, sample)
        calls.append(1)
        if len(calls) in steps:
            if weights:
                with torch.no_grad():
                    next(p for p in stage.model.parameters() if p.requires_grad).view(-1)[0] = math.nan
            loss = loss * math.nan
        return loss, density

    monkeypatch.setattr(training, "loss_and_density", bad)


def test_a_nan_is_discarded_and_reported(base, tmp_path, monkeypatch):
    poison(monkeypatch, {6, 7})
    run, said = sparsify(base, tmp_path / "run")
    assert sum("the update was discarded" in text for text in said) == 2
    steps = [line["step"] for line in lines(run.path)]
    assert steps == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]
    assert all(torch.isfinite(p).all() for p in sl.load(run.path)[0].parameters())


def test_ruined_weights_go_back_to_the_last_checkpoint(base, tmp_path, monkeypatch):
    poison(monkeypatch, {9}, weights=True)
    run, said = sparsify(base, tmp_path / "run")
    assert any("went back to the checkpoint of step 5" in text for text in said)
    assert all(torch.isfinite(p).all() for p in sl.load(run.path)[0].parameters())


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_ruins_weights_and_moments_is_never_kept(base, tmp_path, monkeypatch, every, optimizer):
    """Neither as a checkpoint (every=1) nor through moments that the first checkpoint knows nothing of (every=100)."""
    original, calls = training.make_optimizer, []

    def make(parameters, settings):
        found = original(parameters, settings)
        step = found.step

        def ruin():
            step()
            calls.append(1)
            if len(calls) == 3:
                for name, p in parameters.items():
                    if not name.endswith("gate_bias"):
                        p.data.fill_(math.nan)
                        for moment in found.state[p].values():
                            moment.fill_(math.nan)

        found.step = ruin
        return found

    monkeypatch.setattr(training, "make_optimizer", make)
    run, said = sparsify(base, tmp_path / "run", checkpoint_every=every, optimizer=optimizer)
    assert sum("went back to the checkpoint" in text for text in said) == 1, said
    assert math.isfinite(run.read("evaluation.json")[-1]["loss"]) and len(lines(run.path)) >= 10


def test_a_discarded_last_step_is_done_again(base, tmp_path, monkeypatch):
    poison(monkeypatch, {12})
    run, said = sparsify(base, tmp_path / "run")
    assert any("step 12" in text and "discarded" in text for text in said)
    assert lines(run.path)[-1]["step"] == 12 and "heldout_loss" in lines(run.path)[-1]


@pytest.mark.parametrize("change", [{"optimizer": "Muon"}, {"loss": "KL"}, {"precision": "fp16"}, {"compile": "on"}])
def test_words_that_are_no_choice_are_refused(base, tmp_path, change):
    (name, value) = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name}='{value}': expected"):
        sparsify(base, tmp_path / "run", **change)


def test_three_nans_in_a_row_stop_with_advice(base, tmp_path, monkeypatch):
    poison(monkeypatch, {6, 7, 8})
    with pytest.raises(ValueError, match=r"3 steps in a row were not finite.*--lr"):
        sparsify(base, tmp_path / "run")
    monkeypatch.undo()
    sparsify(base, tmp_path / "run", resume=True)  # what was computed before is still there


def test_ctrl_c_in_a_real_process(base, tmp_path):
    """SIGINT to the command line: exit code 130, a sentence, a checkpoint; --resume finishes the run."""
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(" ".join(f"w{(i * j) % 62}" for j in range(40)) for i in range(200)))
    arguments = [sys.executable, "-m", "sparselens", "sparsify", str(base), "--data", str(text), "--out",
                 str(tmp_path / "run"), "--length", "16", "--batch", "2", "--steps", "150", "--cache",
                 str(tmp_path / "cache"), "--evaluate-every", "100", "--checkpoint-every", "1000"]  # fmt: skip
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.time() + 60
    while time.time() < deadline and (not metrics.is_file() or metrics.read_text().count("\n") < 5):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "continue with --resume" in errors and "Traceback" not in errors
    done = subprocess.run([*arguments, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in Metrics.read(tmp_path / "run")]
    assert steps == list(range(1, 151))


def test_unreachable_target_keeps_the_best_and_says_so(base, tmp_path):
    run, said = sparsify(base, tmp_path / "run", target="0.0001", density=None)
    assert any("The target 0.0101 was not reached" in text and "--slack" in text for text in said)
    summary = run.read("summary.json")
    assert summary["met"] is False and summary["best_step"] > 0
    assert is_gated(sl.load(run.path)[0])


def test_the_returned_state_is_the_sparsest_that_meets_the_target(base, tmp_path):
    options = {"density": None, "target": "100", "steps": 20, "evaluate_every": 2, "evaluate_sequences": 8}
    run, _ = sparsify(base, tmp_path / "run", **options)
    evaluated = [line for line in lines(run.path) if "heldout_density" in line]
    best = min(evaluated, key=lambda line: line["heldout_density"])
    assert run.read("summary.json")["best_step"] == best["step"]


def test_the_best_state_is_written_with_the_checkpoints_and_not_more_often(base, tmp_path, monkeypatch):
    """Every evaluation may find a better one; before each checkpoint the one it speaks of is on disk."""
    from sparselens.runs.checkpoints import load_checkpoint

    written, original, evaluate, then = [], engine.save_checkpoint, training.Stage.evaluate, {}

    def save(folder, step, tensors, state, **options):
        written.append((folder.name, step))
        if folder.name == "checkpoints" and state["best"]["step"] >= 0:
            assert (folder.parent / "best" / f"step-{state['best']['step']:08d}").is_dir()
        return original(folder, step, tensors, state, **options)

    def noted(stage):
        then[stage.progress.step] = {name: p.detach().clone() for name, p in stage.parameters.items()}
        return evaluate(stage)

    for module in (engine, training):
        monkeypatch.setattr(module, "save_checkpoint", save)
    monkeypatch.setattr(training.Stage, "evaluate", noted)
    monkeypatch.setattr(training.Budget, "rank", lambda self, loss, margin, density: [abs(len(then) - 7)])  # the 7th
    run, _ = sparsify(base, tmp_path / "run", evaluate_every=1, checkpoint_every=4, steps=12)
    best = [step for name, step in written if name == "best"]
    assert best == [4, 7] and run.read("summary.json")["best_step"] == 7
    saved = load_checkpoint(run.path / "best")[0]
    assert all(torch.equal(saved[name], value) for name, value in then[7].items())
    assert any(not torch.equal(saved[name], value) for name, value in then[8].items())
    found = [line for line in Metrics.read(run.path) if "heldout_loss" in line]
    assert len(found) == 12


def test_the_budget_is_kept_and_the_best_loss_within_it_returned(base, tmp_path):
    """The density ends within its budget, every layer is reported, and no better state was passed over."""
    options = {"density": 0.2, "steps": 150, "evaluate_every": 10, "evaluate_sequences": 8, "batch": 8, "bias_lr": 0.1}
    run, _ = sparsify(base, tmp_path / "run", **options)
    evaluated = [line for line in lines(run.path) if "heldout_density" in line]
    assert evaluated[0]["heldout_density"] > 0.3 and evaluated[-1]["heldout_density"] <= 0.2
    for line in evaluated:
        assert line["heldout_density"] == pytest.approx(sum(line["heldout_density_per_layer"]) / 2)
    within = [line for line in evaluated if line["heldout_density"] <= 0.2]
    best = min(within, key=lambda line: line["heldout_loss"])
    assert run.read("summary.json")["best_step"] == best["step"]


def test_gates_are_deterministic_once_closed(base, tmp_path, monkeypatch):
    """Sampled while the budget falls, exactly as evaluated afterwards."""
    drawn = []
    original = training.forward

    def spy(model, batch, **options):
        drawn.append(options.get("sample"))
        return original(model, batch, **options)

    monkeypatch.setattr(training, "forward", spy)
    _, said = sparsify(base, tmp_path / "run", closing=0.5, steps=12)
    assert drawn == [True] * 6 + [False] * 6
    assert any("The budget of 1.00% of the edges was not reached" in text and "--density" in text for text in said)


def shifted_gpt2():
    """Head 1 of layer 0 has attention logits around 40; softmax, and so the model, is the same without the offset."""
    model = tiny_model("gpt2").eval()
    attention = model.transformer.h[0].attn
    width, d_head = model.config.n_embd, model.config.n_embd // model.config.n_head
    with torch.no_grad():
        attention.c_attn.weight[:, d_head : 2 * d_head] = 0  # its queries: a constant
        attention.c_attn.bias[d_head : 2 * d_head] = 1.0
        attention.c_attn.bias[width + d_head : width + 2 * d_head] = 40.0 / d_head**0.5
    return model


@pytest.mark.parametrize("start", [0.0, 1.5])
def test_heads_with_an_offset_start_within_reach(start):
    model = shifted_gpt2()
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    before = model(ids, use_cache=False).logits
    add_gates(model, Gate(bias=start))
    assert start_within_reach(model, ids) >= 1
    first = gate_biases(model)[0]
    assert first[1] < start - 35 and (first[[0, 2, 3]] > start - 2).all()
    options = {"use_cache": False, "output_attentions": True, "gate_output": "margin"}
    margins = model(ids, **options).attentions[0][:, 1]
    share = (margins > start)[margins.isfinite()].float().mean()
    assert 0.85 <= share <= 0.92  # nine in ten, of 272
    with torch.no_grad():
        for bias in gate_biases(model):
            bias.fill_(1000.0)
    assert torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-4)


def test_sparsify_says_which_heads_start_lower(tmp_path):
    sl.save(shifted_gpt2(), tiny_tokenizer(), tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join([" ".join(f"w{i}" for i in range(20))] * 60))
    (tmp_path / "other.txt").write_text(" ".join(f"w{i}" for i in range(60)))
    said = []
    run = sl.sparsify(
        tmp_path / "model", str(tmp_path / "text.txt"), tmp_path / "run", heldout=(str(tmp_path / "other.txt"),),
        cache=tmp_path / "cache", length=16, steps=1, batch=2, bias_lr=1e-6, show_progress=False, say=said.append,
    )  # fmt: skip
    assert any("start with a lower gate bias" in line for line in said)
    assert gate_biases(sl.load(run.path)[0])[0][1] < -35


def test_lora_trains_adapters_and_gates_only(base, tmp_path):
    run, _ = sparsify(base, tmp_path / "run", lora=2)
    model, _ = sl.load(run.path)
    dense, _ = sl.load(base)
    frozen = dict(dense.named_parameters())
    inner = {name.replace(".base_layer", ""): p for name, p in model.get_base_model().named_parameters()}
    assert all(torch.equal(inner[name], p) for name, p in frozen.items())
    assert any(bias.abs().sum() > 0 for bias in gate_biases(model))
    assert (run.path / "model" / "adapter_model.safetensors").is_file()


def test_kl_target_is_the_tolerance():
    assert _target(Sparsify(loss="kl", density=None, tolerance=0.05), 3.0, None) == 0.05
    assert _target(Sparsify(tolerance=0.05), 3.0, None) == pytest.approx(3.05)
    assert _target(Sparsify(target="control", tolerance=0.05), 3.0, 2.5) == pytest.approx(2.55)
    assert _target(Sparsify(target="2", tolerance=0.05), 3.0, None) == pytest.approx(2.05)


def test_overrides_reach_the_right_settings():
    from sparselens.config import Text

    settings, text = overridden(Sparsify(), Text(), {"steps": 7, "length": 99, "target": "control", "bias": 1.0})
    assert settings.training.steps == 7 and text.length == 99 and settings.control and settings.gate.bias == 1.0
    both, _ = overridden(Sparsify(), Text(), {"micro_batch": 6, "batch": 12, "gate": Gate(normalise="open"), "bias": 2})
    assert both.training.micro_batch == 6 and both.gate == Gate(bias=2, normalise="open")
    with pytest.raises(ValueError, match="unknown setting 'stepps'"):
        overridden(Sparsify(), Text(), {"stepps": 7})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"micro_batch": 3}, "does not divide"),
        ({"warmup": 2.0}, "warmup=2.0"),
        ({"lora": -1}, "lora=-1"),
    ],
)
def test_bad_training_settings(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Training(**change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"target": "low"}, "target='low'"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"slack_until": 0.0}, "slack_until"),
        ({"density": 0.0}, "density=0.0"),
        ({"density": 1.5}, "density=1.5"),
        ({"closing": 0.0}, "closing=0.0"),
    ],
)
def test_bad_sparsify_settings(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Sparsify(**change)


def test_refusals_before_any_work(base, tmp_path, monkeypatch):
    """Each of these fails before a single file is written."""

    class Long(Copying):
        length = 1000

    with pytest.raises(ValueError, match="longer than the 64 this model allows"):
        sl.sparsify(base, Long(), tmp_path / "run")
    with pytest.raises(ValueError, match="no model found"):
        sl.sparsify("no-such/model", Copying(), tmp_path / "run")
    with pytest.raises(ValueError, match="no text found"):
        sl.sparsify(base, str(tmp_path / "*.nothing"), tmp_path / "run", length=16)
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match="GB free; this run may need"):
        sl.sparsify(base, Copying(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sparse_model_is_not_made_sparse_again(base, tmp_path):
    run, _ = sparsify(base, tmp_path / "run")
    with pytest.raises(ValueError, match="already sparse"):
        sparsify(run.path, tmp_path / "again")


def test_a_run_or_a_model_in_memory_serves_as_well_as_its_name(base, tmp_path):
    whole, _ = sparsify(base, tmp_path / "whole")
    model, tokenizer = sl.load(base)
    model.train().lm_head.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    made, _ = sparsify((model, tokenizer), tmp_path / "made")
    assert lines(made.path) == lines(whole.path) and made.record["config"]["model"] == str(base)
    assert model.training and not is_gated(model)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0]) and p.requires_grad == before[name][1], name
    dense = Run.create(tmp_path / "dense", "sparsify", {})
    dense.unlock()
    sl.save(model, tokenizer, dense.path / "model")
    again, _ = sparsify(dense, tmp_path / "again")
    assert lines(again.path) == lines(whole.path) and again.record["config"]["model"] == str(dense.path)
    with pytest.raises(ValueError, match="already sparse"):
        sparsify(again, tmp_path / "twice")
    model.config._name_or_path = ""  # with its name it would find its tokenizer
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        sl.sparsify(model, str(base / "config.json"), tmp_path / "no", length=16)


def test_an_existing_run_is_not_overwritten(base, tmp_path):
    run, _ = sparsify(base, tmp_path / "run")
    before = json.loads((run.path / "summary.json").read_text())
    with pytest.raises(ValueError, match="already holds a run"):
        sparsify(base, tmp_path / "run")
    with pytest.raises(ValueError, match="holds another run"):
        sparsify(base, tmp_path / "run", resume=True, lr=5e-3)
    assert json.loads((run.path / "summary.json").read_text()) == before


def test_full_disk_in_mid_run(base, tmp_path):
    """The file size limit hits at the first checkpoint after the start; the run can go on once it is lifted."""
    import resource

    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size, before[1]))  # weights fit, Adam's moments do not
        with pytest.raises(OSError, match=r"could not write the checkpoint of step 5.*--resume"):
            sparsify(base, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    whole, _ = sparsify(base, tmp_path / "whole")
    resumed, _ = sparsify(base, tmp_path / "run", resume=True)
    assert lines(resumed.path) == lines(whole.path)


def test_trackers_are_optional_and_work(base, tmp_path):
    pytest.importorskip("tensorboard")
    run, _ = sparsify(base, tmp_path / "run", tracker="tensorboard")
    assert list(run.path.rglob("events.out.tfevents*"))
