import numpy as np
import pytest
import torch
from tiny_models import tiny_tokenizer
from tracing_setup import PROMPT, biased_model, total_effects, traced

import sparselens as sl
from sparselens.attribution.graph import BIAS, ERROR, FEATURE, POSITION, TOKEN
from sparselens.attribution.interventions import (
    agreement,
    check_changes,
    check_edges,
    check_top,
    intervene,
)
from sparselens.models.hooks import capture, patch
from sparselens.transcoders.transcoder import Transcoder

LAYERS = [0, 1]


def logit_values(graph, logits):
    """What the graph's targets read: logit minus the vocabulary's mean."""
    return (logits - logits.mean())[[t["token"] for t in graph.targets]]


def run_model(graph, values):
    """The Hugging Face model itself with some sites patched -> the values of the graph's logit targets."""
    frozen = graph.live.frozen
    with torch.no_grad(), patch(frozen.decoder.model, values):
        return logit_values(graph, frozen.decoder.model(frozen.ids[None]).logits[0, -1])


def feature(graph, layer, position):
    """The most active feature there."""
    here = (graph.kind == FEATURE) & (graph.layer == layer) & (graph.position == position)
    return int(here.nonzero()[graph.value[here].argmax(), 0])


# ---- the prediction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cross_layer", [True, False], ids=["cross-layer", "per-layer"])
@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "olmo2"])
def test_infinitesimal_interventions_in_the_frozen_model(family, gated, cross_layer):
    """Finite differences of the frozen model are the edges; with features responding, the total effects."""
    # The last word has features in every layer of every one of these models.
    graph = traced(family, gated, cross_layer=cross_layer, budget=10_000, prompt="w3 w5 w8 w13 w21 w5 w3")
    replacement, step = graph.live, 1e-4
    logits = list(range(graph.n_nodes - len(graph.targets), graph.n_nodes))
    watch = [*logits, feature(graph, 1, 7)]
    effects = total_effects(replacement, torch.tensor(watch))
    edges = torch.zeros(len(watch), replacement.n_sources, dtype=torch.float64)
    for i, node in enumerate(watch):
        source, weight = graph.row(node)
        edges[i, source] = weight
    sources = [feature(graph, 0, 3), feature(graph, 0, 7), graph.find("token", -1, 4), graph.find("error", 0, 6)]
    if family == "gpt2":
        sources.append(graph.find("position", -1, 2))
    for source in sources:
        for respond, wanted in ((False, edges), (True, effects)):
            moved = intervene(graph, scale={source: 1 + step}, frozen=True, respond=respond, watch=watch)
            slope = (moved.after - moved.before) / step
            torch.testing.assert_close(slope, wanted[:, source], rtol=1e-3, atol=1e-9)


def test_small_changes_of_the_real_model_follow_the_prediction_where_nothing_is_frozen_away():
    """A feature of the last layer at the last position reaches the logits through the final norm alone."""
    graph = traced("llama")
    node = feature(graph, 1, 7)
    before = graph.live.frozen.final_norm.scale[-1]
    outcome = intervene(graph, scale={node: 0.0})
    after = outcome.run.final_norm.scale[-1]
    predicted = intervene(graph, scale={node: 0.0}, frozen=True)
    # Undo the one thing that is frozen in the prediction and not in the model.
    constant = graph.live._logits[1]
    torch.testing.assert_close((outcome.after - constant) / after * before, predicted.after - constant)


def test_small_changes_with_mlps_held_follow_the_edges_up_to_patterns_and_norms():
    """With all gates closed and MLPs held, a feature reaches the logits through the final norm alone."""
    graph = traced("gpt2", gated=True, gate_bias=-1e6)
    node, step = feature(graph, 0, 7), 0.5
    moved = intervene(graph, scale={node: 1 + step}, hold_mlps=True)
    scale = moved.run.final_norm.scale[-1] / graph.live.frozen.final_norm.scale[-1]
    predicted = intervene(graph, scale={node: 1 + step}, frozen=True, respond=False)
    constant = graph.live._logits[1] + graph.live._logits[0] @ graph.live.frozen.final_norm.bias
    torch.testing.assert_close((moved.after - constant) / scale, predicted.after - constant, rtol=1e-9, atol=0)


