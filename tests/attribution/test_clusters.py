import json
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_tokenizer
from tracing_setup import biased_model, traced

import sparselens as sl
from sparselens.attribution.clusters import (
    _layers,
    balance,
    carry_clusters,
    choose_edge,
    cluster_edges,
    find_clusters,
    mark_of,
    name_positions,
    read_rules,
    rules_of,
)
from sparselens.attribution.graph import ERROR, FEATURE, node_name
from sparselens.attribution.head_shares import carry
from sparselens.runs.run import write_json
from sparselens.transcoders.transcoder import Transcoder


@pytest.fixture(scope="module", params=[("gpt2", False), ("gpt2", True), ("llama", True)], ids=str)
def graph(request):
    family, gated = request.param
    return traced(family, gated, target="w4", budget=10_000, nodes=0.95)


# ---- sums ------------------------------------------------------------------------------------------------------------


def test_cluster_edges_are_sums_of_node_edges(graph):
    clusters = find_clusters(graph)
    source, target, weight = graph.edges(kept=False)
    edges = cluster_edges(graph, clusters)
    assert len(edges) > 8
    for edge in edges:
        a, b = (torch.tensor(clusters[i].nodes) for i in (edge.source, edge.target))
        inside = torch.isin(source, a) & torch.isin(target, b)
        assert edge.weight == pytest.approx(float(weight[inside].sum()), rel=1e-9, abs=1e-12)
        assert len(edge.pairs) == int(inside.sum())
        # What passes: of the influence through each target, this edge's share of everything that enters it.
        flow = 0.0
        for t, w in zip(target[inside].tolist(), weight[inside].tolist(), strict=True):
            own = graph.targets[0]["weight"] if t == graph.n_nodes - 1 else 0.0
            enters = float(graph.row_abs[graph.row_target == t])
            flow += abs(w) / enters * (float(graph.influence[t]) + own)
        assert edge.flow == pytest.approx(flow, rel=1e-9) and edge.flow > 0


def test_the_order_of_the_clusters_does_not_matter(graph):
    """Backwards: the same edges and balances under other numbers; the answer is number 0 then."""
    clusters = find_clusters(graph)
    last = len(clusters) - 1
    edges = {(e.source, e.target): (e.weight, e.flow, sorted(e.pairs)) for e in cluster_edges(graph, clusters)}
    turned = cluster_edges(graph, clusters[::-1])
    assert {(last - e.source, last - e.target) for e in turned} == edges.keys() and len(turned) > 10
    for edge in turned:
        weight, flow, pairs = edges[last - edge.source, last - edge.target]
        assert (edge.weight, edge.flow) == (pytest.approx(weight), pytest.approx(flow)) and sorted(edge.pairs) == pairs
    assert [e.flow for e in turned] == sorted((e.flow for e in turned), reverse=True)
    for ours, theirs in zip(balance(graph, clusters), balance(graph, clusters[::-1])[::-1], strict=True):
        assert ours == pytest.approx(theirs)


def test_head_shares_of_cluster_edges_are_sums_of_those_of_node_edges(graph):
    edges = cluster_edges(graph, find_clusters(graph))[:6]
    for edge, whole in zip(edges, carry_clusters(graph, edges, top=None), strict=True):
        parts = carry(graph, edge.pairs, top=None)
        assert whole.weight == pytest.approx(edge.weight, rel=1e-9, abs=1e-12)
        for name in ("departure_heads", "arrival_heads", "single_heads"):
            torch.testing.assert_close(
                getattr(whole, name), sum(getattr(p, name) for p in parts), rtol=1e-9, atol=1e-12
            )
        for side in ("departure", "arrival"):
            links = {
                tuple(link[k] for k in ("layer", "head", "query", "key")): link["share"]
                for link in getattr(whole, side)
            }
            for part in parts:
                for link in getattr(part, side):
                    links[tuple(link[k] for k in ("layer", "head", "query", "key"))] -= link["share"]
            assert max(map(abs, links.values()), default=0) < 1e-9
            total = whole.direct + sum(link["share"] for link in getattr(whole, side))
            assert total == pytest.approx(edge.weight, rel=1e-9, abs=1e-12)


def test_what_reaches_a_cluster_adds_up_to_its_value(graph):
    clusters = find_clusters(graph)
    for cluster, sums in zip(clusters, balance(graph, clusters), strict=True):
        rows = torch.isin(graph.row_target, torch.tensor(cluster.nodes))
        assert sums["value"] == pytest.approx(float(graph.row_value[rows].sum()), rel=1e-9, abs=1e-12)
        parts = sums["clusters"] + sums["within"] + sums["outside"] + sums["biases"]
        assert parts == pytest.approx(sums["value"], rel=1e-9, abs=1e-9)
    into = {i: 0.0 for i in range(len(clusters))}
    for edge in cluster_edges(graph, clusters):
        into[edge.target] += edge.weight
    for i, sums in enumerate(balance(graph, clusters)):
        assert into[i] == pytest.approx(sums["clusters"], rel=1e-9, abs=1e-9)


