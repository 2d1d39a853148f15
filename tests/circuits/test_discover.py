"""Circuits of real (tiny) models: the pieces are the model, scores are derivatives, and the whole walk."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from pairs import QUIET, chosen, random_prompts, words_task
from tiny_models import CONFIGS, tiny_model, tiny_tokenizer
from tracing_setup import biased_model

from sparselens.circuits.attention_edges import AttentionEdges
from sparselens.circuits.circuit import Circuit
from sparselens.circuits.compare import compare, table
from sparselens.circuits.discover import answered, discover, prepare
from sparselens.circuits.rows import MultiplierRow, Reading, Results
from sparselens.circuits.run import Patcher, run_nodes
from sparselens.circuits.scores import (
    _differences,
    _writer_products,
    _writes,
    eap,
    estimate_memory,
    exact,
    path_points,
    reader_shares,
    stretch_weights,
)
from sparselens.cli import main
from sparselens.config import Gate, Search
from sparselens.models.architectures import Dimensions, mlp_width
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates, save
from sparselens.tasks import Pair, Task
from sparselens.tasks.prompts import build
from sparselens.training.dry_run import PeakMemory


def large_vocabulary(size: int):
    model = tiny_model("llama")
    model.resize_token_embeddings(size)
    return model


def gated(family: str, bias: float = 0.3):
    return add_gates(tiny_model(family), Gate(bias=bias))


@pytest.mark.parametrize("ablation", ["corrupted", "mean", "zero"])
@pytest.mark.parametrize("family", CONFIGS)
def test_full_circuit_is_the_model_and_empty_is_the_corrupted_prompt(family, ablation):
    """Patcher checks itself to 1e-4 of the logits; here with sdpa as well as with gates."""
    biased = [biased_model(family, gates, torch.float32) for gates in (False, True)]
    for model in (tiny_model(family, attention="eager" if "gemma2" in family else "sdpa"), gated(family), *biased):
        patcher = Patcher(Decoder(model), random_prompts(), ablation)
        assert all(error < 1e-5 for error in patcher.checks.values())
        if ablation == "corrupted":
            prompts = patcher.prompts
            with torch.no_grad():
                own = prompts.score(prompts.at_reads(model(prompts.corrupted).logits).double())
            assert torch.allclose(patcher.m_nothing, own, atol=1e-4)


def test_the_self_check_notices_a_model_it_does_not_understand():
    model = tiny_model("llama")
    decoder = Decoder(model)
    decoder.parts[0].mlp.register_forward_hook(
        lambda module, arguments, output: output * (1 + 0.1 * decoder_is_running())
    )
    decoder_is_running = iter_flag(model)
    with pytest.raises(ValueError, match="self-check failed: the full circuit"):
        Patcher(decoder, random_prompts())


def test_how_far_the_pieces_may_be_from_the_model():
    """1e-4 of the largest logit; where gates may flip, a tenth of the prompts may differ."""
    error = torch.full((20,), 9e-5)
    error[3], error[7] = 0.5, 0.4
    patchers = [SimpleNamespace(decoder=SimpleNamespace(gates=g, config=CONFIGS["gpt2"]())) for g in (None, [])]
    assert Patcher._judge(patchers[1], "full", error) == pytest.approx(9e-5)
    assert Patcher._judge(patchers[0], "full", error[8:]) == pytest.approx(9e-5)
    for patcher, errors in (
        (patchers[0], error), (patchers[1], error[:19]), (patchers[1], error[:9]),
        (patchers[0], torch.tensor([1.5e-4])), (patchers[1], torch.full((20,), 1.5e-4)),
        (patchers[0], torch.tensor([torch.nan])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="self-check failed: the empty circuit differs from the corrupted prompts"):
            Patcher._judge(patcher, "empty", errors)


def test_reads_that_are_not_there_are_not_checked():
    decoder, prompts = Decoder(tiny_model("gpt2")), random_prompts(3, 8)
    prompts.used[1, 1] = False
    prompts.position[1, 1] = 0
    patcher = Patcher(decoder, prompts)
    logits = torch.zeros(3, 2, 64)
    own = prompts.ask(decoder.model, prompts.clean)
    wanted = [own[0].abs().max() / own[0].abs().max(), own[1, 0].abs().max() / own[1, 0].abs().max(), 1.0]
    assert patcher._errors(logits, prompts.clean, prompts).tolist() == pytest.approx([float(w) for w in wanted])
    logits = own.clone()
    logits[1, 1] += 7  # not there
    logits[2, 0, 5] += 0.5 * own[2].abs().max()
    assert patcher._errors(logits, prompts.clean, prompts).tolist() == pytest.approx([0, 0, 0.5], abs=1e-6)
    assert all(error < 1e-5 for error in patcher.checks.values())


def test_mean_ablation_is_the_mean_over_both_prompts_of_those_that_have_not_ended():
    """Every node by hand, position by position; after the longest prompt's end it is zero."""
    decoder, prompts = Decoder(biased_model("gpt2")), random_prompts(3, 8)
    prompts.lengths[:] = torch.tensor([7, 5, 3])
    prompts.position[:] = torch.tensor([[5, 6], [3, 4], [1, 2]])
    patcher = Patcher(decoder, prompts, "mean")
    runs = [run_nodes(decoder, x) for x in (patcher.clean, patcher.corrupted)]
    base = patcher.base_of(torch.tensor([0, 2]))
    for name in ("embedding", "final", "attention_in", "mlp_in", "z", "mlp_out"):
        found, both = getattr(base, name), [getattr(run, name) for run in runs]
        layers = [(found, *both)] if name in ("embedding", "final") else zip(found, *both, strict=True)
        for value, clean, corrupted in layers:
            assert len(value) == 2 and torch.equal(value[0], value[1])
            for t in range(8):
                alive = [i for i, length in enumerate((7, 5, 3)) if t < length]
                at = [run[i, ..., t, :] for run in (clean, corrupted) for i in alive]
                wanted = sum(at) / len(at) if at else torch.zeros_like(value[0, ..., t, :])
                torch.testing.assert_close(value[0, ..., t, :], wanted)