# ---- the measurement -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["mlp-input", "residual"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "olmo2"])
def test_removed_features_against_hooks_on_the_model(family, hook):
    graph = traced(family, gated=True, hook=hook)
    node = feature(graph, 0, 4)
    writes = graph.live.writes(torch.tensor([node]))[0]  # [place, D]

    def less(layer):
        def change(out):
            out = out.clone()
            out[:, 4] -= writes[layer + 1]
            return out

        return change

    changed = run_model(graph, {f"m{layer}": less(layer) for layer in LAYERS})
    torch.testing.assert_close(intervene(graph, scale={node: 0.0}).after, changed, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(intervene(graph, set={node: 0.0}).after, changed, rtol=1e-6, atol=1e-8)


def test_held_features_are_held_at_their_value_in_the_changed_run():
    """The second feature is held at what it was although the first one, below it, changes what it would be."""
    graph = traced("gpt2")
    first, second = feature(graph, 0, 4), feature(graph, 1, 4)
    loose, held = (intervene(graph, scale={first: 3.0, **extra}, watch=[second]) for extra in ({}, {second: 1.0}))
    assert float(loose.after[0]) == pytest.approx(float(held.after[0]))  # its pre-activation follows either way
    activation = float(graph.value[second])
    written = held.run.blocks[1].mlp_out - loose.run.blocks[1].mlp_out
    now = graph.live.encode(1, loose.run.blocks[1].mlp_in)[4, int(graph.index[second])]
    wanted = (activation - now) * graph.live.transcoder.W_dec[1][int(graph.index[second]), 0]
    torch.testing.assert_close(written[4], wanted)
    assert abs(float(activation - now)) > 1e-3


def test_silent_features_can_be_set():
    graph = traced("llama")
    active = graph.index[(graph.kind == FEATURE) & (graph.layer == 0) & (graph.position == 2)]
    silent = min({*range(48)} - {*active.tolist()})
    decoder = graph.live.transcoder.W_dec[0][silent]

    def more(layer):
        def change(out):
            out = out.clone()
            out[:, 2] += 1.5 * decoder[layer]
            return out

        return change

    outcome = intervene(graph, set={(0, 2, silent): 1.5})
    torch.testing.assert_close(outcome.after, run_model(graph, {"m0": more(0), "m1": more(1)}), rtol=1e-6, atol=1e-7)
    assert float((intervene(graph, set={(0, 2, silent): 1.5}, frozen=True).after - outcome.before).abs().max()) > 0


@pytest.mark.parametrize("family, gated", [("gpt2", True), ("llama", False), ("gpt_neox", True)])
def test_silenced_heads_and_closed_gates_against_hooks_on_the_model(family, gated):
    graph = traced(family, gated)
    changed = run_model(graph, {"a0.h1": 0.0, "a1.h2": 0.0})
    assert not torch.allclose(changed, graph.value[-len(graph.targets) :])
    silenced = intervene(graph, ablate=["a0.h1", "a1.h2"]).after
    torch.testing.assert_close(silenced, changed, rtol=1e-6, atol=1e-7)
    every = [(layer, head, q, k) for layer, head in ((0, 1), (1, 2)) for q in range(8) for k in range(q + 1)]
    torch.testing.assert_close(intervene(graph, close=every).after, silenced)

    frozen = graph.live.frozen
    layer, head, query, key = 0, 3, *divmod(int(frozen.pattern(0)[3].flatten().argmax()), 8)
    value = frozen.blocks[0].values.view(8, 4, 8)[key, head]

    def closed(z):
        z = z.clone()
        z[:, query] -= frozen.pattern(0)[head, query, key] * value
        return z

    outcome = intervene(graph, close=[(layer, head, query, key)])
    torch.testing.assert_close(outcome.after, run_model(graph, {"a0.h3": closed}), rtol=1e-6, atol=1e-7)


def test_a_closed_gate_leaves_the_softmax_where_gates_renormalise():
    graph = traced("llama", gated=True, normalise="open")
    pattern = graph.live.frozen.pattern(1)
    head, query, key = ((pattern > 0) & (pattern < 1)).nonzero()[0].tolist()
    changed = intervene(graph, close=[(1, head, query, key)]).run.pattern(1)
    assert changed[head, query, key] == 0
    assert float(changed[head, query].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["gpt2", "olmo2"])
def test_predicted_closing_of_a_gate_in_the_last_layer(family):
    """Nothing but the residual stream comes after it: what is missing is what flowed through that gate."""
    graph = traced(family, gated=True)
    frozen = graph.live.frozen
    query = 7
    head, key = divmod(int(frozen.pattern(1)[:, query].argmax()), 8)
    z = torch.zeros(1, 4, 8, dtype=torch.float64)
    z[0, head] = frozen.pattern(1)[head, query, key] * frozen.blocks[1].values.view(8, 4, 8)[key, head]
    lost = frozen.from_mix(1, z.flatten(1), torch.tensor([query]))[0]
    reads = graph.live.reads(torch.arange(graph.n_nodes - len(graph.targets), graph.n_nodes))
    for change in (dict(close=[(1, head, query, key)]), dict(ablate=[f"a1.h{head}"])):
        moved = intervene(graph, **change, frozen=True, respond=False)
        if "close" in change:
            torch.testing.assert_close(moved.after - moved.before, -(reads.vector @ lost).detach())
        else:
            assert not torch.allclose(moved.after, moved.before)


def test_nothing_changed_changes_nothing():
    graph = traced("gpt2", gated=True)
    for frozen in (True, False):
        outcome = intervene(graph, scale={3: 1.0, graph.find("token", -1, 0): 1.0}, frozen=frozen)
        torch.testing.assert_close(outcome.after, outcome.before)
    few = sl.trace(biased_model("gpt2"), tiny_tokenizer(), Transcoder.random(2, 3, 32, dtype=torch.float64), PROMPT)
    every = dict.fromkeys(range(len(few.live.layer)), 1.0)  # three features of eight positions: no two are confused
    for frozen in (True, False):
        outcome = intervene(few, scale=every, frozen=frozen)
        torch.testing.assert_close(outcome.after, outcome.before)
    with torch.no_grad(), capture(graph.live.frozen.decoder.model, ["m1"]) as seen:
        graph.live.frozen.decoder.model(graph.live.frozen.ids[None])
    torch.testing.assert_close(intervene(graph).run.blocks[1].mlp_out, seen["m1"][0])


def test_tracing_is_not_disturbed_by_interventions():
    graph = traced("llama", gated=True)
    replacement = graph.live
    targets = torch.arange(graph.n_nodes - len(graph.targets), graph.n_nodes)
    before = replacement.rows(replacement.reads(targets))
    intervene(graph, scale={0: 5.0}, ablate=["a0"], close=[(1, 0, 3, 2)])
    torch.testing.assert_close(replacement.rows(replacement.reads(targets)), before, rtol=0, atol=0)


# ---- predicted against measured --------------------------------------------------------------------------------------


def test_checks_of_edges():
    graph = traced("gpt2", gated=True)
    rows = check_top(graph, n=12)
    assert len(rows) == 12
    for row in rows:
        assert row["predicted_direct"] == pytest.approx(-row["weight"], rel=1e-9)
        assert len(row["sources"]) == len(row["targets"]) == 1
        outcome = intervene(graph, scale={row["sources"][0]: 0.0}, watch=row["targets"])
        assert row["measured"] == pytest.approx(outcome.change[row["targets"][0]])
    assert agreement(rows)["pearson"] > 0.5
    assert agreement(rows, "predicted_direct", "measured_direct")["pearson"] > 0.9

    # Between groups: all sources removed together, targets added up with their weights.
    source, target, _ = graph.edges()
    wide = graph.kind[source] != POSITION
    targets = {int(t): 0.5 for t in target[wide][:3]}
    sources = [s for s in {*source[wide].tolist()} - targets.keys() if int(graph.kind[s]) in (FEATURE, ERROR, TOKEN)][
        :4
    ]
    (row,) = check_edges(graph, [(sources, targets)])
    source, target, weight = graph.edges(kept=False)
    between = torch.isin(source, torch.tensor(sources)) & torch.isin(target, torch.tensor(list(targets)))
    assert row["predicted_direct"] == pytest.approx(-0.5 * float(weight[between].sum()), rel=1e-6)
    closed = check_changes(graph, [{"close": [(0, 0, 3, 1)]}], [{graph.n_nodes - 1: 1.0}])
    ways = {"predicted_direct", "predicted_path", "measured_direct", "predicted", "measured"}
    assert {"before", *ways} == closed[0].keys()


def test_agreement_is_the_usual_correlation():
    rng = np.random.default_rng(0)
    a = rng.normal(size=20)
    rows = [{"predicted": x, "measured": x**3 + 0.1} for x in a]
    assert agreement(rows)["spearman"] == pytest.approx(1.0)
    assert agreement(rows)["pearson"] == pytest.approx(np.corrcoef(a, a**3)[0, 1])
    assert agreement([{"predicted": 1.0, "measured": 2.0}] * 3)["pearson"] is None
    two = [{"predicted": 1.0, "measured": 2.0}, {"predicted": 2.0, "measured": -1.0}]
    assert agreement(two) == {"pearson": pytest.approx(-1), "spearman": pytest.approx(-1), "n": 2}
    assert agreement(two[:1]) == {"pearson": None, "spearman": None, "n": 1}
    ties = [{"predicted": x, "measured": y} for x, y in ((1.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 3.0))]
    assert agreement(ties)["spearman"] == pytest.approx(np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5])[0, 1])


