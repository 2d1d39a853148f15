"""Malformed inputs, made by hand, to every command: exit code 2, one sentence, nothing written (house.py)."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sample_run import PROMPT, command

DEEP = "[" * 100_000 + "]" * 100_000
SPARSIFY = ["sparsify", "base", "--data", "text.txt", "--out", "new", "--cache", "cache", "--length", "16",
            "--heldout-tokens", "300", "--batch", "2", "--steps", "20"]  # fmt: skip
TRANSCODE = ["transcode", "base", "--data", "text.txt", "--out", "new", "--cache", "cache", "--length", "16",
             "--heldout-tokens", "300", "--batch", "2", "--steps", "20", "--features", "16", "--k", "4"]  # fmt: skip
DISCOVER = ["discover", "base", "--task", "pairs.jsonl", "--out", "new"]
COMPARE = ["compare", "base", "base", "--tasks", "pairs.jsonl", "--out", "new"]
TRACE = ["trace", "run", "--transcoder", "coder", "--prompt", PROMPT, "--out", "new"]
FEATURES = ["features", "coder", "--data", "text.txt", "--out", "new", "--cache", "cache", "--length", "16"]
RESUME = ["sparsify", "base", "--data", "text.txt", "--out", "run", "--cache", "cache", "--length", "16",
          "--heldout-tokens", "300", "--batch", "2", "--steps", "20", "--evaluate-every", "10", "--resume"]  # fmt: skip


def named(cases):
    """Readable ids: the words that differ."""
    return [pytest.param(case, id=ascii(" ".join(str(part) for part in case)[-60:])) for case in cases]


# ---- arguments -------------------------------------------------------------------------------------------------------

ARGUMENTS = [
    *([*SPARSIFY, *change.split()] for change in (
        "--steps 0", "--steps -1", "--steps 1.5", "--steps many", "--batch 0", "--micro-batch 3", "--micro-batch 0",
        "--lr nan", "--lr inf", "--lr 0", "--lr -1", "--bias nan", "--bias-lr 0", "--density 0", "--density 2",
        "--density nan", "--closing 0", "--closing nan", "--tolerance 0", "--tolerance nan", "--tolerance inf",
        "--target nan", "--target low", "--target inf", "--length 1", "--heldout-tokens 0",
        "--lora -1", "--precision fp8", "--loss mse", "--tracker paper", "--seed abc", "--seed -1",
        "--evaluate-every 0", "--data",
        "--checkpoint-every 0", "--warmup 2", "--decay -1", "--weight-decay nan", "--clip inf", "--slack nan",
        "--normalise some", "--no-such-flag", "--text-field nothing --data text.jsonl", "--heldout nothing.txt",
        "--data nothing.txt", "--data nothing/*.txt", "--data run.zip", "--data base/model.safetensors",
        "--out text.txt",
        "--out base", "--out text.txt/deeper", "--out run", "--resume", "--cache text.txt",
    )),
    ["sparsify"], ["sparsify", "base"], ["sparsify", "base", "--data", "text.txt"], [], ["sparsen"], ["--steps", "3"],
    ["sparsify", "nothing", *SPARSIFY[2:]], ["sparsify", "", *SPARSIFY[2:]], ["sparsify", "/", *SPARSIFY[2:]],
    ["sparsify", "run", *SPARSIFY[2:]], ["sparsify", "text.txt", *SPARSIFY[2:]],
    ["sparsify", "a" * 5000, *SPARSIFY[2:]],
    ["sparsify", "no\x00thing", *SPARSIFY[2:]], ["sparsify", "../../../etc/passwd", *SPARSIFY[2:]],
    ["sparsify", "owner/" + "x" * 300, *SPARSIFY[2:]], ["sparsify", "base\udcff", *SPARSIFY[2:]],
    [*SPARSIFY, "--out", "o\x00ut"], [*SPARSIFY, "--out", "x" * 300], [*SPARSIFY, "--data", "te\x00xt.txt"],
    *([*TRANSCODE, *change.split()] for change in (
        "--features 0", "--k 0", "--k 17", "--activation relu", "--reads all", "--sparsity -1", "--sparsity nan",
        "--threshold 0", "--bandwidth inf", "--lr nan", "--steps 0", "--batch -3", "--normalise-over 0", "--seed x",
        "--out run", "--out text.txt", "--resume", "--json base", "--json text.txt/rows.json",
        "--data nothing.jsonl", "--precision int8", "--sparsity-warmup 1.1", "--dead-after 0", "--sharpness -1",
    )),
    ["transcode", "nothing", *TRANSCODE[2:]], ["transcode"],
    *([*DISCOVER, *change.split()] for change in (
        "--task nothing", "--task nothing.jsonl", "--task text.txt", "--task base", "--prompts 1", "--prompts -4",
        "--points 0", "--steps 0", "--method guess", "--path long", "--ablation none", "--selection best",
        "--memory-mb 0", "--seed one", "--out text.txt", "--out text.txt/x", "--json base", "--json text.txt/x",
        "--task ioi", "--task addition", "--task greater-than",
    )),
    ["discover", "nothing"], ["discover", "coder", *DISCOVER[2:]], ["discover"],
    *([*COMPARE, *change.split()] for change in (
        "--tasks nothing", "--tasks pairs.jsonl nothing", "--control nothing", "--prompts 0", "--out text.txt",
        "--json base", "--tasks",
    )),
    ["compare", "base"], ["compare", "base", "nothing"], ["compare", "nothing", "base"], ["compare"],
    *([*TRACE, *change.split()] for change in (
        "--transcoder nothing", "--transcoder base", "--position 99", "--position -99", "--budget -1", "--nodes 0",
        "--edges 2", "--layer-share nan", "--cluster-edges 0", "--links 0", "--checks -1", "--memory-mb 0",
        "--edge nothing", "--edge a->b", "--clusters nothing.json", "--against base", "--against-transcoder coder",
        "--against nothing --against-transcoder coder", "--out text.txt", "--json base",
    )),
    [*TRACE, "--faces", "nothing"], [*TRACE, "--faces", "coder"], [*TRACE, "--cuts", "-1"],
    *([*FEATURES, *change.split()] for change in (
        "--tokens 0", "--tokens 2000", "--batch 0", "--contexts 0", "--samples -1", "--before -1", "--budget 0",
        "--checkpoint-minutes 0", "--seed -1", "--data nothing.txt", "--data pairs.jsonl", "--out run", "--resume",
        "--out text.txt", "--model nothing", "--model base", "--labeller nothing", "--labeller json:nothing",
        "--labeller json:__name__", "--length 1", "--cache text.txt",
    )),
    ["features", "nothing"], ["features", "coder", "--out", "new"], ["features", "base", *FEATURES[2:]], ["features"],
    ["trace", "nothing", *TRACE[2:]], ["trace", "run", "--prompt", "w1"], ["trace", "run", "--transcoder", "coder"],
    [*TRACE, "--target", ""], [*TRACE, "--target", "w3 - "], [*TRACE, "--target", " - "], [*TRACE, "--target", "w3 w4"],
    ["evaluate"], ["evaluate", "nothing"], ["evaluate", "base"], ["evaluate", "text.txt"], ["evaluate", "coder"],
    ["evaluate", "run", "nothing"], ["evaluate", "run", "--sequences", "0"], ["evaluate", "run", "--sequences", "-1"],
    ["evaluate", "run", "--data", "nothing.txt"], ["evaluate", "run", "--json", "base"],
    ["evaluate", "run", "--json", "text.txt/x.json"], ["evaluate", "run", "--limit", "3"],
    ["evaluate", "run", "--benchmarks", "no_such_benchmark", "--questions", "base"],
    ["evaluate", "run", "--tasks", "ioi"],
    ["evaluate", "run", "--behaviour", "text.txt"], ["evaluate", "run", "--behaviour", "b", "--prompts", "nothing"],
    ["evaluate", "run", "--behaviour", "b", "--prompts", "base/model.safetensors"],
    ["plan"], ["plan", "nothing"], ["plan", "text.txt"],
    *(["plan", "base", *change.split()] for change in (
        "--gpus -1", "--steps 0", "--gpu-memory 0", "--gpu-memory nan", "--tokens-per-second 0",
    )),
    ["report"], ["report", "nothing"], ["report", "base"], ["report", "run", "run", "run"], ["report", "text.txt"],
    ["report", "run", "--out", "base"], ["report", "run", "--out", "text.txt/page.html"],
    ["report", "run", "--port", "x"],
    ["report", "run", "--serve", "--out", "page.html"], ["report", "run", "--serve", "--port", "-1"],
    ["report", "run", "--serve", "--port", "99999"], ["report", "run", "--prompt", ""],
    ["figures"], ["figures", "nothing"], ["figures", "run", "--format", "gif"], ["figures", "run", "--out", "text.txt"],
    ["figures", "coder"], ["figures", "base"],
    ["export"], ["export", "run"], ["export", "run", "--out", "base"], ["export", "nothing", "--out", "new"],
    ["export", "coder", "--out", "new"], ["export", "base", "--out", "new"], ["export", "run", "--out", "text.txt/x"],
    ["export", "run", "--out", "new", "--adapter"], ["export", "run", "--out", "text.txt"],
    ["bench"], ["bench", "everything"], ["bench", "kernels", "--slow"],
    ["demo", "--seed", "x"], ["demo", "--out", "text.txt"], ["demo", "--out", "base"], ["demo", "--out", "run"],
    ["demo", "--speed", "9"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", named(ARGUMENTS))
def test_arguments(house, arguments):
    command(house, *arguments).refused()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would work")
def test_bench_without_a_gpu(house):
    assert "no CUDA device" in command(house, "bench", "kernels", "--json", "rows.json").refused()


# ---- JSON files ------------------------------------------------------------------------------------------------------

NOT_JSON = {"empty": b"", "cut": b'{"a": [1, 2', "garbage": b"\xff\xfe\x00\x80", "deep": DEEP.encode(),
            "pickle": b"\x80\x04\x95garbage.", "number": b"1" + b"0" * 5000, "list": b"[]", "null": b"null",
            "text": b'"words"'}  # fmt: skip
FILES = {
    "run/run.json": (["evaluate", "run"], ["report", "run"], ["figures", "run"], ["export", "run", "--out", "new"],
                     RESUME),
    "run/evaluation.json": (["report", "run"], ["export", "run", "--out", "new"]),
    "run/summary.json": (["report", "run"], ["export", "run", "--out", "new"]),
    "run/circuits/results.json": (["report", "run"], ["figures", "run"]),
    "run/circuits/circuit.json": (["report", "run"],),
    "run/trace/trace.json": (["report", "run"], ["figures", "run"]),
    "run/attention/attention.json": (["report", "run"], ["figures", "run"]),
    "clusters.json": ([*TRACE, "--clusters", "clusters.json"],),
    "base/config.json": (SPARSIFY, DISCOVER, TRANSCODE, ["evaluate", "run"]),
    "run/model/config.json": (TRACE, ["evaluate", "run"], ["export", "run", "--out", "new"]),
    "base/tokenizer.json": (SPARSIFY, COMPARE),
    "coder/transcoder/config.yaml": (TRACE,),
}  # fmt: skip


@pytest.mark.parametrize("content", NOT_JSON)
@pytest.mark.parametrize("file", FILES)
def test_files_that_are_not_what_they_should_be(house, file, content):
    (house / file).write_bytes(NOT_JSON[content])
    for arguments in FILES[file]:
        done = command(house, *arguments)
        if (file, content, arguments[0]) == ("run/evaluation.json", "list", "report"):
            done.survived()  # no rows: not evaluated yet
        else:
            done.refused()


def change(path: Path, *keys, value=None, remove=False):
    """Replace or remove one value deep inside a JSON file."""
    whole = json.loads(path.read_text())
    inner = whole
    for key in keys[:-1]:
        inner = inner[key]
    if remove:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(whole))


VALUES = [
    ("run/run.json", ["kind"], 7, ["report", "run"]),
    ("run/run.json", ["config"], [], ["evaluate", "run"]),
    ("run/run.json", ["config", "training"], None, ["evaluate", "run"]),
    ("run/run.json", ["config", "training", "batch"], "two", ["evaluate", "run"]),
    ("run/run.json", ["config", "training", "precision"], "fp1", ["evaluate", "run"]),
    ("run/run.json", ["config", "text"], {}, ["evaluate", "run"]),
    ("run/run.json", ["config", "text", "patterns"], 3, ["evaluate", "run"]),
    ("run/run.json", ["config", "text", "length"], -4, ["evaluate", "run"]),
    ("run/run.json", ["config", "text", "cache"], 4, ["evaluate", "run"]),
    ("run/run.json", ["config", "model"], {"a": 1}, ["evaluate", "run"]),
    ("run/run.json", ["config", "model"], "../../nowhere", ["evaluate", "run"]),
    ("run/run.json", ["config", "training"], 5, ["export", "run", "--out", "new"]),
    ("run/run.json", ["config", "lr"], 5, RESUME),
    ("run/run.json", ["config", "data"], None, RESUME),
    ("run/evaluation.json", [0], 5, ["report", "run"]),
    ("run/evaluation.json", [0, "kind"], [], ["report", "run"]),
    ("run/evaluation.json", [1, "density"], "all", ["export", "run", "--out", "new"]),
    ("run/evaluation.json", [1, "loss"], None, ["export", "run", "--out", "new"]),
    ("run/summary.json", ["target"], "low", ["export", "run", "--out", "new"]),
    ("run/summary.json", ["target"], None, ["report", "run"]),
    ("run/circuits/results.json", ["readings", "components", "curve"], [1, 2], ["report", "run"]),
    ("run/circuits/results.json", ["readings", "components", "curve", "edges"], "many", ["report", "run"]),
    ("run/circuits/results.json", ["n_layers"], {}, ["report", "run"]),
    ("run/circuits/results.json", ["readings", "components", "curve", "effect"], None, ["figures", "run"]),
    ("run/circuits/circuit.json", ["cfg"], 4, ["report", "run"]),
    ("run/circuits/circuit.json", ["cfg", "n_layers"], -3, ["report", "run"]),
    ("run/circuits/circuit.json", ["edges"], {"a9.h9->m9": {"score": 1}}, ["report", "run"]),
    ("run/circuits/circuit.json", ["edges"], {"nonsense": {}}, ["report", "run"]),
    ("run/circuits/circuit.json", ["edges"], [1], ["report", "run"]),
    ("run/trace/trace.json", ["clusters"], "none", ["report", "run"]),
    ("run/trace/trace.json", ["clusters", 0], 3, ["report", "run"]),
    ("run/trace/trace.json", ["edges", 0, "source"], None, ["report", "run"]),
    ("run/trace/trace.json", ["tokens"], 9, ["figures", "run"]),
    ("run/trace/trace.json", ["main"], "edge", ["report", "run"]),
    ("run/attention/attention.json", ["prompts"], None, ["report", "run"]),
    ("run/attention/attention.json", ["prompts", 0, "file"], "../../../../../etc/passwd", ["report", "run"]),
    ("run/attention/attention.json", ["prompts", 0, "file"], 5, ["report", "run"]),
    ("run/attention/attention.json", ["prompts", 0, "models"], [1], ["report", "run"]),
    ("base/config.json", ["model_type"], "nonsense", DISCOVER),
    ("base/config.json", ["model_type"], "bert", DISCOVER),
    ("base/config.json", ["model_type"], None, DISCOVER),
    ("base/config.json", ["n_head"], 0, DISCOVER),
    ("base/config.json", ["n_head"], -4, DISCOVER),
    ("base/config.json", ["n_head"], 5, DISCOVER),
    ("base/config.json", ["n_embd"], 64, DISCOVER),
    ("base/config.json", ["n_embd"], "wide", DISCOVER),
    ("base/config.json", ["n_layer"], 3, DISCOVER),
    ("base/config.json", ["n_layer"], -1, DISCOVER),
    ("base/config.json", ["n_layer"], 0, DISCOVER),
    ("base/config.json", ["vocab_size"], 10, SPARSIFY),
    ("base/config.json", ["activation_function"], "exec('1')", DISCOVER),
    ("run/model/config.json", ["sparselens"], 3, TRACE),
    ("run/model/config.json", ["sparselens"], {"normalise": "some"}, TRACE),
    ("run/model/config.json", ["sparselens"], {}, TRACE),
    ("clusters.json", ["mine"], [], [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], [1, 2], [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], {"positions": "all"}, [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], {"layers": [1]}, [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], {"kinds": [[1]]}, [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], {"pushes": "yes"}, [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], {"colour": "red"}, [*TRACE, "--clusters", "clusters.json"]),
    ("clusters.json", ["mine"], ["9_9_9"], [*TRACE, "--clusters", "clusters.json"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "keys", "value", "arguments"),
    [pytest.param(*case, id=f"{case[0]} {case[1]}={case[2]} {case[3][0]}"[:90]) for case in VALUES],
)
def test_one_wrong_value_in_a_file(house, file, keys, value, arguments):
    change(house / file, *keys, value=value)
    sentence = command(house, *arguments).refused()
    assert not sentence.endswith("None"), sentence


def test_a_task_name_is_not_a_path(house):
    """Names from a file become part of a file's name: without their slashes."""
    results = json.loads((house / "run/circuits/results.json").read_text())
    tasks = {name: {"models": {"dense": results}} for name in ("first", "../../../evil", "/tmp/evil", "a\x00b")}
    (house / "run/circuits/results.json").write_text(json.dumps({"names": {"dense": "x"}, "tasks": tasks}))
    done = command(house, "figures", "run", "--out", "drawn")
    assert done.code == 0 and not done.outside, done.err
    assert all(name.startswith("drawn") for name in done.changed) and "drawn/figure3-_________evil.pdf" in done.changed