def test_dropped_edges_are_counted_as_outside():
    graph = traced(target="w4", edges_per_row=5)
    clusters = find_clusters(graph)
    sums = balance(graph, clusters)[-1]
    parts = sums["clusters"] + sums["within"] + sums["outside"] + sums["biases"]
    assert parts == pytest.approx(float(graph.row_value[0]), rel=1e-9)


# ---- who belongs where -----------------------------------------------------------------------------------------------


def test_every_kept_node_is_in_exactly_one_cluster(graph):
    clusters = find_clusters(graph)
    listed = [node for cluster in clusters for node in cluster.nodes]
    assert sorted(listed) == graph.node_kept.nonzero().flatten().tolist()
    for cluster in clusters:
        assert {int(p) for p in graph.position[cluster.nodes]} <= set(cluster.positions)
    assert [c.kind for c in clusters].count("output") == 1 and clusters[-1].kind == "output"
    assert clusters[-1].layers == (graph.n_layers, graph.n_layers) and clusters[-1].name == "w4"


def test_say_features_push_the_answer_by_themselves(graph):
    """By hand: half or more of the influence is the feature's own edge to the logit, at the answer's position."""
    say = next(c for c in find_clusters(graph) if c.kind == "say")
    answer = graph.n_nodes - 1
    own = dict(zip(*(t.tolist() for t in graph.row(answer)), strict=True))
    for node in graph.nodes(kind="feature"):
        if node.position != len(graph.tokens) - 1:
            assert node.id not in say.nodes
            continue
        share = abs(own.get(node.id, 0.0)) / float(graph.row_abs[0]) / node.influence
        assert (node.id in say.nodes) == (share >= 0.5)


def test_names_and_positions_do_not_depend_on_the_transcoder():
    found = []
    for seed in (0, 1):
        model, transcoder = biased_model("gpt2"), Transcoder.random(2, 48, 32, dtype=torch.float64, seed=seed)
        graph = sl.trace(model, tiny_tokenizer(), transcoder, "w3 w5 w8 w3 w9", "w4", nodes=0.95)
        found.append((graph, find_clusters(graph)))
    (one, a), (other, b) = found
    features = [{node_name(g, n.id) for n in g.nodes(kind="feature")} for g in (one, other)]
    assert features[0] != features[1]  # other features, same story
    assert [(c.name, c.kind, c.positions) for c in a] == [(c.name, c.kind, c.positions) for c in b]
    assert [c.name for c in a] == ["<|endoftext|>", "w3 @1", "w5", "w8", "w3 @4", "w9", "say w4", "w4"]
    assert rules_of(one) == rules_of(other)


@pytest.mark.parametrize("token, mark", [
    ('"', "quotes"), (' "', "quotes"), ("“", "quotes"), ('."', "quotes"), ("(", "brackets"), (" )", "brackets"),
    ("?", "?"), (" ...", "..."), ("\n\n", "whitespace"), ("", "whitespace"), (" the", None), ("+", None), ("'s", None),
    ("$", None), ("\ud800", None), ("<|endoftext|>", None), ("（", "brackets"), ("\x00", None),
])  # fmt: skip
def test_marks(token, mark):
    assert mark_of(token) == mark


def test_names_of_positions():
    tokens = ["The", " opposite", " of", ' "', "large", '"', " is", ' "']
    assert name_positions(tokens) == ["The", "opposite", "of", "quotes", "large", "quotes", "is", "quotes"]
    assert name_positions(["John", " and", " John", "\n", "."]) == ["John @0", "and", "John @2", "whitespace", "."]
    assert name_positions(["quotes", '"', "\x00", "\ud800"]) == ["quotes @0", "quotes", "\\x00", "\\ud800"]


def test_an_answer_that_is_a_word_of_the_prompt_keeps_its_own_box():
    graph = traced(target="w8")
    names = [c.name for c in find_clusters(graph)]
    assert "w8" in names and names[-1] == "w8 (output)" and len(set(names)) == len(names)


def test_several_targets_are_never_added_up():
    graph = traced(target=["w4", "w9"])
    outputs = [c for c in find_clusters(graph) if c.kind == "output"]
    last = graph.n_nodes - 1
    assert [(c.name, c.nodes) for c in outputs] == [("w4", [last - 1]), ("w9", [last])]