def test_zero_ablation_leaves_the_output_biases_of_attention():
    decoder = Decoder(biased_model("gpt2"))
    base = Patcher(decoder, random_prompts(3, 8), "zero").base_of(slice(0, 2))
    first, second = (part.output[1].expand(2, 8, 32) for part in decoder.parts)
    assert not any(x.any() for x in (base.embedding, *base.z, *base.mlp_out, base.attention_in[0]))
    for found, wanted in ((base.mlp_in[0], first), (base.attention_in[1], first), (base.final, first + second)):
        torch.testing.assert_close(found, wanted)


def iter_flag(model):
    """1 while the model's own forward pass runs, 0 while its pieces are called."""
    running = [0]
    model.register_forward_pre_hook(lambda *a: running.__setitem__(0, 1))
    model.register_forward_hook(lambda *a: running.__setitem__(0, 0), always_call=True)
    return lambda: running[0]


def test_single_edges_and_any_grouping_of_circuits():
    """One circuit alone, in a batch of many, and in small pieces of prompts: the same numbers."""
    decoder, prompts = Decoder(tiny_model("qwen3")), random_prompts(5)
    c, rng = decoder.components, np.random.default_rng(0)
    masks = np.stack([c.prune((rng.random(c.possible.shape) < share) & c.possible) for share in (0.1, 0.3, 0.6, 0.9)])
    together = Patcher(decoder, prompts).run(masks)
    little = Patcher(decoder, prompts, memory_mb=0.02)
    alone = torch.stack([little.run(mask[None])[0] for mask in masks])
    assert torch.allclose(together, alone, atol=1e-5)