def test_bad_changes():
    graph = traced("gpt2")
    bias = int((graph.kind == BIAS).nonzero()[0])
    for change, message in [
        (dict(scale={graph.n_nodes - 1: 0.0}), "is a logit"),
        (dict(scale={bias: 0.0}), "bias has no position"),
        (dict(set={graph.find("token", -1, 0): 1.0}), "no feature"),
        *((dict(set={name: 1.0}), "no feature") for name in ((2, 0, 0), (-1, 0, 0), (0, 0, 48), (0, 0, -1))),
        *((dict(set={(0, at, 0): 1.0}), f"at position {at}") for at in (8, -1)),
        *((dict(close=[(0, 0, *at)]), "no gate from query") for at in ((1, 2), (8, 2), (3, -1))),
        *((dict(close=[(*at, 1, 1)]), "no head") for at in ((2, 0), (-1, 0), (0, 4), (0, -1))),
        (dict(ablate=["m1"]), "expected heads"),
        (dict(ablate=["a9.h1"]), "no site"),
    ]:
        with pytest.raises(ValueError, match=message):
            intervene(graph, **change)
    intervene(
        graph, set={(1, 7, 47): 1.0, (0, 0, 0): 1.0}, close=[(1, 3, 7, 7), (0, 0, 0, 0)]
    )  # the last and the first
