"""The report without a browser: rows are the Run's own numbers, and the page is one inert, self-contained file."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from report_runs import HOSTILE, LONE, make_run, real_trace, rows_in, write_attention, write_circuits

from sparselens.circuits.circuit import Circuit
from sparselens.circuits.rows import WORDING
from sparselens.cli import main
from sparselens.models.component_graph import Components
from sparselens.reporting import build_page, page, payload
from sparselens.reporting.page import embed, joined_scripts, scripts
from sparselens.reporting.readings import fewer, question
from sparselens.reporting.sections import OUTSIDE, finite, pack_margins, pack_weights
from sparselens.reporting.sections.attention import attention
from sparselens.reporting.sections.attribution import KINDS, features, one_trace
from sparselens.reporting.sections.circuits import drawable
from sparselens.reporting.sections.story import story
from sparselens.reporting.sections.summary import verdicts
from sparselens.runs.run import Run, write_json
from sparselens.serving.serve import make_server, stamp

ASSETS = Path(page.__file__).parent / "assets"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def unpack(packed: dict) -> np.ndarray:
    kind = {"Uint8Array": "<u1", "Uint16Array": "<u2", "Int16Array": "<i2"}[packed["type"]]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), kind)


# ---- the file ----


def test_page_is_one_inert_file(run):
    page = build_page(payload([run]))
    assert page.isascii(), "no encoding can garble it"
    assert "{{" not in page.split('id="rows"')[0], "every placeholder is filled"
    assert not re.search(r"""(src|href)=["'](?!#)""", page), "nothing is loaded from anywhere"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.split('id="rows"')[0])
    assert rows_in(page) == json.loads(json.dumps(payload([run])))


def test_policy_names_exactly_what_is_there(run):
    page = build_page(payload([run]))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["default-src"] == "'none'" and "connect-src" not in parts
    for name, content in (
        ("script-src", re.search(r'<script type="module">(.*?)</script>', page, re.S)[1]),
        ("style-src", re.search(r"<style>(.*?)</style>", page, re.S)[1]),
    ):
        expected = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert parts[name] == f"'sha256-{expected}'"
    live = build_page(payload([run], live=True))
    assert "connect-src 'self'" in live and "'unsafe" not in live


@pytest.mark.parametrize("text", [HOSTILE, LONE, "\u2028\u2029", "<!--<script>", "]]>&lt;", "{{DATA}}", "\x00\x1f"])
def test_text_stays_data(text):
    assert json.loads(embed({"x": [text]})) == {"x": [text]}
    assert not set(embed([text])) & set("<>&")
    assert embed([text]).isascii()


def test_hostile_names_everywhere(tmp_path):
    run = make_run(tmp_path / "run", model=HOSTILE, tokens=[HOSTILE, LONE, "x"])
    page = build_page(payload([run]))
    assert page.count("</script>") == 2, "the rows and the script, nothing that came from a name"
    assert "<img" not in page
    shown = rows_in(page)["runs"][0]
    assert shown["summary"]["title"] == HOSTILE
    assert shown["attention"]["prompts"][0]["tokens"] == [HOSTILE, LONE, "x"]


