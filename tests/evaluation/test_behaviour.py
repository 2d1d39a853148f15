"""Is it still the same model? Agreement, KL, task accuracy and next tokens, checked against plain forward passes."""

import json

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.data.batches import TextBatches
from sparselens.evaluation.behaviour import behaviour, markdown, read_prompts
from sparselens.models.loading import add_gates
from sparselens.tasks import Pair, Task
from sparselens.tasks.registry import Words

TEXT = "\n<|endoftext|>\n".join(" ".join(f"w{(i * j + j) % 62}" for j in range(40)) for i in range(60))
PAIRS = tuple(Pair(f"w{i} w{i + 1}", f"w{i + 3} w{i + 1}", f" w{i + 5}", f" w{i + 9}") for i in range(20))


@pytest.fixture(scope="module")
def models():
    sparse = add_gates(tiny_model("llama"), sl.Gate(bias=-1.0)).eval()
    return {"base": tiny_model("llama"), "control": tiny_model("llama", seed=1), "sparse": sparse}


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return TextBatches([str(folder / "text.txt")], tiny_tokenizer(), 16, cache=folder / "cache", need=1 << 20,
                       heldout_tokens=200, progress=False)  # fmt: skip


@pytest.fixture(scope="module")
def result(models, batches):
    prompts = ["w1 w2 w3", "w4 w5"]
    task = Task("after", None, "logit", PAIRS)
    return behaviour(models, tiny_tokenizer(), prompts, batches=batches, tasks=[task], micro_batch=3)


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_text(result, models, batches):
    base, sparse = result["text"]["base"], result["text"]["sparse"]
    assert base["top1_agreement"] == 1 and base["kl_to_base"] == pytest.approx(0, abs=1e-6)
    batch = batches.heldout(0, batches.n_heldout)
    with torch.no_grad():
        ours, theirs = (
            models[name](batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            for name in ("base", "sparse")
        )
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    kl = (ours.log_softmax(-1).exp() * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1).mean().item()
    assert 0 < same < 1, "a model that says something else now and then, or this test checks nothing"
    assert sparse["top1_agreement"] == pytest.approx(same) and sparse["kl_to_base"] == pytest.approx(kl, rel=1e-4)
    assert sparse["density"] < 1 and sparse["agreement_standard_error"] > 0


def test_tasks(result, models):
    tokenizer, words = tiny_tokenizer(), Words(tiny_tokenizer())
    for name, model in models.items():
        right = []
        for pair in PAIRS:
            last = logits(model, words.encode(pair.clean))[-1]
            answer, wrong = (last[tokenizer(text)["input_ids"][0]] for text in (pair.answer, pair.wrong))
            right.append(bool(answer > wrong))
        cell = result["tasks"]["after"][name]
        share = sum(right) / 20
        assert cell == pytest.approx(
            {"accuracy": share, "standard_error": (share * (1 - share) / 20) ** 0.5, "prompts": 20}
        )


def test_next_tokens(result, models):
    tokenizer = tiny_tokenizer()
    for one in result["prompts"]:
        for name, model in models.items():
            p = logits(model, Words(tokenizer).encode(one["prompt"]))[-1].softmax(-1)
            best = p.topk(3)
            said = one["next"][name]
            assert [entry["token"] for entry in said] == [tokenizer.decode([i]) for i in best.indices.tolist()]
            assert [entry["p"] for entry in said] == pytest.approx(best.values.tolist(), rel=1e-5)
        assert one["kl"]["base"] == 0 and one["kl"]["control"] > 0
    same = sum(one["next"]["control"][0]["token"] == one["next"]["base"][0]["token"] for one in result["prompts"])
    assert result["prompts_same_top1"] == {
        "base": 2, "control": same, "sparse": result["prompts_same_top1"]["sparse"]
    }  # fmt: skip


def test_tables(result):
    text = markdown(result)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert [len(lines) for lines in tables[:3]] == [5, 3, 4], "three models, one task, two prompts, and headers"
    assert len(tables) == 3 + 2 * 4, "where control and sparse differ: three ways to group, and places"
    assert all(len({line.count(" |") for line in lines}) == 1 for lines in tables), "every row has all cells"
    assert "top-1 token as base" in text and "`w4 w5`" in text and json.loads(json.dumps(result)) == result


def test_cells_hold_any_token(models):
    odd = behaviour(models, tiny_tokenizer(), ["w1"])
    odd["prompts"][0]["next"]["base"][0]["token"] = "|\n`"
    row = markdown(odd).strip().splitlines()[-1]
    assert "`\\|\\n'`" in row


def test_fifty_ordinary_prompts(tmp_path):
    prompts = read_prompts()
    assert len(set(prompts)) == 50 and all(prompt == prompt.strip() for prompt in prompts)
    (tmp_path / "mine.txt").write_text("one \n\n two\n")
    assert read_prompts(tmp_path / "mine.txt") == ["one", " two"]
    for content, complaint in ((b"\n\n", "holds no prompts"), (b"\xff\xfe", "not UTF-8")):
        (tmp_path / "bad.txt").write_bytes(content)
        with pytest.raises(ValueError, match=complaint):
            read_prompts(tmp_path / "bad.txt")


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        sl.save(model, tiny_tokenizer(), folder / name)
    (folder / "prompts.txt").write_text("w1 w2\nw3\n")
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_command(folders, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    main(["evaluate", *(str(folders / name) for name in ("base", "control", "sparse")), "--data",
          str(folders / "text.txt"), "--sequences", "4", "--behaviour", "said", "--prompts",
          str(folders / "prompts.txt"), "--json", "rows.json"])  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == ["dense", "dense 2", "sparse"]
    assert rows[0]["kl_to_base"] == pytest.approx(0, abs=1e-6) and rows[2]["density"] < 1
    said = json.loads((tmp_path / "said" / "behaviour.json").read_text())
    assert len(said["prompts"]) == 2 and said["text"]["sparse"]["top1_agreement"] == rows[2]["top1_agreement"]
    assert "versions" in said["provenance"]
    assert "| `w1 w2` |" in (tmp_path / "said" / "behaviour.md").read_text()
    assert "dense 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no/model", "--behaviour", "x", "--prompts", "none.txt"], "no such file of prompts"),
        (["no/model", "--behaviour", "x", "--tasks", "ioy"], "unknown task 'ioy'"),
        (["no/model", "--tasks", "ioi"], "for --behaviour FOLDER"),
        (["no/model"], "is not a Run"),
        ([], "name a Run or a model"),
        (["no/model", "--behaviour", __file__], "is a file"),
    ],
)
def test_bad_input_before_any_model_is_loaded(arguments, complaint, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", *arguments])
    assert exit_.value.code == 2 and complaint in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_models_must_share_a_vocabulary(models):
    other = tiny_model("llama")
    other.resize_token_embeddings(32)
    with pytest.raises(ValueError, match="different vocabularies"):
        behaviour({"base": models["base"], "other": other}, tiny_tokenizer(), ["w1"])