def test_an_edge_carries_only_its_own_writer():
    """input->logits alone: the corrupted residual stream with the clean embedding swapped in."""
    decoder, prompts = Decoder(tiny_model("gpt2")), random_prompts()
    patcher = Patcher(decoder, prompts)
    mask = np.zeros_like(decoder.components.possible)
    mask[decoder.components.edge("input->logits")] = True
    clean, corrupted = decoder.begin(prompts.clean), decoder.begin(prompts.corrupted)
    with torch.no_grad():
        final = run_nodes(decoder, corrupted).final + clean - corrupted
        expected = prompts.score(prompts.at_reads(decoder.unembed(final)).double())
    assert torch.allclose(patcher.run(mask[None])[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "family, with_gates, step, ablation",
    [(family, gates, 1e-5, "corrupted") for family in ("gpt2", "gpt_neox") for gates in (False, True)]
    # RMS norms compute in fp32 whatever they are given: a wider step, and no gates that it could flip.
    + [(family, False, 2e-3, "corrupted") for family in ("llama", "qwen3", "olmo2", "gemma3_text")]
    + [("gpt2", False, 1e-5, "mean"), ("gpt2", False, 1e-5, "zero"), ("gpt_neox", False, 1e-5, "mean")],
)
def test_eap_is_the_derivative_of_exact_patching(family, with_gates, step, ablation):
    """Every edge, by central differences. Gates held still: where none flips, that is the derivative."""
    model = (gated(family) if with_gates else tiny_model(family)).double()
    decoder, prompts = Decoder(model, straight_through=False), random_prompts(2, 6)
    scores = eap(decoder, prompts, ablation=ablation)
    patcher, c = Patcher(decoder, prompts, ablation), decoder.components
    edges = np.flatnonzero(c.possible)
    masks = torch.from_numpy(c.possible).double().flatten().repeat(2 * len(edges), 1)
    rows = torch.arange(len(edges))
    masks[2 * rows, edges] += step
    masks[2 * rows + 1, edges] -= step
    values = patcher.run(masks.view(-1, *c.possible.shape)).mean(1)
    slope = ((values[0::2] - values[1::2]) / (2 * step)).numpy()
    assert np.abs(slope - scores.ravel()[edges]).max() < 1e-3 * np.abs(scores).max()


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(x)) for x in (np.abs(a), np.abs(b))]
    return float(np.corrcoef(*ranks)[0, 1])


def test_eap_ig_ranks_like_exact_patching():
    model = tiny_model("gpt2")
    decoder, prompts = Decoder(model), random_prompts(8, 8)
    edges = np.flatnonzero(decoder.components.possible)
    wanted = exact(Patcher(decoder, prompts)).ravel()[edges]
    ranked = {path: eap(decoder, prompts, 5, n_at_once=3, path=path).ravel()[edges] for path in ("own", "whole")}
    assert spearman(wanted, ranked["own"]) > 0.9
    assert spearman(wanted, ranked["own"]) > spearman(wanted, ranked["whole"])


def test_weights_average_over_the_stretch_an_edge_covers():
    """Linear functions exactly, whatever the points; the whole path is their trapezoid rule."""
    shares = np.array([1e-9, 0.03, 0.2, 0.77, 1.0])
    points = path_points(5, "own")
    weights = stretch_weights(shares, points)
    assert np.allclose(weights.sum(0), 1)
    assert np.allclose(np.array(points) @ weights, 1 - shares / 2)
    assert np.allclose(weights[:, 0], [0, 0, 0, 0, 1], atol=1e-6)
    assert np.allclose(np.trapezoid(np.exp(points), points), np.exp(points) @ weights[:, -1])
    assert path_points(0, "own") == path_points(1, "own") == path_points(1, "whole") == [1.0]
    assert path_points(5, "whole") == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])  # midpoints
    assert points == pytest.approx([0, 7 / 16, 3 / 4, 15 / 16, 1]) and path_points(2, "own") == [0, 1]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "olmo2"])
def test_shares_of_what_changes_at_a_reader(family):
    """From inner products made in pieces, against what every writer and the whole residual stream really change."""
    decoder, prompts = Decoder(tiny_model(family).double()), random_prompts(5, 6)
    c = decoder.components
    clean, corrupted = decoder.begin(prompts.clean), decoder.begin(prompts.corrupted)
    found = torch.zeros(c.n_writers, c.n_writers, dtype=torch.float64)
    _writer_products(decoder, _differences(decoder, prompts, clean, corrupted, _writes(decoder, corrupted)), found)
    runs = [run_nodes(decoder, x) for x in (clean, corrupted)]
    changes = [runs[0].embedding - runs[1].embedding]
    for layer in range(c.n_layers):
        changes += [*decoder.write_each(layer, runs[0].z[layer] - runs[1].z[layer])]
        changes += [runs[0].mlp_out[layer] - runs[1].mlp_out[layer]]
    written = torch.stack([change.flatten() for change in changes])
    assert torch.allclose(found, written @ written.T, rtol=1e-6)
    at_end = (runs[0].final - runs[1].final).flatten()
    wanted = (written @ at_end).abs() / at_end.square().sum()
    assert np.allclose(reader_shares(c.possible, found.numpy())[-1], wanted.clamp(max=1).detach().numpy())


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "gpt_neox"])
def test_memory_stays_below_its_estimate(family):
    model = tiny_model(family)
    decoder, prompts = Decoder(model), random_prompts(16, 12)
    peak = PeakMemory().ignore(model)
    with peak:
        eap(decoder, prompts, steps=2, n_at_once=16, path="own")
    estimate = estimate_memory(decoder.dims, mlp_width(decoder.config), 16, 12, 2, 64)
    assert 0.3 * estimate.total < peak.peak < estimate.total


