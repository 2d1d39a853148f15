"""Cuts predicted along the cut, and what really happens."""

import numpy as np
import pytest
import torch
from tracing_setup import traced

from sparselens.attribution.clusters import choose_edge, cluster_edges, find_clusters
from sparselens.attribution.cuts import arrivals, cut_edge, cut_features, cut_figures, cuts, heads_cut
from sparselens.attribution.graph import FEATURE
from sparselens.attribution.head_shares import carry
from sparselens.attribution.interventions import WAYS, intervene
from sparselens.attribution.trace import summarise
from sparselens.config import Trace

FAMILIES = ["gpt2", "gpt_neox", "llama", "olmo2", "gemma2"]


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "gated"])
def graph(request):
    return traced("llama", request.param, target="w4", nodes=0.95)


def strongest(graph, n=4):
    source, target, weight = graph.edges()
    usable = (graph.kind[source] == FEATURE).nonzero()[:, 0]
    order = usable[weight[usable].abs().argsort(descending=True)][:n]
    return [(int(source[i]), int(target[i]), float(weight[i])) for i in order]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_path_is_the_gradient_averaged_from_edge_in_to_edge_out(family):
    """Against Gauss-Legendre points of the derivative, and between the tangent and what norms do."""
    graph = traced(family, target="w4", nodes=0.95)
    points, weights = np.polynomial.legendre.leggauss(64)  # few are too few: norms turn quickly near the end
    for source, target, _ in strongest(graph, 1):

        def value(scale, source=source, target=target):
            held = {"hold_mlps": True, "hold_patterns": True}
            return float(intervene(graph, scale={source: scale}, watch=[target], **held).after[0])

        step = 1e-5
        scales = 0.5 - 0.5 * points
        slopes = [(value(scale + step) - value(scale - step)) / (2 * step) for scale in scales.tolist()]
        average = -float(np.array(slopes) @ weights) / 2
        path = WAYS["predicted_path"](graph, scale={source: 0.0}, watch=[target])
        assert float((path.after - path.before)[0]) == pytest.approx(average, rel=1e-3, abs=1e-6)


def test_held_patterns_are_those_of_the_uncut_model(graph):
    """Half of the story each: with them held, the queries may do what they like."""
    source, target, _ = strongest(graph, 1)[0]
    outcome = intervene(graph, scale={source: 0.0}, hold_mlps=True, hold_patterns=True, watch=[target])
    for layer in range(graph.n_layers):
        torch.testing.assert_close(outcome.run.pattern(layer), graph.live.frozen.pattern(layer))
    free = intervene(graph, scale={source: 0.0}, hold_mlps=True, watch=[target])
    assert any(not torch.equal(free.run.pattern(i), graph.live.frozen.pattern(i)) for i in range(graph.n_layers))


