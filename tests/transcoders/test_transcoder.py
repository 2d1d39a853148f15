"""The transcoder by itself: what it computes, its gradients, its files."""

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import sparselens as sl
from sparselens.transcoders import decoding as transcoder_decoding
from sparselens.transcoders.decoding import (
    batch_topk_mask,
    batch_topk_threshold,
    decode,
    entries,
    jumprelu,
    read,
    topk_mask,
    write,
    write_densely,
)
from sparselens.transcoders.transcoder import Transcoder

KINDS = [(True, "jumprelu"), (False, "jumprelu"), (True, "topk"), (False, "batchtopk")]


def double(**options) -> Transcoder:
    return Transcoder.random(3, 20, 8, dtype=torch.float64, **options)


@pytest.mark.parametrize(("cross_layer", "activation"), KINDS)
def test_reconstruction_is_the_double_sum(cross_layer, activation):
    """y_m = b_m + sum over layers, features of a * W_dec, token by token, written out."""
    t = double(cross_layer=cross_layer, activation=activation)
    inputs = [torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(3)]
    outputs = t.reconstruct(inputs)
    for m in range(3):
        expected = t.b_dec[m].repeat(2, 3, 1)
        for layer in range(m + 1) if cross_layer else [m]:
            a = t.encode(layer, inputs[layer])
            for f in range(20):
                expected += a[..., f, None] * t.W_dec[layer][f, m - layer]
        torch.testing.assert_close(outputs[m], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("cross_layer", "activation"), KINDS)
def test_the_sparse_path_writes_what_the_dense_one_does(cross_layer, activation):
    t = double(cross_layer=cross_layer, activation=activation)
    activations = [t.encode(layer, torch.randn(4, 5, 8, dtype=torch.float64)) for layer in range(3)]
    activations[1][0, 0, :3] = 1.0  # a number like any other
    dense = t.decode(activations)
    for m in range(3):
        sources = range(m + 1) if cross_layer else [m]
        sparse = sum(t.written(layer, activations[layer])[..., m - layer, :] for layer in sources) + t.b_dec[m]
        torch.testing.assert_close(sparse, dense[m], rtol=1e-12, atol=1e-12)


def test_a_fifth_of_a_random_transcoder_is_active():
    t = Transcoder.random(2, 500, 64)
    share = (t.encode(1, torch.randn(400, 64)) > 0).float().mean()
    assert 0.15 < share < 0.25


def test_sparse_encoding_and_decoding_have_the_dense_gradients():
    """Values, encoder, bias and decoder, against autograd through the full matrices; one token has no entry at all."""
    x = torch.randn(7, 5, dtype=torch.float64)
    W_enc, b_enc = torch.randn(11, 5, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    W_dec = torch.randn(11, 3, 4, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (W_enc, b_enc, W_dec)]
    pre = x @ W_enc.T + b_enc
    mask = pre > 1
    mask[3] = False
    weights = torch.randn(7, 3, 4, dtype=torch.float64)

    dense = torch.einsum("tf,fjd->tjd", (pre * mask).sin(), W_dec)
    expected = torch.autograd.grad((dense * weights).sum(), leaves)
    at = entries(mask)
    assert 0 < len(at.tokens) < mask.numel() / 2
    for way in (write, write_densely):
        sparse = way(read(x, W_enc, b_enc, pre.detach(), at).sin(), at, W_dec)
        torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((sparse * weights).sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("active", "way"), [(1, "write"), (50, "write_densely")])
def test_the_faster_way_is_taken(active, way, monkeypatch):
    """One feature in a hundred: follow the entries; one in two: the dense product."""
    mask = torch.zeros(10, 100, dtype=torch.bool)
    mask[:, :active] = True
    at, weight = entries(mask), torch.randn(100, 2, 3)
    expected = decode(torch.ones(10 * active), at, weight)
    monkeypatch.setattr(transcoder_decoding, way, lambda *arguments: "taken")
    assert decode(torch.ones(10 * active), at, weight) == "taken"
    torch.testing.assert_close(expected, weight[:active].sum(0).expand(10, 2, 3))


def test_no_entries_at_all():
    weight = torch.randn(6, 2, 3, requires_grad=True)
    at = entries(torch.zeros(4, 6, dtype=torch.bool))
    out = write(torch.zeros(0), at, weight)
    assert out.shape == (4, 2, 3) and not out.any()
    out.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_decoding_on_cuda(dtype):
    torch.manual_seed(0)
    a = torch.rand(300, 500) * (torch.rand(300, 500) < 0.02)
    weight = torch.randn(500, 3, 32)
    at = entries(a.cuda() != 0)
    values = a.cuda()[at.tokens, at.features].to(dtype).requires_grad_()
    device_weight = weight.cuda().requires_grad_()
    sparse = write(values, at, device_weight)
    gradient = torch.randn(300, 3, 32)
    sparse.backward(gradient.cuda().to(dtype))
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-1)
    torch.testing.assert_close(sparse.float().cpu(), torch.einsum("tf,fjd->tjd", a, weight), **tolerance)
    expected = torch.einsum("tf,tjd->fjd", a, gradient)
    torch.testing.assert_close(device_weight.grad.cpu(), expected, **tolerance)
    dense = torch.einsum("tjd,fjd->tf", gradient, weight)[at.tokens.cpu(), at.features.cpu()]
    torch.testing.assert_close(values.grad.float().cpu(), dense, **tolerance)