@pytest.mark.parametrize("metric", ["logit", "probability", "log-probability"])
def test_large_vocabularies_count_when_circuits_run(metric):
    """200 logits for every number in the residual stream: as many circuits at a time as the memory allows."""
    model = large_vocabulary(50_000)
    decoder, prompts, allowed = Decoder(model), random_prompts(16, 12, metric=metric), 32
    masks = np.repeat(decoder.components.possible[None], 24, 0)
    peaks = [PeakMemory().ignore(model) for _ in range(3)]
    with peaks[0]:
        patcher = Patcher(decoder, prompts, memory_mb=allowed)
    with peaks[1]:
        patcher.run(masks)
    with peaks[2]:
        edges = AttentionEdges(decoder, prompts, "corrupted", memory_mb=allowed)
        for some in edges.parts():
            edges.integrated(some)
    assert all(0.2 * allowed < peak.peak / 2**20 < allowed for peak in peaks), [p.peak / 2**20 for p in peaks]


def test_logits_are_made_where_they_are_read_alone():
    """Same answers, without a logit anywhere else."""
    model, prompts = large_vocabulary(5_000), random_prompts(6, 12)
    seen = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[-2]))
    whole = prompts.at_reads(model(input_ids=prompts.clean).logits)
    assert torch.allclose(prompts.ask(model, prompts.clean), whole, atol=1e-5)
    mixed = replace(prompts, position=torch.tensor([[3, 7], [7, 3], [0, 11], [5, 5], [2, 3], [11, 0]]))
    whole = mixed.at_reads(model(input_ids=prompts.clean).logits)
    assert torch.allclose(mixed.ask(model, prompts.clean), whole, atol=1e-5)
    seen.clear()
    answered(model, prompts)
    Patcher(Decoder(model), prompts)
    edges = AttentionEdges(Decoder(model), prompts)
    edges.check(next(edges.parts()))
    assert seen and max(seen) == 2


def test_memory_at_real_sizes():
    gpt2 = Dimensions(n_layers=12, n_heads=12, n_kv_heads=12, d_model=768, d_head=64, max_tokens=1024)
    llama = Dimensions(n_layers=32, n_heads=32, n_kv_heads=8, d_model=4096, d_head=128, max_tokens=8192)
    assert estimate_memory(gpt2, 3072, 16, 64).per_token < 0.5 * 2**20
    assert estimate_memory(llama, 14336, 16, 64).per_token < 3 * 2**20
    # Numbers of four bytes: stored, the larger of attention's and the MLP's graph, readers (llama: 48 of 64 writers).
    assert estimate_memory(gpt2, 3072, 16, 64).per_token == 4 * (27_648 + 32_256 + 16_896)
    assert estimate_memory(gpt2, 3072, 16, 1024, gated=True).per_token == 4 * (27_648 + 116_736 + 16_896)
    assert estimate_memory(llama, 14336, 16, 64).per_token == 4 * (393_216 + 153_600 + 196_608)
    whole = estimate_memory(gpt2, 3072, 16, 64, reads=2, vocabulary=50_257)
    assert whole.logits == 4 * 16 * 6 * 2 * 50_257 and whole.total == 307_200 * 16 * 64 + whole.logits


def test_exact_patching_of_a_big_graph_is_refused_early():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=12, num_attention_heads=8)
    model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None))
    with pytest.raises(ValueError, match=r"exact patching would need .* use --method eap-ig"):
        discover(model, tiny_tokenizer(), words_task(), method="exact", **QUIET)


