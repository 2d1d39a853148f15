"""Text from a model's own distribution, for models whose training text is not at hand.

    python examples/sample_text.py MODEL --tokens 800000 --out text.jsonl

Samples start from the model's document separator at temperature 1, so they are what the model itself believes in.
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

import sparselens as sl
from sparselens.data.batches import separator_id
from sparselens.models.architectures import dimensions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face name, folder, Run or .gguf file")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, help="tokens per sample; default: the longest the model allows")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = sl.load(arguments.model, device=device)
    length = arguments.length or dimensions(model.config).max_tokens
    start = torch.full((arguments.batch, 1), separator_id(tokenizer), device=device)
    torch.manual_seed(arguments.seed)
    with arguments.out.open("w") as file, tqdm(total=arguments.tokens, unit="tok", unit_scale=True) as bar:
        while bar.n < arguments.tokens:
            samples = model.generate(
                start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=length - 1, pad_token_id=tokenizer.eos_token_id or 0,
            )  # fmt: skip
            for text in tokenizer.batch_decode(samples, skip_special_tokens=True):
                file.write(json.dumps({"text": text}) + "\n")
            bar.update(samples.numel())


if __name__ == "__main__":
    main()
