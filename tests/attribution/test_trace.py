import copy
import warnings
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from pairs import random_prompts
from tiny_models import tiny_tokenizer
from tracing_setup import FAMILIES, PROMPT, biased_model, total_effects, traced

import sparselens as sl
from sparselens.attribution.graph import BIAS, ERROR, FEATURE, LOGIT, POSITION, TOKEN
from sparselens.attribution.growth import _freeze, choose_targets
from sparselens.attribution.linear_model import Frozen
from sparselens.attribution.qk_terms import explain_look
from sparselens.circuits.run import Patcher
from sparselens.models.decoder import Decoder
from sparselens.models.hooks import capture
from sparselens.tasks.registry import Words
from sparselens.training.dry_run import PeakMemory
from sparselens.transcoders.transcoder import Transcoder

EVERY = 10_000  # a budget that expands every feature


# ---- completeness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_sums_to_its_value(family, gated):
    assert traced(family, gated, torch.float64, budget=EVERY).completeness_error < 1e-9
    assert traced(family, gated, torch.float32, budget=EVERY).completeness_error < 1e-4


@pytest.mark.parametrize("options", [
    dict(cross_layer=False), dict(hook="residual"), dict(activation="topk"), dict(activation="batchtopk"),
    dict(gated=True, normalise="open"), dict(target="w4"), dict(target=("w4", "w9")), dict(target=torch.ones(32)),
    dict(edges_per_row=5), dict(memory_mb=0.01),
], ids=lambda o: "-".join(f"{k}" for k in o))  # fmt: skip
def test_every_row_sums_to_its_value_whatever_is_asked(options):
    graph = traced(**options)
    assert graph.completeness_error < 1e-9
    stored = graph._row_sums(graph.weight) + graph.rest.sum(1)
    torch.testing.assert_close(stored, graph.row_value, rtol=1e-9, atol=1e-12)


def clipped_model(gated=False, clip=0.6):
    """OLMo with clip_qkv, which makes some values constants."""
    model = biased_model("olmo", gated)
    model.config.clip_qkv = clip
    return model


@pytest.mark.parametrize("gated", [False, True], ids=["dense", "gated"])
def test_clipped_queries_keys_and_values(gated):
    """The pieces are the model, rows and looks add up, and what a clip holds depends on nothing."""
    model = clipped_model(gated)
    graph = sl.trace(model, tiny_tokenizer(), Transcoder.random(2, 48, 32, dtype=torch.float64), PROMPT, budget=EVERY)
    frozen = graph.live.frozen
    assert graph.completeness_error < 1e-9 and frozen.check < 1e-6
    for layer, block in enumerate(frozen.blocks):
        assert 0.05 < float((block.open_values == 0).double().mean()) < 0.95 and block.values.abs().max() == 0.6
        assert torch.equal(block.open_values == 0, block.values.abs() == 0.6)
        look = explain_look(graph, layer, 1, 5, 3)
        logit = float(block.q[1, 5] @ block.k[1, 3]) * frozen.decoder.parts[layer].scale
        assert look.logit == pytest.approx(logit, rel=1e-9) == pytest.approx(float(look.kinds.sum()), rel=1e-9)
    signal, at = torch.randn(3, 3, 32, dtype=torch.float64), torch.tensor([0, 1, 3])
    every = torch.randn(2, 32, dtype=torch.float64)
    reads = frozen.reads(4, frozen.final_norm, torch.tensor([7, 7]), every, torch.zeros(2).double())
    *_, (_, end, _) = frozen.push(lambda place: signal[:, place], at)
    back = sum(torch.einsum("sd,nsd->sn", signal[:, p.layer + 1], p.place[:, at]) for p in frozen.pull(reads))
    torch.testing.assert_close(end[:, -1] @ reads.vector.T, back)
    patcher = Patcher(Decoder(model), random_prompts())
    assert all(error < 1e-6 for error in patcher.checks.values())
    prompts = patcher.prompts
    with torch.no_grad():
        own = prompts.score(prompts.at_reads(model(prompts.clean).logits))
        model.config.clip_qkv = None
        free = prompts.score(prompts.at_reads(model(prompts.clean).logits))
    torch.testing.assert_close(patcher.m_model, own, atol=1e-6, rtol=0)
    assert (own - free).abs().max() > 0.05, "or the clip does nothing here"


