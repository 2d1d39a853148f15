"""A 7B model on one GPU: sparse against dense post-training steps, and circuit scoring, with their memory.

    python benchmarks/scale.py --json results/scale-h200.json
    python benchmarks/scale.py --tiny            # the same code on small models, for a CPU

1. LoRA steps of OLMo-7B's shape (random weights): gates and the fused kernel against dense attention (SDPA). Same
   model, adapters, optimiser and text; the two take turns, `repeats` steps each, medians. The text is one document per
   sequence, which is where SDPA is fastest (packed documents would cost it its flash kernel).
2. EAP scores of all 1,592,881 edges of the same shape in fp32: seconds, and peak memory beside the estimate.
3. Full fine-tuning of SmolLM2-135M's shape: what `sparselens plan` is checked against.
A step is what `sparselens sparsify` does: loss and density, backward pass, clipping, AdamW. Peak memory is PyTorch's.
"""

import argparse
import gc
import json
import statistics
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OlmoConfig, OlmoForCausalLM

from sparselens.circuits.scores import eap, estimate_memory
from sparselens.config import Sparsify, Training
from sparselens.models.architectures import base_model, blocks, mlp_width
from sparselens.models.component_graph import Components
from sparselens.models.decoder import Decoder
from sparselens.models.loading import NAME
from sparselens.runs.run import provenance, write_json
from sparselens.tasks import Pair
from sparselens.tasks.prompts import Item, Prompts, Read, collate
from sparselens.training.controllers import Budget
from sparselens.training.copies import compiles, dense_copy, with_gates
from sparselens.training.dry_run import PeakMemory
from sparselens.training.engine import make_optimizer
from sparselens.training.loop import Stage, loss_and_density

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30
PARTS = ["lora", "discover", "full", "compiled"]  # the last: `full` with compiled blocks, about two minutes more
WANTED = {"speed_ratio": 0.75, "memory_ratio": 1.2}  # at least, at most


def olmo(tiny: bool) -> OlmoConfig:
    """allenai/OLMo-7B-hf, except that positions go up to 4,096 (as in OLMo-7B-0724)."""
    small = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4,
                 intermediate_size=96, vocab_size=128, eos_token_id=0)  # fmt: skip
    return OlmoConfig(
        **dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=11008,
               vocab_size=50304, max_position_embeddings=4096) | (small if tiny else {}),
    )  # fmt: skip