def test_layers_by_hand():
    """Influence 1, 6, 3 in layers 0, 1, 2, of features; errors do not count beside them."""
    graph = SimpleNamespace(
        n_layers=3, kind=torch.tensor([FEATURE] * 4 + [ERROR]), layer=torch.tensor([0, 1, 1, 2, 2]),
        influence=torch.tensor([1.0, 4.0, 2.0, 3.0, 100.0]),
    )  # fmt: skip
    every = torch.arange(5)
    for share, layers in ((0.1, (0, 0)), (0.5, (1, 1)), (0.6, (1, 1)), (0.61, (0, 1)), (0.8, (1, 2)), (0.95, (0, 2))):
        assert _layers(graph, every, share) == layers, share
    assert _layers(graph, every[4:], 0.9) == (2, 2), "no features: of the others"
    graph.influence = torch.zeros(5)
    assert _layers(graph, every[1:], 0.9) == (1, 2), "without influence: wherever they are"


def test_layers_are_the_shortest_range_that_holds_the_share(graph):
    for cluster in find_clusters(graph):
        features = [n for n in cluster.nodes if int(graph.kind[n]) == FEATURE]
        if not features:
            continue
        total, (low, high) = float(graph.influence[features].sum()), cluster.layers
        held = sum(float(graph.influence[n]) for n in features if low <= int(graph.layer[n]) <= high)
        assert held >= 0.9 * total - 1e-12
        if low < high:  # both ends are needed
            for a, b in ((low + 1, high), (low, high - 1)):
                held = sum(float(graph.influence[n]) for n in features if a <= int(graph.layer[n]) <= b)
                assert held < 0.9 * total
    assert _layers(graph, torch.tensor([graph.n_nodes - 1]), 0.9) == (2, 2)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_rules_written_and_read_back_give_the_same_clusters(graph, tmp_path):
    write_json(tmp_path / "clusters.json", rules_of(graph))
    assert find_clusters(graph, read_rules(tmp_path / "clusters.json")) == find_clusters(graph)


def test_clusters_can_be_renamed_split_and_listed_by_hand(graph, tmp_path):
    features = graph.nodes(kind="feature")
    mine = [node_name(graph, n.id) for n in features[:2]] + ["0_error_mlp_2"]
    rules = {"mine": mine, "first": {"positions": [0, 1]}, "low": {"layers": [0, 0], "kinds": ["feature"]}}
    write_json(tmp_path / "c.json", rules)
    clusters = {c.name: c for c in find_clusters(graph, read_rules(tmp_path / "c.json"))}
    assert {node_name(graph, n) for n in clusters["mine"].nodes} == set(mine)
    assert {int(graph.position[n]) for n in clusters["first"].nodes} == {0, 1}
    taken = {n for c in clusters.values() for n in c.nodes}
    assert all(n.id in taken for n in features if n.layer == 0 and n.position > 1)
    assert not any(n.id in taken for n in features[2:] if n.layer == 1 and n.position > 1)
    assert clusters["w4"].kind == "output"
    edges = cluster_edges(graph, list(clusters.values()))
    carried = carry_clusters(graph, edges)
    assert all(c.weight == pytest.approx(e.weight, rel=1e-9, abs=1e-12) for c, e in zip(carried, edges, strict=True))


def test_an_output_can_be_renamed(graph):
    name = node_name(graph, graph.n_nodes - 1)
    clusters = find_clusters(graph, {"the answer": [name], "all": {"positions": list(range(8))}})
    assert [(c.name, c.kind) for c in clusters] == [("all", "word"), ("the answer", "output")]


@pytest.mark.parametrize("rules, message", [
    ({"a": ["0_99999_1"]}, "no node '0_99999_1'.*kept nearby.*rules"),
    ({"a": ["E_5_1"], "b": ["E_5_1"]}, "listed twice, in 'a' and in 'b'"),
    ({"a": {"positions": [8]}}, r"positions \[8\], but the prompt has 8 tokens"),
    ({"a": {"position": [1]}}, "expected node ids, or some of"),
    ({"a": {}}, "'a' is {}; expected node ids, or some of"),
    ({"a": 3}, "'a' is 3; expected node ids, or some of"),
    ({"a": {"layers": [1]}}, "layers of 'a'"),
    ({"a": {"kinds": ["logits"]}}, "kinds of 'a'"),
    ({"a": {"pushes": 1}}, "pushes of 'a'"),
    ({"a": [3]}, r"lists \[3\]"),
    ({"a": []}, "lists nothing"),
    ({}, "expected an object"),
    ([], "expected an object"),
])  # fmt: skip
def test_clusters_that_cannot_be(rules, message):
    graph = traced(target="w4")
    with pytest.raises(ValueError, match=message):
        find_clusters(graph, rules)