def test_prompts_of_one_token_and_transcoders_without_an_active_feature():
    for prompt, n in (([5], 1), ("<|endoftext|>", 1), ("w3", 2)):
        graph = traced(prompt=prompt)
        assert graph.completeness_error < 1e-9 and len(graph.tokens) == n
    transcoder = Transcoder.random(2, 48, 32, dtype=torch.float64)
    for threshold in transcoder.threshold:
        threshold.fill_(1e6)
    graph = sl.trace(biased_model("gpt2"), tiny_tokenizer(), transcoder, PROMPT)
    assert graph.completeness_error < 1e-9 and graph.nodes(kind="feature") == []
    assert len(graph.row_target) == len(graph.targets)


def test_half_precision_is_traced_in_fp32():
    model, transcoder = biased_model("llama", dtype=torch.bfloat16), Transcoder.random(2, 48, 32, dtype=torch.bfloat16)
    graph = sl.trace(model, tiny_tokenizer(), transcoder, PROMPT)
    assert graph.settings["dtype"] == "float32" and graph.completeness_error < 1e-4
    assert next(model.parameters()).dtype == torch.bfloat16


def test_values_are_the_models_own():
    """Logits, MLP inputs and therefore activations come from the Hugging Face model, not from a look-alike."""
    model = biased_model("gpt2", gated=True)
    transcoder = Transcoder.random(2, 48, 32, dtype=torch.float64)
    graph = sl.trace(model, tiny_tokenizer(), transcoder, PROMPT, target=["w4", "w9"])
    received = {}
    handles = [
        block.mlp.register_forward_pre_hook(lambda m, a, i=i: received.update({i: a[0][0]}))
        for i, block in enumerate(model.transformer.h)
    ]
    ids = torch.tensor([Words(tiny_tokenizer()).encode(PROMPT)])
    with torch.no_grad(), capture(model, ["m0", "m1"]) as seen:
        logits = model(ids).logits[0, -1]
    [handle.remove() for handle in handles]
    wanted = (logits - logits.mean())[[6, 11]]
    torch.testing.assert_close(graph.value[-2:], wanted)
    for layer in (0, 1):
        activation = transcoder.encode(layer, received[layer])
        mine = (graph.kind == FEATURE) & (graph.layer == layer)
        assert int(mine.sum()) == int((activation != 0).sum())
        at = graph.position[mine].long(), graph.index[mine].long()
        torch.testing.assert_close(graph.value[mine], activation[at])
        error = seen[f"m{layer}"][0] - transcoder.reconstruct([received[0], received[1]])[layer]
        torch.testing.assert_close(graph.live.error[layer], error)


# ---- edges against autograd and finite differences -------------------------------------------------------------------


def frozen_by_autograd(model, ids):
    """The model with detached patterns, denominators and MLP outputs, as hooks on the Hugging Face model itself."""
    held = {}

    def hold_mlp(layer):
        def hook(module, arguments, output):
            held[layer] = output.detach().requires_grad_()
            return held[layer]

        return hook

    handles = [block.mlp.register_forward_hook(hold_mlp(i)) for i, block in enumerate(model.transformer.h)]
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]

    def norm(module):
        def forward(x):
            c = x - x.mean(-1, keepdim=True)
            return c / (c.pow(2).mean(-1, keepdim=True) + module.eps).sqrt().detach() * module.weight + module.bias

        return forward

    for module in norms:
        module.forward = norm(module)
    original = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda *a, **k: original(*a, **k).detach()
    try:
        embedding = model.transformer.wte(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedding).logits[0, -1]
    finally:
        torch.nn.functional.softmax = original
        [handle.remove() for handle in handles]
    return logits, [embedding, held[0], held[1]]


def test_edges_are_the_gradients_of_the_frozen_model():
    model = copy.deepcopy(biased_model("gpt2"))
    graph = traced("gpt2", target=("w4", "w9"), budget=0)
    ids = torch.tensor([Words(tiny_tokenizer()).encode(PROMPT)])
    logits, places = frozen_by_autograd(model, ids)
    gradients = torch.autograd.grad(logits[6] - logits[11], places)
    replacement = graph.live
    sources = torch.arange(replacement.columns[BIAS].start)
    wanted = torch.zeros(len(sources), dtype=torch.float64)
    at = replacement.places(sources)
    for place, gradient in enumerate(gradients):
        wanted += (replacement.writes(sources)[:, place] * gradient[0, at]).sum(-1)
    ids, weights = graph.row(graph.n_nodes - 1)
    found = torch.zeros(replacement.n_sources, dtype=torch.float64).index_add_(0, ids, weights)[: len(sources)]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "gemma2"])
