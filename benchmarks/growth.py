"""How time and memory grow: sparsify, discover, transcode and trace against tokens, layers, heads and prompts.

    python benchmarks/growth.py --json results/growth.json --picture results/growth.png

Small random models on one CPU core, one size doubled three times while the others stay. Seconds are the core's own time
(other programs disturb it little), the least of three; memory is what tensors take beside the weights, counted by a
dispatch mode in a run of its own. A slope is the exponent over the last two doublings: 1 is linear, 2 quadratic. Above
1.15, or 2 in tokens where attention is in the time, it is marked and explained (docs/scale.md).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparselens.attribution.growth import attribution_graph
from sparselens.circuits.circuit import Circuit
from sparselens.circuits.faithfulness import log_sizes
from sparselens.circuits.run import Patcher
from sparselens.circuits.scores import eap
from sparselens.config import Gate, Sparsify, Training, Transcode
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates
from sparselens.runs.run import provenance, write_json
from sparselens.tasks import Pair
from sparselens.tasks.prompts import Prompts
from sparselens.training.dry_run import PeakMemory
from sparselens.training.engine import make_optimizer
from sparselens.training.loop import Stage, loss_and_density
from sparselens.transcoders.evaluation import observe
from sparselens.transcoders.losses import Learner
from sparselens.transcoders.transcoder import Transcoder

VOCABULARY = 512
BASE = {"tokens": 64, "layers": 4, "heads": 4, "prompts": 8}
WIDTH = 128  # d_model, whatever the number of heads
LINEAR = 1.15  # a slope up to this counts as linear
EXPLAINED = {
    ("sparsify", "tokens", "bytes"): "the CPU's reference attention keeps queries x keys; the fused kernel does not",
    ("discover scoring", "layers", "seconds"): "so many edges: every layer reads all before it",
    ("discover scoring", "heads", "seconds"): "so many edges: 3 H readers times H writers per pair of layers",
    ("discover curve", "layers", "seconds"): "every part of a circuit sums what all parts before it wrote",
    ("discover curve", "heads", "seconds"): "every part of a circuit sums what all parts before it wrote",
    ("transcode", "layers", "seconds"): "cross-layer features write to all later layers: L (L + 1) / 2 decoders",
    ("transcode", "layers", "bytes"): "cross-layer features write to all later layers: L (L + 1) / 2 decoders",
    ("trace", "layers", "seconds"): "cross-layer features, and rows that run back through all layers before them",
    ("trace", "layers", "bytes"): "cross-layer features write to all later layers: L (L + 1) / 2 decoders",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--doublings", type=int, default=3)
    parser.add_argument("--only", help="one of: " + ", ".join(JOBS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (make, variables) in JOBS.items():
        if arguments.only in (None, name):
            rows += [grow(name, make, variable, arguments.doublings) for variable in variables]
    if arguments.json:
        shape = {"base": BASE, "width": WIDTH, "vocabulary": VOCABULARY}
        write_json(arguments.json, {"shape": shape, "rows": rows, "provenance": provenance()})
    if arguments.picture:
        draw(rows, arguments.picture)


def grow(name: str, make: Callable, variable: str, doublings: int) -> dict:
    """One row of the table: what doubling one size, again and again, does."""
    sizes = [BASE[variable] * 2**i for i in range(doublings + 1)]
    seconds, peaks = [], []
    for size in sizes:
        torch.manual_seed(0)
        job, weights = make(**(BASE | {variable: size}))
        job()  # what happens only once
        seconds.append(min(timed(job) for _ in range(3)))
        counted = PeakMemory().ignore(*weights)
        with counted:
            job()
        peaks.append(counted.peak)
    row = {"job": name, "variable": variable, "sizes": sizes, "seconds": seconds, "bytes": peaks}
    words = f"{name:18}{variable:9}"
    for what in ("seconds", "bytes"):
        row[f"{what}_slope"] = slope = fit(sizes, row[what])
        quadratic = what == "seconds" and variable == "tokens"
        above = slope > (2 * LINEAR if quadratic else LINEAR)
        if above:
            row[f"{what}_explained"] = EXPLAINED.get((name, variable, what))
        words += f"  {what} {row[what][0]:9.3g} to {row[what][-1]:9.3g}, slope {slope:5.2f}{'*' if above else ' '}"
    notes = [row.get(f"{what}_explained", "") for what in ("seconds", "bytes")]
    print(
        words
        + "  "
        + "; ".join(dict.fromkeys("NOT EXPLAINED" if note is None else note for note in notes if note != ""))
    )
    return row


def timed(job: Callable[[], object]) -> float:
    began = time.process_time()
    job()
    return time.process_time() - began


def fit(sizes: list[int], values: list[float]) -> float:
    """The exponent over the last three sizes, where what is done once has faded."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(values[-3:]), 1)[0])


# ---------------------------------------------------------------- what is measured: (a job to repeat, its modules)


def model_of(layers: int, heads: int, tokens: int, gated: bool = False) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=WIDTH // heads,
        max_position_embeddings=max(64, tokens), bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return (add_gates(model, Gate()) if gated else model).eval()


