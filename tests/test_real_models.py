"""The recipes of real models (examples/), end to end on tiny ones: what they write is what results/ promises."""

import json
import runpy
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISED = {
    "base_loss", "control_loss", "sparse_loss", "kl_to_base", "density", "worst_layer_density", "edges_per_query",
    "tokens", "minutes", "tokens_per_second", "peak_gib", "seeds", "command", "density_per_layer", "density_per_head",
    "versions",
}  # fmt: skip


@pytest.mark.parametrize("name", ["smollm2_135m", "gemma3_270m", "stories15m"])
def test_recipe(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for part, words in (("text", 20), ("heldout", 22), ("unseen", 24)):
        documents = [" ".join(f"w{(i * k) % 60}" for i in range(words)) for k in range(1, 60)]
        Path(f"{part}.txt").write_text("\n<|endoftext|>\n".join(documents))
    sl.save(tiny_model("gemma3_text" if "gemma" in name else "llama"), tiny_tokenizer(), tmp_path / "model")
    report = ["--unseen", "unseen.txt", "--json", "found.json"]
    command = ["model", "--out", "run", "--steps", "4", "--batch", "2", *report]
    if name == "stories15m":
        command += ["--tokens", "8000"]
    else:
        command += ["--data", "text.txt", "--heldout", "heldout.txt", "--length", "16", "--micro-batch", "1"]
    monkeypatch.setattr("sys.argv", [f"{name}.py", *command])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    found = json.loads(Path("found.json").read_text())
    assert found.keys() >= PROMISED
    losses = found["base_loss"], found["control_loss"], found["sparse_loss"]
    assert all(row.keys() == {"heldout", "unseen"} for row in losses)
    assert losses[0]["heldout"] != losses[0]["unseen"] and losses[0] != losses[2]
    assert losses[0] == pytest.approx(losses[1]), "taught by the base, the control is the base"
    assert 0 < found["density"] <= found["worst_layer_density"] <= 1
    assert "base_loss" in capsys.readouterr().out