def test_scripts_are_real_modules():
    """Joined, they must not hide each other's names; apart, every import must name something that is exported."""
    defined: dict[str, str] = {}
    exports = {}
    assert set(scripts()) == {path.name for path in ASSETS.glob("*.js")}, "every script is somebody's"
    for name, text in scripts().items():
        exports[name] = set(re.findall(r"^export (?:async )?(?:const|let|function|class) (\w+)", text, re.M))
        for found in re.findall(r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", text, re.M):
            assert found not in defined, f"{found} is in {name} and {defined[found]}"
            defined[found] = name
        for names, source in re.findall(r'^import \{([^}]+)\} from "\./([\w.]+)";', text, re.M):
            assert {n.strip() for n in names.split(",") if n.strip()} <= exports[source], (
                f"{name} imports what {source} lacks"
            )
        assert "innerHTML" not in text.replace("there is no innerHTML", "") and "eval(" not in text
    assert "import" not in re.sub(r"//.*", "", joined_scripts()).replace("important", "")


def test_no_torch_for_the_page(run):
    code = (
        f"import sys; from sparselens.reporting import payload, build_page; build_page(payload([{str(run)!r}])); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_size_of_a_135m_model(tmp_path):
    """30 layers of 9 heads, 3 models, prompts of 64 tokens, 3,000 edges: under 5 MB, and it says what it left out."""
    words = [f" word{i}" for i in range(64)]
    run = make_run(tmp_path / "run", n_layers=30, n_heads=9, tokens=words, parts=("training", "trace"))
    rng = np.random.default_rng(0)
    texts = ("first", "second")
    write_attention(run / "attention", rng, 30, 9, words, texts)
    write_circuits(run / "circuits", rng, 12, 9, 3000, tokens=words)  # 3,000 edges are drawn, however big the model
    value = payload([run])
    assert len(build_page(value)) < 5_000_000
    found = value["runs"][0]["attention"]
    shown = [prompt["text"] for prompt in found["prompts"]]
    assert shown[0] == "first"
    assert all(text in shown or text in " ".join(found["left_out"]) for text in texts)


# ---- rows ----


def test_circuit_numbers_are_the_runs(run):
    results = json.loads((run / "circuits" / "results.json").read_text())
    shown = payload([run])["runs"][0]["circuits"]["tasks"][0]
    for reading in shown["readings"]:
        for role, model in results["tasks"]["ioi"]["models"].items():
            for key in ("curve", "edges_at", "edges_at_interval", "n_edges", "example_curve", "example_at"):
                found = reading["models"][role].get(key)
                assert found == model["readings"][reading["name"]].get(key), "to the last digit"
    for key in ("multipliers", "open_edges"):
        assert shown[key] == results["tasks"]["ioi"][key]


def test_a_new_reading_needs_no_new_reader(run, capsys):
    """Curve, multipliers and figures of a reading nobody has heard of; only its picture is missing."""
    results = json.loads((run / "circuits" / "results.json").read_text())
    row = results["tasks"]["ioi"]
    row["multipliers"] = {"moved": row["multipliers"]["corrupted"]}
    for model in row["models"].values():
        kept = dict(model["readings"]["corrupted"])
        del kept["columns"], kept["tokens"]
        model["readings"]["moved"] = kept
    (run / "circuits" / "results.json").write_text(json.dumps(results))
    shown = payload([run])["runs"][0]
    reading = shown["circuits"]["tasks"][0]["readings"][-1]
    assert (reading["name"], reading["picture"]) == ("moved", None) and reading["models"]["sparse"]["curve"]
    labels = [verdict["label"] for verdict in shown["summary"]["verdicts"]]
    assert {"Circuit (moved) of ioi", "Circuit (moved) of ioi, against the control"} <= set(labels)
    main(["figures", str(run), "--format", "svg"])
    assert "figure2-moved.svg" in capsys.readouterr().out


def test_the_headline_comes_first_whatever_is_there(tmp_path):
    """In the order of WORDING, however the file is ordered; a Run may hold any of them."""
    for readings, first, heads in (
        (("components", "heads-corrupted", "share", "removed"), "removed", True),
        (("components",), "components", False),
        (("heads", "components"), "heads", True),
        (("learnt",), "learnt", False),
    ):
        folder = make_run(tmp_path / first, readings=readings, parts=("circuits",))
        rows = payload([folder])["runs"][0]
        task = rows["circuits"]["tasks"][0]
        assert task["readings"][0]["name"] == first and {r["name"] for r in task["readings"]} == set(readings)
        sparse = rows["summary"]["table"][-1]
        assert sparse["circuit_edges"] == task["readings"][0]["models"]["sparse"]["edges_at"]["0.9"]
        assert (sparse["heads_edges"] is not None) == heads
        assert build_page(payload([folder]))


def test_every_reading_says_what_it_asks_and_of_how_much(run):
    for reading in payload([run])["runs"][0]["circuits"]["tasks"][0]["readings"]:
        scope = "task" if reading["name"] == "components" else "prompt"
        assert reading["scope"] == scope and reading["question"] == question(reading["name"], scope)
        assert WORDING[reading["name"]].others in reading["question"]


def test_results_of_an_earlier_version_are_refused(run):
    path = run / "circuits" / "results.json"
    results = json.loads(path.read_text())
    (model, *_) = results["tasks"]["ioi"]["models"].values()
    old = {name: value for name, value in model.items() if name != "readings"} | model["readings"]["components"]
    for value in (old, {"tasks": {"ioi": {"models": {"dense": old}}}}):
        path.write_text(json.dumps(value))
        with pytest.raises(ValueError, match="earlier version"):
            payload([run])


def test_the_mean_multiplier_reaches_the_page(tmp_path):
    folder = make_run(tmp_path / "run", parts=("circuits",))
    results = json.loads((folder / "circuits" / "results.json").read_text())
    row = results["tasks"]["ioi"]
    thresholds = row["multipliers"]["components"]["dense"]
    thresholds["mean"] = thresholds["0.9"] | {"multiplier": 7.25}
    write_json(folder / "circuits" / "results.json", results)
    found = payload([folder])["runs"][0]["summary"]["verdicts"]
    said = [v["label"] for v in found if "mean from 50 to 95 %: 7.2x fewer" in v["detail"]]
    assert said == ["Component graph of ioi"]


def test_attention_edges_are_the_runs(run):
    """Curve and multipliers to the last digit; edges in the Run's order, so that a prefix is a measured circuit."""
    row = json.loads((run / "circuits" / "results.json").read_text())["tasks"]["ioi"]
    shown = {reading["name"]: reading for reading in payload([run])["runs"][0]["circuits"]["tasks"][0]["readings"]}
    pictures = {name: reading["picture"] for name, reading in shown.items()}
    assert pictures == {
        "removed": "tokens", "share": "tokens", "corrupted": "tokens", "learnt": None, "heads": None,
        "heads-corrupted": None, "components": "graph",
    }  # fmt: skip
    for role, model in row["models"].items():
        found, kept = shown["removed"]["models"][role], model["readings"]["removed"]
        assert found["tokens"] == kept["tokens"] and found["n_layers"] == 3
        columns = [found["edges"][name] for name in kept["columns"]]
        for edge, expected in zip(zip(*columns, strict=True), kept["circuit"], strict=True):
            assert edge[:4] == tuple(expected[:4])
            assert edge[4:] == pytest.approx(expected[4:], rel=1e-3)


def test_a_task_has_four_verdicts_at_most(run):
    """The headline against both models, then all that leads to the answer, then the component graph."""
    found = [v for v in payload([run])["runs"][0]["summary"]["verdicts"] if "ioi" in v["label"]]
    assert [verdict["label"] for verdict in found] == [
        "Attention edges of ioi", "Attention edges of ioi, against the control", "All of it, ioi",
        "Component graph of ioi",
    ]  # fmt: skip
    assert found[2]["detail"].endswith("55.7x fewer (50.2 to 61.3), n = 16 prompts; no search involved")


@pytest.mark.parametrize("whole", [True, False])
def test_every_measured_circuit_can_be_drawn(tmp_path, whole):
    """A prefix of the listed edges, pruned, is the circuit that was measured; from all scores or the 90 % circuit."""
    rng = np.random.default_rng(1)
    c = Components(3, 4)
    circuit = Circuit(c, np.where(c.possible, rng.standard_normal(c.possible.shape), 0.0), c.possible)
    order = circuit.order()
    asked = [20, 40, 80, 160]
    masks = [c.prune(c.mask(order[:n])) for n in asked]
    circuit.mask = masks[-1]
    found = {"circuit": circuit.edges, "curve": {"edges": [int(m.sum()) for m in masks]}}
    results = {"n_layers": 3, "n_heads": 4, "readings": {"components": found}}
    edges, prefixes = drawable(results, circuit if whole else None)
    names = [
        f"{edges['nodes'][a]}->{edges['nodes'][b]}" + ("" if letter == "-" else f"<{letter}>")
        for a, b, letter in zip(edges["from"], edges["to"], edges["through"], strict=True)
    ]
    for mask, prefix in zip(masks, prefixes, strict=True):
        drawn = np.zeros_like(c.possible)
        for name in names[:prefix]:
            drawn[c.edge(name)] = True
        assert (c.prune(drawn) == mask).all()


def test_big_circuits_are_cut_and_say_so():
    rng = np.random.default_rng(0)
    c = Components(4, 4)
    circuit = Circuit(c, np.where(c.possible, rng.standard_normal(c.possible.shape), 0.0), c.possible)
    results = {"n_layers": 4, "n_heads": 4, "readings": {"components": {"curve": {"edges": [50, c.n_edges]}}}}
    edges, prefixes = drawable(results, circuit, most=100)
    assert 50 < len(edges["from"]) <= 100 and prefixes[-1] is None


def test_packing_keeps_what_is_open():
    weights = np.array([[[[1.0, 0.0], [1e-7, 0.25]]]])
    assert unpack(pack_weights(weights)).tolist() == [65535, 1, 16384], "rounded, but an open edge never becomes none"
    margins = np.array([[[[1e-9, -np.inf], [-3.0, 6.0]]]])
    packed = pack_margins(margins)
    assert unpack(packed).tolist()[0] == 1, "open by a hair is open"
    assert np.allclose(unpack(packed)[1:] * packed["scale"], [-3.0, 6.0], atol=1e-3)
    outside = pack_margins(np.array([[[[-np.inf, 0], [1.0, 2.0]]]]))
    assert unpack(outside)[0] == OUTSIDE


def test_attention_budget(tmp_path):
    run = Run(make_run(tmp_path / "run", parts=("attention",)))
    whole = attention(run)
    assert not whole["left_out"] and len(whole["prompts"]) == 2
    assert whole["prompts"][0]["models"]["dense"]["weights"]["type"] == "Uint16Array"
    cases = ((5000, "Uint8Array", 2, 0), (4000, "Uint8Array", 2, 2), (2000, "Uint8Array", 1, 2), (50, "", 0, 2))
    for budget, kind, n_prompts, n_left_out in cases:
        tight = attention(run, budget)
        assert (len(tight["prompts"]), len(tight["left_out"])) == (n_prompts, n_left_out), budget
        assert all(prompt["models"]["sparse"]["weights"]["type"] == kind for prompt in tight["prompts"])


def verdict_of(label, part="state", **changes):
    base = {"kind": "base", "loss": 1.7, "sequences": 9, "kl_to_base": 0.0, "density": 1.0, "density_per_layer": None}
    control = base | {"kind": "control", "loss": changes.get("control", 1.69)}
    sparse = base | {"kind": "sparse", "loss": changes.get("loss", 1.705), "kl_to_base": changes.get("kl", 0.02)}
    sparse |= {"density": 0.02, "density_per_layer": changes.get("layers", [0.01, 0.03])}
    summary = {"target": changes.get("limit", 1.71), "met": changes.get("met", True), "best_step": 5}
    config = {"loss": changes.get("kind", "cross-entropy"), "target": "base", "tolerance": 0.01}
    config |= changes.get("budget", {})
    sparse |= {"edges_per_query": 0.7}
    found = verdicts({"base": base, "control": control, "sparse": sparse}, summary, config, changes.get("circuits"), [])
    return {verdict["label"]: verdict[part] for verdict in found}.get(label)


def test_verdicts_are_rules():
    assert verdict_of("Constraint") == "met" and verdict_of("Constraint", met=False) == "missed"
    assert verdict_of("On unseen text") == "met" and verdict_of("On unseen text", loss=1.72) == "missed"
    assert verdict_of("On unseen text", kind="kl", limit=0.05) == "met"
    assert verdict_of("On unseen text", kind="kl", limit=0.01) == "missed"
    assert verdict_of("Control") == "met" and verdict_of("Control", control=1.75) == "care"
    assert verdict_of("Layers stuck open", layers=[0.7, 0.01]) == "care" and verdict_of("No layer stuck open") == "met"
    for low, high, state in ((1.2, 3.0, "met"), (0.8, 3.0, "care"), (0.2, 0.9, "missed")):
        row = {"dense_edges": 60, "sparse_edges": 30, "multiplier": 2.0, "low": low, "high": high, "n_prompts": 8}
        thresholds = {"0.9": row}
        circuits = {"tasks": [{"name": "ioi", "multipliers": {"components": {"dense": thresholds}}}], "problems": []}
        assert verdict_of("Component graph of ioi", circuits=circuits) == state
        assert "mean" not in verdict_of("Component graph of ioi", "detail", circuits=circuits)
        thresholds["mean"] = row | {"multiplier": 0.5}
        assert verdict_of("Component graph of ioi", "detail", circuits=circuits).endswith("50 to 95 %: 2.0x more")


def test_a_budget_is_told_in_what_it_counts():
    def told(met, **budget):
        return verdict_of("Constraint", "detail", met=met, budget=budget)

    assert "at most 1.00% of the edges on the steering slice" in told(True, density=0.01)
    assert "kept, with 2.00% of the edges" in told(False, density=0.01)
    assert "at most 0.9 edges per head and query on" in told(True, density=0.01, edges=0.9)
    assert "kept, with 0.7 edges per head and query" in told(False, density=0.01, edges=0.5)
    assert "kept, with" not in told(False, density=0.01, edges=0.9), "within the budget: it is the loss that was missed"
    assert "at most" not in told(True, density=None, edges=None).partition("nats")[2]


def test_a_control_that_is_the_base_is_called_that():
    """Taught by the base alone it is never trained: nothing was compared, and no verdict says so."""
    row = {"dense_edges": 60, "sparse_edges": 30, "multiplier": 2.0, "low": 1.2, "high": 3.0, "n_prompts": 8}
    multipliers = {"removed": {"dense": {"0.9": row}, "control": {"0.9": row}}}
    circuits = {"tasks": [{"name": "ioi", "multipliers": multipliers}], "problems": []}
    assert "it is the base" in verdict_of("Control", "sentence", kind="kl", control=1.7)
    assert "no harm" in verdict_of("Control", "sentence", kind="kl", control=1.705), "it was trained after all"
    assert "no harm" in verdict_of("Control", "sentence", control=1.7)
    against = "Attention edges of ioi, against the control"
    assert verdict_of(against, circuits=circuits) == "met"
    assert verdict_of(against, circuits=circuits, kind="kl", control=1.7) is None
    rows = {
        kind: {"kind": kind, "loss": loss, "sequences": 9, "density": 0.1, "kl_to_base": 0.0}
        for kind, loss in (("base", 1.7), ("control", 1.7), ("sparse", 1.8))
    }
    assert "would stay as it is" in story("x", rows, {"loss": "kl"}, None)["sentences"][1]
    assert "trained alike has 1.700" in story("x", rows, {"loss": "cross-entropy"}, None)["sentences"][1]


def test_a_ratio_and_its_interval_point_the_same_way():
    assert fewer({"multiplier": 2.24, "low": 1.9, "high": 2.52}) == "2.2x fewer (1.9 to 2.5)"
    assert fewer({"multiplier": 0.5, "low": 0.4, "high": 0.8}) == "2.0x more (1.2 to 2.5)"
    assert fewer({"multiplier": 177.3, "low": 99.0, "high": 1234.5}) == "177x fewer (99.0 to 1,234)"


def test_numbers_json_does_not_have():
    assert finite({"a": [float("nan"), float("inf"), 1.5]}) == {"a": [None, None, 1.5]}


def test_empty_and_unfinished_runs(tmp_path):
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "run.json", {"kind": "sparsify", "config": {"model": "gpt2"}, "provenance": {}})
    rows = payload([tmp_path / "run"])["runs"][0]
    assert (
        rows["training"] is None
        and rows["attention"] is None
        and rows["circuits"] is None
        and rows["attribution"] == []
    )
    assert rows["summary"]["verdicts"][0]["state"] == "open"
    assert "sparselens compare gpt2" in rows["commands"]["circuits"]
    assert rows["commands"]["summary"] == f"sparselens sparsify gpt2 --data TEXT --out {tmp_path / 'run'} --resume"
    record = {
        "kind": "sparsify",
        "config": {"model": "gpt2"},
        "provenance": {"command": "sparselens sparsify x --lr 1"},
    }
    write_json(tmp_path / "run" / "run.json", record)
    again = payload([tmp_path / "run"])["runs"][0]["commands"]["training"]
    assert again == "sparselens sparsify x --lr 1 --resume", "the settings it was started with"
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert payload([tmp_path / "run"])["runs"][0]["training"]["series"]["sparse"]["loss"] == [2.0], (
        "half a line is no line"
    )


def test_transcoder_runs(tmp_path):
    write_json(tmp_path / "run" / "run.json", {"kind": "transcode", "config": {"model": "gpt2"}, "provenance": {}})
    line = {"fvu": 0.3, "fvu_per_layer": [0.2, 0.4], "l0": 9.0, "dead_share": 0.1, "tokens_per_second": 1000}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps({"step": i} | line) + "\n" for i in (1, 2)))
    results = line | {"loss_recovered": 0.7, "replacement_loss": 3.3, "model_loss": 3.0, "zero_loss": 4.0}
    write_json(tmp_path / "run" / "results.json", results)
    rows = payload([tmp_path / "run"])["runs"][0]
    assert rows["summary"]["sentence"].startswith("9.0 active features per layer explain 70")
    assert [verdict["state"] for verdict in rows["summary"]["verdicts"]] == ["care", "met"]
    assert [chart["title"] for chart in rows["training"]["charts"]] == ["FVU", "L0", "Dead features", "Speed"]
    assert rows["training"]["per_layer"]["values"] == [[0.2, 0.2], [0.4, 0.4]]


