"""A model of GPT-2 small's shape, from nothing: something to make sparse where GPT-2's own weights are out of reach.

    python examples/gpt2_shaped.py --tokenizer gpt2 --data prose.txt code.txt --heldout prose-val.txt --out runs/gpt2

12 layers of 12 heads, 768 wide, 1,024 learned positions, LayerNorm with biases, 50,257 tokens. 1,500 steps of 256
sequences are 393M tokens. What the blocks multiply with is trained by Muon, the rest (embeddings, norms, biases) by
AdamW; documents follow one another without a mask, as in GPT-2's own training. Killed or stopped, the same command goes
on from the last checkpoint. The result is an ordinary Hugging Face folder, OUT/model. On a CPU try
`--layers 2 --width 64 --heads 4 --length 64 --batch 8 --steps 20`.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from sparselens.data import Batches, TextBatches
from sparselens.evaluate import token_losses
from sparselens.huggingface import save
from sparselens.run import write_json


def make_model(layers: int, width: int, heads: int, length: int, tokens: int, end: int, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=tokens, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=end,
            eos_token_id=end, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, its steps scaled to AdamW's size; AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (".h." in name and p.ndim == 2)]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda or None)
    return [muon, adam]


def schedule(done: float) -> float:
    """Share of the learning rate when this share of the steps is done: up in 2 %, level, down over the last half."""
    return min(1.0, (done + 1e-3) / 0.02, 2 * (1 - done))


def pretrain(
    model: GPT2LMHeadModel, batches: Batches, folder: Path, *, steps: int, batch: int, micro_batch: int, lr: float,
    every: int = 250,
) -> list[dict[str, float]]:  # fmt: skip
    """Train to the end, or go on from the last checkpoint; returns the lines of the log."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    model.to(device).train()
    optimizers = make_optimizers(model, lr)
    lines = restore(model, optimizers, folder)
    first = int(lines[-1]["step"]) if lines else 0
    loss_of = LanguageLoss(model)
    compiled = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
    began = time.perf_counter()
    for step in tqdm(range(first, steps), initial=first, total=steps, unit="step"):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step / steps)
        total = 0.0
        for part in range(0, batch, micro_batch):
            found = batches.train(step * batch + part, micro_batch)
            inputs, labels = (found[name].to(device) for name in ("input_ids", "labels"))
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = compiled(inputs, labels) * micro_batch / batch
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % every == 0 or step + 1 == steps:
            line = {"step": step + 1, "loss": float(total), "heldout_loss": heldout_loss(model, batches, device)}
            lines.append(line | {"seconds": round(time.perf_counter() - began, 1)})
            checkpoint(model, optimizers, folder, lines)
            tqdm.write(json.dumps(lines[-1]))
    return lines


class LanguageLoss(nn.Module):
    """The mean loss of a batch as one module, so that blocks and loss are compiled together."""

    def __init__(self, model: GPT2LMHeadModel):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return token_losses(self.model(input_ids=inputs, use_cache=False).logits, labels).mean()


@torch.no_grad()
def heldout_loss(model: GPT2LMHeadModel, batches: Batches, device: str, most: int = 128, at_once: int = 16) -> float:
    model.eval()
    losses = []
    for start in range(0, min(most, batches.n_heldout), at_once):
        found = batches.heldout(start, at_once)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=found["input_ids"].to(device), use_cache=False).logits
        losses.append(token_losses(logits, found["labels"].to(device)).mean().item())
    model.train()
    return sum(losses) / len(losses)


def checkpoint(model: nn.Module, optimizers: list, folder: Path, lines: list[dict[str, float]]) -> None:
    """Weights and optimiser states as one safetensors file, then the log, which makes it count."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{i}.{j}.{key}": torch.as_tensor(value) for key, value in state.items()}
    name = f"checkpoint-{int(lines[-1]['step'])}.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    write_json(folder / "log.json", {"checkpoint": name, "lines": lines})
    for old in folder.glob("checkpoint-*.safetensors"):
        if old.name != name:
            old.unlink()


def restore(model: nn.Module, optimizers: list, folder: Path) -> list[dict[str, float]]:
    if not (folder / "log.json").is_file():
        return []
    log = json.loads((folder / "log.json").read_text())
    tensors = load_file(folder / log["checkpoint"], device=str(next(model.parameters()).device))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[f"model.{name}"])
    for i, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        for key, value in tensors.items():
            owner, _, rest = key.partition(".")
            if owner == str(i):
                j, _, field = rest.partition(".")
                whole["state"].setdefault(int(j), {})[field] = value
        optimizer.load_state_dict(whole)
    return log["lines"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="gpt2", help="folder or Hugging Face name")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--heldout", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path(".sparselens-cache"))
    a = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.tokenizer, trust_remote_code=False)
    batches = TextBatches(
        a.data, tokenizer, a.length, cache=a.cache, need=a.steps * a.batch * a.length, heldout_patterns=a.heldout,
        seed=a.seed,
    )  # fmt: skip
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model = make_model(a.layers, a.width, a.heads, a.length, len(tokenizer), end, a.seed)
    micro = math.gcd(a.batch, a.micro_batch)
    lines = pretrain(model, batches, a.out, steps=a.steps, batch=a.batch, micro_batch=micro, lr=a.lr)
    save(model.eval(), tokenizer, a.out / "model")
    print(f"held-out loss {lines[-1]['heldout_loss']:.3f} nats; {a.out / 'model'} is ready for sparselens sparsify")


if __name__ == "__main__":
    main()
