"""Training transcoders on tiny models: exact folding, exact resume, honest numbers."""

import json
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from tiny_models import CONFIGS, tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.config import Transcode
from sparselens.models.loading import add_gates
from sparselens.runs.run import Metrics
from sparselens.training.engine import Interrupted
from sparselens.training.measure import forward
from sparselens.transcoders import transcode as transcoding
from sparselens.transcoders.evaluation import Variance, measure_fit, measure_replacement
from sparselens.transcoders.losses import Learner
from sparselens.transcoders.mlp_hooks import observe, replaced
from sparselens.transcoders.transcoder import Transcoder

QUICK = dict(
    features=24, k=4, steps=12, batch=4, normalise_over=2, lr=3e-3, evaluate_every=5, evaluate_sequences=4,
    checkpoint_every=5, dead_after=300, sparsity=0.01,
)  # fmt: skip
ACTIVATIONS = ["jumprelu", "topk", "batchtopk"]


class Words:
    """Random token sequences, by number."""

    length, n_heldout = 10, 8

    def _make(self, numbers, offset):
        rows = [torch.randint(2, 64, (11,), generator=torch.Generator().manual_seed(offset + i)) for i in numbers]
        ids = torch.stack(rows)
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def train(self, start, count):
        return self._make(range(start, start + count), 0)

    def heldout(self, start, count):
        return self._make((i % self.n_heldout for i in range(start, start + count)), 10**9)

    def describe(self):
        return {"task": "words"}


def gated_model(family="gpt2"):
    return add_gates(tiny_model(family), sl.Gate(bias=0.5)).eval()


def transcode(out, model=None, **options):
    said = []
    options = QUICK | options
    made = sl.transcode(
        model or tiny_model("gpt2"), data=Words(), out=out, show_progress=False, say=said.append, **options
    )
    return made, said


def lines(folder):
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in Metrics.read(folder)]


def activations(n_layers=3, tokens=40, d_model=6, seed=0):
    """Inputs with a mean and a scale, and outputs that are a nonlinear function of all inputs so far."""
    g = torch.Generator().manual_seed(seed)
    inputs = [
        5 * torch.randn(d_model, generator=g) + 2 * torch.randn(tokens, d_model, generator=g) for _ in range(n_layers)
    ]
    outputs = [(0.3 * sum(inputs[: i + 1])).sin() * (i + 1) + 7 for i in range(n_layers)]
    return inputs, outputs


def learner(**options) -> Learner:
    torch.manual_seed(0)
    made = Learner(3, 6, Transcode(**(QUICK | {"features": 20} | options)))
    made.begin(*activations())
    with torch.no_grad():
        for W_dec, b_dec in zip(made.transcoder.W_dec, made.transcoder.b_dec, strict=True):
            W_dec.normal_().mul_(0.3)
            b_dec.normal_()
        for log_threshold in made.log_threshold:
            log_threshold.add_(0.3 * torch.randn(20))
    return made


def naive_losses(made: Learner, inputs, outputs):
    """The loss terms with full matrices and autograd through every product; straight-through by detaching."""
    t, s = made.transcoder, made.settings
    x = [(one - m) / c for one, m, c in zip(inputs, made.input_mean, made.input_scale, strict=True)]
    y = [(one - m) / c for one, m, c in zip(outputs, made.output_mean, made.output_scale, strict=True)]
    activations, sparsity = [], 0.0
    for layer in range(t.n_layers):
        z = x[layer] @ t.W_enc[layer].T + t.b_enc[layer]
        if s.activation == "jumprelu":
            threshold = made.log_threshold[layer].exp()
            near = ((z - threshold).abs() < s.bandwidth / 2).detach()
            step = -(threshold.detach() / s.bandwidth) * near * (threshold - threshold.detach())
            a = z * ((z > threshold) & (z > 0)).detach() + step
            norm = (t.W_dec[layer].pow(2).sum((1, 2)) / t.d_model + 1e-6).sqrt()
            sparsity = sparsity + torch.tanh(s.sharpness * a * norm).sum() / len(z)
        else:
            kth = z.topk(s.k, 1).values[:, -1:] if s.activation == "topk" else z.flatten().topk(s.k * len(z)).values[-1]
            a = z * ((z >= kth) & (z > 0)).detach()
        activations.append(a)
    guesses = t.decode(activations)
    errors = torch.stack([(g - true).pow(2).mean() for g, true in zip(guesses, y, strict=True)])
    return errors, sparsity, activations


