"""`sparselens demo`: train the addition model, make it sparse, draw what is left, and trace one sum through it."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..attribution.graph import Graph
from ..attribution.trace import Features, trace
from ..circuits.compare import compare
from ..circuits.rows import MultiplierRow, OpenRow
from ..config import Search, Sparsify, Trace, Training, Transcode
from ..faces.features import features
from ..faces.store import FOLDER as FACES
from ..models.loading import is_gated, load, save
from ..reporting.figures.attribution import draw_trace_all
from ..reporting.figures.circuits import draw_all
from ..reporting.figures.flow import Flow, draw_flow
from ..runs.run import Run, reading
from ..serving.publish import report
from ..training.engine import Interrupted, threads_for
from ..training.loop import Stage, train
from ..training.sparsify import sparsify_into, with_error
from ..transcoders.transcode import transcode
from .addition import ANSWER, CHARACTERS, EXAMPLE, POSITIONS, AdditionBatches, answer, encode, make_model
from .task import prompt_of

Loaded = tuple[nn.Module, PreTrainedTokenizerBase]
DENSE = Training(
    steps=1200, batch=128, lr=3e-3, decay=0.9, evaluate_every=250, evaluate_sequences=500, checkpoint_every=500
)
SPARSE = Sparsify(
    loss="cross-entropy", density=None, tolerance=0.0015, slack=0.005, slack_until=0.7, control=True,
    training=Training(
        steps=1800, batch=128, lr=1e-3, bias_lr=1e-2, decay=0.6, evaluate_every=25, evaluate_sequences=500,
        checkpoint_every=600,
    ),
)  # fmt: skip
FEATURES = Transcode(
    features=256, k=8, sparsity=0.01, sparsity_warmup=0.2, steps=500, batch=64, lr=3e-3, decay=0.3, dead_after=20_000,
    evaluate_every=500, evaluate_sequences=500, checkpoint_every=500,
)  # fmt: skip

# Multipliers to tell: by reading, for 90 % of the effect, and all that lead to the answer.
TOLD = {
    "open": "attention edges that lead to the answer",
    "removed": "attention edges for 90 % of the effect, the others removed",
    "removed-task": "the same, one circuit for all sums",
    "components": "edges between components for 90 % of the effect",
}

SUMS_READ = 3000  # for the faces of features

# What the report says of this Run, asks of it and shows.
ABOUT = {
    "name": "The addition model", "task": "addition", "exact": True, "filled": ANSWER,
    "prompts": [prompt_of(text) for text in ("36+28", "7+95", "50+50", "86+19")],
}  # fmt: skip


def demo(
    out: str | Path = "runs/demo", seed: int = 0, show_progress: bool = True, say: Callable[[str], None] = print
) -> Run:
    """A dense addition model, its control, the sparse one, figures 1 to 4: from nothing. Goes on where it stopped."""
    out = Path(out)
    complete = ("summary.json", "figure1.png", "circuits.json", "trace/trace.json", "report.html")
    if all((out / name).is_file() for name in complete):
        run = Run(out)
        say(f"{out} is complete; remove it to run the demo again.\n")
        with reading(out):
            _tell(run, say)
        return run
    began = time.perf_counter()
    sparse_settings = dataclasses.replace(SPARSE, training=dataclasses.replace(SPARSE.training, seed=seed))
    dense_settings = dataclasses.replace(DENSE, seed=seed)
    batches = AdditionBatches(seed)
    asked = {"model": "addition", "seed": seed, "data": batches.describe(), **dataclasses.asdict(sparse_settings)}
    asked["dense"] = dataclasses.asdict(dense_settings)
    resume = (out / "run.json").is_file()
    run = Run.create(out, "demo", asked, resume)
    try:
        with threads_for(0):  # it is tiny in all it does
            _walk(run, batches, dense_settings, sparse_settings, resume, show_progress, say, began)
    except Interrupted as stopped:
        raise Interrupted(f"{str(stopped).partition(';')[0]}; the same command again goes on from there") from stopped
    finally:
        run.unlock()
    _tell(run, say)
    return run


def _walk(
    run: Run, batches: AdditionBatches, dense_settings: Training, sparse_settings: Sparsify, resume: bool,
    show_progress: bool, say: Callable[[str], None], began: float,
) -> None:  # fmt: skip
    """Every model, figure and number of the demo, into its Run."""
    out, seed = run.path, dense_settings.seed
    run.write("about.json", ABOUT)
    base, tokenizer = _dense(run, batches, dense_settings, resume, show_progress, say)
    sparse = sparsify_into(
        run, base, tokenizer, batches, sparse_settings, resume=resume, show_progress=show_progress, say=_nothing
    )
    tried = batches.heldout_pairs[:20].tolist()
    example = next((pair for pair in tried if _both_right(base, sparse, *pair)), EXAMPLE)
    flow = {"base": flow_of(base, *example), "sparse": flow_of(sparse, *example)}
    run.write("figure1.json", flow)
    for suffix in ("png", "svg"):
        draw_flow(flow, out / f"figure1.{suffix}")
    multiplier = _circuits(run, (base, tokenizer), sparse, seed)
    features = _features(run, (base, tokenizer), (sparse, tokenizer), batches, example, seed, show_progress)
    rows = run.read("evaluation.json")
    dense_row, sparse_row, total = rows[0], rows[-1], flow["base"]["edges"]
    found = {
        "dense_exact": dense_row["exact"], "sparse_exact": sparse_row["exact"], "density": sparse_row["density"],
        "edges_open": sparse_row["density"] * total, "edges_total": total,
        "edges_per_layer": [share * total / 4 for share in sparse_row["density_per_layer"]],
        "multiplier": multiplier, "features": features, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    run.write("summary.json", run.read("summary.json") | found)
    report(out, say=_nothing)
    for leftover in ("checkpoints", "best", "control/checkpoints", "base/checkpoints"):
        shutil.rmtree(out / leftover, ignore_errors=True)


def _dense(
    run: Run,
    batches: AdditionBatches,
    settings: Training,
    resume: bool,
    show_progress: bool,
    say: Callable[[str], None],
) -> Loaded:
    folder = run.path / "base"
    if (folder / "model").is_dir():
        return load(folder / "model")
    model, tokenizer = make_model(settings.seed)
    stage = Stage("dense", model, batches, folder, settings, steering=500, say=say, show_progress=show_progress)
    train(stage, resume and folder.is_dir())
    save(model, tokenizer, folder / "model")
    return model, tokenizer


def _nothing(text: str) -> None:
    """Said by no one: the demo tells its own story."""


class OpenTold(OpenRow):  # all that leads to the answer, under the names of other multipliers as well
    dense_edges: float
    sparse_edges: float


def _circuits(run: Run, base: Loaded, sparse: nn.Module, seed: int) -> dict[str, MultiplierRow | OpenTold] | None:
    """Figures 2 and 3: how many edges explain addition in the dense, control and sparse model."""
    control = load(run.path / "control" / "model")
    names = ("Addition model", "Sparse addition model")
    settings = Search(seed=seed)
    try:
        result = compare(base, sparse, "addition", control=control, settings=settings, names=names, say=_nothing)
    except ValueError as error:  # a model that cannot add has no circuit for it
        run.write("circuits.json", {"error": str(error)})
        return None
    run.write("circuits.json", result)
    for role, circuit in result.circuits["addition"].items():
        circuit.save(run.path / f"circuit-addition-{role}.json")
    draw_all(result, run.path)
    row = result["tasks"]["addition"]
    measured = row["multipliers"]
    found: dict[str, MultiplierRow | OpenTold] = {}
    found |= {reading: measured[reading]["dense"]["0.9"] for reading in TOLD if reading in measured}
    if "open_edges" in row:
        opened = row["open_edges"]
        found["open"] = {"dense_edges": opened["dense"], "sparse_edges": opened["sparse"], **opened}
    return found


def _features(
    run: Run, base: Loaded, sparse: Loaded, batches: AdditionBatches, example: tuple[int, int], seed: int,
    show_progress: bool,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Figure 4: features of both models' MLPs, one sum traced through them, and the heads that carry it."""
    transcoders = {}
    settings = dataclasses.replace(FEATURES, seed=seed)
    for name, (model, tokenizer) in (("dense", base), ("sparse", sparse)):
        folder = run.path / "transcoders" / name
        if not (folder / "results.json").is_file():
            transcode(
                model, data=batches, out=folder, settings=settings, name=f"addition-{name}",
                resume=(folder / "run.json").is_file(), show_progress=show_progress, say=_nothing,
            )  # fmt: skip
        if not (folder / FACES / "faces.json").is_file():
            features(
                folder, batches, model=(model, tokenizer), tokens=SUMS_READ * batches.length, show_progress=False,
                resume=(folder / FACES / "run.json").is_file(), say=_nothing,
            )  # fmt: skip
        transcoders[name] = folder
    trace_sum((sparse, transcoders["sparse"]), (base, transcoders["dense"]), example, run.path / "trace")
    results = {name: Run(run.path / "transcoders" / name).read("results.json") for name in transcoders}
    return {name: {key: row[key] for key in ("fvu", "l0")} for name, row in results.items()}