def test_pull_is_the_transpose_of_push(family):
    frozen = Frozen(biased_model(family, gated=True), torch.tensor([5, 7, 10, 15, 23]))
    signal = torch.randn(3, 3, 32, dtype=torch.float64)  # [sources, places, D]
    at = torch.tensor([0, 1, 3])
    end = torch.tensor([4, 4])
    reads = frozen.reads(4, frozen.final_norm, end, torch.randn(2, 32, dtype=torch.float64), torch.zeros(2).double())
    *_, (_, end, _) = frozen.push(lambda place: signal[:, place], at)
    forward = end[:, -1] @ reads.vector.T
    back = sum(
        torch.einsum("sd,nsd->sn", signal[:, pulled.layer + 1], pulled.place[:, at]) for pulled in frozen.pull(reads)
    )
    torch.testing.assert_close(forward, back)


@pytest.mark.parametrize("hook", ["mlp-input", "residual"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "olmo2"])
def test_total_effects_of_the_origins_sum_to_the_target(family, hook):
    """Through all chains of features, everything comes from tokens, positions, errors and biases."""
    graph = traced(family, gated=True, hook=hook)
    targets = torch.arange(graph.n_nodes - len(graph.targets), graph.n_nodes)
    effects = total_effects(graph.live, targets)
    torch.testing.assert_close(effects[:, len(graph.live.layer) :].sum(1), graph.value[targets])


# ---- the graph -------------------------------------------------------------------------------------------------------


def test_structure_of_the_graph():
    graph = traced("gpt2")
    counts = torch.bincount(graph.kind.long(), minlength=6).tolist()
    assert counts[ERROR] == 2 * 8 and counts[TOKEN] == counts[POSITION] == 8 and counts[BIAS] == 5
    assert counts[LOGIT] == len(graph.targets) <= 10
    source, target, _ = graph.edges(kept=False)
    free = graph.kind[source] != BIAS
    assert (graph.layer[source] < graph.layer[target])[free].all()
    assert (graph.position[source] <= graph.position[target])[free].all()
    assert graph.label(graph.find("token", -1, 0)) == "token at 0 '<|endoftext|>'"
    assert graph.label(graph.find("token", -1, 3)) == "token at 3 'w8'"
    assert graph.label(graph.find("error", 0, 0)) == "error of layer 0 at 0 '<|endoftext|>'"
    everywhere = graph.kind == BIAS
    assert (graph.position[everywhere] == -1).all() and graph.layer[everywhere].tolist() == [0, 1, 0, 1, -1]
    biases = [graph.label(int(i)) for i in everywhere.nonzero()]
    assert biases == [f"{which} bias of layer {layer}" for which in ("attention", "decoder") for layer in (0, 1)] + [
        "own bias"
    ]
    assert not (traced("llama").kind == POSITION).any()


def test_closed_gates_carry_nothing():
    graph = traced("gpt2", gated=True, gate_bias=-1e6)
    source, target, _ = graph.edges(kept=False)
    free = graph.kind[source] != BIAS
    assert (graph.position[source] == graph.position[target])[free].all()


def test_influence_and_pruning():
    graph = traced("llama", budget=EVERY)
    # By hand, densely: shares of |edges|, all powers added up.
    n = graph.n_nodes
    dense = torch.zeros(n, n, dtype=torch.float64)
    source, target, weight = graph.edges(kept=False)
    dense[target, source] = torch.where(graph.kind[source] == BIAS, 0.0, weight.abs())
    dense /= dense.sum(1, keepdim=True).clamp(min=1e-30)
    start = torch.zeros(n, dtype=torch.float64)
    start[-len(graph.targets) :] = torch.tensor([t["weight"] for t in graph.targets], dtype=torch.float64)
    total = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - dense.T, start) - start
    torch.testing.assert_close(graph.influence, total)

    inputs, errors = (total[graph.kind == k].sum() for k in (TOKEN, ERROR))
    scores = graph.scores()
    assert scores["replacement"] == pytest.approx(float(inputs / (inputs + errors)))
    from_errors = dense[:, graph.kind == ERROR].sum(1)
    everything = total + start
    assert scores["completeness"] == pytest.approx(float(((1 - from_errors) * everything).sum() / everything.sum()))

    kept = [graph.prune(*shares).edge_kept.clone() for shares in ((), (0.8, 0.98), (0.8, 0.6))]
    assert torch.equal(kept[0], kept[1]) and kept[2].sum() < kept[1].sum(), "the shares that `trace` keeps"
    assert torch.equal(traced("llama", budget=EVERY).edge_kept, kept[0])
    few, many = (int(graph.prune(nodes=share).node_kept.sum()) for share in (0.3, 0.9))
    assert 8 < few < many < n
    source, target, _ = graph.edges()
    assert graph.node_kept[source].all() and graph.node_kept[target].all()
    for node in graph.nodes(kind="feature"):
        assert (source == node.id).any() and (target == node.id).any()


