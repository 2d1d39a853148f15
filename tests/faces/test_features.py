"""From a transcoder and text to faces: the pass, the files, what is refused, what is found."""

import json
import os
import signal
from html import escape
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.faces import features as verb
from sparselens.faces.finish import Book, Writer, nearest, promoted, words_of, written
from sparselens.faces.store import BLOCK, Faces
from sparselens.training.engine import Interrupted
from sparselens.transcoders.mlp_hooks import observe
from sparselens.transcoders.transcoder import Transcoder

QUICK = dict(tokens=6000, batch=8, contexts=4, before=4, after=2, show_progress=False, say=lambda text: None)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A model, text, and a transcoder trained on it for a few steps."""
    folder = tmp_path_factory.mktemp("house")
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), folder / "base")
    sl.save(tiny_model("gpt2", seed=1), tiny_tokenizer(), folder / "other")
    documents = (" ".join(f"w{(i * j + j) % 62}" for j in range(60)) for i in range(200))
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    sl.transcode(
        str(folder / "base"), data=str(folder / "text.txt"), out=folder / "coder", features=70, k=6, steps=12, batch=4,
        length=32, cache=folder / "cache", evaluate_every=12, evaluate_sequences=4, heldout_tokens=300,
        show_progress=False, say=lambda text: None,
    )  # fmt: skip
    return folder


def read(house, out=None, **options):
    text = {"data": str(house / "text.txt"), "length": 32, "cache": house / "cache"}
    return sl.features(house / "coder", out=out, **{**text, **QUICK, **options})


@pytest.fixture(scope="module")
def faces(house):
    return read(house)


def test_faces_lie_beside_the_transcoder_and_are_small(faces, house):
    assert faces.path == house / "coder" / "faces" and len(faces) == 140
    assert {path.suffix for path in faces.path.iterdir()} == {".json", ".safetensors"}
    assert faces.about["bytes_per_feature"] < 2048 and not (faces.path / "progress").exists()
    assert Faces(house / "coder").about == faces.about
    blobs = [len(load_file(faces.path / f"layer_{layer}.safetensors")["blob"]) for layer in range(2)]
    assert faces.about["bytes_per_feature"] == pytest.approx(sum(blobs) / 140, abs=0.06)


def test_cards_are_true(faces, house):
    """Every context is found again in the model: tokens, activations, and that nothing stronger was passed over."""
    model, tokenizer = sl.load(house / "base")
    coder = Transcoder.load(house / "coder")
    batches = verb._batches(
        str(house / "text.txt"), house / "coder", model, tokenizer, verb.Settings(tokens=6000),
        verb.Text(length=32, cache=house / "cache"), print, False,
    )[0]  # fmt: skip
    n = faces.about["sequences"]
    ids = batches.train(0, n)["input_ids"]
    inputs, _ = observe(model, batches.train(0, n), "mlp-input")
    for layer in range(2):
        a = coder.encode(layer, inputs[layer])
        for f in range(0, 70, 9):
            card = faces.card(layer, f)
            assert card["fires"] == int((a[..., f] > 0).sum()) == sum(card["histogram"])
            assert card["largest"] == pytest.approx(float(a[..., f].max()), rel=1e-3)
            if not card["fires"]:
                continue
            assert 0 < len(card["nearest"]) <= 5 and all(0 < cosine <= 1 for *_, cosine in card["nearest"])
            assert card["mean"] == pytest.approx(float(a[..., f].sum() / card["fires"]), rel=1e-3)
            strongest = a[..., f].amax(1).sort(descending=True).values
            assert card["top"][0]["value"] == pytest.approx(float(strongest[0]), rel=1e-3)
            for one in [*card["top"], *card["lower"]]:
                sequence, position = one["place"]
                assert one["value"] == pytest.approx(float(a[sequence, position, f]), rel=1e-3)
                words = tokenizer.convert_ids_to_tokens(ids[sequence].tolist())
                first = position - one["at"]
                assert one["text"] == words[first : first + len(one["text"])]
                levels = a[sequence, first : first + len(one["text"]), f] * 255 / card["largest"]
                assert max(abs(x - y) for x, y in zip(one["activations"], levels.tolist(), strict=True)) <= 1.5
    assert sum(faces.card(layer, f)["fires"] > 0 for layer in range(2) for f in range(70)) > 40


def test_a_context_ends_with_its_document():
    """Before and behind; of documents that are packed, position ids begin again."""
    lengths = [3, 1, 4, 5, 2]
    places = torch.cat([torch.arange(n) for n in lengths])
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    batch = {"input_ids": torch.arange(100, 115)[None], "position_ids": places[None]}
    asked = []
    book = Book(SimpleNamespace(train=lambda *some: asked.append(some) or batch), 7, 3, None)
    assert asked == [(0, 3), (3, 3), (6, 1)]
    for position in range(15):
        for before, after in ((0, 0), (2, 1), (1, 3), (9, 9)):
            near = range(max(0, position - before), min(15, position + after + 1))
            wanted = [i for i in near if owner[i] == owner[position]]
            text, at = book.around(0, position, before, after)
            assert text == [str(100 + i) for i in wanted] and wanted[at] == position


def test_contexts_of_a_card_are_those_that_are_there_each_text_once():
    """The first sequence has number 0; an empty slot -1."""
    texts = {0: ["a", "b"], 1: ["c", "d"], 2: ["a", "b"]}
    book = SimpleNamespace(around=lambda sequence, position, before, after: (texts[sequence], 1))
    kept = {
        "top_sequence": np.array([[0, 1, 2, -1]]), "top_position": np.array([[1, 1, 1, 0]]),
        "top_value": np.array([[4.0, 3.0, 2.0, 0.0]]),
        "top_window": np.array([[[0, 1, 4], [0, 0, 3], [0, 0, 2], [9, 9, 9]]]),
    }  # fmt: skip
    found = Writer(book, verb.Settings(before=1, after=1), 100, 1)._excerpts(kept, "top", 0, 4.0, set())
    assert [slot for slot, _ in found] == [0, 1]
    assert found[0][1] == {"text": ["a", "b"], "activations": [0, 64], "at": 1, "value": 4.0, "place": [0, 1]}


def test_words_a_search_finds_a_feature_by():
    """The six words it fires on most, the commonest first, and the three it promotes most."""
    fired = ["c", "b", "b", "a", "a", "a", "d", "e", "f", "g", " "]
    card = {
        "top": [{"text": ["x", word], "at": 1} for word in fired],
        "promoted": [(f" P{i}", 1.0) for i in range(5)],
    }
    assert words_of(card) == "a\tb\tc\td\te\tf\tp0\tp1\tp2"


def test_promoted_words_raise_their_logits(house):
    """What a feature promotes most is what its decoders, added to the end of the residual stream, raise most."""
    model, _ = sl.load(house / "base")
    coder = Transcoder.load(house / "coder")
    z, words, _, lowered = promoted(model, coder, 0, 3)
    norm = model.requires_grad_(False).transformer.ln_f
    for f in (0, 33, 69):
        write = coder.W_dec[0][f].sum(0)
        centred = write - write.mean()
        logits = model.lm_head(centred * norm.weight)
        order = logits.argsort(descending=True)
        assert words[f].tolist() == order[:3].tolist() and lowered[f].tolist() == order.flip(0)[:3].tolist()
        wanted = (logits.max() - logits.mean()) / logits.std()
        assert float(z[f, 0]) == pytest.approx(float(wanted), rel=1e-4)


def test_nearest_features_read_and_write_most_alike():
    """The mean of two cosines, over all layers; not the feature itself, and none that never fired."""
    model, coder = tiny_model("gpt2"), Transcoder.random(2, 7, 32)
    with torch.no_grad():  # whatever their lengths
        for layer in range(2):
            coder.W_enc[layer] *= torch.linspace(0.1, 9, 7)[:, None]
            coder.W_dec[layer] *= torch.linspace(5, 0.2, 7)[:, None, None]
    fires = [torch.tensor([1, 2, 0, 3, 1, 1, 1]), torch.tensor([4, 0, 1, 1, 1, 1, 2])]
    cosines, numbers = nearest(model, coder, fires, 4)
    reads = torch.cat(list(coder.W_enc))
    writes = torch.cat([written(model, coder, layer) for layer in range(2)])
    every = sum(torch.nn.functional.cosine_similarity(x[:, None], x[None], -1) for x in (reads, writes)) / 2
    fired = torch.cat(fires) > 0
    for i in range(14):
        row = torch.where(fired & fired[i], every[i], 0.0)
        row[i] = -1
        best = row.topk(4)
        torch.testing.assert_close(cosines[i], best.values, rtol=1e-5, atol=1e-6)
        assert [n for n, c in zip(numbers[i].tolist(), cosines[i].tolist(), strict=True) if c > 0] == [
            n for n, c in zip(best.indices.tolist(), best.values.tolist(), strict=True) if c > 0
        ]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "olmo2"])
def test_what_a_feature_writes_goes_through_the_norm_behind_the_mlp(family):
    """Of all layers together; its gain, where a family has one: 1 + weight in Gemma, the weight in OLMo 2."""
    model, coder = tiny_model(family), Transcoder.random(2, 6, 32)
    found = written(model, coder, 0)
    wanted = torch.zeros(6, 32)
    for layer in range(2):
        rows = coder.W_dec[0][:, layer]
        if family != "gpt2":
            with torch.no_grad():
                weight = model.model.layers[layer].post_feedforward_layernorm.weight
                weight += torch.linspace(0, 1, 32)
            found = written(model, coder, 0)
            rows = rows * (weight + (family == "gemma2"))
        wanted = wanted + rows
    torch.testing.assert_close(found, wanted)


def test_a_killed_pass_goes_on(house, faces, tmp_path, monkeypatch):
    """Killed after five batches, some of them behind the last state: the same files in the end."""
    calls, batch, save = [0], verb._Pass._batch, verb._Pass._save

    def fragile(self, count):
        calls[0] += 1
        if calls[0] == 6:
            raise MemoryError("killed")
        if calls[0] == 4:
            save(self)
        batch(self, count)

    monkeypatch.setattr(verb._Pass, "_batch", fragile)
    with pytest.raises(MemoryError):
        read(house, tmp_path / "faces")
    assert not (tmp_path / "faces" / "faces.json").exists()
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        read(house, tmp_path / "faces")
    with pytest.raises(ValueError, match="no faces in"):
        Faces(tmp_path / "faces")
    said = []
    again = read(house, tmp_path / "faces", resume=True, say=said.append)
    assert any(text.startswith("going on after 24") for text in said)
    for layer in range(2):
        name = f"layer_{layer}.safetensors"
        assert (again.path / name).read_bytes() == (faces.path / name).read_bytes()
    assert read(house, tmp_path / "faces", resume=True).about == again.about  # complete: nothing is done again


def test_ctrl_c_leaves_a_state_to_go_on_from(house, faces, tmp_path, monkeypatch):
    batch = verb._Pass._batch

    def press(self, count):
        batch(self, count)
        if self.next == 32:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(verb._Pass, "_batch", press)
    with pytest.raises(Interrupted, match=r"stopped after 32 of \d+ sequences; continue with --resume"):
        read(house, tmp_path / "faces")
    monkeypatch.setattr(verb._Pass, "_batch", batch)
    again = read(house, tmp_path / "faces", resume=True)
    assert (again.path / "layer_1.safetensors").read_bytes() == (faces.path / "layer_1.safetensors").read_bytes()


def test_processes_share_the_writing(house, faces, tmp_path, monkeypatch):
    monkeypatch.setattr("sparselens.faces.finish.SHARED_FROM", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    shared = read(house, tmp_path / "faces")
    for name in ("layer_0.safetensors", "layer_1.safetensors", "index.json"):
        assert (shared.path / name).read_bytes() == (faces.path / name).read_bytes()


def test_memory_does_not_grow_with_the_text(house, tmp_path):
    sizes = []
    for tokens in (4096, 6000):
        passing = []
        original = verb._Pass.write

        def keep(self, *arguments, passing=passing, original=original):
            passing.append(sum(t.numel() * t.element_size() for t in self.collector.tensors().values()))
            return original(self, *arguments)

        verb._Pass.write = keep
        try:
            read(house, tmp_path / str(tokens), tokens=tokens)
        finally:
            verb._Pass.write = original
        sizes += passing
    assert len(sizes) == 2 and sizes[0] == sizes[1]


def test_budget(house, tmp_path):
    small = read(house, tmp_path / "small", budget=250, contexts=20)
    assert small.about["bytes_per_feature"] <= 250
    assert all(small.card(0, f)["top"] for f in range(70) if small.card(0, f)["fires"])


# ---- looking at them -------------------------------------------------------------------------------------------------


def test_feature(faces, house):
    feature = sl.Feature(house / "coder", 1, 66)
    assert feature.card["feature"] == 66 and feature.card["layer"] == 1 and 66 // BLOCK == 1
    assert feature.label == faces.label(1, 66) and feature.label in repr(feature)
    busy = max(range(70), key=lambda f: faces.card(0, f)["fires"])
    html = sl.Feature(faces, 0, busy)._repr_html_()
    assert "<script" not in html and escape(faces.card(0, busy)["top"][0]["text"][0]) in html and "promotes" in html


def test_the_studio_calls_features_by_their_labels(faces, house, tmp_path):
    from sparselens.live.features import Features

    graph = sl.trace(sl.load(house / "base"), house / "coder", "w3 w5 w8", budget=2)
    node = int((graph.kind == 0).nonzero()[0])
    for folder in (house / "coder", tmp_path):
        member = SimpleNamespace(transcoder=folder)
        row = Features(SimpleNamespace(member=lambda role, member=member: member))._row("dense", graph, node)
        label = faces.label(row["layer"], row["feature"])
        assert row["label"] == (f"{label} ({graph.label(node)})" if folder != tmp_path else graph.label(node))


def test_hostile_words_are_text_in_the_card(faces):
    from sparselens.faces.card import html

    card = {**faces.card(0, 0), "label": "<img src=x onerror=alert(1)>", "promoted": [("</div><b>", 1.0)]}
    card["top"] = [{"text": ["<i>", "\n"], "activations": [255, 0], "at": 0, "value": 1.0, "place": [0, 0]}]
    shown = html(card)
    assert "<img" not in shown and "<b>&lt;" in shown and "<i>" not in shown


def test_hostile_numbers_are_text_in_the_card(faces):
    """A file of faces may be anybody's: what should be a number may be markup."""
    from sparselens.faces.card import html

    for name in ("layer", "feature", "fits"):
        card = {**faces.card(0, 0), name: "<img src=x onerror=alert(1)>"}
        assert "<img" not in html(card)