@pytest.mark.parametrize("cross_layer", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_losses_and_gradients_are_the_naive_ones(activation, cross_layer):
    """fp64: the sparse training step against dense matrices, all terms and all gradients."""
    made = learner(activation=activation, cross_layer=cross_layer, sharpness=2.0, bandwidth=0.3).double()
    inputs, outputs = ([one.double() for one in side] for side in activations(seed=1))
    losses = made(inputs, outputs)
    errors, sparsity, a = naive_losses(made, inputs, outputs)
    torch.testing.assert_close(losses.errors, errors, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(losses.l0, torch.stack([(one > 0).sum() / len(one) for one in a]))
    parameters = list(made.parameters())
    found = torch.autograd.grad(made.loss(losses, 0.05), parameters)
    expected = torch.autograd.grad(errors.sum() + 0.05 * sparsity, parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    if activation == "jumprelu":
        assert any(p.abs().max() > 0 for p in found[-3:]), "thresholds learn"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("cross_layer", [True, False])
def test_folding_is_exact(activation, cross_layer):
    """The folded transcoder on raw activations is the normalised one on normalised ones, unnormalised."""
    made = learner(activation=activation, cross_layer=cross_layer)
    inputs, outputs = activations(seed=2)
    losses = made(inputs, outputs)
    folded = made.folded()
    guesses = folded.reconstruct(inputs)
    for layer in range(3):
        error = ((guesses[layer] - outputs[layer]) / made.output_scale[layer]).pow(2).mean()
        assert error.item() == pytest.approx(losses.errors[layer].item(), rel=1e-5)
        a = folded.encode(layer, inputs[layer])
        assert (a > 0).sum() / len(a) == pytest.approx(losses.l0[layer].item())
    torch.testing.assert_close(made.transcoder.W_dec[1][:, 0] * made.output_scale[1], folded.W_dec[1][:, 0])
    if cross_layer:
        torch.testing.assert_close(made.transcoder.W_dec[0][:, 2] * made.output_scale[2], folded.W_dec[0][:, 2])


def test_normalised_outputs_make_the_error_the_fvu():
    made = Learner(3, 6, Transcode(**QUICK))
    inputs, outputs = activations()
    made.begin(inputs, outputs)
    assert made(inputs, outputs).errors.tolist() == pytest.approx([1.0] * 3, rel=1e-4), "nothing is written yet"
    l0 = made(inputs, outputs).l0
    assert (l0 > 0.5 * 4).all() and (l0 < 3 * 4).all(), "about k features are active at the start"


def test_features_start_where_the_data_is():
    """Every encoder a token's direction, half as much noise added; active on k / n_features of the tokens."""
    made = Learner(3, 6, Transcode(**(QUICK | {"features": 20, "k": 5, "threshold": 0.1})))
    inputs, outputs = activations()
    made.begin(inputs, outputs)
    generator = torch.Generator().manual_seed(made.settings.seed)
    for layer, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
        for rows, mean, scale in ((x, made.input_mean, made.input_scale), (y, made.output_mean, made.output_scale)):
            torch.testing.assert_close(mean[layer], rows.mean(0))
            assert scale[layer].item() == pytest.approx(((rows - rows.mean(0)) ** 2).mean().item() ** 0.5)
        x = (x - made.input_mean[layer]) / made.input_scale[layer]
        token = x[torch.randint(40, (20,), generator=generator)]
        noise = torch.randn(20, 6, generator=generator)
        mixed = token / token.norm(dim=1, keepdim=True) + 0.5 * noise / noise.norm(dim=1, keepdim=True)
        W_enc = made.transcoder.W_enc[layer]
        torch.testing.assert_close(W_enc, mixed / mixed.norm(dim=1, keepdim=True))
        pre = x @ W_enc.T + made.transcoder.b_enc[layer]
        # Ten of forty tokens, the tenth at twice the threshold.
        torch.testing.assert_close(pre.sort(0, descending=True).values[9], torch.full((20,), 0.2))
    assert made.transcoder.b_dec[0].abs().max() == made.transcoder.W_dec[0].abs().max() == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dead_features_are_pulled_towards_the_worst_tokens(activation):
    """The third term as written: relu(threshold - z) of dead features, tokens weighted by their squared error."""
    made = learner(activation=activation, dead_penalty=0.25, dead_after=100).double()
    inputs, outputs = ([one.double() for one in side] for side in activations(seed=1))
    made.silent[0, :4], made.silent[0, 4], made.silent[2, 7] = 100, 99, 300
    losses = made(inputs, outputs)
    errors, sparsity, a = naive_losses(made, inputs, outputs)
    guesses, wanted = made.transcoder.decode(a), 0.0
    for layer, dead in ((0, [0, 1, 2, 3]), (2, [7])):
        x = (inputs[layer] - made.input_mean[layer]) / made.input_scale[layer]
        y = (outputs[layer] - made.output_mean[layer]) / made.output_scale[layer]
        error = ((guesses[layer] - y) ** 2).mean(1).detach()
        z = x @ made.transcoder.W_enc[layer].T + made.transcoder.b_enc[layer]
        chosen = a[layer] != 0
        level = made.log_threshold[layer].exp()[dead] if activation == "jumprelu" else z[chosen].min()
        wanted = wanted + ((level - z[:, dead]).clamp(min=0).sum(1) * error).sum() / error.sum()
    torch.testing.assert_close(losses.dead, wanted)
    torch.testing.assert_close(made.loss(losses, 0.05), errors.sum() + 0.05 * sparsity + 0.25 * wanted)
    before = made.silent.clone()
    made.note_fired(losses.fired, 40)
    fired = torch.stack([(one > 0).any(0) for one in a])
    assert torch.equal(made.silent, torch.where(fired, 0.0, before + 40)) and 0 < fired.sum() < fired.numel()


def test_dead_features_come_back():
    """Features pushed far below their thresholds are dead without the penalty and active again with it."""

    def train(penalty):
        made = learner(dead_penalty=penalty, dead_after=100, lr=0.05)
        with torch.no_grad():
            for bias in made.transcoder.b_enc:
                bias[:5] -= 3
        optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
        for _ in range(60):
            inputs, outputs = activations(seed=0)
            losses = made(inputs, outputs)
            optimizer.zero_grad()
            made.loss(losses, 0.0).backward()
            optimizer.step()
            made.note_fired(losses.fired, 40)
        return made.dead[:, :5].float().mean().item()

    assert train(0.0) == 1.0
    assert train(1e-3) < 0.2


@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2", "gemma2"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hook", ["mlp-input", "residual"])
def test_replacing_by_the_exact_outputs_changes_nothing(family, gated, hook):
    """A transcoder that writes nothing but this model's MLP outputs gives the model's own logits."""
    model = gated_model(family) if gated else tiny_model(family)
    batch = Words().train(0, 2)
    inputs, outputs = observe(model, batch, hook)
    d_model = inputs[0].shape[-1]

    class Exact(Transcoder):
        def encode(self, layer, x):
            torch.testing.assert_close(x, inputs[layer], rtol=1e-4, atol=1e-4)
            return super().encode(layer, x)

        def written(self, layer, a):
            return torch.stack([outputs[layer]] + [torch.zeros_like(outputs[layer])] * (1 - layer), -2)

    with torch.no_grad():
        own = forward(model, batch).logits
        with replaced(model, Exact(2, 5, d_model, input_hook=hook)):
            instead = forward(model, batch).logits
        torch.testing.assert_close(instead, own, rtol=1e-4, atol=1e-4)
        with replaced(model, Transcoder(2, 5, d_model, input_hook=hook)):
            assert not torch.allclose(forward(model, batch).logits, own, atol=1e-2)
        assert torch.equal(forward(model, batch).logits, own), "hooks are gone"


def test_cross_layer_replacement_is_built_up_layer_by_layer():
    """Against a hand-made run: reconstruct layer 0, feed it on, read layer 1's input, reconstruct layer 1."""
    model = tiny_model("gpt2")
    t = Transcoder.random(2, 30, 32)
    batch = Words().train(0, 2)
    with torch.no_grad():
        first = t.reconstruct(observe(model, batch, "mlp-input")[0])[0]
        with sl_patch(model, {"m0": first}):
            inputs, _ = observe(model, batch, "mlp-input")
            second = t.reconstruct(inputs)[1]
        with sl_patch(model, {"m0": first, "m1": second}):
            expected = forward(model, batch).logits
        with replaced(model, t):
            found = forward(model, batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def sl_patch(model, values):
    from sparselens.models.hooks import patch

    return patch(model, values)


def test_fit_against_naive():
    model, batches = tiny_model("llama"), Words()
    t = Transcoder.random(2, 30, 32)
    fit = measure_fit(model, t, batches, 8, micro_batch=3)
    inputs, outputs = observe(model, batches.heldout(0, 8), "mlp-input")
    guesses = t.reconstruct(inputs)
    for layer in range(2):
        y = outputs[layer].double()
        error, centred = (guesses[layer].double() - y).pow(2), (y - y.mean((0, 1))).pow(2)
        assert fit["fvu_per_layer"][layer] == pytest.approx((error.sum() / centred.sum()).item(), rel=1e-5)
        y, error = y[:, 1:], error[:, 1:]
        centred = (y - y.mean((0, 1))).pow(2)
        assert fit["fvu_per_layer_after_first"][layer] == pytest.approx((error.sum() / centred.sum()).item(), rel=1e-5)
        assert fit["l0_per_layer"][layer] == pytest.approx(
            (t.encode(layer, inputs[layer]) > 0).float().sum(-1).mean().item()
        )


def test_losses_with_mlps_replaced_and_silent():
    """On the first three held-out sequences, one of them faultless; recovered: of what silent MLPs cost."""
    model, t, batches = tiny_model("llama"), Transcoder.random(2, 30, 32), Words()
    batch = {name: value.clone() for name, value in batches.heldout(0, 4).items()}
    with torch.no_grad():
        batch["labels"][1] = model(batch["input_ids"]).logits[1].argmax(-1)
    batches.heldout = lambda start, count: {name: value[start : start + count] for name, value in batch.items()}
    found = measure_replacement(model, t, batches, 3)

    def loss():
        with torch.no_grad():
            logits = model(batch["input_ids"][:3]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:3].flatten()).item()

    assert found["model_loss"] == pytest.approx(loss(), rel=1e-5) and found["model_exact"] == pytest.approx(1 / 3)
    with replaced(model, t):
        assert found["replacement_loss"] == pytest.approx(loss(), rel=1e-5)
    with sl_patch(model, {"m0": 0.0, "m1": 0.0}):
        assert found["zero_loss"] == pytest.approx(loss(), rel=1e-5)
    lost, back = found["zero_loss"] - found["model_loss"], found["zero_loss"] - found["replacement_loss"]
    assert found["loss_recovered"] == pytest.approx(back / lost, rel=1e-4) and found["replacement_exact"] == 0


def test_fractions_of_variance_by_hand():
    """Outputs 1 and 3, guesses 2 and 3: an error of 1, of 2 around the mean; in two parts as in one."""
    whole, parts, nothing = Variance(1), Variance(1), Variance(1)
    true, guess = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [3.0]])
    whole.add(true, guess)
    for i in range(2):
        parts.add(true[i : i + 1], guess[i : i + 1])
    assert whole.fvu() == parts.fvu() == 0.5 and math.isnan(nothing.fvu())


