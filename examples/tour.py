"""A tour in about a minute on one CPU core: a small model that adds, made sparse and taken apart.

    python examples/tour.py                # runs everything and prints; the page is runs/tour/sparse/report.html
    marimo edit examples/tour.py           # the same as a notebook (pip install marimo)

Run it from the root of the repository. What is in runs/tour already is not trained again.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(app_title="sparselens: a tour")


@app.cell
def settings():
    from pathlib import Path

    folder = Path("runs/tour")
    dense_steps, sparse_steps, feature_steps = 600, 250, 100  # few: the demo trains far longer
    control = True
    return control, dense_steps, feature_steps, folder, sparse_steps


@app.cell(hide_code=True)
def welcome():
    import marimo as mo

    mo.md(
        """
        # sparselens: a tour

        A model that adds two-digit numbers: 4 layers of 4 heads, eleven characters, 4 * 4 * 66 = 1,056
        possible attention edges. It reads `36+28=?????` and writes `00064` at the question marks, all
        five digits at once. Everything below works the same way on `gpt2` or any other supported model;
        only the text and the waiting differ.

        ## 1. A dense model

        Trained on the spot, not to perfection. With a real model this cell is `sl.load("gpt2")`.
        """
    )
    return (mo,)


@app.cell
def dense_model(dense_steps, folder):
    import sparselens as sl
    from sparselens.config import Training
    from sparselens.demo.addition import AdditionBatches, answer, make_model
    from sparselens.training.loop import Stage, train

    batches = AdditionBatches(seed=0)  # all 10,000 sums; a fifth is held out
    if not (folder / "dense" / "model").is_dir():
        _model, _tokenizer = make_model(seed=0, dropout=0.0)  # learns faster
        _settings = Training(
            steps=dense_steps, batch=64, lr=4e-3, decay=0.9, evaluate_every=100, checkpoint_every=10_000
        )
        train(Stage("dense", _model, batches, folder / "dense", _settings, steering=500, show_progress=False))
        sl.save(_model, _tokenizer, folder / "dense" / "model")
    dense_folder = folder / "dense" / "model"
    dense, tokenizer = sl.load(dense_folder)
    print("dense: 36+28 =", answer(dense, 36, 28))
    return answer, batches, dense, dense_folder, sl, tokenizer


@app.cell(hide_code=True)
def about_gates(mo):
    mo.md(
        """
        ## 2. Gates

        `gate=` gives every attention edge a gate: open where *attention logit + bias > 0*. Nothing has
        been trained yet, so closing edges does harm; the number of open ones comes back with every
        forward pass.
        """
    )
    return


@app.cell
def gates(answer, batches, dense_folder, sl):
    gated, _ = sl.load(dense_folder, gate=sl.Gate(bias=0.0))
    _inputs = batches.heldout(0, 100)["input_ids"]
    # per layer [batch, n_heads, (open, possible)]
    _edges = gated(_inputs, output_attentions=True, gate_output="edges").attentions
    open_at_first = sum(layer[..., 0].sum().item() for layer in _edges) / len(_inputs)
    print(f"untrained gates: {open_at_first:.0f} of 1,056 edges open; 36+28 = {answer(gated, 36, 28)}")
    return (open_at_first,)


@app.cell(hide_code=True)
def about_sparsify(mo):
    mo.md(
        """
        ## 3. Sparse, with a control

        `sparsify` closes gates down to a budget of edges, here 5 %, and lets the weights learn to do
        without the rest. The **control** gets the same batches, steps and optimiser but no gates. Look
        at it before you praise the sparse model: this dense model was not finished, so *any* further
        training makes it better.
        """
    )
    return


@app.cell
def sparsify(batches, control, dense_folder, folder, sl, sparse_steps):
    if (folder / "sparse" / "summary.json").is_file():
        run = sl.Run(folder / "sparse")
    else:
        run = sl.sparsify(
            dense_folder, batches, folder / "sparse", density=0.05, closing=0.4, control=control,
            steps=sparse_steps, batch=64, lr=2e-3, evaluate_every=50, evaluate_sequences=200,
            checkpoint_every=10_000, show_progress=False, say=lambda text: None,
        )  # fmt: skip
    sparse, _ = sl.load(run.path)
    rows = run.read("evaluation.json")
    for _row in rows:
        _open = _row["density"] * 1056
        print(f"{_row['kind']:8} loss {_row['loss']:.3f}   exact {_row['exact']:.1%}   open edges {_open:.0f}")
    return rows, run, sparse


@app.cell(hide_code=True)
def about_discover(mo):
    mo.md(
        """
        ## 4. Circuits

        `discover` asks which of the 479 edges between heads, MLPs, input and output the model needs to
        add: it scores them all, then runs circuits of growing size on held-out sums, every other edge
        carrying what it carries for *another* sum. The **explained effect** is 1 for the whole model
        and 0 for no edge at all.
        """
    )
    return


@app.cell
def discover(dense, sl, tokenizer):
    from sparselens.config import Search

    search = Search(
        prompts=16, points=10, steps=3, readings=("removed", "components"), random_control=False
    )  # small; see `discover --help`
    circuit = sl.discover(dense, tokenizer, "addition", settings=search)
    found = circuit.results["readings"]["components"]
    print(f"dense: {found['edges_at']['0.9']} of {found['n_edges']} edges explain 90 %")
    print("the strongest:", ", ".join(f"{_edge} {_score:+.2f}" for _edge, _score in circuit.edges[:4]))
    return circuit, search


@app.cell(hide_code=True)
def about_compare(mo):
    mo.md(
        """
        ## 5. Dense against sparse

        The same sums, the same method. The **multiplier** says how many times fewer edges the sparse
        model needs, with a bootstrap interval over the prompts; once for edges between parts, once for
        single attention edges (head, query, key). After so few steps, with 5 % of the edges left and 16
        prompts, expect nothing clear: the interval will probably hold 1. `make demo` takes its time
        and keeps 1 %.
        """
    )
    return


@app.cell
def compare(dense, run, search, sl, sparse, tokenizer):
    from sparselens.circuits.compare import table

    comparison = sl.compare(
        dense, sparse, "addition", tokenizer=tokenizer, settings=search, names=("dense", "sparse"),
        say=lambda text: None,
    )  # fmt: skip
    run.write("circuits.json", comparison)
    print(table(comparison))
    return (comparison,)


@app.cell(hide_code=True)
def about_transcode(mo):
    mo.md(
        """
        ## 6. Features

        A **transcoder** computes nearly what the MLPs compute, as a sum over a handful of active
        features. FVU is the share of variance it misses, L0 the number of active features per token and
        layer.
        """
    )
    return


@app.cell
def transcode(batches, feature_steps, folder, sl, sparse):
    _place = folder / "features"
    if (_place / "results.json").is_file():
        transcoder = sl.Transcoder.load(_place)
    else:
        transcoder = sl.transcode(
            sparse, data=batches, out=_place, name="tour", features=128, k=8, sparsity=0.01, steps=feature_steps,
            batch=64, lr=6e-3, dead_after=20_000, evaluate_every=1000, show_progress=False, say=lambda text: None,
        )  # fmt: skip
    features = sl.Run(_place).read("results.json")
    print(f"features: FVU {features['fvu']:.3f}, L0 {features['l0']:.1f}")
    return features, transcoder


@app.cell(hide_code=True)
def about_trace(mo):
    mo.md(
        """
        ## 7. One sum, taken apart

        `trace` explains the tens digit of 36 + 28 (position 9). Every row of the graph adds up to the
        number it explains; the **completeness error** is the largest relative gap. Features are grouped
        into words, and every edge between words names the heads that carry it ("no head": it stays at
        its position). Then every source is removed, the MLPs held: *predicted* is what the graph says,
        *measured* what the model did.
        """
    )
    return


@app.cell
def trace(run, sl, sparse, tokenizer, transcoder):
    traced = sl.trace(
        (sparse, tokenizer), transcoder, "36+28=?????", position=9, checks=5, names=["sparse"], out=run.path / "trace"
    ).rows
    print(
        f"answer at position 9: {traced['target'][0]['label']}   completeness error {traced['completeness_error']:.0e}"
    )
    for _edge in traced["edges"][:4]:
        _heads = ", ".join(f"a{_head['layer']}.h{_head['head']}" for _head in _edge["heads_for_80"]) or "no head"
        _predicted, _measured = _edge["predicted_direct"], _edge["measured_direct"]
        print(
            f"{_edge['source']:>6} -> {_edge['target']:10} {_edge['weight']:+7.2f}, 80 % by {_heads:12} "
            f"source removed: predicted {_predicted:+7.2f}, measured {_measured:+7.2f}"
        )
    return (traced,)


@app.cell(hide_code=True)
def about_report(mo):
    mo.md(
        """
        ## 8. One page

        Everything above that a Run holds, in one HTML file that works offline. Open it in a browser.
        """
    )
    return


@app.cell
def report(comparison, run, sl, traced):
    page = sl.report(run, prompts=[traced["prompt"]], say=lambda text: None)
    _size = page.stat().st_size / 1e6
    print(f"{page} ({_size:.1f} MB), with the circuits of {', '.join(comparison['tasks'])}: open it in a browser")
    return (page,)


if __name__ == "__main__":
    app.run()
