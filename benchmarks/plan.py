"""What `sparselens plan` says beside what a run then takes: memory, seconds per step, the whole run, disk.

    python benchmarks/plan.py --json results/plan-cpu.json
    python benchmarks/plan.py --against results/scale-h200.json --json results/plan-h200.json   # no GPU needed
    python benchmarks/plan.py --paper                             # the table on paper of docs/scale.md

Every case is planned and run in a fresh process, on random weights and random text. Memory on a CPU is all that the
process had resident at most, on a GPU PyTorch's peak (the plan's allowance for the process is left out there). Seconds
per step are the median of the steps after the first two; on a CPU they are one core's own time, which other programs do
not disturb.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

SMALL = dict(kind="llama", vocab_size=8000, hidden_size=256, num_attention_heads=8, intermediate_size=704)
CPU_CASES = {
    # name: (model, sequence length, settings of the run)
    "llama 6 x 288, 32,000 words": (
        dict(kind="llama", num_hidden_layers=6, hidden_size=288, num_attention_heads=6, intermediate_size=768,
             vocab_size=32000, tie_word_embeddings=True), 256, dict(batch=8),
    ),
    "llama 12 x 256": (SMALL | dict(num_hidden_layers=12), 128, dict(batch=8, micro_batch=4)),
    "llama 12 x 256, checkpointing": (
        SMALL | dict(num_hidden_layers=12), 128, dict(batch=8, gradient_checkpointing=True),
    ),
    "llama 8 x 256, LoRA, KL": (SMALL | dict(num_hidden_layers=8), 128, dict(batch=8, lora=16, loss="kl")),
    "gpt2 4 x 512": (
        dict(kind="gpt2", n_layer=4, n_embd=512, n_head=8, vocab_size=4000, n_positions=512), 64, dict(batch=16),
    ),
}  # fmt: skip
SMOLLM = dict(kind="llama", num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3,
              head_dim=64, intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)  # fmt: skip
GPU_CASES = {
    "SmolLM2-135M": (SMOLLM, 512, dict(batch=64)),
    "SmolLM2-135M, KL, 4 parts": (SMOLLM, 512, dict(batch=64, micro_batch=16, loss="kl")),
    "SmolLM2-135M, LoRA, checkpointing": (SMOLLM, 1024, dict(batch=32, lora=16, gradient_checkpointing=True)),
    "llama 16 x 2048": (
        dict(kind="llama", num_hidden_layers=16, hidden_size=2048, num_attention_heads=16, intermediate_size=8192,
             vocab_size=50304), 2048, dict(batch=8, gradient_checkpointing=True),
    ),
}  # fmt: skip
STEPS = 8
BIG = {  # 7B: OLMo's shape, 13B: Llama 2's, 32B: Qwen 2.5's, 70B: Llama 3's
    "7B": dict(kind="olmo", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=11008,
               vocab_size=50304),
    "13B": dict(kind="llama", num_hidden_layers=40, hidden_size=5120, num_attention_heads=40, intermediate_size=13824,
                vocab_size=32000),
    "32B": dict(kind="llama", num_hidden_layers=64, hidden_size=5120, num_attention_heads=40, num_key_value_heads=8,
                intermediate_size=27648, vocab_size=152064),
    "70B": dict(kind="llama", num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8,
                intermediate_size=28672, vocab_size=128256),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--paper", action="store_true", help="only the table for models and clusters not at hand")
    parser.add_argument("--against", type=Path, help="plan the steps that scale.py measured on an H200")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--child", nargs=2, metavar=("plan|run", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.paper:
        paper()
        return
    if arguments.against:
        against(arguments.against, arguments.json)
        return
    gpu = torch.cuda.is_available()
    cases = GPU_CASES if gpu else CPU_CASES
    if arguments.child:
        what, name = arguments.child
        if not gpu:  # one core's own time, on both sides: other programs do not count
            torch.set_num_threads(1)
            time.perf_counter = time.process_time
        print(json.dumps((planned if what == "plan" else measured)(*cases[name])))
        return
    print(
        f"{'':36}{'memory, GiB':>22}{'s per step':>22}{'run, s':>22}{'disk, GB':>22}\n{'':36}"
        + "   planned  measured" * 4
    )
    rows = []
    for name in cases:
        if arguments.only and arguments.only not in name:
            continue
        row = {"case": name, "planned": child("plan", name), "measured": child("run", name)}
        rows.append(row)
        numbers = "".join(
            f"{row['planned'][key]:10.3f}{row['measured'][key]:10.3f}  "
            for key in ("gib", "seconds_per_step", "seconds", "gb")
        )
        print(f"{name:36}{numbers}", flush=True)
    conclude(rows, torch.cuda.get_device_name() if gpu else "cpu", arguments.json)


def conclude(rows: list[dict], machine: str, out: Path | None) -> None:
    """The largest errors, and the file. A row may lack some of the quantities."""
    keys = dict.fromkeys(key for row in rows for key in row["planned"])
    worst = {
        key: max(abs(row["planned"][key] / row["measured"][key] - 1) for row in rows if key in row["planned"])
        for key in keys
    }
    print("largest error: " + ", ".join(f"{key} {value:.0%}" for key, value in worst.items()))
    if out:
        from sparselens.runs.run import provenance, write_json

        write_json(out, {"machine": machine, "rows": rows, "largest_error": worst, "provenance": provenance()})


def against(path: Path, out: Path | None) -> None:
    """Training steps that benchmarks/scale.py timed, and a whole run, beside their plans for an H200.

    scale.py keeps no base beside the model, and most of its 7B rows have bfloat16 weights: there only time compares.
    """
    from sparselens.training.plan import GIB, plan

    measured = json.loads(path.read_text())
    cases = []
    for kind, sizes in (("lora", BIG["7B"]), ("full", SMOLLM), ("compiled", SMOLLM)):
        for row in measured[kind]:
            options = dict(batch=row["batch"], loss="cross-entropy", compile="yes" if kind == "compiled" else "no",
                           steps=1, lora=16 if kind == "lora" else 0,
                           gradient_checkpointing=row.get("gradient_checkpointing", False))  # fmt: skip
            name = f"{'OLMo-7B, LoRA' if kind == 'lora' else 'SmolLM2-135M'} {row['batch']} x {row['tokens']}"
            name += ", checkpointing" * options["gradient_checkpointing"] + ", compiled" * (kind == "compiled")
            gib = row["sparse_peak_gib"] if row.get("weights", "float32") == "float32" else None
            found = {"gib": gib, "seconds_per_step": statistics.median(row["sparse_seconds"])}
            cases.append((name, sizes, row["tokens"], options, ("base", "process"), found))
    run = json.loads((path.parent / "smollm2-135m.json").read_text())["alone"]
    options = dict(batch=run["batch"], steps=run["steps"], checkpoint_every=10**6)
    found = {"gib": run["peak_gib"], "seconds_per_step": run["batch"] * run["length"] / run["tokens_per_second"],
             "seconds": run["minutes"] * 60}  # fmt: skip
    cases.append(("SmolLM2-135M, the whole run", SMOLLM, run["length"], options, ("process",), found))
    rows = []
    print(f"{'planned / measured':44}{'memory, GiB':>18}{'s per step':>18}{'run, s':>14}")
    for name, sizes, length, options, left_out, found in cases:
        with tempfile.TemporaryDirectory() as folder:
            configuration(sizes).save_pretrained(folder)
            planned = plan(folder, gpus=1, gpu_memory=139.8, length=length, **options)
        memory = sum(size for part, size in planned.memory.items() if part not in left_out) / GIB
        guess = {"gib": memory, "seconds_per_step": planned.compute, "seconds": planned.seconds}
        guess = {key: guess[key] for key, value in found.items() if value is not None}
        rows.append({"case": name, "planned": guess, "measured": {key: found[key] for key in guess}})
        cells = [
            f"{guess[k]:.3g} / {found[k]:.3g}" if k in guess else "" for k in ("gib", "seconds_per_step", "seconds")
        ]
        print(f"{name:44}{cells[0]:>18}{cells[1]:>18}{cells[2]:>14}", flush=True)
    conclude(rows, measured["machine"], out)


def paper(length: int = 4096, batch: int = 256, steps: int = 1200, gib: float = 139.0) -> None:
    """Models and clusters nobody measured, from the plan's own arithmetic: the largest micro-batch that fits."""
    from sparselens.training.plan import GIB, plan

    print("| model | trained | GPUs | sequences at once | GiB per GPU | tokens/s | hours | communication / computing |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sizes in BIG.items():
        for what, lora, sharded in (("LoRA, DDP", 16, False), ("LoRA, FSDP2", 16, True), ("all, FSDP2", 0, True)):
            for gpus in (8, 64, 256):
                for micro in (8, 4, 2, 1):
                    if batch % (gpus * micro):
                        continue
                    with tempfile.TemporaryDirectory() as folder:
                        configuration(sizes).save_pretrained(folder)
                        found = plan(
                            folder, gpus=gpus, gpu_memory=gib, sharded=sharded, lora=lora, length=length, batch=batch,
                            micro_batch=micro, steps=steps, gradient_checkpointing=True,
                        )  # fmt: skip
                    if found.total_memory <= gib * GIB:
                        break
                memory = f"{found.total_memory / GIB:.0f}"
                if found.total_memory > gib * GIB:
                    print(f"| {name} | {what} | {gpus} | 1 | {memory}: does not fit | | | |", flush=True)
                    if sharded:
                        continue
                    break  # copies do not shrink with more GPUs
                rate = batch * length / max(found.compute, found.communication)
                print(f"| {name} | {what} | {gpus} | {micro} | {memory} | {rate:,.0f} | {found.seconds / 3600:.1f} "
                      f"| {found.communication / found.compute:.2f} |", flush=True)  # fmt: skip


def child(what: str, name: str) -> dict:
    out = subprocess.run([sys.executable, __file__, "--child", what, name], capture_output=True, text=True)
    if out.returncode:
        raise RuntimeError(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def configuration(sizes: dict):
    from transformers import AutoConfig

    sizes = dict(sizes)
    kind = sizes.pop("kind")
    limits = {} if kind == "gpt2" else {"max_position_embeddings": 4096}
    return AutoConfig.for_model(kind, **sizes, **limits, bos_token_id=0, eos_token_id=0, pad_token_id=None)


def options(length: int, overrides: dict):
    """(Sparsify, Text) of a short run that evaluates and writes checkpoints, as long ones do."""
    from sparselens.config import Sparsify, Text
    from sparselens.training.sparsify import overridden

    heldout = 32 * length
    return overridden(
        Sparsify(), Text(length=length, heldout_tokens=heldout),
        dict(steps=STEPS, evaluate_every=4, evaluate_sequences=8, checkpoint_every=3) | overrides,
    )  # fmt: skip


def planned(sizes: dict, length: int, overrides: dict) -> dict:
    from sparselens.training.plan import plan

    settings, text = options(length, overrides)
    with tempfile.TemporaryDirectory() as folder:
        configuration(sizes).save_pretrained(folder)
        found = plan(folder, settings=settings, text=text)
    del found.disk["tokenised text"]
    if torch.cuda.is_available():
        del found.memory["process"]
    assert not found.problem(), found.problem()
    per_step = max(found.compute, found.communication)
    return {"gib": found.total_memory / 2**30, "seconds_per_step": per_step, "seconds": found.seconds,
            "gb": found.total_disk / 1e9}  # fmt: skip


class RandomText:
    """Numbered sequences of random tokens."""

    def __init__(self, vocabulary: int, length: int, n_heldout: int):
        self.vocabulary, self.length, self.n_heldout = vocabulary, length, n_heldout

    def train(self, start: int, count: int) -> dict:
        ids = torch.randint(0, self.vocabulary, (count, self.length), generator=torch.Generator().manual_seed(start))
        return {"input_ids": ids, "labels": ids}

    heldout = train

    def describe(self) -> dict:
        return {"sources": ["random"]}


def measured(sizes: dict, length: int, overrides: dict) -> dict:
    from transformers import AutoModelForCausalLM

    from sparselens.runs.run import Metrics, Run
    from sparselens.training import sparsify as sparsification

    settings, text = options(length, overrides)
    torch.randn(64, 64) @ torch.randn(64, 64)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configuration(sizes))
        model.config._name_or_path = "random"
        run = Run.create(Path(folder) / "run", "sparsify", {"model": "random"})
        batches = RandomText(model.config.vocab_size, length, text.heldout_tokens // length)
        most = Watch(run.path)
        began = time.perf_counter()
        with most:
            sparsification.sparsify_into(
                run, model, None, batches, settings, show_progress=False, say=lambda words: None
            )  # fmt: skip
        seconds = time.perf_counter() - began
        # A step that evaluates has that in its time.
        lines = [line for line in Metrics.read(run.path)[2:] if "heldout_loss" not in line]
        run.unlock()
    tokens = settings.training.batch * length
    per_step = statistics.median(tokens / line["tokens_per_second"] for line in lines)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else most_resident()
    return {"gib": memory / 2**30, "seconds_per_step": per_step, "seconds": seconds, "gb": most.bytes / 1e9}


class Watch(threading.Thread):
    """The most bytes that a folder held while this ran."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.bytes, self.over = folder, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            total = 0
            for path in self.folder.rglob("*"):
                try:
                    total += path.stat().st_size if path.is_file() else 0
                except OSError:  # gone in the meantime
                    continue
            self.bytes = max(self.bytes, total)

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.join()


def most_resident() -> int:
    """Bytes of this process in memory, at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