def test_straight_through_gradients_as_written():
    z = torch.tensor([-0.5, 0.05, 0.15, 0.24, 0.26, 2.0], dtype=torch.float64, requires_grad=True)
    threshold = torch.full((6,), 0.2, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0, 11.0], dtype=torch.float64)
    a = jumprelu(z, threshold, 0.1)
    assert a.tolist() == [0, 0, 0, 0.24, 0.26, 2.0]
    a.backward(g)
    assert z.grad.tolist() == [0, 0, 0, 5, 7, 11]
    # -(threshold / bandwidth) * [|z - threshold| < bandwidth / 2] * g: 0.15 lies on the edge, 0.24 within, 0.26 beyond
    torch.testing.assert_close(threshold.grad, torch.tensor([0, 0, 0, -10.0, 0, 0], dtype=torch.float64))


def test_the_straight_through_gradient_estimates_the_true_one():
    """d/dθ of the mean activation over smooth data, by finite differences, is what the window estimates."""
    z = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    threshold = torch.tensor(0.5, dtype=torch.float64)
    leaf = threshold.expand(len(z)).clone().requires_grad_()
    jumprelu(z, leaf, 0.2).mean().backward()
    estimate = leaf.grad.sum()
    step = 0.05
    true = ((z * (z > threshold + step)).mean() - (z * (z > threshold - step)).mean()) / (2 * step)
    assert estimate.item() == pytest.approx(true.item(), rel=0.03)


def test_topk_takes_the_largest_of_each_token_batchtopk_of_all():
    pre = torch.tensor([[3.0, 2.0, 1.0, -1.0], [9.0, 8.0, 7.0, 6.0], [-1.0, -2.0, 0.5, -3.0]])
    assert topk_mask(pre, 2).tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, False],
    ]
    assert batch_topk_mask(pre, 2).tolist() == [[True, True, False, False], [True] * 4, [False] * 4]
    assert batch_topk_threshold(pre, 2) == pytest.approx(1.5)
    assert batch_topk_threshold(pre, 4) == 0.0
    assert batch_topk_threshold(-pre, 3) == 0.0, "never below zero"
    close = torch.tensor([[1.0, 1.0 - 2**-24]])  # neighbours: their middle rounds to the larger, which must stay active
    assert batch_topk_threshold(close, 1) == 1.0 - 2**-24


def test_batchtopk_becomes_jumprelu_with_the_same_activations():
    t = Transcoder.random(3, 50, 16, activation="batchtopk")
    inputs = [torch.randn(4, 30, 16) for _ in range(3)]
    converted = t.as_jumprelu(inputs)
    for layer, x in enumerate(inputs):
        before, after = t.encode(layer, x), converted.encode(layer, x)
        assert torch.equal(before, after) and (before > 0).sum() == 10 * 120
    with pytest.raises(ValueError, match="a topk transcoder has no common threshold"):
        Transcoder.random(1, 10, 4, activation="topk").as_jumprelu([torch.randn(3, 4)])


@pytest.mark.parametrize(("cross_layer", "activation"), KINDS)
def test_files_bring_back_every_bit(tmp_path, cross_layer, activation):
    t = Transcoder.random(3, 20, 8, cross_layer=cross_layer, activation=activation)
    t.input_hook, t.model_name = "residual", "some/model: name"
    loaded = Transcoder.load(t.save(tmp_path / "transcoder"))
    assert (loaded.cross_layer, loaded.activation, loaded.k) == (t.cross_layer, t.activation, t.k)
    assert (loaded.input_hook, loaded.model_name) == ("residual", "some/model: name")
    before, after = t.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    loaded.save(tmp_path / "transcoder")  # over itself
    assert Transcoder.load(tmp_path / "transcoder").n_features == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["transcoder"]


def test_the_layout_is_circuit_tracers(tmp_path):
    t = Transcoder.random(3, 20, 8)
    t.save(tmp_path / "clt")
    assert yaml.safe_load((tmp_path / "clt" / "config.yaml").read_text()) == {
        "model_name": "", "model_kind": "cross_layer_transcoder", "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out", "scan": "",
    }  # fmt: skip
    shapes = {k: list(v.shape) for k, v in load_file(tmp_path / "clt" / "W_enc_1.safetensors").items()}
    assert shapes == {"W_enc_1": [20, 8], "b_enc_1": [20], "b_dec_1": [8], "threshold_1": [20]}
    shapes = {k: list(v.shape) for k, v in load_file(tmp_path / "clt" / "W_dec_1.safetensors").items()}
    assert shapes == {"W_dec_1": [20, 2, 8]}


