import copy
import json

import jsonschema
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tracing_setup import traced

from sparselens.attribution.clusters import find_clusters
from sparselens.attribution.graph import BIAS, ERROR, FEATURE, LOGIT, POSITION, TOKEN, Graph, node_name
from sparselens.attribution.head_shares import carry
from sparselens.attribution.neuronpedia import graph_json, pairing, slug_of, write_graph


def _object(required, **properties):
    return {"type": "object", "required": required, "properties": properties}


TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
MAYBE = {"type": ["number", "null"]}
TEXTS = {"type": "array", "items": TEXT}

# What Neuronpedia's graph-schema.json asks for, in our own words; extra keys are allowed everywhere.
SCHEMA = _object(
    ["metadata", "qParams", "nodes", "links"],
    metadata=_object(
        ["slug", "scan", "transcoder_list", "prompt_tokens", "prompt"],  # the list: circuit-tracer's own reader
        transcoder_list=TEXTS, slug=TEXT, scan=TEXT, prompt_tokens=TEXTS, prompt=TEXT, node_threshold=NUMBER,
        feature_details=_object([], feature_json_base_url=TEXT, neuronpedia_source_set=TEXT),
        info=_object(
            [], description=TEXT, creator_name=TEXT, creator_url=TEXT, source_urls={"type": "array"},
            create_time_ms=NUMBER, generator=_object([], name=TEXT, version=TEXT, url=TEXT, email=TEXT),
        ),
        generation_settings=_object(
            [], max_n_logits=WHOLE, desired_logit_prob=NUMBER, batch_size=WHOLE, max_feature_nodes=WHOLE
        ),
        pruning_settings=_object([], node_threshold=NUMBER, edge_threshold=NUMBER),
    ),
    qParams=_object(
        [], pinnedIds=TEXTS, supernodes={"type": "array"}, linkType=TEXT, clickedId=TEXT, sg_pos=TEXT
    ),
    nodes={"type": "array", "items": _object(
        ["node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"],
        node_id=TEXT, feature={"type": ["integer", "null"]}, layer={"type": ["string", "integer"]}, ctx_idx=WHOLE,
        feature_type=TEXT, jsNodeId=TEXT, clerp=TEXT, influence=MAYBE, activation=MAYBE,
    )},
    links={"type": "array", "items": _object(["source", "target", "weight"], source=TEXT, target=TEXT, weight=NUMBER)},
)  # fmt: skip


def check(found):
    jsonschema.Draft7Validator(SCHEMA).validate(json.loads(json.dumps(found, allow_nan=False)))


@pytest.fixture(scope="module", params=["w4", ("w4", "w9"), None], ids=["token", "difference", "likeliest"])
def graph(request):
    return traced("gpt2", True, target=request.param, nodes=0.9)


def test_graphs_follow_the_schema(graph):
    found = graph_json(graph, find_clusters(graph), slug="a-slug", scan="gpt2")
    check(found)
    assert len(found["nodes"]) == int(graph.node_kept.sum()) and len(found["links"]) == int(graph.edge_kept.sum())
    ids = [node["node_id"] for node in found["nodes"]]
    assert len(set(ids)) == len(ids) and len({node["jsNodeId"] for node in found["nodes"]}) == len(ids)
    assert {link[end] for link in found["links"] for end in ("source", "target")} <= set(ids)
    assert found["metadata"]["prompt_tokens"] == graph.tokens


@pytest.mark.parametrize("spoil", [
    lambda g: g.pop("links"),
    lambda g: g["metadata"].pop("slug"),
    lambda g: g["metadata"].__setitem__("prompt_tokens", [1]),
    lambda g: g["nodes"][0].pop("clerp"),
    lambda g: g["nodes"][0].__setitem__("feature", "7"),
    lambda g: g["nodes"][0].__setitem__("ctx_idx", 1.5),
    lambda g: g["links"][0].__setitem__("weight", None),
    lambda g: g["qParams"].__setitem__("pinnedIds", [3]),
])  # fmt: skip
def test_the_schema_refuses_what_viewers_cannot_read(graph, spoil):
    found = graph_json(graph, find_clusters(graph), heads=False)
    check(found)
    spoil(found)
    with pytest.raises(jsonschema.ValidationError):
        check(found)


def test_nodes_say_what_they_are(graph):
    rows = {node["node_id"]: node for node in graph_json(graph, heads=False)["nodes"]}
    for node in graph.nodes():
        row = rows[node_name(graph, node.id)]
        assert row["ctx_idx"] == node.position
        if node.kind == "feature":
            assert row["feature_type"] == "cross layer transcoder" and row["activation"] == node.value
            layer, index = node.layer, node.index
            assert row["feature"] == (layer + index) * (layer + index + 1) // 2 + index and row["layer"] == str(layer)
        elif node.kind == "error":
            assert row["node_id"] == f"{node.layer}_error_mlp_{node.position}"
        elif node.kind == "logit":
            assert row["layer"] == str(graph.n_layers + 1) and row["influence"] is None
            target = graph.targets[node.id - (graph.n_nodes - len(graph.targets))]
            assert float(row["clerp"].split("(p=")[1].split(")")[0]) == pytest.approx(
                target["probability"] or 0, abs=5e-4
            )  # as circuit-tracer's viewer reads it
            assert ("(no probability)" in row["clerp"]) == (target["probability"] is None)
        else:
            assert row["feature_type"] == "embedding" and row["layer"] == "E"