def largest(scores: dict, share: float) -> set:
    """The keys of the largest scores that together hold this share."""
    chosen, held, total = set(), 0.0, sum(scores.values())
    for key, score in sorted(scores.items(), key=lambda item: -item[1]):
        if held >= share * total * (1 - 1e-12) or score == 0:
            break
        chosen.add(key)
        held += score
    return chosen


@pytest.mark.parametrize("nodes, edges", [(0.5, 0.6), (0.8, 0.98)])
def test_pruning_edge_by_edge(nodes, edges):
    """The rules at the top of graph.py, with sets and loops; some features have no row."""
    graph = traced("gpt2", budget=30, nodes=nodes, edges=edges)
    kind, n = graph.kind.tolist(), graph.n_nodes
    source, target, weight = (t.tolist() for t in graph.edges(kept=False))
    rows = set(graph.row_target.tolist())
    always = {i for i in range(n) if kind[i] in (TOKEN, LOGIT)}
    rest = {i for i in range(n) if kind[i] in (ERROR, POSITION) or (kind[i] == FEATURE and i in rows)}
    keep = largest({i: float(graph.influence[i]) for i in rest}, nodes) | always
    between = {(s, t): abs(w) for s, t, w in zip(source, target, weight, strict=True) if {s, t} <= keep}
    into = {t: sum(w for (_, other), w in between.items() if other == t) for _, t in between}
    share = {(s, t): w / into[t] for (s, t), w in between.items() if into[t]}
    start = {n - len(graph.targets) + i: one["weight"] for i, one in enumerate(graph.targets)}
    through = {i: start.get(i, 0.0) for i in keep}  # influence among the kept nodes; targets come last, then downwards
    for layer in range(graph.n_layers, -1, -1):
        for (s, t), w in share.items():
            if int(graph.layer[t]) == layer:
                through[s] += w * through[t]
    chosen = largest({(s, t): w * through[t] for (s, t), w in share.items()}, edges)
    before = None
    while before != (keep, chosen):
        before = keep, chosen
        leaves, enters = {s for s, _ in chosen}, {t for _, t in chosen}
        keep = always | {i for i in keep if i in leaves and (i in enters or kind[i] != FEATURE)}
        chosen = {(s, t) for s, t in chosen if {s, t} <= keep}
    assert set(graph.node_kept.nonzero()[:, 0].tolist()) == keep
    found = graph.edges()
    assert set(zip(found[0].tolist(), found[1].tolist(), strict=True)) == chosen
    assert len(always) < len(keep) < len(rest | always) and len(chosen) > 20


def test_scores_do_not_depend_on_how_many_edges_are_stored():
    whole, few = (traced("gpt2", budget=EVERY, edges_per_row=n).scores() for n in (10_000, 60))
    assert few["completeness"] == pytest.approx(whole["completeness"], abs=0.03)
    assert few["replacement"] == pytest.approx(whole["replacement"], abs=0.03)


def test_a_graph_that_was_not_pruned_keeps_everything():
    graph = traced("gpt2", budget=20)
    parts = {f.name: getattr(graph, f.name) for f in fields(graph)}
    whole = sl.Graph(
        **{name: part for name, part in parts.items() if name not in ("influence", "node_kept", "edge_kept")}
    )
    assert whole.node_kept.all() and len(whole.node_kept) == whole.n_nodes == len(whole.nodes()) > len(graph.nodes())
    assert whole.edge_kept.all() and len(whole.edges()[0]) == len(whole.source) > len(graph.edges()[0])
    assert torch.equal(whole.influence, graph.influence)


def test_the_completeness_error_is_that_of_the_worst_row():
    """Of three rows: 1 of 10 missing, 0.5 of 2, and 0.01 of a value too small to be measured against itself."""
    graph = traced("gpt2", budget=0, target=["w4", "w9", "w13"])
    values, sums = torch.tensor([10.0, 2.0, 0.0]), torch.tensor([9.0, 2.5, 0.01])
    for row_abs, wanted in (([20.0, 20.0, 40.0], 0.25), ([20.0, 20.0, 10.0], 1.0)):  # 0.01 of 0.04, and of 0.01
        changed = replace(graph, row_value=values, row_sum=sums, row_abs=torch.tensor(row_abs))
        assert changed.completeness_error == pytest.approx(wanted)