def smollm(tiny: bool) -> LlamaConfig:
    """HuggingFaceTB/SmolLM2-135M."""
    small = dict(num_hidden_layers=2, hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
                 intermediate_size=96, vocab_size=128)  # fmt: skip
    return LlamaConfig(
        **dict(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
               intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
        | (small if tiny else {}),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models: does the script run?")
    parser.add_argument("--repeats", type=int, default=4, help="steps of each kind; the median counts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3], help="what to measure")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if DEVICE == "cpu" and not arguments.tiny:
        parser.error("a 7B model needs a GPU; --tiny runs small models anywhere")
    tiny, began = arguments.tiny, time.perf_counter()
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "provenance": provenance(),
        "wanted": WANTED,
        "matmul_tflops": matmul_tflops(256 if tiny else 8192),
    }

    def keep() -> None:  # after every part: whatever comes next, what was measured is on disk
        result["seconds"] = round(time.perf_counter() - began, 1)
        if arguments.json:
            write_json(arguments.json, result)

    short, long = (32, 64) if tiny else (2048, 4096)
    repeats, parts = arguments.repeats, arguments.parts
    print(f"{result['machine']}: {result['matmul_tflops']} TFLOP/s in bf16 matrix products")
    if "lora" in parts:
        print("LoRA steps, OLMo-7B's shape, rank 16 on every linear layer, bf16 autocast")
        result["lora"] = rows = []
        # bfloat16 base weights; gradient checkpointing makes room for twice the tokens.
        for checkpointing, tokens in ((True, 4 * long), (False, 2 * long)):
            shapes = [(tokens // length, length) for length in (short, long)]
            rows += lora_rows(olmo(tiny), torch.bfloat16, shapes, checkpointing, repeats)
            keep()
        # fp32 base weights, as `load` gives them.
        rows += lora_rows(olmo(tiny), torch.float32, [(4 * long // short, short)], True, max(1, repeats // 2))
        keep()
    if "discover" in parts:
        result["discover"] = discover_row(olmo(tiny), n_prompts=16, tokens=32)
        print("discover " + json.dumps(result["discover"]))
        keep()
    for name in ("full", "compiled"):
        if name in parts:
            print(f"{name}: fine-tuning of all weights, SmolLM2-135M's shape, fp32 weights, bf16 autocast")
            shapes = [(2, 32), (4, 32)] if tiny else [(16, 512), (64, 512)]
            result[name] = full_rows(smollm(tiny), shapes[-1:] if name == "compiled" else shapes, repeats, name)
            keep()
    print(f"{result['seconds']} s in all")


# ---------------------------------------------------------------- training steps


def lora_rows(config, dtype: torch.dtype, shapes: list[tuple[int, int]], checkpointing: bool, repeats: int) -> list:
    """One row per shape (batch, tokens): dense and sparse steps of the same adapters."""
    with released():
        settings = Sparsify(training=Training(lora=16, compile="no"))
        model = trainable(OlmoForCausalLM, config, dtype, settings)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        rows = [compare(model, settings, *shape, repeats) for shape in shapes]
    for row in rows:
        row |= {"weights": str(dtype).removeprefix("torch."), "gradient_checkpointing": checkpointing}
        print(json.dumps(row), flush=True)
    return rows


def full_rows(config, shapes: list[tuple[int, int]], repeats: int, name: str) -> list:
    """The same with all weights trained, blocks compiled or not."""
    with released():
        settings = Sparsify(training=Training(compile="yes" if name == "compiled" else "no"))
        model = trainable(LlamaForCausalLM, config, torch.float32, settings)
        rows = [compare(model, settings, *shape, 2 * repeats) for shape in shapes]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def trainable(kind, config, dtype: torch.dtype, settings: Sparsify) -> Any:
    """A model with random weights, gates and adapters, made on the device, as `sparsify` makes it from a real one."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        base = kind._from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False)
    model = dense_copy(base, settings.training)
    del base
    with_gates(model, settings)
    return model.train()


@contextmanager
def gates(model, on: bool):
    """With gates, or with the model's own dense attention: same weights, adapters and optimiser."""
    config = base_model(model).config
    settings = config.sparselens
    if not on:
        config.sparselens = None
        base_model(model).set_attn_implementation("sdpa")
    try:
        yield
    finally:
        config.sparselens = settings
        base_model(model).set_attn_implementation(NAME)


def compare(model, settings: Sparsify, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second and peak memory, dense and sparse in turns."""
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    ids = torch.randint(0, base_model(model).config.vocab_size, (batch, tokens + 1), device=DEVICE)
    text = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(parameters, settings.training)
    stage = Stage("scale", model, batches=None, folder=Path(), settings=settings.training)  # type: ignore[arg-type]
    if compiles(settings.training, DEVICE):
        for block in blocks(model):
            block.compile()
    controller = Budget(target=0.0, density=0.01)
    seconds: dict[str, list[float]] = {"dense": [], "sparse": []}
    peaks = {"dense": 0.0, "sparse": 0.0}

    def step(seed: int, gated: bool) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss, density = loss_and_density(stage, text, (seed, 0))
        (controller.objective(loss, density) if gated else loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        row["density" if gated else "loss"] = (density if gated else loss).item()  # a real step reads them, too

    empty_cache()
    try:
        for repeat in range(-1, repeats):  # the first round compiles
            for name in seconds:
                with gates(model, name == "sparse"):
                    reset_peak()
                    start = time.perf_counter()
                    step(repeat + 1, name == "sparse")
                    if repeat >= 0:
                        seconds[name].append(time.perf_counter() - start)
                        peaks[name] = max(peaks[name], peak())
    except torch.cuda.OutOfMemoryError as error:
        model.zero_grad(set_to_none=True)
        return row | {"out_of_memory": str(error).splitlines()[0]}
    for name in seconds:
        row[f"{name}_tokens_per_second"] = round(batch * tokens / statistics.median(seconds[name]))
        row[f"{name}_seconds"] = [round(value, 4) for value in seconds[name]]
        row[f"{name}_peak_gib"] = round(peaks[name] / GIB, 3)
    row["speed_ratio"] = round(row["sparse_tokens_per_second"] / row["dense_tokens_per_second"], 3)
    row["memory_ratio"] = round(row["sparse_peak_gib"] / row["dense_peak_gib"], 3) if DEVICE == "cuda" else None
    row["met"] = row["speed_ratio"] >= WANTED["speed_ratio"] and (row["memory_ratio"] or 0) <= WANTED["memory_ratio"]
    return row


# ---------------------------------------------------------------- circuit scoring


def discover_row(config, n_prompts: int, tokens: int) -> dict[str, Any]:
    """EAP and EAP-IG on random prompts, in fp32. Random weights answer no task, so the checks of `discover`, that the
    model can do it, have no place here; scores cost the same."""
    with released():
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = OlmoForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        decoder = Decoder(model.eval().requires_grad_(False))
        c = decoder.components
        prompts = random_prompts(config.vocab_size, n_prompts, tokens).to(DEVICE)
        expected = estimate_memory(decoder.dims, mlp_width(config), n_prompts, tokens, 1, config.vocab_size)
        row = {
            "n_edges": c.n_edges,
            "n_edges_by_formula": edges_by_formula(c),
            "n_prompts": n_prompts,
            "tokens": tokens,
            "weights_gib": round(sum(p.numel() * 4 for p in model.parameters()) / GIB, 3),
            "estimated_gib": round(expected.total / GIB, 3),
        }
        for name, steps in (("eap", 0), ("eap-ig", 5)):
            reset_peak()
            before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
            counted = PeakMemory().ignore(model)
            start = time.perf_counter()
            if DEVICE == "cuda":
                scores = eap(decoder, prompts, steps, n_at_once=n_prompts)
            else:
                with counted:
                    scores = eap(decoder, prompts, steps, n_at_once=n_prompts)
            row[f"{name}_seconds"] = round(time.perf_counter() - start, 2)
            used = peak() - before if DEVICE == "cuda" else counted.peak
            row[f"{name}_measured_gib"] = round(used / GIB, 6)
            found = scores[c.possible]
            row[f"{name}_finite_scores"] = int(torch.from_numpy(found).isfinite().sum())
            row[f"{name}_zero_scores"] = int((found == 0).sum())
    return row


def edges_by_formula(c: Components, inputs: int = 1) -> int:
    """METHOD.md: sum over layers of 3H(E + l(H+1)) + (E + l(H+1) + H), plus E + L(H+1)."""
    h = c.n_heads
    before = [inputs + layer * (h + 1) for layer in range(c.n_layers + 1)]
    return sum(3 * h * n + n + h for n in before[:-1]) + before[-1]


def random_prompts(vocabulary: int, n: int, tokens: int) -> Prompts:
    """Pairs of random text that differ in one token, with a random right and wrong answer."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for ids in torch.randint(0, vocabulary, (n, tokens), generator=generator).tolist():
        place, other, right, wrong = tokens // 2, *(torch.randperm(vocabulary, generator=generator)[:3].tolist())
        corrupted = [*ids[:place], other, *ids[place + 1 :]]
        read = Read(tokens - 1, (right,), (wrong,), -1)
        items.append(Item(tuple(ids), tuple(corrupted), (read,), Pair("", "", "", "")))
    return collate(items, "logit")


# ---------------------------------------------------------------- the machine


def matmul_tflops(size: int) -> float:
    """What a large bf16 matrix product reaches here: the measure of a step's utilisation."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(10):
        reset_peak()  # waits for the device, too
        start = time.perf_counter()
        a @ b
        peak()
        seconds.append(time.perf_counter() - start)
    return round(2 * size**3 / statistics.median(seconds) / 1e12, 1)


@contextmanager
def released():
    """Leave nothing of this block on the device."""
    try:
        yield
    finally:
        empty_cache()


def empty_cache() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    """Bytes on the device at most, since `reset_peak`; 0 where PyTorch does not count."""
    if DEVICE != "cuda":
        return 0.0
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