def text_of(prompts: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (prompts, tokens))
    return {"input_ids": ids, "labels": ids}


def sparsify_step(tokens: int, layers: int, heads: int, prompts: int):
    model = model_of(layers, heads, tokens, gated=True).train()
    settings = Sparsify(training=Training()).training
    optimizer = make_optimizer(dict(model.named_parameters()), settings)
    stage = Stage("growth", model, None, Path(), settings)  # type: ignore[arg-type]
    text = text_of(prompts, tokens)

    def job() -> None:
        loss, density = loss_and_density(stage, text, (0, 0))
        (loss + density.sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return job, [model]


def prompts_of(n: int, tokens: int) -> Prompts:
    clean, corrupted = (torch.randint(0, VOCABULARY, (n, tokens)) for _ in range(2))
    right, shape = torch.randint(0, VOCABULARY - 1, (n, 1, 1)), (n, 1)
    return Prompts(
        "logit", clean, corrupted, torch.full((n,), tokens), torch.full(shape, tokens - 1), right, right + 1,
        torch.full(shape, -1), torch.ones(shape, dtype=torch.bool), tuple(Pair("", "", "", "") for _ in range(n)),
    )  # fmt: skip


def scoring(tokens: int, layers: int, heads: int, prompts: int):
    model = model_of(layers, heads, tokens).requires_grad_(False)
    decoder, pairs = Decoder(model), prompts_of(prompts, tokens)
    return lambda: eap(decoder, pairs, 0, prompts), [model]


def curve(tokens: int, layers: int, heads: int, prompts: int):
    model = model_of(layers, heads, tokens).requires_grad_(False)
    decoder, pairs = Decoder(model), prompts_of(prompts, tokens)
    c = decoder.components
    scores = np.random.default_rng(0).normal(size=c.possible.shape)
    order = Circuit(c, scores, c.possible).order()
    masks = torch.stack([torch.from_numpy(c.prune(c.mask(order[:n]))) for n in log_sizes(len(order), 6)])
    patcher = Patcher(decoder, pairs, memory_mb=1)  # one circuit at a time: otherwise they fill what they are given
    return lambda: patcher.run(masks), [model]


def transcode_step(tokens: int, layers: int, heads: int, prompts: int):
    model = model_of(layers, heads, tokens).requires_grad_(False)
    learner = Learner(layers, WIDTH, Transcode(features=512, k=8))
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
    text = text_of(prompts, tokens)

    def activations() -> tuple[list[Tensor], list[Tensor]]:
        inputs, outputs = observe(model, text, "mlp-input")
        return [x.flatten(0, 1) for x in inputs], [x.flatten(0, 1) for x in outputs]

    learner.begin(*activations())

    def job() -> None:
        learner.loss(learner(*activations()), 0.005).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return job, [model, learner]


def trace_prompt(tokens: int, layers: int, heads: int, prompts: int):
    model = model_of(layers, heads, tokens).requires_grad_(False)
    transcoder = Transcoder.random(layers, 256, WIDTH)
    words, ids = tokenizer(), torch.randint(0, VOCABULARY, (tokens,))
    return lambda: attribution_graph(model, words, transcoder, ids, budget=128, edges_per_row=1024), [model, transcoder]


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0")


JOBS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "sparsify": (sparsify_step, ("tokens", "layers", "heads", "prompts")),
    "discover scoring": (scoring, ("tokens", "layers", "heads", "prompts")),
    "discover curve": (curve, ("tokens", "layers", "heads", "prompts")),
    "transcode": (transcode_step, ("tokens", "layers", "heads", "prompts")),
    "trace": (trace_prompt, ("tokens", "layers", "heads")),  # one prompt
}


def draw(rows: list[dict], path: Path) -> None:
    """Small multiples: time above, memory below, a column per size, a line per command with its slope at the end."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    colours = dict(zip(JOBS, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.6), sharex="col", sharey="row", layout="constrained")
    for i, what in enumerate(("seconds", "bytes")):
        for j, variable in enumerate(("tokens", "layers", "heads", "prompts")):
            axis = axes[i][j]
            for row in rows:
                if row["variable"] == variable:
                    values = np.array(row[what]) / (1 if what == "seconds" else 2**20)
                    axis.loglog(row["sizes"], values, marker="o", markersize=3, color=colours[row["job"]])
                    at = (row["sizes"][-1] * 1.1, values[-1])
                    axis.annotate(f"{row[f'{what}_slope']:.1f}", at, color=colours[row["job"]], fontsize=8, va="center")
            axis.set_xticks([BASE[variable] * 2**k for k in range(4)])
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlim(right=BASE[variable] * 2**3 * 1.5)
            axis.spines[["top", "right"]].set_visible(False)
            if i:
                axis.set_xlabel(variable)
        axes[i][0].set_ylabel("CPU seconds" if what == "seconds" else "MB beside the weights")
    handles = [plt.Line2D([], [], color=colour, marker="o", markersize=3) for colour in colours.values()]
    figure.legend(handles, list(colours), ncols=len(colours), loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