def test_scores_of_a_graph_of_which_edges_were_dropped():
    """Exactly: dropped features are no part of it, dropped errors, tokens and positions still are."""
    whole, few = (traced("gpt2", budget=EVERY, edges_per_row=n) for n in (10_000, 25))
    n = whole.n_nodes
    stored = set(zip(*(t.tolist() for t in few.edges(kept=False)[:2]), strict=True))
    dense = torch.zeros(n, n, dtype=torch.float64)
    for s, t, w in zip(*(x.tolist() for x in whole.edges(kept=False)), strict=True):
        if whole.kind[s] != BIAS and (whole.kind[s] != FEATURE or (s, t) in stored):
            dense[t, s] = abs(w)
    assert len(stored) < len(whole.source) / 2
    dense /= dense.sum(1, keepdim=True).clamp(min=1e-30)
    start = torch.zeros(n, dtype=torch.float64)
    start[-len(few.targets) :] = torch.tensor([t["weight"] for t in few.targets], dtype=torch.float64)
    through = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - dense.T, start)
    inputs = through[(whole.kind == TOKEN) | (whole.kind == POSITION)].sum()
    errors = through[whole.kind == ERROR].sum()
    scores = few.scores()
    assert scores["replacement"] == pytest.approx(float(inputs / (inputs + errors)), rel=1e-9)
    from_errors = through @ dense[:, whole.kind == ERROR].sum(1)
    assert scores["completeness"] == pytest.approx(1 - float(from_errors / through.sum()), rel=1e-9)