def test_padding_counts_nowhere():
    class Padded(Words):
        def heldout(self, start, count):
            batch = super().heldout(start, count)
            mask = torch.ones_like(batch["input_ids"])
            mask[:, 7:] = 0
            return batch | {"attention_mask": mask}

    class Short(Words):
        def heldout(self, start, count):
            return {name: value[:, :7] for name, value in super().heldout(start, count).items()}

    model, t = tiny_model("gpt2"), Transcoder.random(2, 30, 32)
    padded, short = (measure_fit(model, t, batches, 4) for batches in (Padded(), Short()))
    assert padded["fvu_per_layer"] == pytest.approx(short["fvu_per_layer"], rel=1e-4)
    assert padded["l0_per_layer"] == pytest.approx(short["l0_per_layer"])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_end_to_end(tmp_path, activation, gated):
    model = gated_model() if gated else tiny_model("gpt2")
    made, said = transcode(tmp_path / "run", model, activation=activation, steps=30, lr=2e-2, sparsity=0.001)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert made.activation == ("topk" if activation == "topk" else "jumprelu")
    assert results["tokens"] == 30 * 4 * 10 and results["minutes"] > 0 and len(results["fvu_per_layer"]) == 2
    assert results["fvu"] < 0.9 and results["model_loss"] < results["zero_loss"] + 1
    loaded = sl.Transcoder.load(tmp_path / "run")
    fit = measure_fit(model, loaded, Words(), 4, micro_batch=4)
    assert fit["fvu_per_layer"] == pytest.approx(results["fvu_per_layer"], rel=1e-6)
    again = measure_replacement(model, loaded, Words(), 4, micro_batch=4)
    assert again["replacement_loss"] == pytest.approx(results["replacement_loss"], rel=1e-6)
    assert "held-out sequences" in said[-2] and "heldout_replacement_loss" in lines(tmp_path / "run")[4]