@pytest.mark.parametrize("selection", ["top", "greedy", "heads"])
def test_discover_from_end_to_end(selection, tmp_path):
    model = gated("llama")
    circuit = discover(
        model, tiny_tokenizer(), chosen([model]), selection=selection, prompts=12, points=8, steps=3,
        readings=("components",), **QUIET,
    )  # fmt: skip
    found = circuit.results
    row = found["readings"]["components"]
    assert row["n_edges"] == circuit.components.n_edges == row["n_edges_scored"]
    assert row["m_model"] > row["m_nothing"]
    assert row["curve"]["edges"][-1] == row["n_edges"] and row["curve"]["effect"][-1] == pytest.approx(1.0)
    assert circuit.n_edges == row["edges_at"]["0.9"]
    assert np.array_equal(circuit.components.prune(circuit.mask), circuit.mask)
    tokens = found["open_edges"]
    assert tokens["n_open"] + tokens["n_proven_absent"] == tokens["n_possible"] == 2 * 4 * 15  # five tokens
    circuit.save(tmp_path / "circuit.json")
    assert np.array_equal(Circuit.load(tmp_path / "circuit.json").mask, circuit.mask)


def test_closed_gates_are_zeros_in_the_graph():
    """A head whose gates are all closed writes nothing: its edges score exactly zero."""
    model = gated("gpt2")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("h.1.attn.gate_bias"))[2] = -100.0
    decoder = Decoder(model)
    scores = eap(decoder, random_prompts(), steps=2)
    assert (scores[:, decoder.components.head_writer(1, 2)] == 0).all()
    assert (scores[:, decoder.components.head_writer(1, 1)] != 0).any()


def test_a_control_is_measured_only_where_it_is_another_model(monkeypatch):
    from sparselens.circuits import compare as procedure

    measured: list[int] = []
    real = procedure.discover_on
    monkeypatch.setattr(procedure, "discover_on", lambda *a, **o: measured.append(1) or real(*a, **o))
    dense, sparse, other = tiny_model("gpt2"), gated("gpt2", bias=1.0), tiny_model("gpt2")
    next(other.parameters()).data[3, 0] += 1e-3
    settings = Search(prompts=8, points=4, readings=("removed",), scope="prompt", random_control=False)
    for control, times, lines in ((copy.deepcopy(dense), 2, 4), (other, 3, 5)):
        measured.clear()
        said: list[str] = []
        result = compare(
            dense, sparse, [chosen([dense, sparse])], control=control, tokenizer=tiny_tokenizer(), settings=settings,
            say=said.append,
        )  # fmt: skip
        assert len(measured) == times and len(table(result).splitlines()) == lines
        assert any("has the weights of the dense model" in line for line in said) == (times == 2)
        assert set(result["tasks"]["words"]["multipliers"]["removed"]) == {"dense", "control"}