def trace_sum(
    sparse: tuple[Loaded, Features], dense: tuple[Loaded, Features], example: tuple[int, int], out: Path
) -> Graph:
    """One sum in both models: who brings the tens digit its digits, and figure 4 of it.

    The sparse model comes first, so its strongest edge is the one both are asked about.
    """
    a, b = example
    graph = trace(
        *sparse, prompt_of(f"{a}+{b}"), f"{a + b:05}"[-2], against=dense, out=out,
        names=("Sparse addition model", "Addition model"), settings=Trace(position=POSITIONS - 2, checks=10),
    )  # fmt: skip
    assert graph.rows is not None
    draw_trace_all(graph.rows, out)
    return graph


def _both_right(base: nn.Module, sparse: nn.Module, a: int, b: int) -> bool:
    """Held-out sums are tried in order, 36 + 28 first: the picture shows one that both models get right."""
    return answer(base, a, b) == answer(sparse, a, b) == f"{a + b:05}"


def flow_of(model: Any, a: int, b: int) -> Flow:
    """What figure 1 shows of one model: input, output, and the attention [layer][head][query][key] of one sum."""
    inputs = encode(torch.tensor([[a, b]]))["input_ids"]
    options = {"gate_output": "pattern"} if is_gated(model) else {}
    before = model.config._attn_implementation
    if not options:
        model.set_attn_implementation("eager")  # the one that returns its weights
    with torch.no_grad():
        output = model(inputs, use_cache=False, output_attentions=True, **options)
    model.set_attn_implementation(before)
    text = "".join(CHARACTERS[i] for i in inputs[0])
    attention = torch.stack(output.attentions)[:, 0]
    n_edges = int((attention > 0).sum()) if options else attention[..., 0].numel() * (POSITIONS + 1) // 2
    rounded = [[[[round(w, 6) for w in row] for row in head] for head in layer] for layer in attention.tolist()]
    said = text[:-ANSWER] + answer(model, a, b)
    return {"input": text, "output": said, "edges": n_edges, "attention": rounded}


