"""What a first hour runs into: settings that do not fit, files nobody else can read, sentences that mislead."""

import os
import re
import subprocess
import sys

import pytest
import torch
from copying_runs import sparsify
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.demo import walk
from sparselens.evaluation.side_by_side import evaluate
from sparselens.models.loading import add_gates, gate_biases
from sparselens.training import engine, sparsify as procedure

TEXT = "\n<|endoftext|>\n".join(" ".join(f"w{(i * j + j) % 62}" for j in range(40)) for i in range(200))


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("verb", ["sparsify", "transcode"])
def test_sequences_too_long_for_a_model_are_shortened_with_a_line(base, tmp_path, verb):
    said: list[str] = []
    more = {"features": 8, "k": 2, "normalise_over": 1} if verb == "transcode" else {}
    options = {"data": "text.txt", "out": "run", "length": 512, "batch": 1, "steps": 1, "heldout_tokens": 128}
    getattr(sl, verb)(str(base), **options, **more, show_progress=False, say=said.append)
    assert any("64 tokens instead of 512" in line for line in said)
    assert sl.Run("run").record["config"]["data"]["length"] == 64


def test_a_plan_is_made_for_the_length_that_the_run_will_have(base):
    common = {"gpus": 1, "tokens_per_second": 100.0, "steps": 10, "batch": 2}
    found = sl.plan(str(base), length=512, **common)
    assert found.seconds == sl.plan(str(base), length=64, **common).seconds and "of 64 tokens at once" in str(found)


def test_the_parts_of_a_plans_time_add_up(base):
    options = {"control": True, "loss": "cross-entropy", "tokens_per_second": 1e4, "checkpoint_every": 1}
    found = sl.plan(str(base), gpus=1, length=64, steps=300, **options)
    assert set(found.times) == {"start", "training", "checkpoints", "evaluation"}
    assert sum(found.times.values()) == pytest.approx(found.seconds)
    first, second = str(found).splitlines()[2:4]
    assert first.startswith("time") and all(name in first for name in found.times) and "600 steps" in second


def test_an_interrupted_demo_says_how_it_goes_on(tmp_path, monkeypatch):
    def stop(*args, **options):
        raise engine.Interrupted("stopped after step 3 of 9; continue with --resume")

    monkeypatch.setattr(walk, "_dense", stop)
    with pytest.raises(engine.Interrupted, match="stopped after step 3 of 9") as stopped:
        walk.demo(tmp_path / "demo", show_progress=False, say=lambda text: None)
    assert "--resume" not in str(stopped.value) and "same command again" in str(stopped.value)


def test_a_control_above_the_base_is_mentioned():
    row = {"loss": 2.0, "loss_standard_error": 0.01}
    note = procedure.control_note(
        [row | {"kind": "base"}, row | {"kind": "control", "loss": 2.33}, row | {"kind": "sparse"}]
    )
    assert note and "0.33" in note and "--lr" in note
    assert procedure.control_note([row | {"kind": "base"}, row | {"kind": "control", "loss": 2.01}]) is None
    assert procedure.control_note([row | {"kind": "base"}, row | {"kind": "sparse"}]) is None


def test_a_model_with_nothing_to_evaluate_it_on(base):
    for source in (str(base), "owner/name"):
        with pytest.raises(ValueError, match=r"nothing to evaluate .* on: .*not a Run.*--data") as refused:
            evaluate(source)
        assert source in str(refused.value)


def test_weights_are_as_readable_as_everything_else(base, tmp_path):
    mask = os.umask(0o022)
    try:
        sl.save(add_gates(tiny_model("gpt2"), sl.Gate()), tiny_tokenizer(), tmp_path / "model")
    finally:
        os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o644}, modes


def test_what_is_measured_after_training_shows_how_far_it_is(base, tmp_path, capsys):
    """On a CPU that takes longer than a short training, and nothing moved on the screen."""
    sparsify(base, tmp_path / "quiet", steps=1, control=True)
    assert not capsys.readouterr().err
    sparsify(base, tmp_path / "run", steps=1, control=True, show_progress=True)
    bars = capsys.readouterr().err
    for model in ("base", "base, measured", "control, measured", "sparse, measured"):
        assert re.search(rf"{model}: +0%", bars), model


def test_the_announcement_names_the_processes(base, tmp_path):
    _, said = sparsify(base, tmp_path / "run", steps=1)
    assert "1 process" in said[0]


def test_gate_biases_are_frozen_by_peft_and_can_be_set_free():
    """As docs/faq.md says."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(add_gates(tiny_model("llama"), sl.Gate()), config)
    assert not any(bias.requires_grad for bias in gate_biases(model))
    for bias in gate_biases(model):
        bias.requires_grad_(True)
    out = model(torch.randint(1, 60, (1, 9)), output_attentions=True, gate_output="edges", gate_sample=True)
    torch.stack(out.attentions)[..., 0].sum().backward()
    assert all(bias.grad.abs().sum() > 0 for bias in gate_biases(model))


def test_a_tiny_model_trains_on_one_thread_unless_told_otherwise():
    code = """
import torch
from sparselens.training.engine import threads_for
torch.set_num_threads(2)
seen = []
for parameters in (100_000, 100_000_000):
    with threads_for(parameters):
        seen.append(torch.get_num_threads())
print(*seen, torch.get_num_threads())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for more, expected in (({}, "1 2 2"), ({"OMP_NUM_THREADS": "2"}, "2 2 2")):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment | more)
        assert result.stdout.split() == expected.split(), result.stderr


def test_training_asks_for_its_threads(base, tmp_path, monkeypatch):
    asked: list[int] = []
    real = engine.threads_for
    monkeypatch.setattr(engine, "threads_for", lambda parameters: asked.append(parameters) or real(parameters))
    whole = sum(p.numel() for p in tiny_model("llama").parameters()) + 8
    sparsify(base, tmp_path / "run", steps=1)
    assert asked and all(n == whole for n in asked)
    sparsify(base, tmp_path / "few", steps=1, lora=2)
    assert asked[-1] > whole, "the model's size counts, not that of the few matrices that are trained"


def test_the_specification_defines_the_edges_of_both_kinds_of_gates():
    from sparselens.gating import reference

    header = " ".join(reference.__doc__.split())
    assert re.search(r"edges = .* sampl.*number of open", header, re.IGNORECASE)