@pytest.mark.parametrize("options", [{}, {"activation": "batchtopk"}, {"cross_layer": False}], ids=str)
def test_resume_is_bit_identical(tmp_path, options, monkeypatch):
    """Interrupted after step 7 and resumed: every metric and every weight equals the uninterrupted run's."""
    whole, _ = transcode(tmp_path / "whole", **options)
    original, calls = transcoding.TranscoderStage.describe, []

    def describe(stage, line):
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return original(stage, line)

    monkeypatch.setattr(transcoding.TranscoderStage, "describe", describe)
    with pytest.raises(Interrupted, match="after step 7 of 12"):
        transcode(tmp_path / "parts", **options)
    monkeypatch.undo()
    parts, _ = transcode(tmp_path / "parts", resume=True, **options)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    a, b = whole.state_dict(), parts.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_nans_are_discarded_and_the_third_in_a_row_stops(tmp_path, monkeypatch):
    original, calls = Learner.loss, []

    def bad(steps):
        def loss(self, losses, sparsity):
            calls.append(1)
            return original(self, losses, sparsity) * (torch.nan if len(calls) in steps else 1)

        return loss

    monkeypatch.setattr(Learner, "loss", bad({3, 4}))
    made, said = transcode(tmp_path / "run")
    assert sum("the update was discarded" in text for text in said) == 2
    assert all(p.isfinite().all() for p in made.parameters()) and len(lines(tmp_path / "run")) == 10
    calls.clear()
    monkeypatch.setattr(Learner, "loss", bad({6, 7, 8}))
    with pytest.raises(ValueError, match=r"3 steps in a row were not finite.*--lr"):
        transcode(tmp_path / "again")