def test_compare_is_paired_and_brings_the_control(tmp_path):
    dense, sparse = tiny_model("gpt2"), gated("gpt2", bias=1.0)
    result = compare(
        dense, sparse, [chosen([dense, sparse])], control=dense, tokenizer=tiny_tokenizer(),
        settings=Search(prompts=10, points=6, steps=2, readings=("removed", "components")), **QUIET,
    )  # fmt: skip
    found = result["tasks"]["words"]["multipliers"]
    assert list(found) == ["removed", "removed-task", "components"]
    for reading, baselines in found.items():
        assert list(baselines) == ["dense", "control"] and baselines["control"] == baselines["dense"]
        for thresholds in baselines.values():
            assert list(thresholds) == ["0.8", "0.9", "0.95", "0.98", *(["mean"] if reading != "removed" else [])]
            known = MultiplierRow.__required_keys__, set(MultiplierRow.__annotations__)
            assert all(known[0] <= set(row) <= known[1] for row in thresholds.values())
    lines = table(result).splitlines()
    assert len(lines) == 1 + 1 + 3 + 1 and "all that lead to the answer" in lines[1]
    opened = result["tasks"]["words"]["open_edges"]
    counts = [result["tasks"]["words"]["models"][role]["leading"]["per_prompt"] for role in ("dense", "sparse")]
    ratios = np.log(counts[0]) - np.log(counts[1])
    assert opened["multiplier"] == pytest.approx(np.exp(ratios.mean())) and opened["control"] == opened["dense"]
    assert 1 <= opened["low"] <= opened["multiplier"] <= opened["high"] and opened["n_prompts"] == len(counts[0])
    assert len({len(circuit.curves["components"].m_model) for circuit in result.circuits["words"].values()}) == 1
    from sparselens.reporting.figures.circuits import draw_all

    paths = draw_all(json.loads(json.dumps(result)), tmp_path)
    assert {path.suffix for path in paths} == {".png", ".svg", ".pdf"} and all(
        path.stat().st_size > 2000 for path in paths
    )
    again = draw_all(result, tmp_path / "again")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_command_line(tmp_path, capsys):
    model = tiny_model("llama")
    save(model, tiny_tokenizer(), tmp_path / "model")
    pairs = tmp_path / "mine.jsonl"
    rows = [
        {"clean": p.clean, "corrupted": p.corrupted, "answer": p.answer, "wrong": p.wrong}
        for p in chosen([model]).pairs
    ]
    pairs.write_text("\n".join(json.dumps(row) for row in rows))
    common = ["--prompts", "10", "--points", "6", "--steps", "2"]
    main(["discover", str(tmp_path / "model"), "--task", str(pairs), "--json", str(tmp_path / "d.json"),
          "--out", str(tmp_path / "out"), *common])  # fmt: skip
    found = json.loads((tmp_path / "d.json").read_text())
    assert found.keys() - {"provenance"} <= Results.__annotations__.keys() and list(found["readings"]) == [
        "removed", "removed-task", "share", "heads", "heads-corrupted", "components"
    ]  # fmt: skip
    for row in found["readings"].values():
        assert Reading.__required_keys__ <= row.keys() <= Reading.__annotations__.keys()
        assert set(row["curve"]) == {"edges", "effect", "low", "high"}
    assert (tmp_path / "out" / "figure2.png").is_file() and (tmp_path / "out" / "circuit.json").is_file()
    folder = str(tmp_path / "model")
    main(["compare", folder, folder, "--tasks", str(pairs), "--json", str(tmp_path / "c.json"), *common])
    found = json.loads((tmp_path / "c.json").read_text())
    assert all(reading["mine"]["0.9"]["multiplier"] == 1.0 for reading in found["readings"].values())
    assert found["open_edges"]["mine"]["multiplier"] == 1.0 and found["provenance"]
    pairs.write_text(json.dumps({"clean": "w1 w2", "corrupted": "w1", "answer": " w3", "wrong": " w4"}))
    with pytest.raises(SystemExit):
        main(["discover", str(tmp_path / "model"), "--task", str(pairs)])
    assert "no usable pair" in capsys.readouterr().err


def test_a_task_the_model_cannot_do_is_refused():
    model = tiny_model("gpt2")
    same = Task(
        "same", None, "logit", tuple(Pair(f"w{i} w1 w2 w3", f"w{i + 1} w1 w2 w3", " w5", " w6") for i in range(8, 50))
    )
    with pytest.raises(ValueError, match=r"right on only|no effect to explain"):
        discover(model, tiny_tokenizer(), same, prompts=8, readings=("components",), **QUIET)


def test_a_model_right_on_fewer_than_half_of_the_prompts_is_warned_about():
    """Between a quarter, where it is refused, and a half."""
    model, said = tiny_model("gpt2"), []
    prompts = build(words_task(200), tiny_tokenizer(), 200, **QUIET)
    right = answered(model, prompts)
    good, bad = (prompts.take(some).pairs for some in (right, ~right))
    for n_right, warned in ((16, True), (22, False)):
        pairs = (*good[:n_right], *bad[: 40 - n_right])
        assert len(pairs) == 40
        prepare([model], tiny_tokenizer(), Task("half", None, "logit", pairs),
                Search(prompts=20, readings=("components",)), said.append)  # fmt: skip
        lines = [line for line in said if "fewer than half" in line]
        assert bool(lines) == warned and all(f"{n_right} of 40" in line for line in lines)
        said.clear()


def test_an_unsupported_family_is_refused_before_any_prompt():
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=32
    )
    said: list[str] = []
    with pytest.raises(ValueError, match=r"'opt'.*[Ss]upported: gemma2, .*qwen3") as refused:
        discover(transformers.OPTForCausalLM(config), tiny_tokenizer(), words_task(), say=said.append)
    assert not said and "gates into" not in str(refused.value)


def test_bfloat16_is_refused():
    with pytest.raises(ValueError, match="float32"):
        Decoder(tiny_model("gpt2").bfloat16())