def test_a_head_with_a_bias():
    """No family has one here; where the unembedding has a bias, it is part of logits and of targets."""
    model = biased_model("gpt2")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(64, dtype=torch.float64))
    transcoder = Transcoder.random(2, 48, 32, dtype=torch.float64)
    ids = torch.tensor([Words(tiny_tokenizer()).encode(PROMPT)])
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    for target, index, wanted in (("w4", 6, logits[6] - logits.mean()), (("w4", "w9"), -1, logits[6] - logits[11])):
        graph = sl.trace(model, tiny_tokenizer(), transcoder, PROMPT, target)
        assert int(graph.index[-1]) == index, "a difference is no token"
        graph.live.set_logits(torch.ones(1, 32, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        assert graph.live.logit_position == 7, "the last one"
        assert graph.completeness_error < 1e-9 and graph.live.frozen.check < 1e-9
        assert float(graph.value[-1]) == pytest.approx(float(wanted))


def test_growth_expands_the_most_influential():
    whole, some = traced("llama", budget=EVERY), traced("llama", budget=20)
    assert len(some.row_target) == 20 + len(some.targets)
    best = whole.influence[: len(whole.live.layer)].topk(20).indices.tolist()
    assert len({*best} & {*some.row_target.tolist()}) >= 15


def test_save_and_load(tmp_path):
    graph = traced("gpt2")
    again = sl.Graph.load(graph.save(tmp_path / "graph"))
    for name in ("prompt", "tokens", "targets", "settings", "n_layers", "n_heads"):
        assert getattr(again, name) == getattr(graph, name)
    for name in ("kind", "source", "weight", "row_sum", "rest", "influence", "node_kept", "edge_kept"):
        assert torch.equal(getattr(again, name), getattr(graph, name))
    assert again.completeness_error == graph.completeness_error
    with pytest.raises(ValueError, match="has no model"):
        again.replacement()
    with pytest.raises(ValueError, match="no graph at"):
        sl.Graph.load(tmp_path)


def test_long_prompts_fit_into_memory(monkeypatch):
    """2,000 tokens: neither [nodes x nodes] nor all attention patterns are ever there at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr("sparselens.attribution.linear_model.CACHE", 2**26)  # patterns of all layers: twice that
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    transcoder = Transcoder.random(2, 32, 16)
    ids = torch.randint(0, 64, (2000,), generator=torch.Generator().manual_seed(0))
    with PeakMemory().ignore(model, transcoder) as memory:
        graph = sl.trace(model, tiny_tokenizer(), transcoder, ids, budget=24, edges_per_row=500, memory_mb=64)
    assert graph.completeness_error < 1e-4
    n = len(graph.live.layer)
    assert n > 10_000 and memory.peak < 200 * 2**20 < n * n * 4 / 2
    assert len(graph.source) <= len(graph.row_target) * (500 + 5)


@torch.no_grad()
def test_targets_are_the_likeliest_tokens_up_to_a_share():
    """From flat to sharp: as many as reach 95 %, ten at most; weights in proportion, read against the mean logit."""
    frozen = Frozen(biased_model("gpt_neox"), torch.tensor([5, 7, 10, 15, 23]))
    weight, counts = frozen.unembed_weight, set()
    for factor in range(1, 200, 3):
        frozen.unembed_weight = weight * factor / 4
        for at, options in ((-1, {}), (2, {"at": 2})):
            logits = frozen.final[at] @ frozen.unembed_weight
            p, order = logits.softmax(-1).sort(descending=True)
            n = next(n for n in range(1, 65) if p[:n].sum() >= 0.95 or n == 10)
            found = choose_targets(frozen, tiny_tokenizer(), None, **options)
            assert [t.row["token"] for t in found] == order[:n].tolist()
            assert [t.row["probability"] for t in found] == pytest.approx(p[:n].tolist())
            assert [t.row["weight"] for t in found] == pytest.approx((p[:n] / p[:n].sum()).tolist())
            values = torch.stack([frozen.final[at] @ t.direction + t.constant for t in found])
            torch.testing.assert_close(values, logits[order[:n]] - logits.mean())
            counts.add(n)
    assert len(counts) > 6, counts


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, message", [
    ("w4 w9", "2 tokens"), (64, "vocabulary has 64"), (torch.ones(5), r"shape \[32\]"),
    (("w1", "w2", "w3"), "two tokens"),
])  # fmt: skip
def test_bad_targets(target, message):
    with pytest.raises(ValueError, match=message):
        traced(target=target)


def test_how_far_the_pieces_may_be_from_the_model(monkeypatch):
    model, ids = biased_model("gpt2"), torch.arange(64)
    for check, gates in ((9e-5, None), (9e-5, []), (1.5e-4, None), (1.5e-4, [])):
        found = SimpleNamespace(check=check, decoder=SimpleNamespace(gates=gates))
        monkeypatch.setattr("sparselens.attribution.growth.Frozen", lambda *_, found=found: found)
        with warnings.catch_warnings(record=True) as said:
            if check > 1e-4 and gates is None:
                with pytest.raises(ValueError, match=r"1\.5e-04 of the largest logit away"):
                    _freeze(model, ids)
            else:
                assert _freeze(model, ids) is found
        assert len(said) == (check > 1e-4 and gates is not None)
    with pytest.raises(ValueError, match="65 tokens, the model reads at most 64"):
        _freeze(model, torch.zeros(65, dtype=torch.long))


def test_other_bad_input():
    with pytest.raises(ValueError, match="made for another model"):
        sl.trace(biased_model("gpt2"), tiny_tokenizer(), Transcoder.random(3, 8, 32, dtype=torch.float64), PROMPT)
    with pytest.raises(ValueError, match="training mode"):
        sl.trace(biased_model("gpt2").train(), tiny_tokenizer(), Transcoder.random(2, 8, 32), PROMPT)
    for prompt in ("", "  ", []):
        with pytest.raises(ValueError, match="no tokens"):
            traced(prompt=prompt)
    with pytest.raises(ValueError, match="budget=-1"):
        traced(budget=-1)
    with pytest.raises(ValueError, match="edges_per_row=0"):
        traced(edges_per_row=0)
    assert traced(edges_per_row=1).completeness_error < 1e-9
    for options in (dict(nodes=0), dict(nodes=1.01), dict(edges=0), dict(edges=1.01)):
        with pytest.raises(ValueError, match="share above 0"):
            traced(**options)
    for options in (dict(mass=0), dict(mass=1.01), dict(most_targets=0)):
        with pytest.raises(ValueError, match="expected a share up to 1, and at least 1"):
            traced(**options)
    whole = traced(nodes=1, edges=1, mass=1, most_targets=100)
    assert len(whole.targets) == 64 and sum(t["weight"] for t in whole.targets) == pytest.approx(1)
    graph = traced(budget=0)
    with pytest.raises(ValueError, match="not expanded"):
        graph.row(0)
    with pytest.raises(ValueError, match="expected one"):
        graph.find("feature", 0, 0, 47_000)
