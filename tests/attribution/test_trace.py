import copy

import pytest
import torch
from tiny_models import tiny_tokenizer
from tracing_setup import FAMILIES, PROMPT, biased_model, total_effects, traced

import sparselens as sl
from sparselens.attribution.graph import BIAS, ERROR, FEATURE, LOGIT, POSITION, TOKEN
from sparselens.attribution.linear_model import Frozen
from sparselens.models.hooks import capture
from sparselens.models.memory import PeakMemory
from sparselens.tasks.words import Words
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

    few, many = (int(graph.prune(nodes=share).node_kept.sum()) for share in (0.3, 0.9))
    assert 8 < few < many < n
    source, target, _ = graph.edges()
    assert graph.node_kept[source].all() and graph.node_kept[target].all()
    for node in graph.nodes(kind="feature"):
        assert (source == node.id).any() and (target == node.id).any()


def test_scores_do_not_depend_on_how_many_edges_are_stored():
    whole, few = (traced("gpt2", budget=EVERY, edges_per_row=n).scores() for n in (10_000, 60))
    assert few["completeness"] == pytest.approx(whole["completeness"], abs=0.03)
    assert few["replacement"] == pytest.approx(whole["replacement"], abs=0.03)


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


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, message", [
    ("w4 w9", "2 tokens"), (64, "vocabulary has 64"), (torch.ones(5), r"shape \[32\]"),
    (("w1", "w2", "w3"), "two tokens"),
])  # fmt: skip
def test_bad_targets(target, message):
    with pytest.raises(ValueError, match=message):
        traced(target=target)


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
    with pytest.raises(ValueError, match="share above 0"):
        traced(nodes=0)
    graph = traced(budget=0)
    with pytest.raises(ValueError, match="not expanded"):
        graph.row(0)
    with pytest.raises(ValueError, match="expected one"):
        graph.find("feature", 0, 0, 47_000)
