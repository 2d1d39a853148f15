from collections import defaultdict

import pytest
import torch
import transformers as hf
from tiny_models import tiny_tokenizer
from tracing_setup import FAMILIES, traced

import sparselens as sl
from sparselens.attribution.graph import ERROR, FEATURE, LOGIT, POSITION, TOKEN
from sparselens.attribution.head_shares import Carried, carry
from sparselens.attribution.qk_terms import describe, explain_look, measure_look
from sparselens.config import Gate
from sparselens.models.loading import add_gates
from sparselens.transcoders.transcoder import Transcoder


def carry_all(graph, top=16):
    """(source id, target id, Carried) of every kept edge."""
    pairs = list(zip(*(ids.tolist() for ids in graph.edges()[:2]), strict=True))
    return [(s, t, carried) for (s, t), carried in zip(pairs, carry(graph, pairs, top=top), strict=True)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_sum_to_the_edge(family, gated, dtype, tolerance):
    graph = traced(family, gated, dtype, nodes=0.6)
    source, target, weight = graph.edges()
    kinds = {int(k) for k in graph.kind[source]}
    assert {FEATURE, ERROR, TOKEN} <= kinds and (POSITION in kinds) == (family == "gpt2")
    assert {int(k) for k in graph.kind[target]} == {FEATURE, LOGIT}
    for (_, _, carried), wanted in zip(carry_all(graph), weight.tolist(), strict=True):
        assert carried.weight == pytest.approx(wanted, rel=tolerance)
        for heads in (carried.departure_heads, carried.arrival_heads):
            assert float(heads.sum()) + carried.direct == pytest.approx(wanted, rel=tolerance)


def test_listed_links_and_rest_sum_to_the_edge():
    graph = traced("gpt2", cross_layer=False)
    weights = graph.edges()[2].tolist()
    for (source, target, carried), weight in zip(carry_all(graph, top=3), weights, strict=True):
        assert carried.weight == pytest.approx(weight, rel=1e-9)
        for links, rest in ((carried.departure, carried.departure_rest), (carried.arrival, carried.arrival_rest)):
            total = sum(link["share"] for link in links) + rest + carried.direct
            assert len(links) <= 3 and total == pytest.approx(carried.weight, rel=1e-9)
        assert all(link["key"] == graph.position[source] for link in carried.departure)
        assert all(link["query"] == graph.position[target] for link in carried.arrival)
        assert all(link["layer"] <= graph.layer[target] for link in carried.departure + carried.arrival)
        assert (carried.direct == 0) or graph.position[source] == graph.position[target]


def test_closed_gates_have_no_share():
    graph = traced("llama", gated=True)
    closed = [graph.live.frozen.pattern(layer) == 0 for layer in range(2)]
    assert 0.2 < torch.stack(closed).double().mean() < 0.9
    for _, _, carried in carry_all(graph, top=None):
        for link in carried.departure + carried.arrival:
            assert not closed[link["layer"]][link["head"], link["query"], link["key"]]


# ---- against all paths, one by one -----------------------------------------------------------------------------------


def small(parallel, gated):
    """Three layers, two heads, four tokens: few enough paths to walk them all."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=16)
    if parallel:
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, intermediate_size=16))
    else:
        config = hf.GPT2Config(
            vocab_size=64, n_embd=8, n_layer=3, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None
        )
        model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    model = model.eval().double()
    if gated:
        model = add_gates(model, Gate(bias=0.5)).double()
    transcoder = Transcoder.random(3, 12, 8, dtype=torch.float64)
    return sl.trace(
        model, tiny_tokenizer(), transcoder, [5, 9, 11, 7], target=["w4"], budget=1000, nodes=1.0, edges=1.0
    )


def all_paths(graph, source, target):
    """Yields (contribution, [(layer, head, query, key), ...]) for every path from source to target."""
    replacement, frozen = graph.live, graph.live.frozen
    ids = torch.tensor([source])
    at, writes = int(replacement.places(ids)), replacement.writes(ids)[0]
    reads = replacement.reads(torch.tensor([target]))
    stage, end, vector = int(reads.stage), int(reads.position), reads.vector[0]

    def walk(layer, position, x, links):  # x enters block `layer`
        if stage == 2 * graph.n_layers and layer == graph.n_layers:
            if position == end:
                yield float(x @ vector), links
            return
        if frozen.parallel and stage == 2 * layer + 1:
            if position == end:
                yield float(x @ vector), links
            return
        steps = [(position, x, links)]
        values = frozen.to_values(layer, x[None], torch.tensor([position]))[0].view(2, -1)
        for head in range(2):
            alone = torch.zeros_like(values)
            alone[head] = values[head]
            for query in range(position, 4):
                p = frozen.pattern(layer)[head, query, position]
                moved = frozen.from_mix(layer, (alone * p).flatten()[None], torch.tensor([query]))[0]
                steps.append((query, moved, [*links, (layer, head, query, position)]))
        for place, y, taken in steps:
            if not frozen.parallel and stage == 2 * layer + 1:
                if place == end:
                    yield float(y @ vector), taken
            else:
                yield from walk(layer + 1, place, y, taken)

    for place in range(graph.n_layers + 1):
        if bool(writes[place].any()) and 2 * place <= stage:
            yield from walk(place, at, frozen.write(place, writes[place][None], torch.tensor([at]))[0], [])


@pytest.mark.parametrize("parallel, gated", [(False, False), (False, True), (True, False)])
def test_shares_against_all_paths(parallel, gated):
    graph = small(parallel, gated)
    logit = graph.n_nodes - 1
    features = torch.arange(len(graph.live.layer))
    late = features[(graph.layer[features] == 2) & (graph.position[features] >= 2)][-1]
    pairs = []
    for target in (logit, int(late)):
        sources, weights = graph.row(target)
        for kind in (FEATURE, ERROR, TOKEN):
            for moved in (True, False):
                here = graph.kind[sources] == kind
                here &= (graph.position[sources] != graph.position[target]) == moved
                if here.any():
                    pairs.append((int(sources[here][weights[here].abs().argmax()]), target))
    assert len(pairs) >= 10
    for (source, target), carried in zip(pairs, carry(graph, pairs, top=None), strict=True):
        departure, arrival = defaultdict(float), defaultdict(float)
        total = direct = single = 0.0
        with torch.no_grad():
            walked_paths = list(all_paths(graph, source, target))
        for value, links in walked_paths:
            total += value
            moving = [link for link in links if link[2] != link[3]]
            if graph.position[source] == graph.position[target]:
                moving = links
            if not moving:
                direct += value
                continue
            departure[moving[0]] += value
            arrival[moving[-1]] += value
            single += value * (len(moving) == 1)
        assert carried.weight == pytest.approx(total, rel=1e-9)
        assert carried.direct == pytest.approx(direct, rel=1e-9, abs=1e-12)
        assert carried.single_hop == pytest.approx(single, rel=1e-9, abs=1e-12)
        for mine, walked in ((carried.departure, departure), (carried.arrival, arrival)):
            found = {(link["layer"], link["head"], link["query"], link["key"]): link["share"] for link in mine}
            assert {k for k, v in walked.items() if abs(v) > 1e-12} <= found.keys()
            for link, share in found.items():
                assert share == pytest.approx(walked.get(link, 0.0), rel=1e-9, abs=1e-12)


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_mb", [1024, 0.05])
def test_groups_add_up(memory_mb):
    graph = traced("gpt2", gated=True)
    source, target, _ = graph.edges()
    pairs = list(zip(source.tolist(), target.tolist(), strict=True))[:60]
    groups = [i % 4 for i in range(len(pairs))]
    single = carry(graph, pairs, top=None)
    for number, together in enumerate(carry(graph, pairs, groups, top=None, memory_mb=memory_mb)):
        mine = [c for c, g in zip(single, groups, strict=True) if g == number]
        assert together.weight == pytest.approx(sum(c.weight for c in mine), rel=1e-9)
        assert together.direct == pytest.approx(sum(c.direct for c in mine), rel=1e-9)
        torch.testing.assert_close(together.single_heads, sum(c.single_heads for c in mine))
        for side in ("departure", "arrival"):
            sums = defaultdict(float)
            for carried in mine:
                for link in getattr(carried, side):
                    sums[tuple(link[k] for k in ("layer", "head", "query", "key"))] += link["share"]
            found = {
                tuple(e[k] for k in ("layer", "head", "query", "key")): e["share"] for e in getattr(together, side)
            }
            assert found == pytest.approx({k: v for k, v in sums.items()}, rel=1e-9, abs=1e-12)


def test_a_group_without_edges_carries_nothing():
    graph = traced("gpt2", gated=True)
    source, target, weight = (t[0].item() for t in graph.edges())
    *empty, one = carry(graph, [(source, target)], [2])
    assert one.weight == pytest.approx(weight) and len(empty) == 2
    for carried in empty:
        found = carried.as_row()
        assert [found.pop(name) for name in ("departure", "arrival", "heads_for_80")] == [[], [], []]
        assert set(found.values()) == {0.0} and not carried.departure_heads.any() and carried.links_for() == []


def test_heads_for_takes_signs_into_account():
    heads = torch.tensor([[5.0, -3.0], [2.0, 1.0]])
    carried = Carried(6.0, [], [], 0.0, 0.0, heads.flip(0), heads, torch.zeros(2, 2), 1.0)
    # Heads bring 5: 5 reaches 80 % at once; then -3 takes it away again, which a prefix does not wait for.
    assert carried.heads_for(0.8) == [(0, 0)]
    assert carried.heads_for(1.0) == [(0, 0)]
    assert carried.heads_for(0.8, by="departure") == [(1, 0)]
    negative = Carried(-4.0, [], [], 0.0, 0.0, heads, -torch.tensor([[3.0, -2.0], [2.0, 1.0]]), heads, 0.0)
    assert negative.heads_for(0.8) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert negative.heads_for(0.7) == [(0, 0)]
    links = [
        {"layer": 0, "head": i, "query": 3, "key": 1, "share": share} for i, share in enumerate((3.0, -2.0, 2.5, 0.5))
    ]
    listed = Carried(5.0, [], links, 0.0, 0.0, heads, heads, heads, 1.0)
    assert listed.links_for(0.8) == [(0, 0, 3, 1), (0, 1, 3, 1), (0, 2, 3, 1)]  # 3 - 2 + 2.5 of 4
    assert listed.links_for(0.75) == [(0, 0, 3, 1)] and len(listed.links_for(1.0)) == 4
    most = torch.tensor([[8.5, 1.5], [0.0, 0.0]])  # 85 % is enough where nothing else is asked for
    links = [{"layer": 0, "head": i, "query": 3, "key": 1, "share": share} for i, share in enumerate((8.5, 1.5))]
    assert Carried(10.0, [], links, 0.0, 0.0, most, most, most, 0.0).heads_for() == [(0, 0)]
    assert Carried(10.0, [], links, 0.0, 0.0, most, most, most, 0.0).links_for() == [(0, 0, 3, 1)]
    with pytest.raises(ValueError, match="by='both'"):
        carried.heads_for(by="both")
    for method in (carried.heads_for, carried.links_for):
        for share in (0, 1.1):
            with pytest.raises(ValueError, match="expected a share up to 1"):
                method(share)


def test_what_is_neither_direct_nor_a_single_hop_is_multi_hop():
    heads = torch.tensor([[5.0, -3.0], [2.0, 3.0]])
    carried = Carried(8.0, [], [], 0.25, 0.5, heads, heads, torch.tensor([[1.0, 0.5], [0.0, 0.5]]), 1.0)
    assert (carried.single_hop, carried.multi_hop) == (2.0, 5.0)
    found = carried.as_row()
    assert found["heads_for_80"] == [
        {"layer": layer, "head": head, "share": float(heads[layer, head])}
        for layer, head in ((0, 0), (0, 1), (1, 1), (1, 0))
    ]  # 5 - 3 + 3 + 2 of 7
    assert (found["departure_rest"], found["arrival_rest"], found["direct"], found["multi_hop"]) == (
        0.25,
        0.5,
        1.0,
        5.0,
    )


def test_bad_edges():
    graph = traced("gpt2")
    bias = int((graph.kind == 4).nonzero()[0])
    with pytest.raises(ValueError, match="bias has no position"):
        carry(graph, [(bias, graph.n_nodes - 1)])
    with pytest.raises(ValueError, match="only features and logits are targets"):
        carry(graph, [(0, graph.find("token", -1, 0))])
    with pytest.raises(ValueError, match="1 edges but 2 group"):
        carry(graph, [(0, graph.n_nodes - 1)], [0, 1])


# ---- why a head looks there ------------------------------------------------------------------------------------------


def model_logits(graph, layer):
    """S = scale * Q K^T [H, T, T], from queries and keys as the run computed them."""
    frozen = graph.live.frozen
    block = frozen.blocks[layer]
    return block.q @ block.k.transpose(-1, -2) * frozen.decoder.parts[layer].scale


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text"])
def test_terms_sum_to_the_logit(family):
    graph = traced(family, gated=True, budget=0, gate_bias=-0.15)
    for layer, head, query, key in ((0, 1, 3, 2), (1, 3, 6, 2), (1, 2, 5, 5)):
        look = explain_look(graph, layer, head, query, key, top=10)
        logit = float(model_logits(graph, layer)[head, query, key])
        _, margin = graph.live.frozen.looks(layer)
        assert look.logit == pytest.approx(logit, rel=1e-9)
        assert look.margin == pytest.approx(float(margin[head, query, key]), rel=1e-9)
        assert float(look.kinds.sum()) == pytest.approx(logit, rel=1e-9)
        assert float(look.by_query.sum()) == pytest.approx(logit, rel=1e-9)
        assert float(look.by_key.sum()) == pytest.approx(logit, rel=1e-9)
        assert sum(t["term"] for t in look.terms) + look.rest == pytest.approx(logit, rel=1e-9)
        assert look.certain and abs(look.terms[0]["term"]) == pytest.approx(float((look._q @ look._k.T).abs().max()))
        assert (look.kinds[FEATURE] == 0).all() == (layer == 0)
        text = describe(graph, look)
        assert f"logit {logit:+.3f}" in text
        assert text.count("\n") == len(look.terms) + 1 + int((look.kinds != 0).sum()), "no kinds that add nothing"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gate_margins_are_the_models_own(family):
    graph = traced(family, gated=True, budget=0, gate_bias=0.25)
    frozen = graph.live.frozen
    with torch.no_grad():
        out = frozen.decoder.model(frozen.ids[None], output_attentions=True, gate_output="margin")
    look = explain_look(graph, 1, 2, 5, 3)
    assert look.margin == pytest.approx(float(out.attentions[1][0, 2, 5, 3]), rel=1e-6)


@pytest.mark.parametrize("family, gate_bias", [("gpt2", 0.0), ("gpt2", 0.1), ("gemma2", 0.3)])  # gemma2: capped
def test_would_the_gate_close_without_this_feature(family, gate_bias):
    graph = traced(family, gated=True, budget=0, gate_bias=gate_bias)
    _, margin = graph.live.frozen.looks(1)
    features = len(graph.live.layer)
    checked = 0
    for head, query, key in ((margin > 0) & (margin < 0.3)).nonzero().tolist():
        look = explain_look(graph, 1, head, query, key)
        closing = look.closing()
        for node in range(0, features, 7):
            assert (look.without(node) <= 0) == (node in closing)
        for node in [n for n in closing if n < features][:2]:
            result = measure_look(graph, look, [node])
            assert result["open_before"] and not result["open_predicted"]
            assert result["open_measured"] == (result["measured"] > 0) and result["before"] == look.margin
            checked += 1
    assert checked > 3


def test_removing_a_layer_0_feature_is_predicted_up_to_the_norm():
    """Layer 1 reads the residual stream: removing a feature removes its terms, and changes the denominators."""
    graph = traced("gpt2", gated=False, budget=0)
    look = explain_look(graph, 1, 0, 4, 1)
    order = (look.by_query + look.by_key)[: len(graph.live.layer)].abs().argsort(descending=True)
    moved = [
        (r["predicted"] - r["before"], r["measured"] - r["before"])
        for r in (measure_look(graph, look, [int(i)]) for i in order[:8])
    ]
    predicted, measured = torch.tensor(moved).T
    assert torch.corrcoef(torch.stack([predicted, measured]))[0, 1] > 0.9


def test_the_largest_terms_of_a_few_candidates_are_certain_or_said_not_to_be(monkeypatch):
    """Three sources per side: certain only if no source left out could have a larger term."""
    graph = traced("gpt2", gated=True, budget=0)
    whole = explain_look(graph, 1, 0, 5, 2, top=4)
    every = (whole._q @ whole._k.T).flatten()
    assert [t["term"] for t in whole.terms] == pytest.approx(every[every.abs().argsort(descending=True)[:4]].tolist())
    for t in whole.terms:
        assert t["term"] == pytest.approx(float(whole._q[t["query_source"]] @ whole._k[t["key_source"]]))
    for candidates in (3, 10, 40):
        monkeypatch.setattr("sparselens.attribution.qk_terms.CANDIDATES", candidates)
        few = explain_look(graph, 1, 0, 5, 2, top=1)
        q, k = (side.norm(dim=1).sort(descending=True).values for side in (few._q, few._k))
        bound = max(q[candidates] * k[0], k[candidates] * q[0])
        assert few.certain == (abs(few.terms[0]["term"]) >= bound) and few.rest == few.logit - few.terms[0]["term"]


def test_bad_looks():
    graph = traced("gpt2", budget=0)
    for look in ((0, 0, 2, 3), (2, 0, 1, 1), (-1, 0, 1, 1), (0, 4, 1, 1), (0, -1, 1, 1), (0, 0, 8, 1), (0, 0, 3, -1)):
        with pytest.raises(ValueError, match="no look"):
            explain_look(graph, *look)
    assert explain_look(graph, 1, 3, 7, 7).margin is None and explain_look(graph, 0, 0, 0, 0).key == 0
