"""Plans: counted memory against real steps, arithmetic of time and disk, and what is refused."""

import copy
import json

import pytest
import torch
from tiny_models import CONFIGS, VOCABULARY

from sparselens.cli import main
from sparselens.config import Gate, Sparsify, Training
from sparselens.training import plan as planning
from sparselens.training.copies import count_parameters, shallow, shallow_trainable
from sparselens.training.dry_run import PeakMemory, _loss, count_step, time_step
from sparselens.training.plan import COMPILING, DISK_BYTES, GPU_START, Job, plan
from sparselens.training.sparsify import disk

GIB = 2**30


@pytest.fixture
def folder(tmp_path):
    """A model of which nothing but the configuration is there."""
    CONFIGS["llama"]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    """Tests that ask for the same count share it."""

    def count(config, settings, length, sequences, gpu, cache):
        training = settings.training
        options = (settings.loss, settings.gate, training.precision, training.lora, training.gradient_checkpointing)
        key = (str(config), options, length, sequences, gpu, cache)
        if key not in COUNTS:
            COUNTS[key] = count_step(config, settings, length, sequences, gpu, cache)
        return COUNTS[key]

    monkeypatch.setattr(planning, "count_step", count)


COUNTS: dict = {}


def deep(family: str, layers: int = 5):
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    return config


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_counted_without_its_weights(family):
    config, settings = CONFIGS[family](), Sparsify()
    step, layer = count_step(config, settings, length=16, sequences=2, gpu=True, cache=True)
    plain = sum(p.numel() for p in shallow(config, 2).parameters())
    assert plain <= step.parameters <= plain + 2 * 4  # gates where the fused kernel cannot do the family
    assert step.peak > step.kept > 0 and step.flops > 0 and layer.kept > 0
    gated = shallow_trainable(config, settings, 2, gated=True)
    whole = sum(p.numel() for p in gated.parameters())
    assert count_parameters(config, settings) == (whole, whole)


@pytest.mark.parametrize(
    "changes, loss",
    [
        pytest.param({}, "cross-entropy", id="all weights"),
        pytest.param({"lora": 4}, "kl", id="LoRA, KL"),
        pytest.param({"gradient_checkpointing": True}, "kl", id="checkpointing, KL"),
        pytest.param({"precision": "bf16", "gradient_checkpointing": True}, "kl", id="bf16, checkpointing, KL"),
    ],
)
def test_counted_memory_is_a_real_steps_memory(changes, loss):
    settings = Sparsify(loss=loss, training=Training(**changes))
    config, length, sequences = deep("llama"), 32, 4
    step, _ = count_step(config, settings, length, sequences, gpu=False, cache=True)
    model = shallow_trainable(config, settings, 5, gated=True)
    teacher = shallow(config, 5) if loss == "kl" else None
    ids = torch.randint(0, VOCABULARY, (sequences, length))
    counted = PeakMemory().ignore(model, *([teacher] if teacher else []))
    with counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.training.precision == "bf16"):
            objective = _loss(model, teacher, {"input_ids": ids, "labels": ids}, settings, gpu=False)
        objective.backward()
    assert counted.peak == pytest.approx(step.peak, rel=0.05)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == step.trained


def test_counting_leaves_nothing_fake_behind():
    config, settings = CONFIGS["llama"](), Sparsify()
    count_step(config, settings, length=16, sequences=2, gpu=False, cache=True)
    model = shallow_trainable(config, settings, 2, gated=True)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    record = model(input_ids=ids, output_attentions=True, use_cache=False, gate_output="edges").attentions[0]
    assert type(record) is torch.Tensor and record[..., 1].eq(16 * 17 / 2).all()


def test_memory_grows_as_it_should():
    config = deep("llama")

    def memory(gpus=1, sharded=False, **changes) -> dict:
        return Job(config, Sparsify(training=Training(batch=8, **changes)), 32, gpus, True, sharded).memory()

    whole, half = memory(), memory(micro_batch=4)
    sharded, copied = memory(gpus=4, sharded=True), memory(gpus=4)
    numbers = sum(p.numel() for p in shallow(config, 5).parameters())
    assert [whole[name] / numbers for name in ("weights", "base", "gradients", "Adam")] == [4, 4, 4, 8]
    assert half["activations"] + half["gradients"] < whole["activations"] + whole["gradients"]
    assert memory(gradient_checkpointing=True)["activations"] < whole["activations"]
    assert memory(lora=4)["Adam"] < whole["Adam"] / 2
    for name in ("weights", "base", "gradients", "Adam"):
        assert sharded[name] == whole[name] / 4 == copied[name] / 4
    assert sharded["gathered"] > whole["gathered"] == 0


def test_training_with_normalise_open_keeps_patterns():
    """The fused kernel has no gradients for it; heads of 256 it has."""
    config = deep("llama")

    def activations(**changes) -> float:
        return Job(config, Sparsify(training=Training(batch=4), **changes), 256, 1, True, False).memory()["activations"]

    config.head_dim = 64
    assert activations(gate=Gate(normalise="open")) > 1.5 * activations()
    config.head_dim = 256
    wide = activations()
    config.head_dim = 264
    assert activations() > 1.5 * wide