def _tell(run: Run, say: Callable[[str], None]) -> None:
    rows, summary = run.read("evaluation.json"), run.read("summary.json")
    say(f"{'':10}{'exact sums':>12}{'loss':>20}{'open edges':>16}   (n = {rows[0]['sequences']:,} held-out sums)")
    for row in rows:
        edges = row["density"] * summary["edges_total"]
        say(f"{row['kind']:10}{row['exact']:12.2%}{with_error(row, 5):>20}{edges:10.1f} /{summary['edges_total']:5}")
    layers = ", ".join(f"layer {i}: {n:.1f}" for i, n in enumerate(summary["edges_per_layer"]))
    say(f"\nopen edges by layer: {layers}")
    for kind, found in (summary.get("multiplier") or {}).items():
        say(
            f"{TOLD[kind]}: dense {found['dense_edges']:,.0f}, sparse {found['sparse_edges']:,.0f}: "
            f"{found['multiplier']:.1f}x ({found['low']:.1f} to {found['high']:.1f}, n = {found['n_prompts']} prompts)"
        )
    say(
        f"{summary['seconds']:.0f} s. Open {run.path / 'report.html'}; figures 1 to 3 lie beside it, figure 4 in trace."
    )
    say(f"Ask it yourself, in the browser: sparselens studio {run.path}")
    say(f"Load the sparse model with sparselens.load('{run.path}').")