def test_reading_what_others_wrote(tmp_path):
    """Per-layer sets with 2-D decoders, half precision, no thresholds (ReLU), hooks spelt out with their block."""
    for layer in range(2):
        tensors = {
            "W_enc": torch.randn(6, 4),
            "W_dec": torch.randn(6, 4),
            "b_enc": torch.zeros(6),
            "b_dec": torch.ones(4),
        }
        save_file({name: value.bfloat16() for name, value in tensors.items()}, tmp_path / f"layer_{layer}.safetensors")
    (tmp_path / "config.yaml").write_text(
        "model_kind: transcoder_set\nfeature_input_hook: blocks.{layer}.hook_resid_mid\n"
        "feature_output_hook: hook_mlp_out\nmodel_name: google/gemma-2-2b\nscan: null\n"
    )
    t = Transcoder.load(tmp_path)
    assert not t.cross_layer and t.input_hook == "residual" and t.W_enc[0].dtype == torch.float32
    x = torch.randn(5, 4)
    torch.testing.assert_close(t.encode(0, x), torch.relu(x @ tensors["W_enc"].T * 0 + t.pre_activations(0, x)))
    assert not any(p.requires_grad for p in t.parameters())


@pytest.fixture
def folder(tmp_path):
    return Transcoder.random(2, 6, 4).save(tmp_path / "t")


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / "config.yaml").unlink(), "no transcoder in"),
        (lambda f: (f / "config.yaml").write_text("- a\n- b\n"), "expected `key: value` lines"),
        (lambda f: (f / "config.yaml").write_text("a: [1"), "is not YAML"),
        (lambda f: (f / "config.yaml").write_text("model_kind: sae\n"), "model_kind is 'sae'"),
        (lambda f: (f / "W_dec_1.safetensors").unlink(), r"W_dec_1.safetensors is missing"),
        (lambda f: (f / "W_enc_0.safetensors").unlink(), "has no W_enc_0.safetensors"),
        (lambda f: (f / "W_enc_0.safetensors").write_bytes(b"x" * 50), "not a readable safetensors file"),
        (lambda f: rewrite(f / "W_enc_1.safetensors", lambda t: t.pop("b_enc_1")), "b_enc of layer 1 .* is missing"),
        (
            lambda f: rewrite(f / "W_dec_0.safetensors", lambda t: t.update(W_dec_0=torch.zeros(6, 1, 4))),
            r"W_dec of layer 0 .* has shape \[6, 1, 4\], expected \[6, 2, 4\]",
        ),
        (
            lambda f: rewrite(f / "W_enc_1.safetensors", lambda t: t["W_enc_1"].fill_(torch.nan)),
            "W_enc of layer 1 .* holds NaN",
        ),
        (
            lambda f: rewrite(f / "W_enc_1.safetensors", lambda t: t.update(W_skip_1=torch.zeros(4, 4))),
            "skip connections",
        ),
    ],
)  # fmt: skip
def test_damaged_folders_are_named(folder, damage, complaint):
    damage(folder)
    with pytest.raises(ValueError, match=complaint):
        Transcoder.load(folder)


def test_a_layer_without_its_decoder_is_named(tmp_path):
    folder = Transcoder.random(2, 6, 4, cross_layer=False).save(tmp_path / "t")
    rewrite(folder / "layer_1.safetensors", lambda t: t.pop("W_dec"))
    with pytest.raises(ValueError, match=r"W_dec of layer 1 .* is missing"):
        Transcoder.load(folder)


def test_unknown_hooks_are_refused(folder):
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("mlp.hook_in", "ln2.hook_normalized"))
    with pytest.raises(ValueError, match=r"features read 'ln2.hook_normalized'; supported are mlp.hook_in"):
        Transcoder.load(folder)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"activation": "gelu"}, "activation='gelu': expected one of jumprelu, topk, batchtopk"),
        ({"activation": "topk"}, "k=None: topk expects between 1 and 6"),
        ({"activation": "batchtopk", "k": 7}, "k=7: batchtopk expects between 1 and 6"),
        ({"input_hook": "output"}, "input_hook='output'"),
    ],
)
def test_impossible_transcoders(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Transcoder(2, 6, 4, **options)


def test_possible_ks():
    for k in (1, 4):
        assert Transcoder(1, 4, 2, activation="topk", k=k).k == k


def test_public_names():
    assert sl.Transcoder is Transcoder and callable(sl.transcode)
