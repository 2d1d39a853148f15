"""`sl.push` and `sl.load` through huggingface_hub itself, against a hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from copying_runs import sparsify
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """(the address of a hub, the folder of its repositories)."""
    root = tmp_path_factory.mktemp("hub")
    command = [sys.executable, str(TESTS / "hub_server.py"), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}", root
        process.terminate()


def ask(hub, code, cwd, token="hf_test"):
    """Run in a process of its own that knows no other hub."""
    home = str(cwd / "home")
    more = {"HF_ENDPOINT": hub[0], "HF_TOKEN": token, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    source = str(Path(sl.__file__).parents[1])
    environment = os.environ | more | {"PYTHONPATH": source, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd)


@pytest.fixture(scope="module")
def pushed(hub, tmp_path_factory):
    """A tiny model on the hub, a Run that began with it by name, and what `push` said."""
    folder = tmp_path_factory.mktemp("secret-place")
    base = hub[1] / "them" / "tiny"
    sl.save(tiny_model("llama"), tiny_tokenizer(), base)
    (base / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    sparsify(base, folder / "run", steps=2)
    record = folder / "run" / "run.json"
    record.write_text(record.read_text().replace(str(base), "them/tiny"))  # as if started by its name
    done = ask(hub, "import sparselens as sl; print(sl.push('run', 'me/sparse-tiny', private=True))", folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_what_is_pushed_is_loaded_again(hub, pushed):
    folder, said = pushed
    assert said.strip().endswith("me/sparse-tiny")
    code = (
        "import sparselens as sl, torch; model, tokenizer = sl.load('me/sparse-tiny')\n"
        "from sparselens.models.loading import is_gated\n"
        "assert is_gated(model) and tokenizer('w3')['input_ids']\n"
        "torch.save(model(torch.arange(2, 14)[None]).logits, 'logits.pt')"
    )
    done = ask(hub, code, folder)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        wanted = sl.load(folder / "run")[0](torch.arange(2, 14)[None]).logits
    assert torch.allclose(torch.load(folder / "logits.pt", weights_only=True), wanted, atol=1e-6)


def test_the_card_is_complete_and_names_no_place_on_this_machine(hub, pushed):
    files = {path.name: path for path in (hub[1] / "me" / "sparse-tiny").iterdir()}
    card = files["README.md"].read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "them/tiny" and header["license"] == "mit"
    assert header["library_name"] == "sparselens" and "sparselens" in header["tags"]
    assert header["metrics"] == ["loss", "kl_to_base", "density"]
    (index,) = header["model-index"]
    assert {one["type"] for one in index["results"][0]["metrics"]} == {"loss", "kl_to_base", "density"}
    assert 'sl.load("me/sparse-tiny")' in card
    assert "![" in card and "(figure1.png)" in card
    assert files["figure1.png"].read_bytes()[:4] == b"\x89PNG" and files["figure1.png"].stat().st_size > 5_000
    for path in files.values():
        assert b"secret-place" not in path.read_bytes() and b"/tmp/" not in path.read_bytes(), path.name


def test_the_card_names_the_dataset(pushed, tmp_path):
    import json

    from sparselens.serving.export import Facts, model_card

    record = json.loads((pushed[0] / "run" / "run.json").read_text())
    record["config"]["text"] = {"patterns": ["owner/stories:en:train", "mine/*.jsonl"]}
    run = sl.Run(pushed[0] / "run")
    run.record = record
    header = yaml.safe_load(model_card(run, Facts("me/x", license="mit")).split("---")[1])
    assert header["datasets"] == ["owner/stories"]


def test_a_hub_that_says_no_is_one_sentence(hub, pushed):
    done = ask(hub, "import sparselens as sl; sl.push('run', 'me/other')", pushed[0], token="hf_wrong")
    assert "could not publish me/other" in done.stderr and "hf auth login" in done.stderr
    done = ask(hub, "import sparselens as sl; sl.load('me/nothing')", pushed[0])
    assert "no model found at 'me/nothing'" in done.stderr.splitlines()[-1]