def test_files_that_are_no_clusters(tmp_path):
    with pytest.raises(ValueError, match="no file"):
        read_rules(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json is not JSON"):
        read_rules(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text(json.dumps(["a"]))
    with pytest.raises(ValueError, match=r"list\.json: expected an object"):
        read_rules(tmp_path / "list.json")


# ---- the main edge ---------------------------------------------------------------------------------------------------


def test_the_main_edge_comes_from_elsewhere_and_matters_most(graph):
    clusters = find_clusters(graph)
    edges = cluster_edges(graph, clusters)
    main = choose_edge(clusters, edges)
    assert clusters[main.target].kind in ("say", "output")
    assert len(graph.tokens) - 1 not in clusters[main.source].positions
    rivals = [
        e for e in edges
        if clusters[e.target].kind in ("say", "output") and len(graph.tokens) - 1 not in clusters[e.source].positions
        and clusters[e.source].positions != [0] and e.weight > 0  # not <|endoftext|>; what raises it
    ]  # fmt: skip
    assert main.flow == max(e.flow for e in rivals)


def test_an_edge_can_be_asked_for_by_name(graph):
    clusters = find_clusters(graph)
    edges = cluster_edges(graph, clusters)
    edge = choose_edge(clusters, edges, "w8 -> w4")
    assert (clusters[edge.source].name, clusters[edge.target].name) == ("w8", "w4")
    with pytest.raises(ValueError, match=r"of these clusters: <\|endoftext\|>, w3 @1"):
        choose_edge(clusters, edges, "w8 -> nothing")
    with pytest.raises(ValueError, match="nothing goes from 'w4' to 'w8'") as refused:
        choose_edge(clusters, edges, "w4 -> w8")
    w8 = [c.name for c in clusters].index("w8")
    feeding = {clusters[e.source].name for e in edges if e.target == w8} or {"no cluster"}
    assert set(str(refused.value).partition("fed by ")[2].split(", ")) == feeding
    missing = choose_edge(clusters, edges, "w4 -> w8", strict=False)
    assert missing.weight == missing.flow == 0 and missing.pairs == []
    nothing = carry_clusters(graph, [edge, missing])[1]
    assert nothing.heads_for() == [] and nothing.weight == nothing.direct == nothing.multi_hop == 0
    assert nothing.departure_rest == nothing.arrival_rest == 0 and not nothing.arrival_heads.any()
    assert choose_edge(clusters, edges, "say nothing -> w4", strict=False) == choose_edge(clusters, edges)


# ---- targets at other positions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, gated", [("gpt2", True), ("llama", False)])
def test_a_target_at_an_earlier_position_is_the_target_of_the_shorter_prompt(family, gated):
    """Attention looks back only: what comes after the position cannot matter."""
    long = traced(family, gated, target="w4", position=4, budget=10_000)
    short = traced(family, gated, target="w4", prompt="w3 w5 w8 w13", budget=10_000)
    assert long.completeness_error < 1e-9 and int(long.position[-1]) == 4
    torch.testing.assert_close(long.row_value[0], short.row_value[0], rtol=1e-12, atol=1e-12)
    rows = []
    for graph in (long, short):
        sources, weights = graph.row(graph.n_nodes - 1)
        named = {node_name(graph, s): w for s, w in zip(sources.tolist(), weights.tolist(), strict=True)}
        rows.append({name: w for name, w in named.items() if "bias" not in name and abs(w) > 1e-13})
    assert rows[0].keys() == rows[1].keys()
    assert all(rows[0][name] == pytest.approx(rows[1][name], rel=1e-9, abs=1e-12) for name in rows[0])
    token = [int(((g.kind == 2) & (g.position == 2)).nonzero()[0, 0]) for g in (long, short)]
    shares = [carry(g, [(n, g.n_nodes - 1)])[0] for g, n in zip((long, short), token, strict=True)]
    torch.testing.assert_close(shares[0].arrival_heads, shares[1].arrival_heads, rtol=1e-9, atol=1e-12)
    assert {link["query"] for link in shares[0].arrival} == {4}


def test_interventions_on_a_target_at_an_earlier_position():
    from sparselens.attribution.interventions import intervene

    long = traced(target="w4", position=4)
    short = traced(target="w4", prompt="w3 w5 w8 w13")
    changes = []
    for graph in (long, short):
        token = int(((graph.kind == 2) & (graph.position == 2)).nonzero()[0, 0])
        changes.append(
            [intervene(graph, scale={token: 0.0}, frozen=f).change[graph.n_nodes - 1] for f in (True, False)]
        )
    assert changes[0] == pytest.approx(changes[1], rel=1e-9)


def test_positions_that_do_not_exist():
    with pytest.raises(ValueError, match="position=8: the prompt has 8 tokens"):
        traced(position=8)
    with pytest.raises(ValueError, match="position=-9"):
        traced(position=-9)
    for position, at in ((-2, 6), (-8, 0), (7, 7), (0, 0)):
        assert int(traced(position=position).position[-1]) == at