# ---- tensors ---------------------------------------------------------------------------------------------------------


def header(length: int, content: bytes) -> bytes:
    return struct.pack("<Q", length) + content


def with_tensors(path: Path, edit) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


OVERLAP = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
TENSORS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"xx"),
    "header of 2^63 bytes": lambda path: path.write_bytes(header(2**63, b"{}")),
    "header longer than file": lambda path: path.write_bytes(header(10**6, b"{}")),
    "header not JSON": lambda path: path.write_bytes(header(4, b"{a:b")),
    "header not UTF-8": lambda path: path.write_bytes(header(4, b"\xff\xff\xff\xff")),
    "no tensors": lambda path: path.write_bytes(header(2, b"{}")),
    "overlap": lambda path: path.write_bytes(header(len(OVERLAP), OVERLAP) + b"\x00" * 8),
    "negative shape": lambda path: path.write_bytes(
        header(59, b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}    ') + b"\x00" * 4
    ),
    "unknown dtype": lambda path: path.write_bytes(
        header(58, b'{"a":{"dtype":"X99","shape":[1],"data_offsets":[0,4]}}    ') + b"\x00" * 4
    ),
    "pickle": lambda path: path.write_bytes(b"\x80\x04\x95garbage."),
    "zip": lambda path: path.write_bytes(b"PK\x03\x04" + b"\x00" * 100),
    "missing tensor": lambda path: with_tensors(path, lambda t: t.pop(max(t))),
    "wrong shape": lambda path: with_tensors(path, lambda t: t.update({min(t): np.zeros((3, 3), np.float32)})),
    "NaN": lambda path: with_tensors(path, lambda t: t[min(t)].flat.__setitem__(0, np.nan)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}
