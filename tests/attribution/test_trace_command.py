import json

import matplotlib.image
import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tracing_setup import biased_model

import sparselens as sl
from sparselens.attribution.clusters import carry_clusters, cluster_edges, find_clusters
from sparselens.attribution.head_shares import carry
from sparselens.cli import main
from sparselens.demo.addition import make_model
from sparselens.reporting.figures.attribution import _grid, _sentence, draw_trace, visible
from sparselens.tasks.registry import Words
from sparselens.transcoders.transcoder import Transcoder

PROMPT = "w3 w5 w8 w13 w21 w3 w9"
TOKENS = ["<|endoftext|>", *PROMPT.split()]
EDGE = {"weight", "departure", "arrival", "single_hop", "heads_for_80", "predicted", "measured"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense and a sparse model with their transcoders, as folders."""
    folder = tmp_path_factory.mktemp("models")
    for name, gated in (("dense", False), ("sparse", True)):
        sl.save(biased_model("gpt2", gated, torch.float32), tiny_tokenizer(), folder / name)
        Transcoder.random(2, 48, 32, seed=int(gated)).save(folder / f"{name}-transcoder")
    return folder


def run(folder, *arguments, model="sparse", prompt=PROMPT):
    main(
        [
            "trace",
            str(folder / model),
            "--transcoder",
            str(folder / f"{model}-transcoder"),
            "--prompt",
            prompt,
            *arguments,
        ]
    )


@pytest.fixture(scope="module")
def compared(folder):
    out = folder / "out"
    run(
        folder, "--target", "w4", "--against", str(folder / "dense"), "--against-transcoder",
        str(folder / "dense-transcoder"), "--out", str(out), "--json", str(folder / "rows.json"), "--nodes", "0.95",
    )  # fmt: skip
    return json.loads((folder / "rows.json").read_text())


# ---- what programs read ----------------------------------------------------------------------------------------------


def test_rows_have_what_is_promised(compared):
    for rows in (compared, compared["against"]):
        assert rows["target"][0]["label"] == "w4" and rows["target"][0]["position"] == 7
        assert 0 <= rows["completeness_error"] < 1e-4
        assert rows["tokens"] == TOKENS and rows["prompt"] == PROMPT
        assert {c["name"] for c in rows["clusters"]} >= {"<|endoftext|>", "w8", "w3 @1", "w3 @6", "w4"}
        names = {c["name"] for c in rows["clusters"]}
        for edge in rows["edges"]:
            assert edge.keys() >= EDGE and {edge["source"], edge["target"]} <= names
            assert edge["n_heads_for_80"] == len(edge["heads_for_80"])
            for side in ("departure", "arrival"):
                assert all(link.keys() == {"layer", "head", "query", "key", "share"} for link in edge[side])
                listed = sum(link["share"] for link in edge[side]) + edge[f"{side}_rest"] + edge["direct"]
                assert listed == pytest.approx(edge["weight"], rel=1e-4, abs=1e-5)
            # With everything else held, removing the source takes away the edge.
            assert edge["predicted_direct"] == pytest.approx(-edge["weight"], rel=1e-3, abs=1e-4)
        assert {h["layer"] for h in rows["main"]["heads_for_80"]} <= {0, 1}
    assert compared["gated"] and not compared["against"]["gated"]
    assert compared["agreement"]["n"] == len(compared["edges"])


def test_both_models_are_asked_about_the_same_edge(compared):
    ends = [(rows["main"]["source"], rows["main"]["target"]) for rows in (compared, compared["against"])]
    assert ends[0] == ends[1]


def test_rows_agree_with_the_library(compared, folder):
    model, tokenizer = sl.load(folder / "sparse")
    graph = sl.trace(model, tokenizer, Transcoder.load(folder / "sparse-transcoder"), PROMPT, "w4", nodes=0.95)
    clusters = find_clusters(graph)
    edges = {(clusters[e.source].name, clusters[e.target].name): e for e in cluster_edges(graph, clusters)}
    assert len(edges) == len(compared["edges"])
    for row in compared["edges"]:
        edge = edges[row["source"], row["target"]]
        assert row["weight"] == pytest.approx(edge.weight, rel=1e-4, abs=1e-6)
        (carried,) = carry_clusters(graph, [edge])
        assert [(h["layer"], h["head"]) for h in row["heads_for_80"]] == carried.heads_for(0.8)
        whole = carry(graph, edge.pairs, [0] * len(edge.pairs))[0]
        assert row["single_hop"] == pytest.approx(whole.single_hop, rel=1e-4, abs=1e-5)


def test_maps_looks_and_closed_gates_of_the_main_edge(compared, folder):
    model, tokenizer = sl.load(folder / "sparse")
    graph = sl.trace(model, tokenizer, Transcoder.load(folder / "sparse-transcoder"), PROMPT, "w4", nodes=0.95)
    main_edge = compared["main"]
    shown = [(m["layer"], m["head"]) for m in main_edge["attention"]]
    assert shown == [(h["layer"], h["head"]) for h in main_edge["heads_for_80"]]
    for one in main_edge["attention"]:
        pattern = graph.replacement().frozen.pattern(one["layer"])[one["head"]]
        found = torch.zeros_like(pattern)
        for query, key, weight in one["cells"]:
            found[query, key] = weight
        assert float((found - pattern).abs().max()) < 0.0051
    for look in compared["looks"]:
        total = sum(term["term"] for term in look["terms"]) + look["rest"]
        assert total == pytest.approx(look["logit"], rel=1e-4, abs=1e-5)
        assert look["margin"] is not None and (look["layer"], look["head"]) in shown
        assert all(without["margin_without"] <= 0 for without in look["closing"])
    assert all(look["margin"] is None for look in compared["against"]["looks"])
    closed = main_edge["closed"]
    assert closed["n_links"] == len(closed["links"]) >= 1
    from sparselens.attribution.interventions import intervene

    nodes = [n for c in find_clusters(graph) if c.name == main_edge["target"] for n in c.nodes]
    change = intervene(graph, close=[tuple(link) for link in closed["links"]], watch=nodes).change
    assert closed["measured"] == pytest.approx(sum(change.values()), rel=1e-3, abs=1e-5)


def test_files(compared, folder):
    out = folder / "out"
    wanted = {"trace.json", "graph.json", "graph.safetensors", "clusters.json", "graph-neuronpedia.json",
              "graph-metadata.json", "figure4.png", "figure4.svg", "figure4.pdf", "against",
              "sparse-w3-w5-w8-w13-w21-w3-w9.json"}  # fmt: skip  # the graph under its slug
    assert {path.name for path in out.iterdir()} == wanted
    assert json.loads((out / "trace.json").read_text()) == compared
    graph = sl.Graph.load(out)
    assert graph.tokens == TOKENS and graph.prompt == PROMPT
    assert sl.Graph.load(out / "against").settings["gated"] is False
    picture = matplotlib.image.imread(out / "figure4.png")
    red = (picture[..., 0] > 0.7) & (picture[..., 1] < 0.2) & (picture[..., 2] < 0.3)
    assert red.sum() > 200 and picture.shape[1] > 2000
    text = (out / "figure4.svg").read_text()
    assert all(f"L{m['layer']}.H{m['head']}" in text for m in compared["main"]["attention"])


def test_clusters_edited_by_hand(compared, folder, tmp_path):
    rules = json.loads((folder / "out" / "clusters.json").read_text())
    rules["first half"] = {"positions": [1, 2, 3]}
    for name in ("w3 @1", "w5", "w8"):
        del rules[name]
    (tmp_path / "mine.json").write_text(json.dumps(rules))
    options = ("--target", "w4", "--clusters", str(tmp_path / "mine.json"), "--json", str(tmp_path / "rows.json"))
    run(folder, *options, "--edge", "first half->w4", "--nodes", "0.95")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["main"]["source"] == "first half" and rows["main"]["keys"] == [1, 2, 3]
    before = sum(e["weight"] for e in compared["edges"] if e["target"] == "w4" and e["source"] in ("w3 @1", "w5", "w8"))
    assert rows["main"]["weight"] == pytest.approx(before, rel=1e-4, abs=1e-6)


def test_a_difference_at_an_earlier_position_and_the_likeliest_token(folder, tmp_path):
    run(folder, "--target", "w4 - w9", "--position", "3", "--json", str(tmp_path / "a.json"))
    rows = json.loads((tmp_path / "a.json").read_text())
    assert rows["target"] == [{"label": "w4 - w9", "token": None, "probability": None, "weight": 1.0, "position": 3}]
    assert max(link["query"] for edge in rows["edges"] for link in edge["arrival"]) <= 3
    run(folder, "--json", str(tmp_path / "b.json"))
    rows = json.loads((tmp_path / "b.json").read_text())
    model, tokenizer = sl.load(folder / "sparse")
    with torch.no_grad():
        likeliest = int(model(torch.tensor([Words(tokenizer).encode(PROMPT)])).logits[0, -1].argmax())
    assert [t["token"] for t in rows["target"]] == [likeliest]


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, message", [
    (["--target", "w4 w5"], "name a single one"),
    (["--edge", "a->b"], "of these clusters"),
    (["--position", "8"], "position=8"),
    (["--clusters", "nowhere.json"], "no file nowhere.json"),
    (["--against", "x"], "--against needs its own transcoder"),
    (["--nodes", "0"], "nodes=0"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "w3 " * 64], "the prompt has 65 tokens, the model reads at most 64"),
    (["--prompt", "a\ud800"], "not valid text at character 1"),
    (["--transcoder", "nowhere"], "no transcoder in nowhere"),
])  # fmt: skip
def test_bad_requests_are_one_sentence(folder, capsys, arguments, message):
    with pytest.raises((SystemExit, ValueError)) as error:
        run(folder, *arguments)
    assert message in capsys.readouterr().err + str(error.value)


def test_a_transcoder_of_another_model(folder, tmp_path, capsys):
    Transcoder.random(3, 8, 16).save(tmp_path / "other")
    with pytest.raises(SystemExit):
        run(folder, "--transcoder", str(tmp_path / "other"))
    assert "3 layers of width 16, the model 2 of width 32: it was made for another model" in capsys.readouterr().err


def test_models_that_read_the_prompt_differently(folder):
    digits = (make_model(0), Transcoder.random(4, 16, 64))
    words = (biased_model("gpt2", dtype=torch.float32), tiny_tokenizer())
    with pytest.raises(ValueError, match="the second model reads the prompt as other tokens"):
        sl.trace(words, Transcoder.random(2, 48, 32), "w3 w5", "w4", against=digits)
    with pytest.raises(ValueError, match="no tokenizer"):
        sl.trace(words[0], Transcoder.random(2, 48, 32), "w3 w5")
    with pytest.raises(ValueError, match="unknown setting 'depth'"):
        sl.trace(words, Transcoder.random(2, 48, 32), "w3 w5", depth=3)
    with pytest.raises(ValueError, match="one target"):
        sl.trace(words, Transcoder.random(2, 48, 32), "w3 w5", ["w4", "w5"], say=print)


def test_a_second_model_in_which_the_edge_does_not_exist():
    """All gates closed: nothing moves between positions, and that is a result, not an error."""
    closed = biased_model("gpt2", True, torch.float32, gate_bias=-1e4)
    words, coder = tiny_tokenizer(), Transcoder.random(2, 48, 32)
    opened = (biased_model("gpt2", dtype=torch.float32), words)
    second = ((closed, words), coder)
    rows = sl.trace(opened, coder, PROMPT, "w4", against=second, names=("m", "m"), checks=0).rows
    assert (rows["model"], rows["against"]["model"]) == ("m, dense", "m, sparse")
    assert rows["main"]["n_heads_for_80"] >= 1
    other = rows["against"]["main"]
    assert (other["weight"], other["n_heads_for_80"], other["attention"]) == (0.0, 0, [])


# ---- figure 4 --------------------------------------------------------------------------------------------------------


def test_odd_tokens_can_be_printed():
    assert visible(" the") == "the" and visible(" ") == "␣" and visible("\n\n") == "↵↵" and visible("") == "∅"
    assert visible("a\x00\ud800b") == "a□□b" and visible("友") == "□" and visible("$x_1$") == "$x_1$"


@pytest.mark.parametrize("n", [1, 2, 5, 17, 60, 144, 400])
def test_maps_fit_into_their_place(n):
    width, height = 5.0, 3.5
    columns, side, label = _grid(n, width, height)
    rows = -(-n // columns)
    assert side > 0 and columns * (side + 0.07) - 0.07 <= width + 1e-9 and rows * (side + label) <= height + 1e-9
    if n == 60:
        assert side > 0.4  # inches: still a picture


def test_long_prompts_are_shown_around_what_matters():
    tokens = [f" word{i}" for i in range(2000)]
    shown = _sentence(tokens, {5, 1000, 1999})
    assert {5, 1000, 1999} <= {p for p, _ in shown} and sum(len(w) + 1 for _, w in shown) <= 200
    assert [w for p, w in shown if p is None]


def test_hostile_rows_are_drawn_in_every_format(compared, tmp_path):
    rows = json.loads(json.dumps(compared).replace('"w8"', json.dumps("$x\n<")))  # a cluster's name
    rows["tokens"] = ["", "$\\frac{1}{0}$", "\n", "<b>&amp;", "\x00\x1b", "友達", "🙂" * 40, '"']
    rows["model"] = rows["against"]["model"] = "m$_</text>\x00"
    from xml.etree import ElementTree

    for suffix in ("png", "svg", "pdf"):
        draw_trace(rows, tmp_path / f"f.{suffix}")
    ElementTree.parse(tmp_path / "f.svg")


def test_the_marked_cell_is_where_source_and_target_meet(compared, tmp_path):
    """The red square of the only map stands at (key, query), K across and Q upward."""
    rows = json.loads(json.dumps(compared)) | {"tokens": ["a"] * 10}
    rows.pop("against")
    rows["main"] |= {"keys": [2], "queries": [8], "attention": [{"layer": 0, "head": 0, "cells": [[8, 2, 0.5]]}]}
    draw_trace(rows, tmp_path / "f.png")
    picture = matplotlib.image.imread(tmp_path / "f.png")
    dpi = 220
    columns, side, label = _grid(1, 10.6 - 0.44 - 0.28, 2.1 - 0.56 - 0.12)
    left, top = 0.22 + 0.28, 0.56 + label  # inches, from the upper left: titles, then the map's own label
    x, y = int((left + side * 2.5 / 10) * dpi), int((top + side * 1.5 / 10) * dpi)
    np.testing.assert_allclose(picture[y, x, :3], np.array([0xC8, 0x10, 0x2E]) / 255, atol=0.02)
    assert columns == 1


def test_tiny_models_of_other_families_are_traced(tmp_path):
    rows = sl.trace(
        tiny_model("llama"), tiny_tokenizer(), Transcoder.random(2, 48, 32), PROMPT, "w4", out=tmp_path
    ).rows
    assert rows["completeness_error"] < 1e-4
    draw_trace(rows, tmp_path / "figure4.pdf")
    assert (tmp_path / "figure4.pdf").stat().st_size > 1000