def test_allowed_loss_is_target_plus_slack(run):
    allowed = payload([run])["runs"][0]["training"]["series"]["allowed"]
    assert allowed["step"][0] == 0 and allowed["loss"][0] == pytest.approx(0.05 + 0.4)
    assert allowed["loss"][30] == pytest.approx(0.05 + 0.4 * 0.5) and allowed["loss"][60:] == [0.05] * 41


def test_traces_in_one_shape():
    heads = [{"layer": 3, "head": 1, "share": 0.5}]
    edge = {"source": "a", "target": "b", "weight": 1.0, "heads_for_80": heads}
    value = {"prompt": "x", "tokens": ["x"], "n_layers": 4, "n_heads": 2, "clusters": [{"name": "a"}, {"name": "b"}]}
    trace = one_trace(value | {"edges": [edge, edge | {"target": "nobody"}], "target": [{"label": "y"}]}, "t")
    assert (
        trace["target"] == "y"
        and len(trace["edges"]) == 1
        and (trace["edges"][0]["source"], trace["edges"][0]["target"]) == (0, 1)
    )
    assert trace["edges"][0]["heads"] == heads


def test_saved_graphs_are_read_without_torch(tmp_path):
    from tracing_setup import traced

    graph = traced()
    graph.save(tmp_path)
    shown = features(tmp_path)
    nodes = [
        (KINDS[shown["kind"][i]], shown["layer"][i], shown["position"][i], shown["index"][i])
        for i in range(len(shown["kind"]))
    ]
    expected = {(n.kind, n.layer, n.position, n.index) for n in graph.nodes()}
    assert set(nodes) == expected and shown["total_nodes"] == len(expected)
    found = {(nodes[a], nodes[b]): w for a, b, w in zip(shown["from"], shown["to"], shown["weight"], strict=True)}
    for source, target, weight in zip(*(column.tolist() for column in graph.edges()), strict=True):
        ends = tuple((n.kind, n.layer, n.position, n.index) for n in (graph.node(source), graph.node(target)))
        assert found[ends] == pytest.approx(weight, rel=1e-4)


def test_rows_of_a_real_trace():
    value = real_trace()
    shown = one_trace(value, "t")
    assert shown["role"] == "sparse" and len(shown["edges"]) == len(value["edges"]) > 0
    main = shown["edges"][shown["main"]["edge"]]
    names = [shown["clusters"][main[end]]["name"] for end in ("source", "target")]
    assert names == [value["main"]["source"], value["main"]["target"]] and main["weight"] == value["main"]["weight"]
    assert [(h["layer"], h["head"]) for h in main["heads"]] == [
        (h["layer"], h["head"]) for h in value["main"]["heads_for_80"]
    ]
    assert shown["main"]["measured"] == value["main"]["closed"]["measured"]
    assert len(shown["singles"]) == 3 and all(
        isinstance(text, str) for look in shown["looks"] for text in look["closing"]
    )


def test_served_page_knows_when_the_run_moves_on(run):
    before = stamp([run])
    assert stamp([run]) == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "loss": 0.1}\n')
    assert stamp([run]) != before
    with pytest.raises(ValueError, match="is not a Run"):
        make_server([run / "control"])
