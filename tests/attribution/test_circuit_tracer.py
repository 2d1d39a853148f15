"""What `trace --out` leaves, read as circuit-tracer reads it: by its rules, and by its own code where it is installed.

`pip install --no-deps circuit-tracer` is enough: its data models and its server are loaded without the rest of it.
"""

import importlib
import json
import sys
import types
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import report_pages
import torch
from tiny_models import tiny_tokenizer
from tracing_setup import biased_model

import sparselens as sl
from sparselens.attribution.neuronpedia import pairing
from sparselens.transcoders.transcoder import Transcoder

browser = report_pages.browser
PROMPT = "w3 w5 w8 w13 w21 w3 w9"


@pytest.fixture(scope="module", params=["w4", "w4 - w9"], ids=["token", "difference"])
def folder(request, tmp_path_factory):
    """A trace whose features have faces."""
    folder = tmp_path_factory.mktemp("traced")
    sl.save(biased_model("gpt2", False, torch.float32), tiny_tokenizer(), folder / "model")
    Transcoder.random(2, 48, 32).save(folder / "coder")
    documents = (" ".join(f"w{(i * j + j) % 62}" for j in range(60)) for i in range(200))
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    sl.features(
        folder / "coder", str(folder / "text.txt"), model=str(folder / "model"), tokens=5000, length=32,
        cache=folder / "cache", show_progress=False, say=lambda text: None,
    )  # fmt: skip
    sl.trace(folder / "model", folder / "coder", PROMPT, request.param, out=folder / "out", cuts=4)
    return folder / "out"


def graph_of(folder: Path) -> dict:
    (entry,) = json.loads((folder / "graph-metadata.json").read_text())["graphs"]
    found = json.loads((folder / f"{entry['slug']}.json").read_text())
    assert found["metadata"] == entry
    return found


def test_its_rules(folder):
    """Ids, the number behind "(p=", and a file for every feature at the address the viewer asks for."""
    found = graph_of(folder)
    scan = found["metadata"]["scan"]
    assert scan.startswith("./data/"), "a scan that begins with ./ is a folder of features"
    named = 0
    for node in found["nodes"]:
        if node["feature_type"] == "logit":
            assert 0 <= float(node["clerp"].split("(p=")[1].split(")")[0]) <= 1
        if node["feature_type"] != "cross layer transcoder":
            continue
        feature = json.loads((folder / scan.removeprefix("./data/") / f"{node['feature']}.json").read_text())
        assert node["feature"] == pairing(int(node["layer"]), feature["index"])
        assert node["clerp"] == feature["label"] != ""
        for group in feature["examples_quantiles"]:
            for example in group["examples"]:
                assert len(example["tokens"]) == len(example["tokens_acts_list"]) > example["train_token_ind"] >= 0
                assert max(example["tokens_acts_list"]) <= feature["act_max"] * 1.001
        named += 1
    assert named > 3
    plain = json.loads((folder / "graph-neuronpedia.json").read_text())
    assert plain["nodes"] == found["nodes"] and not plain["metadata"]["scan"].startswith("."), "Neuronpedia's: a model"


@pytest.fixture(scope="module")
def frontend():
    """circuit_tracer.frontend without circuit_tracer's own __init__, which wants TransformerLens."""
    spec = find_spec("circuit_tracer")
    if spec is None or find_spec("pydantic") is None:
        pytest.skip("circuit-tracer is not installed (pip install --no-deps circuit-tracer)")
    package = types.ModuleType("circuit_tracer")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules["circuit_tracer"] = package
    yield lambda name: importlib.import_module(f"circuit_tracer.frontend.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "circuit_tracer"]:
        del sys.modules[name]


def test_its_data_models(folder, frontend):
    found = graph_of(folder)
    graph = frontend("graph_models").Model(**found)
    assert len(graph.nodes) == len(found["nodes"]) and graph.metadata.slug == found["metadata"]["slug"]
    model = frontend("feature_models").Model
    files = sorted((folder / "features").rglob("*.json"))
    assert files and all(model(**json.loads(path.read_text())).examples_quantiles is not None for path in files)


def test_its_server(folder, frontend):
    server = frontend("local_server").serve(str(folder), port=0)
    try:
        port = server.httpd.server_address[1]

        def get(path: str):
            with urllib.request.urlopen(f"http://localhost:{port}/{path}") as answer:
                return json.loads(answer.read())

        (entry,) = get("data/graph-metadata.json")["graphs"]
        graph = get(f"graph_data/{entry['slug']}.json")
        node = next(n for n in graph["nodes"] if n["feature_type"] == "cross layer transcoder")
        assert get(f"{entry['scan'].removeprefix('./')}/{node['feature']}.json")["label"] == node["clerp"]
    finally:
        server.stop()


# The few functions of d3 and its companion that the viewer's data code calls; the libraries come from the net.
D3 = """
const order = (x, y) => (x < y ? -1 : x > y ? 1 : 0);
const by = (list, of) => [...list].sort((a, b) => order(of(a), of(b)));
window.d3 = {
  max: (list, of = (d) => d) => list.map(of).reduce((a, b) => (a === undefined || b > a ? b : a), undefined),
  min: (list, of = (d) => d) => list.map(of).reduce((a, b) => (a === undefined || b < a ? b : a), undefined),
  sum: (list, of = (d) => d) => list.reduce((total, d) => total + (+of(d) || 0), 0),
  sort: by, descending: (a, b) => b - a, ascending: (a, b) => a - b, range: (n) => [...Array(n).keys()],
  extent: (list, of) => [d3.min(list, of), d3.max(list, of)],
  nestBy: (list, of) => {
    const groups = new Map();
    for (const d of list) { const key = of(d); groups.set(key, [...(groups.get(key) ?? []), d]); }
    return [...groups].map(([key, values]) => Object.assign(values, { key }));
  },
};
"""


@pytest.mark.browser
@pytest.mark.skipif(report_pages.CHROMIUM is None or find_spec("playwright") is None, reason="no browser")
def test_its_viewers_data_code(folder, frontend, browser):
    """What its page does with a graph before it draws: every node and link is taken, every logit has its number."""
    assets = Path(frontend("graph_models").__file__).parent / "assets"
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_script_tag(content=D3)
    page.add_script_tag(content=(assets / "util.js").read_text())
    page.add_script_tag(content=(assets / "attribution_graph" / "util-cg.js").read_text())
    graph = graph_of(folder)
    shown = page.evaluate(
        """async (graph) => {
            const made = (await utilCg.formatData(graph, { pinnedIds: [], clerps: new Map() })) ?? graph;
            return {
                nodes: made.nodes.map((d) => [d.node_id, d.clerp, d.logitPct ?? null]), links: made.links.length,
                features: made.features.length,
            };
        }""",
        graph,
    )
    page.close()
    assert errors == [] and shown["links"] == len(graph["links"]) and shown["features"] > 0
    assert {node[0] for node in shown["nodes"]} == {node["node_id"] for node in graph["nodes"]}
    numbers = [number for name, _, number in shown["nodes"] if name.startswith("3_") and number is not None]
    assert numbers and all(0 <= number <= 1 for number in numbers)
