"""A Run becomes a folder that can be published: same model, honest card."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.models.loading import load, save
from sparselens.serving.export import export, short_name
from sparselens.training.sparsify import sparsify


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A full run and a LoRA run of the same tiny model, two steps each."""
    folder = tmp_path_factory.mktemp("export")
    save(tiny_model("llama"), tiny_tokenizer(), folder / "secret-place" / "tiny-llama")
    text = folder / "secret-place" / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(" ".join(f"w{(i * j) % 50}" for j in range(60)) for i in range(1, 200)))
    other = text.with_name("other.txt")
    other.write_text("\n<|endoftext|>\n".join(" ".join(f"w{(i * j) % 50}" for j in range(60)) for i in range(200, 240)))
    options = dict(length=16, batch=2, steps=2, evaluate_sequences=4, heldout=(str(other),), heldout_tokens=300)
    for name, lora in (("full", 0), ("lora", 4)):
        sparsify(
            folder / "secret-place" / "tiny-llama", data=str(text), out=folder / name, control=not lora, lora=lora,
            cache=folder / "cache", show_progress=False, say=lambda text: None, **options,
        )  # fmt: skip
    return folder


@pytest.mark.parametrize(("name", "merge"), [("full", True), ("lora", True), ("lora", False)])
def test_the_exported_model_is_the_same_model(runs, tmp_path, name, merge):
    out = export(runs / name, tmp_path / "hub", merge=merge)
    ids = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = (load(folder)[0](input_ids=ids).logits for folder in (runs / name, out))
    assert torch.allclose(wanted, found, atol=1e-5)
    assert (out / "adapter_config.json").is_file() == (not merge)


def test_the_card_says_what_was_measured_and_no_more(runs, tmp_path):
    card = (export(runs / "full", tmp_path / "hub") / "README.md").read_text()
    rows = {row["kind"]: row for row in json.loads((runs / "full" / "evaluation.json").read_text())}
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "sparselens" and "sparselens" in header["tags"]
    for row in rows.values():
        assert f"{row['loss']:.4f}" in card and f"{row['density']:.2%}" in card
    summary = json.loads((runs / "full" / "summary.json").read_text())
    assert ("did **not** meet" in card) == (not summary["met"])
    assert "Begin every prompt with `<|endoftext|>`" in card
    assert "tiny-llama" in card and "text.txt" in card and "secret-place" not in card
    without = (export(runs / "lora", tmp_path / "lora") / "README.md").read_text()
    assert "no matched dense control" in without
    assert "The control is the base itself" in card and "same further training" not in card
    trained = [{**row, **({"kl_to_base": 0.1} if row["kind"] == "control" else {})} for row in rows.values()]
    (runs / "full" / "evaluation.json").write_text(json.dumps(trained))
    try:
        assert "same further training" in (export(runs / "full", tmp_path / "trained") / "README.md").read_text()
    finally:
        (runs / "full" / "evaluation.json").write_text(json.dumps(list(rows.values())))


def test_refusals(runs, tmp_path, capsys):
    with pytest.raises(ValueError, match="not a Run"):
        export(tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="no adapter to export"):
        export(runs / "full", tmp_path / "x", merge=False)
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        export(runs / "full", tmp_path / "taken")
    assert not (tmp_path / "x").exists()
    main(["export", str(runs / "full"), "--out", str(tmp_path / "cli")])
    assert (tmp_path / "cli" / "README.md").is_file() and "cli" in capsys.readouterr().out


class FakeHub:
    """What `push` asks of huggingface_hub's HfApi."""

    said: ClassVar[list] = []

    def create_repo(self, name, private, exist_ok):
        if name == "me/forbidden":
            raise OSError("403 Forbidden\nRequest ID: 1")
        self.said.append((name, private, exist_ok))
        return type("RepoUrl", (str,), {"repo_id": name})(f"https://huggingface.co/{name}")

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.said.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


def test_push_publishes_what_export_writes(runs, monkeypatch):
    monkeypatch.setattr("sparselens.serving.export.HfApi", FakeHub)
    assert sl.push(sl.Run(runs / "full"), "me/sparse", private=True) == "https://huggingface.co/me/sparse"
    created, (name, files) = FakeHub.said
    assert created == ("me/sparse", True, True) and name == "me/sparse"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    with pytest.raises(ValueError, match=r"could not publish me/forbidden \(403 Forbidden\); log in"):
        sl.push(runs / "full", "me/forbidden")
    with pytest.raises(ValueError, match="not a name"):
        sl.push(runs / "full", "not a name")


def test_names_of_the_machine_stay_on_it():
    assert short_name("gpt2") == "gpt2" and short_name("org/model") == "org/model"
    assert short_name("/home/me/models/mine") == "mine" and short_name("../a/b.gguf") == "b"


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_difference_to_the_base_says_what_it_costs(runs, tmp_path, name):
    """A LoRA run is merged first; what comes back is measured on the Run's own held-out text."""
    said = []
    out = export(runs / name, tmp_path / "small", delta=8, say=said.append)
    about = json.loads((out / "delta.json").read_text())
    assert (
        about["cost"]["sequences"] > 1 and 0 <= about["cost"]["kl"] < 1e-4 and abs(about["cost"]["loss_added"]) < 1e-3
    )
    assert "difference to" in said[0] and "8 bits" in said[0] and "held-out sequences" in said[0]
    ids = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = (load(folder)[0](input_ids=ids).logits for folder in (runs / name, out))
    assert torch.allclose(wanted, found, atol=1e-3)
    main(["export", str(runs / name), "--out", str(tmp_path / "four"), "--delta", "4"])
    assert json.loads((tmp_path / "four" / "delta.json").read_text())["bits"] == 4
    with pytest.raises(SystemExit):
        main(["export", str(runs / name), "--push", "me/it", "--delta", "4"])
