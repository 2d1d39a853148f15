"""The examples of features from end to end on tiny models: train, faces, traces, and the file for results/."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.models.loading import add_gates

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def house(tmp_path, monkeypatch):
    sl.save(tiny_model("gpt2"), tiny_tokenizer(), tmp_path / "dense")
    sl.save(add_gates(tiny_model("gpt2"), sl.Gate(bias=0.5)), tiny_tokenizer(), tmp_path / "sparse")
    documents = (" ".join(f"w{(i * j + j) % 62}" for j in range(60)) for i in range(200))
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield tmp_path
    for name in ("features_study", "stories15m", "stories15m_features", "smollm2_135m", "smollm2_135m_features"):
        sys.modules.pop(name, None)


def run(name, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    importlib.import_module(name).main()


def check(found, out, prompts):
    for role in ("dense", "sparse"):
        assert found["transcoders"][role].keys() >= {"fvu", "l0", "dead", "loss_replaced", "loss_model", "tokens"}
        heads = found["heads_for_80"][role]
        assert heads["n"] == len(heads["each"]) == len(prompts) and heads["low"] <= heads["mean"] <= heads["high"]
        assert sl.Feature(out / role, 0, 0).label
    assert set(found["traces"]) == set(prompts)
    for row in found["traces"].values():
        for role in ("dense", "sparse"):
            assert row[role]["cut"].keys() >= {
                "n",
                "pearson_tangent",
                "pearson_path",
                "spearman_path",
                "sign_agreement",
            }
            assert row[role]["cut"]["n"] > 0 and row[role]["heads_cut"]["n_heads"] == row[role]["heads_for_80"]
    assert all(found[name] for name in ("command", "versions", "hardware"))
    for name in prompts:
        rows = json.loads((out / f"trace-{name}" / "trace.json").read_text())
        assert rows["labels"] and (out / f"trace-{name}" / "figure4.png").is_file()


def test_smollm2(house, monkeypatch, capsys):
    prompts = ["opposite-large", "ioi-mary"]
    arguments = [
        "dense", "sparse", "--data", "text.txt", "--out", "out", "--json", "results.json", "--features", 48, "--k", 4,
        "--batch", 4, "--tokens", 800, "--length", 20, "--evaluate-sequences", 2, "--faces-tokens", 5000, "--cuts", 10,
        "--prompts", *prompts,
    ]  # fmt: skip
    for stage in ("dense", "sparse", "faces"):
        run("smollm2_135m_features", [*arguments, "--only", stage], monkeypatch)
    assert not Path("results.json").exists()
    run("smollm2_135m_features", arguments, monkeypatch)  # goes on with what is missing
    check(json.loads(Path("results.json").read_text()), house / "out", prompts)
    assert '"heads' not in capsys.readouterr().err


def test_stories(house, monkeypatch):
    prompts = ["opposite", "once"]
    run("stories15m_features", [
        "dense", "sparse", "--out", "out", "--json", "results.json", "--tokens", 6000, "--features", 32, "--steps", 4,
        "--batch", 4, "--evaluate-sequences", 2, "--faces-tokens", 4500, "--cuts", 8, "--prompts", *prompts,
    ], monkeypatch)  # fmt: skip
    check(json.loads(Path("results.json").read_text()), house / "out", prompts)
    assert (house / "out" / "stories.npy").is_file()