TENSOR_FILES = {
    "base/model.safetensors": DISCOVER,
    "run/model/model.safetensors": ["export", "run", "--out", "new"],
    "coder/transcoder/W_enc_0.safetensors": TRACE,
    "coder/transcoder/W_dec_1.safetensors": TRACE,
}


@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("file", TENSOR_FILES)
def test_damaged_tensors(house, file, damage):
    TENSORS[damage](house / file)
    sentence = command(house, *TENSOR_FILES[file]).refused()
    if damage in ("missing tensor", "NaN"):  # said, and not only noticed by what comes of it
        words = ("not complete", "missing", "lacks its gates") if damage == "missing tensor" else ("NaN or infinite",)
        assert any(word in sentence for word in words), sentence


@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("file", ["run/trace/graph.safetensors", "run/attention/prompt-0.safetensors"])
def test_damaged_tensors_of_the_report(house, file, damage):
    TENSORS[damage](house / file)
    command(house, "report", "run").survived()  # a number that is not finite is shown as missing


def test_gates_that_are_missing_or_damaged(house):
    path = house / "run/model/model.safetensors"
    gate = next(name for name in load_file(path) if name.endswith("gate_bias"))
    for edit in (
        lambda t: t.pop(gate), lambda t: t.update({gate: np.zeros(3, np.float32)}),
        lambda t: t.update({gate: np.full(4, np.inf, np.float32)}), lambda t: t.update({gate + "x.gate_bias": t[gate]}),
    ):  # fmt: skip
        content = path.read_bytes()
        with_tensors(path, edit)
        assert "gate" in command(house, *TRACE).refused()
        path.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 32, b"not gguf at all"])