def test_search(faces):
    busy = max(((layer, f) for layer in range(2) for f in range(70)), key=lambda p: faces.card(*p)["fires"])
    card = faces.card(*busy)
    word = card["top"][0]["text"][card["top"][0]["at"]]
    assert busy in [(f.layer, f.feature) for f in faces.search(word, most=200)]
    assert [(f.layer, f.feature) for f in faces.search("1/17")] == [(1, 17)]
    with pytest.raises(ValueError, match=r"no feature of .* has 'zebra'"):
        faces.search("zebra")
    with pytest.raises(ValueError, match="nothing to search for"):
        faces.search(" ")


@pytest.mark.parametrize("place", [(0, 70), (2, 0), (-1, 0)])
def test_a_feature_that_does_not_exist(faces, place):
    with pytest.raises(ValueError, match=r"no feature .* has 2 layers \(0 to 1\) of 70 features"):
        sl.Feature(faces, *place)


def test_a_labeller_of_ones_own(house, tmp_path):
    said = []

    def mine(card):
        if card["feature"] == 3:
            raise RuntimeError("quota")
        return f"mine {card['feature']}" if card["layer"] == 0 else None

    made = read(house, tmp_path / "own", labeller=mine, say=said.append)
    assert sl.Feature(made, 0, 2).label == "mine 2" == made.label(0, 2)
    assert not made.label(0, 3).startswith("mine") and any("labeller failed on 0/3" in text for text in said)


