"""Malformed inputs that nobody thought of: hypothesis changes one thing; the answer is a result or a sentence.

Deterministic (the same examples every time), so that a failure can be seen again; `HYPOTHESIS_PROFILE=wild` in the
environment draws new ones.
"""

import contextlib
import json
import os
import random
import shutil

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sample_run import command

from sparselens.attribution.clusters import read_rules
from sparselens.runs.checkpoints import load_checkpoint
from sparselens.runs.run import Metrics
from sparselens.tasks.registry import read_pairs

WILD = os.environ.get("HYPOTHESIS_PROFILE") == "wild"


def examples(count: int):
    return settings(
        max_examples=count, deadline=None, derandomize=not WILD, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


WORDS = st.text(st.characters(categories=None), max_size=20)  # every code point, half characters too
NUMBERS = st.integers(-100, 100) | st.floats() | st.sampled_from([10**30, -(10**30), 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
SMALL = st.none() | st.booleans() | st.integers(-64, 64) | st.floats() | WORDS | st.lists(st.integers(0, 9), max_size=2)


def places(value, path=()):
    """Every place in a JSON value, at most two per list: [keys, ...]."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@contextlib.contextmanager
def changed(path, data, values=VALUES):
    """One value in a JSON file replaced or removed, or a byte flipped, or the file cut; put back afterwards."""
    content = path.read_bytes()
    how = data.draw(st.sampled_from(["value", "value", "value", "remove", "flip", "cut"]), label="how")
    if how in ("value", "remove"):
        whole = json.loads(content)
        keys = data.draw(st.sampled_from(places(whole)), label="where")
        inner = whole
        for key in keys[:-1]:
            inner = inner[key]
        if how == "remove":
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = data.draw(values, label="value")
        path.write_bytes(json.dumps(whole).encode())
    else:
        at = data.draw(st.integers(0, len(content) - 1), label="at")
        flipped = content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
        path.write_bytes(flipped if how == "flip" else content[:at])
    try:
        yield
    finally:
        path.write_bytes(content)


MEASURE = ["evaluate", "base", "--data", "text.txt", "--sequences", "2"]
REPORTED = ["run.json", "evaluation.json", "summary.json", "circuits/results.json", "circuits/circuit.json",
            "trace/trace.json", "attention/attention.json"]  # fmt: skip


@pytest.mark.parametrize("file", REPORTED)
def test_report_of_a_changed_run(house, file):
    @examples(30)
    @given(st.data())
    def check(data):
        with changed(house / "run" / file, data):
            command(house, "report", "run", "--out", "page.html").survived()
        (house / "page.html").unlink(missing_ok=True)

    check()


@pytest.mark.parametrize("file", ["run.json", "evaluation.json", "summary.json", "model/config.json"])
def test_export_of_a_changed_run(house, file):
    @examples(20)
    @given(st.data())
    def check(data):
        with changed(house / "run" / file, data, SMALL):
            command(house, "export", "run", "--out", "new").survived()
        shutil.rmtree(house / "new", ignore_errors=True)

    check()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_changed_model(house, file):
    @examples(30)
    @given(st.data())
    def check(data):
        with changed(house / "base" / file, data, SMALL):
            command(house, *MEASURE).survived()

    check()


def test_a_changed_header(house):
    """The first eight bytes and the JSON behind them: sizes, shapes, offsets."""
    path = house / "base" / "model.safetensors"
    content = path.read_bytes()
    rng = random.Random(None if WILD else 0)
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(0, 600)] = rng.randrange(256)
        path.write_bytes(damaged)
        command(house, *MEASURE).survived()


@examples(25)
@given(prompt=st.text(st.characters(categories=None), max_size=40))
def test_any_prompt(built, prompt):
    done = command(built, "trace", "base", "--transcoder", "coder", f"--prompt={prompt}", "--budget", "5")
    done.survived()
    assert not done.changed


OPTIONS = {
    "sparsify": ["steps", "batch", "micro-batch", "lr", "bias", "density", "closing", "tolerance", "target", "slack",
                 "length", "heldout-tokens", "lora", "seed", "warmup", "decay", "clip", "weight-decay", "precision"],
    "transcode": ["features", "k", "sparsity", "threshold", "lr", "steps", "batch", "seed", "activation", "decay"],
    "discover": ["task", "prompts", "points", "steps", "memory-mb", "seed", "method", "ablation"],
    "trace": ["position", "budget", "nodes", "edges", "links", "memory-mb", "layer-share", "target", "edge"],
    "plan": ["gpus", "gpu-memory", "tokens-per-second", "steps", "length", "batch"],
    "evaluate": ["sequences", "limit", "data"], "report": ["port"], "figures": ["format"], "bench": ["quick"],
    "demo": ["seed"], "compare": ["tasks", "prompts", "control"], "export": ["adapter"],
}  # fmt: skip
# Of each, a call that ends before any work when its option is fine: what is asked is whether nonsense gets that far.
CALLS = {
    "sparsify": ["nothing", "--data", "text.txt", "--out", "new"],
    "transcode": ["nothing", "--data", "text.txt", "--out", "new"],
    "discover": ["nothing"], "trace": ["nothing", "--transcoder", "coder", "--prompt", "w1"], "plan": ["nothing"],
    "evaluate": ["nothing"], "report": ["nothing"], "figures": ["nothing"], "bench": ["nothing"],
    "demo": ["--out", "text.txt"], "compare": ["nothing", "nothing"], "export": ["nothing", "--out", "new"],
}  # fmt: skip
NONSENSE = (
    WORDS
    | NUMBERS.map(str)
    | st.sampled_from(["", "-", "--", "None", "nan", "-inf", "1e400", "0x10", "١", "²", "../.."])
)


@examples(80)
@given(name=st.sampled_from(sorted(OPTIONS)), data=st.data())
def test_any_value_of_any_option(built, name, data):
    option = data.draw(st.sampled_from(OPTIONS[name]))
    value = data.draw(NONSENSE)
    command(built, name, *CALLS[name], f"--{option}={value}").refused()


@examples(100)
@given(rules=st.dictionaries(WORDS, VALUES, max_size=3) | VALUES)
def test_any_clusters(tmp_path, rules):
    path = tmp_path / "clusters.json"
    path.write_text(json.dumps(rules))
    with contextlib.suppress(ValueError):
        read_rules(path)


@examples(100)
@given(
    rows=st.lists(st.fixed_dictionaries(dict.fromkeys(("clean", "corrupted", "answer", "wrong"), VALUES)), max_size=3)
)
def test_any_pairs(tmp_path, rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with contextlib.suppress(ValueError):
        read_pairs(path)


@examples(100)
@given(content=st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode() + b"\n"))
def test_any_metrics_and_checkpoints(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert all(isinstance(line["step"], int) for line in Metrics.read(tmp_path))
    folder = tmp_path / "step-00000001"
    folder.mkdir(exist_ok=True)
    for name in ("checksums.json", "state.json", "state.safetensors"):
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        load_checkpoint(tmp_path)