def test_influence_is_cumulative(graph):
    rows = {node["node_id"]: node["influence"] for node in graph_json(graph, heads=False)["nodes"]}
    total = float(graph.influence.double().sum())
    for node in graph.nodes():
        if node.kind == "logit" or node.influence == 0:
            continue
        larger = graph.influence[graph.influence > node.influence].double().sum() + node.influence
        assert rows[node_name(graph, node.id)] == pytest.approx(float(larger) / total, rel=1e-9)


def test_links_name_the_heads_that_carry_them():
    graph = traced("gpt2", True, target="w4")
    links = graph_json(graph)["links"]
    source, target, weight = (t.tolist() for t in graph.edges())
    for i in range(0, len(links), max(1, len(links) // 10)):
        (carried,) = carry(graph, [(source[i], target[i])])
        link = links[i]
        assert link["weight"] == pytest.approx(weight[i]) and link["weight"] == pytest.approx(carried.weight, rel=1e-9)
        assert [(h["layer"], h["head"]) for h in link["heads"]] == carried.heads_for(0.8)
        brought = carried.weight - carried.direct
        if link["heads"]:
            assert sum(h["share"] for h in link["heads"]) / brought >= 0.8 - 1e-9
    assert any(link["heads"] for link in links)


def test_supernodes_are_clusters(graph):
    clusters = find_clusters(graph)
    found = graph_json(graph, clusters, heads=False)
    ids = {node["node_id"] for node in found["nodes"]}
    assert [group[0] for group in found["qParams"]["supernodes"]] == [c.name for c in clusters if len(c.nodes) > 1]
    for name, *nodes in found["qParams"]["supernodes"]:
        cluster = next(c for c in clusters if c.name == name)
        assert nodes == [node_name(graph, n) for n in cluster.nodes] and set(nodes) <= ids
    assert set(found["qParams"]["pinnedIds"]) <= ids and found["qParams"]["clickedId"] in ids


def test_graphs_from_disk_are_exported_without_heads(graph, tmp_path):
    graph.save(tmp_path)
    found = graph_json(Graph.load(tmp_path), [])
    check(found)
    assert not any("heads" in link for link in found["links"])


def test_files(graph, tmp_path):
    hostile = copy.copy(graph)
    hostile.prompt, hostile.tokens = 'a "b"\n\x00 中 🙂', ["", "a", '"', "\n", "\x00", "中", "🙂", "</script>"]
    path = write_graph(hostile, find_clusters(hostile), tmp_path, slug="A b/../c 中", scan="m")
    found = json.loads(path.read_text())
    check(found)
    assert found["metadata"]["prompt_tokens"] == hostile.tokens and found["metadata"]["slug"] == "a-b-c"
    assert json.loads((tmp_path / "graph-metadata.json").read_text()) == {"graphs": [found["metadata"]]}
    assert json.loads((tmp_path / "a-b-c.json").read_text()) == found, "where circuit-tracer's server looks for it"
    assert slug_of("中") == "graph-1" and slug_of("Trace") == "trace-1", "no other file's name"


# ---- ids -------------------------------------------------------------------------------------------------------------


def table(kinds, layers, positions, indices, n_layers, targets):
    """A graph of nothing but nodes."""
    n = len(kinds)
    empty, whole = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    return Graph(
        "", [], [{"label": "", "token": None, "probability": None, "weight": 1.0}] * targets, n_layers, 1, {},
        torch.tensor(kinds, dtype=torch.int8), torch.tensor(layers), torch.tensor(positions), torch.tensor(indices),
        torch.zeros(n), whole, torch.zeros(1, dtype=torch.int64), whole, empty, empty, empty, empty,
        torch.zeros(0, 6), torch.zeros(0, 6), influence=torch.zeros(n),
    )  # fmt: skip


SMALL = st.integers(0, 3) | st.integers(0, 200_000)
NODES = st.tuples(st.sampled_from([FEATURE, ERROR, TOKEN, POSITION, BIAS]), SMALL, SMALL, SMALL)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(NODES), st.lists(st.integers(-1, 5), min_size=1, max_size=4), SMALL)
def test_no_two_nodes_share_an_id(n_layers, nodes, tokens, answer):
    """Above all: no error node has the id of a layer-0 feature, whatever the numbers."""
    distinct = {}
    for kind, layer, position, index in nodes:
        layer = layer % n_layers if kind in (FEATURE, ERROR, BIAS) else -1
        index = {ERROR: 0, POSITION: position, BIAS: index % 3}.get(kind, index)
        position = -1 if kind == BIAS else position
        if kind == TOKEN:  # one token stands at a position
            distinct[kind, position] = (kind, layer, position, index)
        else:
            distinct[kind, layer, position, index] = (kind, layer, position, index)
    rows = sorted(distinct.values()) + [(LOGIT, n_layers, answer, token) for token in tokens]
    graph = table(*zip(*rows, strict=True), n_layers, len(tokens))
    names = [node_name(graph, i) for i in range(graph.n_nodes)]
    assert len(set(names)) == len(names)
    shown = ["-".join(name.rsplit("_", 1)) for name in names]
    assert len(set(shown)) == len(shown)


def test_answers_are_named_by_their_tokens_and_only_others_by_their_number():
    """Token 0 is a token as any other; -1 is a difference or direction, and the second 7 would have the first one's."""
    graph = table([LOGIT] * 4, [2] * 4, [5] * 4, [0, 7, -1, 7], 2, 4)
    assert [node_name(graph, i) for i in range(4)] == ["3_0_5", "3_7_5", "3_target2_5", "3_target3_5"]


@given(SMALL, SMALL, SMALL, SMALL)
def test_pairing_numbers_are_unique(a, b, c, d):
    assert (pairing(a, b) == pairing(c, d)) == ((a, b) == (c, d))