def test_what_fits_is_told_with_all_contexts_the_label_was_made_from(house, tmp_path):
    """A small budget leaves contexts out of the card: "true of 11 of 3" would be nonsense."""
    whole, small = (read(house, tmp_path / str(b), budget=b, contexts=12) for b in (10_000, 250))
    cut = 0
    for f in range(70):
        card, less = whole.card(0, f), small.card(0, f)
        assert less["fits"] == card["fits"] <= card["contexts"] == less["contexts"] == len(card["top"])
        told = f"true of {less['fits']} of {less['contexts']} top contexts"
        assert (told in sl.Feature(small, 0, f)._repr_html_()) == bool(less["fits"])
        cut += less["fits"] > len(less["top"])
    assert cut > 5, "the case needs contexts that were left out"


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_too_little_text(house, tmp_path):
    (tmp_path / "short.txt").write_text(" ".join(f"w{i % 60}" for i in range(900)))
    with pytest.raises(ValueError, match=r"too few.*at least 4,096.*give more text"):
        read(house, tmp_path / "a", data=str(tmp_path / "short.txt"))
    (tmp_path / "tiny.txt").write_text("w1 w2")
    with pytest.raises(ValueError, match=r"short.*faces need thousands of tokens"):
        read(house, tmp_path / "b", data=str(tmp_path / "tiny.txt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "tiny.txt"], "nothing is left behind"


@pytest.mark.parametrize("change", [{"tokens": 1e6}, {"contexts": "20"}, {"budget": 2.5}])
def test_settings_of_another_kind_are_refused_in_words(house, tmp_path, change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.*expected a whole number"):
        read(house, tmp_path / "faces", **change)


def test_less_text_than_asked_is_said(house, tmp_path):
    said = []
    read(house, tmp_path / "less", tokens=10**6, say=said.append)
    assert "instead of 1,000,000 (--tokens): there are no more" in said[0]


def test_a_transcoder_without_its_model(house, tmp_path):
    coder = Transcoder.load(house / "coder")
    coder.model_name = "nobody/nothing"
    coder.save(tmp_path / "coder")
    with pytest.raises(ValueError, match=r"trained on 'nobody/nothing', which cannot be loaded.*--model"):
        sl.features(tmp_path / "coder", str(house / "text.txt"), **QUICK)
    coder.model_name = ""
    coder.save(tmp_path / "nameless")
    with pytest.raises(ValueError, match="does not say which model it was trained on; name it with --model"):
        sl.features(tmp_path / "nameless", str(house / "text.txt"), **QUICK)
    with pytest.raises(ValueError, match="give `model` and `out`"):
        sl.features(coder, str(house / "text.txt"), **QUICK)


def test_another_model_is_refused_by_name(house, tmp_path):
    with pytest.raises(ValueError, match=r"trained on .*base.*\(dense\), not on .*other.*\(dense\)"):
        read(house, tmp_path / "faces", model=str(house / "other"))
    model, tokenizer = sl.load(house / "base")
    gated = sl.add_gates(model, sl.Gate(bias=0.0))
    with pytest.raises(ValueError, match=r"\(dense\), not on .*\(sparse\)"):
        sl.trace((gated, tokenizer), house / "coder", "w3 w5 w8")
    half = sl.load(house / "base")[0].bfloat16().float()
    sl.trace((half, tokenizer), house / "coder", "w3 w5 w8", budget=2)  # rounding is not another model


def test_a_damaged_file(faces, tmp_path):
    import shutil

    shutil.copytree(faces.path, tmp_path / "faces")
    path = tmp_path / "faces" / "layer_0.safetensors"
    content = bytearray(path.read_bytes())
    content[-200:] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|cannot be read"):
        Faces(tmp_path / "faces").card(0, 69)
    index = json.loads((tmp_path / "faces" / "index.json").read_text())
    for name, layer in (("labels", 1), ("words", 0)):
        less = index | {name: [words[: len(words) - (i == layer)] for i, words in enumerate(index[name])]}
        (tmp_path / "faces" / "index.json").write_text(json.dumps(less))
        with pytest.raises(ValueError, match=rf"index\.json is damaged: {name} are missing"):
            Faces(tmp_path / "faces").label(0, 0)
    (tmp_path / "faces" / "index.json").write_text(json.dumps(index))
    about = json.loads((tmp_path / "faces" / "faces.json").read_text())
    for change in ({"n_features": 71}, {"n_features": 10**15}, {"n_layers": 10**15}):
        (tmp_path / "faces" / "faces.json").write_text(json.dumps(about | change))
        found = Faces(tmp_path / "faces")
        with pytest.raises(ValueError, match=r"damaged"):
            found.label(0, 69)
        if "n_features" in change:
            with pytest.raises(ValueError, match=r"damaged"):
                found.card(1, 70 if change["n_features"] == 71 else 69)
    (tmp_path / "faces" / "faces.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        Faces(tmp_path / "faces")


def test_command(house, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "namer.py").write_text("def name(card):\n    return 'x' if card['feature'] == 0 else None\n")
    arguments = ["features", str(house / "coder"), "--data", str(house / "text.txt"), "--out", "faces",
                 "--length", "32", "--tokens", "5000", "--cache", str(house / "cache"),
                 "--labeller", "namer:name"]  # fmt: skip
    main(arguments)
    assert "features fired on" in capsys.readouterr().out and Faces("faces").label(0, 0) == "x"
    for change, sentence in (
        (["--out", "b", "--labeller", "namer:nothing"], "expected MODULE:FUNCTION"),
        (["--tokens", "0"], "expected at least 1"), (["--out", "c", "--data", "nothing.txt"], "nothing.txt"),
        ([], "already holds a run"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, *change])
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_made_data_needs_no_text(tmp_path):
    """The addition model's transcoder knows how its sums are made; its model lies beside it."""
    from sparselens.demo.addition import AdditionBatches, make_model

    model, tokenizer = make_model(0)
    sl.save(model, tokenizer, tmp_path / "run" / "base" / "model")
    sl.transcode(
        model, data=AdditionBatches(0), out=tmp_path / "run" / "transcoders" / "dense", features=16, k=4, steps=4,
        batch=8, evaluate_every=4, evaluate_sequences=8, name="addition-dense", show_progress=False,
        say=lambda text: None,
    )  # fmt: skip
    made = sl.features(tmp_path / "run" / "transcoders" / "dense", **(QUICK | {"tokens": 5000}))
    assert made.about["model"] == "addition-dense" and made.about["data"]["name"] == "addition"
    assert torch.tensor([made.card(0, f)["fires"] for f in range(16)]).sum() > 0