def test_gguf_that_is_none(house, content):
    pytest.importorskip("gguf")
    (house / "model.gguf").write_bytes(content)
    command(house, "discover", "model.gguf", *DISCOVER[2:]).refused()


# ---- text, pairs, prompts --------------------------------------------------------------------------------------------

TEXTS = {
    "a.txt": [b"", b"\xff\xfe", b"<|endoftext|>\n", b"w1 w2", b"\x00" * 10, b"\n\n\n", b" " * 5000],
    "a.jsonl": [b"", b"{", b"[]\n", b'{"text": 5}\n', b'{"text": null}\n', b'{"body": "w1"}', b'"w1"\n', b"null\n",
                b'{"text": "w1"}\n{"text"', DEEP.encode(), b'{"text": ' + b"1" * 5000 + b"}\n", b'{"text": ["w1"]}\n'],
    "a.parquet": [b"", b"PAR1", b"PAR1" + b"\x00" * 50 + b"PAR1", b"nothing"],
    "a.txt.gz": [b"", b"\x1f\x8b", b"\x1f\x8b\x08\x00" + b"\xff" * 40, b"w1 w2"],
    "a.txt.zst": [b"", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd" + b"\xff" * 40, b"w1 w2"],
    "a.jsonl.xz": [b"", b"\xfd7zXZ\x00", b"\xfd7zXZ\x00" + b"\xff" * 40, b"w1 w2"],
    "a.parquet.gz": [b"", b"w1", b"\x1f\x8b\x08\x00" + b"\xff" * 40],
    "a.csv": [b"text\nw1"], "a.tar": [b"w1"], "a.zip": [b"PK\x03\x04"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [pytest.param(name, content, id=f"{name}-{i}") for name, some in TEXTS.items() for i, content in enumerate(some)],
)
def test_text(house, name, content):
    (house / name).write_bytes(content)
    for arguments in (SPARSIFY, TRANSCODE, ["evaluate", "run"]):
        command(house, *arguments, "--data", name).refused(cache=True)


def pair(**changes) -> str:
    return json.dumps({"clean": "w1 w5 w2 w3", "corrupted": "w1 w6 w2 w3", "answer": " w7", "wrong": " w8"} | changes)


PAIRS = [
    "", "\n\n", "{", "[]", "5", '"w1"', DEEP, pair(clean=""), pair(clean=5), pair(clean=None), pair(corrupted=[]),
    pair(answer=""), pair(answer=5), pair(answer=[]), pair(answer=["", " w1"]), pair(wrong=7), pair(wrong=[[]]),
    pair(metric="speed"), pair(metric=["logit"]), pair(clean="w1"), pair(clean="w1 " * 5000, corrupted="w1 " * 5000),
    pair(answer=" w7", wrong=" w7"), pair() + "\n{", pair() + "\n" + pair(wrong=[]), '{"clean": "w1"}',
    pair(clean="\ud800 w1 w2 w3"), pair(answer="\udfff"), "\x00" * 50, pair().replace("w1", "\x01"),
]  # fmt: skip


@pytest.mark.parametrize("content", PAIRS, ids=range(len(PAIRS)))
def test_pairs(house, content):
    (house / "pairs.jsonl").write_bytes(content.encode("utf-8", "surrogatepass"))
    command(house, *DISCOVER).refused()
    command(house, *COMPARE).refused()


PROMPTS = {
    "empty": "", "space": " ", "newlines": "\n\n", "NUL": "w1\x00w2", "escape": "w1 \x1b[31m w2", "bell": "\x07",
    "enormous": "w1 " * 200_000, "one enormous word": "w" * 1_000_000, "lone surrogate": "w1 \ud800 w2",
    "bytes that are no UTF-8": b"w1 \xff".decode("utf-8", "surrogateescape"), "emoji": "🙂 w1 👩‍👩‍👧 w2",
    "right to left": "\u202ew1 w2\u202c", "combining": "w1 e" + "\u0301" * 100, "byte order mark": "\ufeffw1 w2",
    "line separator": "w1\u2028w2", "markup": "</script><img src=x onerror=alert(1)>", "noncharacter": "w1 \uffff",
    "format": "{prompt} %s %n {0.__class__}", "path": "../../../etc/passwd", "option": "--out",
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(house, name):
    """Many of these are prompts like any other: done, or refused in a sentence."""
    prompt = PROMPTS[name]
    command(house, "trace", "run", "--transcoder", "coder", f"--prompt={prompt}", "--json", "rows.json").survived()
    done = command(house, "report", "run", f"--prompt={prompt}")
    done.survived()
    if "surrogate" in name or "UTF-8" in name or name == "empty":
        done.refused()
    if (house / "rows.json").is_file():
        json.loads((house / "rows.json").read_text())


def test_a_name_that_is_no_utf8_is_written_and_read_back(house):
    """File names are bytes; what is recorded of them must be JSON all the same."""
    name = b"te\xffxt.txt".decode("utf-8", "surrogateescape")
    (house / "text.txt").rename(house / name)
    done = command(house, *SPARSIFY, "--data", name)
    assert done.code == 0, done.err
    record = json.loads((house / "new" / "run.json").read_text())
    assert record["config"]["text"]["patterns"] == [name]
    assert command(house, "report", "new").code == 0