def test_ruined_weights_go_back_to_the_last_checkpoint(tmp_path, monkeypatch):
    original, calls = Learner.loss, []

    def ruined(self, losses, sparsity):
        calls.append(1)
        if len(calls) == 7:
            self.transcoder.W_enc[0].data.fill_(torch.nan)
        return original(self, losses, sparsity) * (torch.nan if len(calls) == 7 else 1)

    monkeypatch.setattr(Learner, "loss", ruined)
    made, said = transcode(tmp_path / "run")
    assert any("went back to the checkpoint of step 5" in text for text in said)
    assert all(p.isfinite().all() for p in made.parameters()) and len(lines(tmp_path / "run")) == 11


def test_bf16_keeps_fp32_weights_and_stays_close(tmp_path):
    transcode(tmp_path / "full", precision="fp32")
    half, _ = transcode(tmp_path / "half", precision="bf16")
    assert all(p.dtype == torch.float32 for p in half.parameters())
    a, b = lines(tmp_path / "full"), lines(tmp_path / "half")
    assert a[0]["fvu"] == pytest.approx(b[0]["fvu"], rel=0.03) and a[0]["fvu"] != b[0]["fvu"]
    assert a[-1]["fvu"] == pytest.approx(b[-1]["fvu"], rel=0.1)


