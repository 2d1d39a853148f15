"""SmolLM2-135M with one attention edge in two hundred, at the loss of its matched dense control.

    python examples/smollm2_135m.py MODEL --data prose.txt code.txt --heldout prose-val.txt --out runs/smollm2-135m

MODEL: a folder, a Hugging Face name (HuggingFaceTB/SmolLM2-135M-Instruct) or a .gguf file. The loss is cross-entropy:
the text is not what the model was trained on, so it adapts, and only the control says how much of the loss is due to
that. Text is used once: --steps x --batch x --length tokens of it are needed. `--unseen` adds text of another kind.
"""

import argparse
import json
from pathlib import Path

import sparselens as sl
from sparselens.data import TextBatches
from sparselens.evaluate import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--heldout", nargs="+", default=[])
    parser.add_argument("--unseen", nargs="+", default=[], help="text of another kind, for the report alone")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--density", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    run = sl.sparsify(
        arguments.model, arguments.data, arguments.out, heldout=tuple(arguments.heldout), target="control",
        tolerance=0.02, density=arguments.density, steps=arguments.steps, batch=arguments.batch,
        micro_batch=arguments.micro_batch, length=arguments.length, lr=arguments.lr, seed=arguments.seed,
        evaluate_every=max(1, arguments.steps // 20), evaluate_sequences=64, checkpoint_every=arguments.steps,
        resume=arguments.resume,
    )  # fmt: skip
    sparse = run.read("evaluation.json")[-1]
    print("density per layer:", " ".join(f"{share:.2%}" for share in sparse["density_per_layer"]))
    if arguments.unseen:
        losses = {
            name: unseen_loss(folder, arguments.unseen, arguments.length)
            for name, folder in (
                ("base", arguments.model),
                ("control", arguments.out / "control" / "model"),
                ("sparse", arguments.out),
            )
        }
        run.write("unseen.json", losses)
        print("unseen text:", json.dumps(losses))


def unseen_loss(folder: str | Path, text: list[str], length: int) -> float:
    """Held-out loss of one model on text of another kind."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = sl.load(folder, device=device)
    batches = TextBatches(
        text, tokenizer, length, cache=Path(".sparselens-cache"), need=1 << 30, heldout_tokens=1 << 17
    )
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return measure(model, batches, 0, batches.n_heldout, micro_batch=16).loss


if __name__ == "__main__":
    main()
