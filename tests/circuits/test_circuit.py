"""Counting, choosing, pruning, curves: everything about circuits that needs no model."""

import itertools
import json

import numpy as np
import pytest

from sparselens.circuits.circuit import Circuit, overlap
from sparselens.circuits.faithfulness import (
    MIB_FRACTIONS,
    Curve,
    check_spread,
    log_sizes,
    mib_areas,
    multiplier,
    refine,
    refined_curve,
)
from sparselens.models.component_graph import Components


@pytest.mark.parametrize(
    "layers, heads, parallel, expected",
    [(12, 12, False, 32_491), (24, 16, False, 231_877), (32, 32, False, 1_592_881), (12, 12, True, 32_491 - 144)],
)
def test_edge_counts(layers, heads, parallel, expected):
    assert Components(layers, heads, parallel).n_edges == expected


def test_gpt2_small_without_the_split():
    """11,611 edges when q, k and v of a head count as one reader; 157 writers."""
    c = Components(12, 12)
    assert c.n_writers == 157
    assert c.n_edges - 2 * int(c.possible[c.head_reader(0, "q") : c.head_reader(0, "k")].sum()) - sum(
        2 * 12 * c.head_writer(layer) for layer in range(1, 12)
    ) == 11_611  # fmt: skip


def brute_prune(c: Components, mask: np.ndarray) -> np.ndarray:
    """Paths by search: an edge lives if its writer is reachable from the input and its reader reaches the logits."""
    edges = [(w, int(c.node_of_reader[r]), r) for r, w in zip(*np.nonzero(mask), strict=True)]
    fed, used = {0}, {-1}
    for _ in range(c.n_writers + 1):
        fed |= {t for w, t, _ in edges if w in fed and t >= 0}
        used |= {w for w, t, _ in edges if t in used}
    out = np.zeros_like(mask)
    for w, t, r in edges:
        out[r, w] = w in fed and t in used
    return out


@pytest.mark.parametrize("parallel", [False, True])
def test_prune_agrees_with_search(parallel):
    rng = np.random.default_rng(0)
    for size, share in itertools.product([(1, 1), (2, 1), (3, 2)] * 15, (0.05, 0.1, 0.2, 0.3, 0.5)):
        c = Components(*size, parallel)
        mask = (rng.random(c.possible.shape) < share) & c.possible
        pruned = c.prune(mask)
        assert np.array_equal(pruned, brute_prune(c, mask))
        assert np.array_equal(c.prune(pruned), pruned)


def test_names_are_mibs_and_unknown_ones_are_refused():
    c = Components(2, 2)
    assert c.readers[c.edge("input->a0.h1<q>")[0]] == "a0.h1<q>"
    for name in ("a0.h2->m0", "a0.h0", "m0->a0.h0<q>", "input->a0.h0"):
        with pytest.raises(ValueError, match=r"no edge|unknown edge"):
            c.edge(name)