def test_the_users_model_is_left_as_it_was(tmp_path):
    model = tiny_model("gpt2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    transcode(tmp_path / "run", model)
    assert model.training and all(p.requires_grad for p in model.parameters())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["model"] == "gpt2", "a model without a name is called by its kind"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_command_line(tmp_path, capsys):
    from sparselens.cli import main

    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(" ".join(f"w{(i * j) % 62}" for j in range(40)) for i in range(100)))
    main(
        ["transcode", str(tmp_path / "base"), "--data", str(text), "--out", str(tmp_path / "run"), "--length", "16",
         "--features", "24", "--k", "4", "--steps", "5", "--batch", "2", "--activation", "batchtopk",
         "--no-cross-layer", "--cache", str(tmp_path / "cache"), "--evaluate-sequences", "4",
         "--json", str(tmp_path / "rows.json")]
    )  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["tokens"] == 5 * 2 * 16 and "provenance" in rows
    assert "MLPs replaced" in capsys.readouterr().out
    loaded = sl.Transcoder.load(tmp_path / "run")
    assert not loaded.cross_layer and loaded.model_name == str(tmp_path / "base")
    with pytest.raises(SystemExit) as error:
        main(["transcode", str(tmp_path / "base"), "--data", str(text), "--out", str(tmp_path / "run")])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"features": 0}, "features=0"),
        ({"k": 30}, "k=30: expected at most the 24 features"),
        ({"activation": "relu"}, "activation='relu': expected one of jumprelu, topk, batchtopk"),
        ({"reads": "mlp"}, "reads='mlp'"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"sparsity": -1.0}, "sparsity=-1.0"),
        ({"sparsity_warmup": 1.5}, "sparsity_warmup=1.5"),
        ({"featurs": 3}, "unknown setting 'featurs'"),
    ],
)
def test_bad_settings(tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        transcode(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_refusals_before_any_work(tmp_path, monkeypatch):
    model = tiny_model("gpt2")

    class Long(Words):
        length = 1000

    class Nothing(Words):
        n_heldout = 0

    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="longer than the 64 this model allows"):
        sl.transcode(model, data=Long(), out=tmp_path / "run")
    with pytest.raises(ValueError, match="no held-out sequences"):
        sl.transcode(model, data=Nothing(), out=tmp_path / "run")
    with pytest.raises(ValueError, match="is empty"):
        sl.transcode(model, tiny_tokenizer(), data=str(tmp_path / "empty.txt"), out=tmp_path / "run", length=16)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        sl.transcode(model, data="text.txt", out=tmp_path / "run", length=16)
    with pytest.raises(ValueError, match="no model found"):
        sl.transcode("no-such/model", data=Words(), out=tmp_path / "run")
    with pytest.raises(ValueError, match="is not empty"):
        sl.transcode((model, tiny_tokenizer()), data=Words(), out=tmp_path)
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match="GB free; this run may need"):
        sl.transcode(model, data=Words(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_transcoder_of_another_shape_is_refused():
    with (
        pytest.raises(ValueError, match="has 3 layers of width 32, the model 2 of width 32"),
        replaced(tiny_model("gpt2"), Transcoder.random(3, 5, 32)),
    ):
        pass


def test_parameters_are_counted():
    for cross_layer in (True, False):
        settings = Transcode(features=7, k=2, cross_layer=cross_layer)
        counted = sum(p.numel() for p in Learner(3, 5, settings).parameters())
        assert transcoding.n_parameters(3, 5, settings) == counted


def test_every_family_has_mlps_to_observe():
    for family in CONFIGS:
        for hook in ("mlp-input", "residual"):
            inputs, outputs = observe(tiny_model(family), Words().train(0, 2), hook)
            assert [x.shape for x in inputs] == [y.shape for y in outputs] == [(2, 10, 32)] * 2