@pytest.mark.parametrize("kind", [None, FEATURE], ids=["any", "feature"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_arrives_at_the_answer_is_what_heads_carry(family, kind):
    """Read by the answer's gradient, what every head brings is its share of the edge; also of what a feature writes in
    the middle of the model, behind the norm that some families have there."""
    graph = traced(family, True, target="w4", nodes=0.95)
    answer, last = graph.n_nodes - 1, len(graph.tokens) - 1
    sources, shares = graph.row(answer)
    elsewhere = (graph.position[sources] >= 0) & (graph.position[sources] < last)
    if kind is not None:
        elsewhere &= graph.kind[sources] == kind
    source = int(sources[elsewhere][shares[elsewhere].abs().argmax()])
    brought = arrivals(graph, [source], [answer])
    (carried,) = carry(graph, [(source, answer)])
    found = torch.zeros_like(carried.arrival_heads)
    for pulled in graph.live.frozen.pull(graph.live.reads(torch.tensor([answer]))):
        if pulled.layer >= 0:
            by_head = graph.live.frozen.by_head(brought[pulled.layer])
            found[pulled.layer] = (pulled.mix[0] * by_head).sum((0, 2))
    torch.testing.assert_close(found, carried.arrival_heads, rtol=1e-6, atol=1e-9)
    assert float(found.sum()) == pytest.approx(carried.weight, rel=1e-6)
    assert all(float(z[:last].abs().max()) == 0 for z in brought.values())


def test_heads_are_cut_as_a_share_of_the_whole_edge(graph):
    clusters = find_clusters(graph)
    edge = choose_edge(clusters, cluster_edges(graph, clusters))
    sources, targets = clusters[edge.source].nodes, sorted(set(edge.targets.tolist()))
    every = [(layer, head) for layer in range(graph.n_layers) for head in range(graph.n_heads)]
    whole, none = (heads_cut(graph, sources, targets, heads) for heads in (every, []))
    assert whole["share"] == pytest.approx(1) and none["share"] == pytest.approx(0, abs=1e-9)
    assert whole["every"] == pytest.approx(cut_edge(graph, sources, edge)["measured"])
    some = [heads_cut(graph, sources, targets, [head])["listed"] for head in every]
    assert len({round(value, 9) for value in some}) > 1, "heads differ"
    arriving = arrivals(graph, sources, targets)
    for (layer, head), listed in zip(every, some, strict=True):
        by_head = torch.unflatten(torch.zeros_like(arriving[layer]), -1, (graph.n_heads, -1)).clone()
        by_head[:, head] = torch.unflatten(arriving[layer], -1, (graph.n_heads, -1))[:, head]
        found = intervene(graph, less={layer: by_head.flatten(-2)}, hold_mlps=True, watch=targets)
        assert listed == pytest.approx(float((found.after - found.before).sum()), abs=1e-9)


def test_the_largest_edges_between_clusters_are_cut_and_no_more(graph, monkeypatch):
    monkeypatch.setattr("sparselens.attribution.cuts.CLUSTER_EDGES", 2)
    clusters = find_clusters(graph)
    rows = summarise(graph, clusters, Trace(checks=0, cuts=0))
    apart = [e for e in rows["edges"] if not {*positions(rows, e["source"])} & {*positions(rows, e["target"])}]
    assert [(r["source"], r["target"]) for r in rows["cut"]["cluster_rows"]] == [
        (e["source"], e["target"]) for e in apart[:2]
    ]
    assert len(apart) > 2 and rows["cut"]["features"]["n"] == 0


def positions(rows, name):
    return next(cluster["positions"] for cluster in rows["clusters"] if cluster["name"] == name)


def test_the_source_stays_when_its_edge_is_cut(graph):
    """Other positions do not notice: their residual streams are as they were."""
    clusters = find_clusters(graph)
    edge = choose_edge(clusters, cluster_edges(graph, clusters))
    targets = sorted(set(edge.targets.tolist()))
    less = arrivals(graph, clusters[edge.source].nodes, targets)
    run = intervene(graph, less=less, hold_mlps=True, watch=targets).run
    place = graph.live.places(torch.tensor(targets)).unique().tolist()
    before = [p for p in range(len(graph.tokens)) if p < min(place)]
    torch.testing.assert_close(run.final[before], graph.live.frozen.final[before])
    assert not torch.equal(run.final[place], graph.live.frozen.final[place])


def test_random_edges_are_told_with_their_weights(graph):
    rows = cut_features(graph, 12, seed=1)
    assert len(rows) == 12 and rows == cut_features(graph, 12, seed=1) != cut_features(graph, 12, seed=2)
    labels = {graph.label(i): i for i in range(graph.n_nodes)}
    for row in rows:
        source, weight = graph.row(labels[row["target"]])
        stored = dict(zip(source.tolist(), weight.tolist(), strict=True))
        assert row["tangent"] == -stored[labels[row["source"]]]
        one, other = labels[row["source"]], labels[row["target"]]
        cut = {"scale": {one: 0.0}}  # within a position the feature is removed; else its edge is cut where it arrives
        if int(graph.position[one]) != int(graph.position[other]):
            cut = {"less": arrivals(graph, [one], [other])}
        real = intervene(graph, **cut, hold_mlps=True, watch=[other])
        assert row["measured"] == pytest.approx(float((real.after - real.before)[0]))
    assert len({int(graph.position[labels[r["source"]]] - graph.position[labels[r["target"]]]) == 0 for r in rows}) == 2


def test_figures_by_hand():
    rows = [{"source": "", "target": "", "tangent": t, "path": p, "measured": m}
            for t, p, m in ((-5.0, -2.0, -2.0), (4.0, 1.0, 1.5), (-0.5, 0.3, -0.3), (0.1, -0.01, 0.01))]  # fmt: skip
    found = cut_figures(rows)
    assert found["n"] == 4 and found["n_signs"] == 3  # the last effect is below a tenth of the largest
    assert found["sign_agreement"] == pytest.approx(2 / 3)
    assert found["norms"] == pytest.approx((3 + 3 + 0.8 + 0.11) / 3.81)
    assert found["patterns"] == pytest.approx((0 + 0.5 + 0.6 + 0.02) / 3.81)
    assert found["pearson_path"] > found["pearson_tangent"] - 0.2 and found["spearman_path"] == pytest.approx(0.8)
    tenth = [{"source": "", "target": "", "tangent": 1.0, "path": 1.0, "measured": m} for m in (10.0, 1.0, 1.1)]
    assert cut_figures(tenth)["n_signs"] == 2  # above a tenth, not at it
    nothing = cut_figures([])
    assert nothing["n"] == 0 and nothing["pearson_path"] is None and nothing["sign_agreement"] is None


def test_a_trace_says_whether_its_cuts_come_true(graph):
    clusters = find_clusters(graph)
    rows = summarise(graph, clusters, Trace(checks=2, cuts=30))
    cut = rows["cut"]
    between, features = cut["clusters"]["n"], cut["features"]["n"]
    assert cut["n"] == between + features and features == 30 and between > 3
    assert cut["n_signs"] == cut["clusters"]["n_signs"] + cut["features"]["n_signs"]
    positions = {c["name"]: set(c["positions"]) for c in rows["clusters"]}
    assert all(not positions[row["source"]] & positions[row["target"]] for row in cut["cluster_rows"])
    assert cut["within"]["n"] > 0
    assert abs(cut["pearson_path"]) <= 1 + 1e-9 and 0 <= cut["sign_agreement"] <= 1
    weights = {(e["source"], e["target"]): e["weight"] for e in rows["edges"]}
    for row in cut["cluster_rows"]:
        assert row["tangent"] == pytest.approx(-weights[row["source"], row["target"]], rel=1e-6)
    none = cuts(graph, clusters, [], [], 0)
    assert none["n"] == 0 and none["sign_agreement"] is None
