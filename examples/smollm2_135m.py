"""SmolLM2-135M with one attention edge in two hundred, at the loss it had.

    python examples/smollm2_135m.py MODEL --data prose.txt code.txt --heldout prose-val.txt code-val.txt \\
        --unseen other.txt --out runs/smollm2-135m --json results/smollm2-135m.json

MODEL: a folder, a Hugging Face name (HuggingFaceTB/SmolLM2-135M-Instruct) or a .gguf file. These are the settings of
`sparselens sparsify --control`: KL to the base on any text, least loss within the budget. Afterwards base, matched
control and sparse model are measured on the held-out part of the text and on text of another kind (`--unseen`).
Circuits follow with `sparselens compare MODEL runs/smollm2-135m --tasks ioi greater-than docstring ioi-long`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import sparselens as sl
from sparselens.data.batches import Batches, TextBatches
from sparselens.runs.run import Run, write_json
from sparselens.training.measure import measure
from sparselens.training.sparsify import report_slice


def main(description: str | None = __doc__, **defaults: Any) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--heldout", nargs="+", required=True)
    parser.add_argument("--unseen", nargs="+", default=[], help="text of another kind, for the report alone")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--density", type=float, default=0.005)
    parser.add_argument("--edges", type=float, help="open edges per head and query, in place of --density")
    parser.add_argument(
        "--shortest", type=int, default=0, help="cut every second sequence into texts this long or longer"
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, help="sequences per forward pass; halved where memory is short")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.set_defaults(**defaults)
    arguments = parser.parse_args()
    tokenizer = sl.load(arguments.model)[1]  # text that cannot be read is noticed before the training, not after it
    texts = (("heldout", arguments.heldout), ("unseen", arguments.unseen))
    corpora = {name: whole_text(files, tokenizer, arguments.length) for name, files in texts if files}
    run = sl.sparsify(
        arguments.model, arguments.data, arguments.out, heldout=tuple(arguments.heldout), heldout_tokens=1 << 20,
        control=True, density=arguments.density, edges=arguments.edges, steps=arguments.steps, batch=arguments.batch,
        micro_batch=arguments.micro_batch, lr=arguments.lr, length=arguments.length, shortest=arguments.shortest,
        seed=arguments.seed, resume=arguments.resume,
    )  # fmt: skip
    publish(run, arguments.model, corpora, arguments.json)


def whole_text(files: list[str], tokenizer: Any, length: int) -> Batches:
    """Text to measure on: all of it, up to a million tokens."""
    most = 1 << 20
    return TextBatches(
        files, tokenizer, length, cache=Path(".sparselens-cache"), need=most, heldout_patterns=files,
        heldout_tokens=most,
    )  # fmt: skip


def publish(run: Run, base: str | Path, corpora: dict[str, Batches], path: Path | None) -> None:
    found = summary(run, base, corpora)
    run.write("corpora.json", found)
    if path:
        write_json(path, found)
    print(json.dumps({key: value for key, value in found.items() if "density_per_" not in key}, indent=1))


def summary(run: Run, base: str | Path, corpora: dict[str, Batches]) -> dict[str, Any]:
    """Everything there is to say about the run in numbers; losses on each corpus, in bf16 on a GPU as in training."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folders = {"base": base, "control": run.path / "control" / "model", "sparse": run.path}
    rows: dict[str, dict[str, Any]] = {}
    reference = sl.load(base, device=device)[0]
    for kind, folder in folders.items():
        model = sl.load(folder, device=device)[0]
        for corpus, batches in corpora.items():
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                # The first quarter of the Run's held-out text has steered it.
                part = report_slice(batches) if corpus == "heldout" else (0, batches.n_heldout)
                found = measure(model, batches, *part, micro_batch=16, base=reference)
            rows.setdefault(corpus, {})[kind] = found.row(str(folder), kind)
    first = next(iter(rows.values()))["sparse"]
    training, made = run.record["config"]["training"], run.read("summary.json")
    return {
        "edges_per_query": first["edges_per_query"],
        **{f"{kind}_loss": {corpus: row[kind]["loss"] for corpus, row in rows.items()} for kind in folders},
        "kl_to_base": {corpus: {k: row[k]["kl_to_base"] for k in folders} for corpus, row in rows.items()},
        "top1_agreement": {corpus: {k: row[k]["top1_agreement"] for k in folders} for corpus, row in rows.items()},
        "density": first["density"],
        "density_by_corpus": {corpus: row["sparse"]["density"] for corpus, row in rows.items()},
        "density_per_layer": first["density_per_layer"],
        "density_per_head": first["density_per_head"],
        "worst_layer_density": max(first["density_per_layer"]),
        "tokens": made["tokens"],
        "minutes": made["minutes"],
        "tokens_per_second": made["tokens_per_second"],
        "peak_gib": made["peak_gib"],
        "seeds": [training["seed"]],
        "settings": run.record["config"],
        **run.record["provenance"],
    }


if __name__ == "__main__":
    main()