def test_time_follows_from_a_given_rate(folder):
    common = dict(length=16, steps=100, batch=8, evaluate_every=1000, heldout_tokens=1, tokens_per_second=32.0)
    found = plan(folder, gpus=1, **common)
    assert found.compute == pytest.approx(8 * 16 / 32) and found.communication == 0
    assert found.seconds == pytest.approx(GPU_START + 100 * found.compute, rel=0.02)
    assert plan(folder, gpus=2, **common).compute == pytest.approx(found.compute / 2)
    assert plan(folder, gpus=1, control=True, **common).seconds == pytest.approx(found.seconds, rel=0.02), "the base"
    alone, both = (plan(folder, gpus=1, control=c, loss="cross-entropy", **common) for c in (False, True))
    assert both.seconds == pytest.approx(2 * alone.seconds - GPU_START, rel=0.02)
    compiled = plan(folder, gpus=1, **(common | dict(compile="yes")))
    assert compiled.seconds == pytest.approx(found.seconds + COMPILING, rel=0.02)
    often = plan(folder, gpus=1, **(common | dict(checkpoint_every=1)))
    assert often.seconds - found.seconds == pytest.approx(100 * 16 * found.trained / DISK_BYTES, rel=0.02)
    assert plan(folder, gpus=2, sharded=True, **common).communication > plan(folder, gpus=2, **common).communication > 0
    assert "2.4 minutes" in str(plan(folder, gpus=1, **(common | dict(steps=30))))


def test_where_speed_comes_from(folder):
    measured = plan(folder, gpus=0, length=16, batch=2, steps=5)
    assert measured.how == "measured on this machine" and measured.tokens_per_second > 1
    if not torch.cuda.is_available():
        assert plan(folder, gpus=1, length=16, batch=8).how == "worked out for an H200"


@pytest.mark.parametrize(
    "name, how", [("NVIDIA H200", "worked out for an H200"), ("another", "measured on this machine")]
)
def test_a_gpu_that_is_here_is_timed_unless_its_speed_is_known(folder, monkeypatch, name, how):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr("sparselens.training.plan.time_step", lambda *settings: (1e-3, 1e-3))
    assert plan(folder, gpus=1, gpu_memory=80, length=16, batch=8).how == how


def test_deeper_models_take_longer():
    gradients, update = time_step(deep("llama", 40), Sparsify(), 16, 2, "cpu")
    assert gradients > 2 * time_step(deep("llama", 2), Sparsify(), 16, 2, "cpu")[0] and update > 0


def test_disk_is_checkpoints_best_and_control():
    assert sum(disk(1000, 1000, Sparsify()).values()) == 3 * 12_000 + 3 * 4_000
    trained = Sparsify(control=True, loss="cross-entropy")
    assert sum(disk(1000, 1000, trained).values()) == 48_000 + 2 * 12_000 + 4_000
    assert sum(disk(1000, 1000, Sparsify(control=True)).values()) == 48_000 + 4_000, "the base once more"
    assert sum(disk(1000, 10, Sparsify(training=Training(lora=1))).values()) == 480


def test_what_cannot_fit_is_refused_with_advice(folder, capsys, monkeypatch):
    common = dict(length=64, batch=64, tokens_per_second=100.0)
    assert plan(folder, gpus=1, gpu_memory=0.71, **common).micro == 32  # as the run itself would do
    found = plan(folder, gpus=1, gpu_memory=0.71, micro_batch=64, **common)
    assert found.problem() and found.seconds == 0 and "time" not in str(found)
    assert "would need" in found.problem() and "--micro-batch 1" in found.problem()
    assert "no setting" in plan(folder, gpus=1, gpu_memory=0.5, micro_batch=64, **common).problem()
    options = ["plan", str(folder), "--gpus", "1", "--length", "64", "--batch", "64", "--micro-batch", "64"]
    with pytest.raises(SystemExit) as refusal:
        main([*options, "--gpu-memory", "0.71"])
    shown = capsys.readouterr()
    assert refusal.value.code == 2 and "memory" in shown.out and "would need" in shown.err
    main([*options, "--tokens-per-second", "1000"])
    assert "1,000 tokens/s (as given)" in capsys.readouterr().out
    monkeypatch.setattr(planning, "free_disk", lambda out: 1e5)
    assert "of disk" in plan(folder, gpus=1, length=16, batch=8).problem()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(gpus=-1), "gpus=-1"),
        (dict(gpus=3, batch=16), "batch=16 cannot be shared by 3 GPUs"),
        (dict(gpu_memory=0), "gpu_memory=0"),
        (dict(tokens_per_second=0), "tokens_per_second=0"),
        (dict(nonsense=1), "unknown setting 'nonsense'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        plan(folder, **(dict(gpus=1, length=16) | changes))


def test_models_that_cannot_be_planned_for(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for name, changed, words in (
        ("sparse", config | {"sparselens": {"version": 1, "normalise": "all"}}, "already sparse"),
        ("unknown", copy.deepcopy(config) | {"model_type": "opt"}, "a 'opt' model cannot be gated"),
        ("flat", CONFIGS["gpt2"]().to_dict() | {"n_inner": 0, "n_positions": 512}, "cannot compute anything"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=words):
            plan(tmp_path / name, gpus=1)
    with pytest.raises(ValueError, match="no model found"):
        plan(tmp_path / "nothing" / "there", gpus=1)