def test_greedy_never_takes_an_unread_writer_and_takes_everything():
    c = Components(3, 2)
    scores = np.random.default_rng(0).normal(size=c.possible.shape)
    order = c.greedy(scores)
    assert sorted(order) == np.flatnonzero(c.possible).tolist()
    known, left = {-1}, set(order.tolist())
    for flat in order:
        reader, writer = divmod(int(flat), c.n_writers)
        assert int(c.node_of_reader[reader]) in known
        offered = [i for i in left if int(c.node_of_reader[i // c.n_writers]) in known]
        assert abs(scores.ravel()[flat]) == max(abs(scores.ravel()[i]) for i in offered), "the largest of those offered"
        left.remove(int(flat))
        known.add(writer)
    signed = c.greedy(scores, absolute=False)
    assert scores.ravel()[signed[0]] == scores[-1].max()


def test_heads_come_in_whole_one_by_one():
    c = Components(3, 2)
    scores = np.where(c.possible, np.random.default_rng(0).normal(size=c.possible.shape), 0)
    order = c.heads(scores)
    assert sorted(order) == np.flatnonzero(c.possible).tolist()
    heads = [c.head_writer(layer, head) for layer in range(3) for head in range(2)]
    ranked = sorted(heads, key=lambda writer: -abs(scores[:, writer].sum()))
    place = 0
    for n in range(len(heads) + 1):  # all edges among input, MLPs, logits and the first n heads, and no others
        inside = {-1, *range(c.n_writers)} - set(ranked[n:])
        among = {
            int(reader * c.n_writers + writer)
            for reader, writer in zip(*np.nonzero(c.possible), strict=True)
            if writer in inside and c.node_of_reader[reader] in inside
        }
        assert set(order[: len(among)].tolist()) == among
        added = order[place : len(among)]
        assert (np.diff(np.abs(scores.ravel()[added])) <= 0).all()  # the largest edges of a head first
        place = len(among)
    assert np.array_equal(Circuit(c, scores, c.possible).order("heads"), order)


def test_random_circuits_are_alive():
    c, rng = Components(4, 3), np.random.default_rng(0)
    for n in (1, 5, 40, 150):
        mask = c.random_circuit(n, rng)
        assert n <= mask.sum() <= n + 20 and np.array_equal(c.prune(mask), mask)


def test_mib_json_there_and_back(tmp_path):
    c = Components(2, 3)
    scores = np.where(c.possible, np.random.default_rng(0).normal(size=c.possible.shape), 0.0)
    circuit = Circuit(c, scores, c.prune(c.mask(c.top(scores)[:30])), d_model=12)
    circuit.save(tmp_path / "circuit.json")
    value = json.loads((tmp_path / "circuit.json").read_text())
    assert set(value) == {"cfg", "nodes", "edges"} and len(value["edges"]) == c.n_edges
    assert set(value["cfg"]) == {"n_layers", "n_heads", "parallel_attn_mlp", "d_model"}
    assert value["nodes"]["logits"] == {"in_graph": True} and "input" in value["nodes"]
    writers = {edge.partition("->")[0] for edge, _ in circuit.edges}
    assert circuit.nodes == [name for name in c.writers[1:] if name in writers] and 2 < len(circuit.nodes) < 8
    assert {name for name, node in value["nodes"].items() if node["in_graph"]} == {*writers, "logits"}
    assert set(value["edges"]["input->a0.h0<q>"]) == {"score", "in_graph"}
    back = Circuit.load(tmp_path / "circuit.json")
    assert np.allclose(back.scores, scores) and np.array_equal(back.mask, circuit.mask)
    with pytest.raises(ValueError, match="unknown edge"):
        Circuit.from_mib(value | {"edges": {"x->y": {"score": 1.0, "in_graph": True}}})
    with pytest.raises(ValueError, match="MIB"):
        Circuit.from_mib({"edges": {}})


def make_curve(edges, effects, n=40, seed=0):
    rng = np.random.default_rng(seed)
    nothing, model = rng.normal(-2, 0.3, n), rng.normal(3, 0.3, n)
    metrics = nothing + np.array(effects)[:, None] * (model - nothing)
    return Curve(np.array(edges), metrics, model, nothing)


def test_reaching_and_staying_above():
    curve = make_curve([1, 10, 100, 1000, 5000], [0.1, 0.92, 0.7, 0.95, 1.0])
    assert np.allclose(curve.effects(), [0.1, 0.92, 0.7, 0.95, 1.0])
    assert curve.edges_at(0.9) == 1000  # 10 reaches it, 100 falls below again
    assert curve.edges_at(0.5) == 10
    assert curve.edges_at(0.99) == 5000
    low, high = curve.band()
    assert (low <= curve.effects() + 1e-9).all() and (high >= curve.effects() - 1e-9).all()


def test_multiplier_is_paired():
    dense, sparse = make_curve([1, 100, 1000], [0.1, 0.5, 1.0]), make_curve([1, 10, 1000], [0.1, 0.93, 1.0])
    found = multiplier(dense, sparse, 0.9)
    assert (found["dense_edges"], found["sparse_edges"], found["multiplier"], found["n_prompts"]) == (
        1000,
        10,
        100.0,
        40,
    )
    assert found["low"] <= 100 <= found["high"]
    with pytest.raises(ValueError, match="different prompts"):
        multiplier(dense, make_curve([1, 2], [0, 1.0], n=7), 0.9)


def test_mean_multiplier():
    effects = np.linspace(0.1, 1.0, 19)
    sparse, dense = (make_curve(factor * np.arange(1, 20) ** 2, effects) for factor in (1, 3))
    found = multiplier(dense, sparse, None)
    assert found["multiplier"] == pytest.approx(3) == found["low"] == found["high"] and found["n_prompts"] == 40
    sizes = [dense.edges_at(level) for level in (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)]
    assert found["dense_edges"] == pytest.approx(np.exp(np.log(sizes).mean()))
    with pytest.raises(ValueError, match="different prompts"):
        multiplier(dense, make_curve([1, 2], [0, 1.0], n=7), None)


def test_a_curve_that_stays_just_below_a_threshold():
    """1,000 against 10 edges at 90 % where the curves are the same but for one point: the mean is not taken in."""
    dense = make_curve([1, 10, 100, 1000], [0.1, 0.89, 0.89, 1.0])
    sparse = make_curve([1, 10, 100, 1000], [0.1, 0.91, 0.91, 1.0])
    assert multiplier(dense, sparse, 0.9)["multiplier"] == 100
    assert multiplier(dense, sparse, None)["multiplier"] == pytest.approx(100 ** (1 / 10))


def uneven_curve(seed=0, scale=1):
    """Prompts that differ in what each circuit explains of them, and so many sizes that hardly two draws agree."""
    rng = np.random.default_rng(seed)
    nothing, model = rng.normal(-1, 0.5, 12), rng.normal(2, 0.5, 12)
    shares = np.linspace(0.4, 1.0, 2000)[:, None] * (1 + rng.normal(0, 0.15, 12))
    shares[-1] = 1.0
    return Curve(scale * np.arange(500, 2500), nothing + shares * (model - nothing), model, nothing)


def percentiles(values):
    """2.5 and 97.5 of a hundred, linear between the sorted values."""
    ordered, ends = np.sort(np.asarray(values, float)), []
    for share in (0.025, 0.975):
        place = share * (len(ordered) - 1)
        low = int(place)
        ends.append(ordered[low] + (place - low) * (ordered[low + 1] - ordered[low]))
    return ends


def test_intervals_are_percentiles_of_a_bootstrap_over_prompts():
    """Every interval again, draw by draw; the curves rise, so that the first size above a threshold is the one."""
    curves = dense, sparse = uneven_curve(0, 3), uneven_curve(1)
    draws = dense.draws()
    assert draws.shape == (1000, 12) and set(draws.ravel().tolist()) == set(range(12))
    effects = []
    for c in curves:
        means = [(c.metrics[:, draw].mean(1), c.m_model[draw].mean(), c.m_nothing[draw].mean()) for draw in draws]
        effects.append(np.array([(circuit - nothing) / (model - nothing) for circuit, model, nothing in means]))

    def sizes(level: float) -> list[np.ndarray]:
        return [c.edges[(e >= level).argmax(1)].astype(float) for c, e in zip(curves, effects, strict=True)]

    for found, wanted in zip(np.transpose(dense.band())[::100], effects[0].T[::100], strict=True):
        assert found == pytest.approx(percentiles(wanted))
    assert dense.row()["low"] == dense.band()[0].tolist() and dense.row()["high"] == dense.band()[1].tolist()
    ours, theirs = sizes(0.8)
    assert dense.reading(5000, [])["edges_at_interval"]["0.8"] == pytest.approx(percentiles(ours))
    found = multiplier(dense, sparse, 0.8)
    assert [found["low"], found["high"]] == pytest.approx(percentiles(ours / theirs))
    found = multiplier(dense, sparse, None)
    ratios = np.mean([np.log(np.divide(*sizes(level / 100))) for level in range(50, 100, 5)], axis=0)
    assert [found["low"], found["high"]] == pytest.approx(np.exp(percentiles(ratios)))
    assert found["low"] < found["multiplier"] < found["high"]


def test_no_circuit_counts_as_less_than_one_edge():
    """Nothing at all reaches the threshold: counted as one edge, or the multiplier would be infinite."""
    free, dear = make_curve([0, 1, 10], [0.96, 0.97, 1.0]), make_curve([1, 5, 10], [0.1, 0.96, 1.0])
    found = multiplier(dear, free, 0.9)
    assert (found["multiplier"], found["low"], found["high"]) == (5.0, 5.0, 5.0)
    assert multiplier(dear, free, None)["multiplier"] == pytest.approx(5)
    one = make_curve([1, 5, 10], [0.96, 0.97, 1.0])
    assert multiplier(dear, one, 0.9)["multiplier"] == 5 == pytest.approx(multiplier(dear, one, None)["multiplier"])


def test_areas():
    fractions = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]  # as published
    assert list(MIB_FRACTIONS) == fractions
    effects = np.linspace(0.1, 1.3, 10)
    steps = [(b - a, (f + g) / 2) for a, b, f, g in zip(fractions, fractions[1:], effects, effects[1:], strict=False)]
    found = mib_areas(effects)
    assert found["cpr"] == pytest.approx(sum(width * height for width, height in steps))
    missing = np.abs(1 - effects)
    steps = [(b - a, (f + g) / 2) for a, b, f, g in zip(fractions, fractions[1:], missing, missing[1:], strict=False)]
    assert found["cmd"] == pytest.approx(sum(width * height for width, height in steps))
    # From (one edge, 0) to (10, 0.5) and (1000, 1): triangle and trapezium over logarithms 1 and 2 long.
    assert make_curve([10, 1000], [0.5, 1.0]).area_log() == pytest.approx((0.25 + 2 * 0.75) / 3)
    assert make_curve([2, 200], [0.5, 1.0]).area_log() == pytest.approx(
        (0.25 * np.log(2) + 0.75 * np.log(100)) / np.log(200)
    )
    assert make_curve([0, 1], [0.0, 1.0]).area_log() == pytest.approx(1.0)
    assert make_curve([0, 2], [0.0, 1.0]).area_log() == pytest.approx(0.5)
    ones = np.ones(len(MIB_FRACTIONS))
    assert mib_areas(ones) == {"cpr": pytest.approx(0.999), "cmd": pytest.approx(0.0)}
    assert make_curve([1, 10, 100], [1.0, 1.0, 1.0]).area_log() == pytest.approx(1.0)
    assert make_curve([1, 10, 100], [0.0, 0.0, 1.0]).area_log() == pytest.approx(0.25)


def test_a_task_the_model_cannot_do_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="no effect to explain"):
        check_spread(rng.normal(size=50), rng.normal(size=50), "ioi")
    check_spread(rng.normal(3, 1, 50), rng.normal(size=50), "ioi")
    # Differences of mean 1 and standard deviation s * sqrt(4 / 3), four of them: standard error s / sqrt(3).
    for spread, refused in ((0.85, False), (0.88, True)):
        model = 5 + np.array([1 - spread, 1 + spread, 1 - spread, 1 + spread])
        if refused:
            with pytest.raises(ValueError, match=r"difference 1 \+- 0\.51"):
                check_spread(model, np.full(4, 5.0), "ioi")
        else:
            check_spread(model, np.full(4, 5.0), "ioi")
    with pytest.raises(ValueError, match="no effect to explain"):
        check_spread(np.array([1.0, 6.0]), np.zeros(2), "two prompts")  # 3.5 +- 2.5
    check_spread(np.array([3.0]), np.array([1.0]), "one prompt")
    with pytest.raises(ValueError, match="no effect to explain"):
        check_spread(np.array([1.0]), np.array([1.0]), "one prompt")


def test_sizes_and_refinement():
    assert log_sizes(100, 3).tolist() == [1, 10, 100]
    assert refine(np.array([1, 10, 1000]), np.array([0.1, 0.5, 1.0])) == [100]
    assert refine(np.array([1, 2, 3]), np.array([0.1, 0.5, 1.0])) == []
    # Three thresholds, three gaps: 0.8 between 4 and 16, 0.9 between 16 and 36, 0.95 between 36 and 100.
    assert refine(np.array([1, 4, 16, 36, 100]), np.array([0.1, 0.7, 0.85, 0.92, 1.0])) == [8, 24, 60]
    assert refine(np.array([9, 36]), np.array([0.99, 1.0])) == [3], "reached by the first: look below it"
    assert refine(np.array([0, 9]), np.array([0.1, 1.0])) == [3] and refine(np.array([9]), np.array([0.1])) == []
    assert refine(np.array([4, 100]), np.array([0.9, 1.0]), (0.9,)) == [2], "reached exactly"


def test_overlap():
    a, b = np.array([True, True, False]), np.array([True, False, True])
    assert overlap(a, b) == {"shared": 1, "jaccard": pytest.approx(1 / 3), "of_smaller": 0.5}
    assert overlap(a, np.array([True, False, False])) == {"shared": 1, "jaccard": 0.5, "of_smaller": 1.0}


def test_a_refined_curve_looks_where_it_crosses_and_never_beyond_what_there_is():
    """Effect n / 40, of 100: the crossing at 36 is closed in on; nothing above the largest size is ever run."""
    asked: list[int] = []

    def run(sizes):
        asked.extend(sizes)
        return np.minimum(np.array(sizes, float)[:, None] / 40, 1.0) * np.ones(3)

    curve = refined_curve([1, 10, 30, 60], run, np.ones(3), np.zeros(3), 100)
    assert len(asked) == len(set(asked)) and len(asked) > 4
    assert 36 <= curve.edges_at(0.9) < 60
    asked.clear()
    curve = refined_curve([1, 10, 30], run, np.ones(3), np.zeros(3), 100)
    assert max(asked) == 30 and curve.edges_at(0.9) == 100
    for n in (2, 100):
        assert refined_curve([], run, np.ones(3), np.zeros(3), n).edges.tolist() == [0, n]
    calls: list[list[int]] = []
    refined_curve(
        [1, 10**6],
        lambda sizes: calls.append(sizes) or run(np.array(sizes) / 10**6 * 40),
        np.ones(3),
        np.zeros(3),
        10**7,
    )
    assert calls == [[1, 10**6], [1000], [31623], [177829]]  # three times between, in the middle of the logarithms
