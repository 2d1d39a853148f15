"""What reading tasks will need, before it starts: memory, and minutes. `plan` asks it without the weights.

The unit of time is one run of the model over a prompt; a gradient counts as three. How long a run takes is measured on
the models at hand (`discover`, `compare`), or worked out from the speed of a matrix product (`plan`).
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from .. import tasks
from ..config import Search
from ..models.access import SAFE, access, refusing
from ..models.architectures import dimensions, mlp_width
from ..models.decoder import Decoder
from ..models.loading import Source, resolve
from ..runs.run import Run
from ..tasks.prompts import Prompts, build, of_common_length
from ..training.plan import available_memory, matmul_flops, read_config
from .attention_edges import AttentionEdges, Others, bytes_per_prompt, prompt_bytes
from .prompt_curves import n_columns
from .rankings import GRADIENT, LEARNT_STEPS, RANKINGS, runs

ALL_OTHERS: tuple[Others, ...] = ("removed", "corrupted", "mean")
CPU_SHARE = 0.3  # of a large matrix product's speed that runs on short prompts reach
GPU_FLOPS, GPU_LAUNCHES, GPU_LAUNCH = 25e12, 60, 8e-6  # an H200 in fp32; operations per layer, seconds each
GIB = 2**30


@dataclass(frozen=True)
class Need:
    """Reading one task in some models."""

    task: str
    n_prompts: int
    length: int
    n_edges: int
    bytes_at_once: float
    seconds: float
    weights: float = 0.0  # bytes of the models, where they are not loaded yet
    available: float = math.inf

    def __str__(self) -> str:
        minutes = "less than a minute" if self.seconds < 60 else f"about {self.seconds / 60:.0f} min"
        memory = f"{self.bytes_at_once / GIB:.2f} GiB at a time"
        if self.weights:
            memory = f"{self.weights / GIB:.1f} GiB of weights and {memory}"
        return (
            f"{self.task}: {self.n_prompts} prompts of {self.length} tokens, {self.n_edges:,} attention edges each; "
            f"{memory}, {minutes}"
        )

    def problem(self) -> str | None:
        """Why it cannot be done here."""
        need = self.weights + self.bytes_at_once
        if need <= self.available:
            return None
        return (
            f"{self.task} needs {need / GIB:.1f} GiB and there are {self.available / GIB:.1f}; take shorter prompts, a "
            "smaller model, less --memory-mb, or --readings components"
        )


def plan_task(model: Source, task: str, settings: Search, n_models: int = 3, gpus: int | None = None) -> Need:
    """What `compare` (three models) or `discover` (one) will need for the readings of attention edges and heads.

    Only the model's configuration and tokenizer are read.
    """
    from transformers import AutoTokenizer

    found, config = tasks.find(task), read_config(model)
    if isinstance(model, Run) or (isinstance(model, str | Path) and (Path(model) / "run.json").is_file()):
        model = Run(model).started_from
    if isinstance(model, str | Path):
        path = Path(model)
        gguf = path.suffix == ".gguf"
        with refusing(f"no tokenizer found at {str(model)!r} (", ")"):
            options = SAFE | {"gguf_file": path.name} if gguf else access(str(model)).options
            tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent if gguf else model), **options)
    else:
        tokenizer = resolve(model)[1]
    d, n = dimensions(config), settings.prompts
    (prompts,) = of_common_length(build(found, tokenizer, 8 * n, settings.seed, d.max_tokens, lambda text: None))
    (_, tokens), reads = prompts.clean.shape, prompts.position.shape[1]
    n_edges, n = d.n_layers * d.n_heads * tokens * (tokens + 1) // 2, min(n, len(prompts))
    one = prompt_bytes(d, config.vocab_size, tokens, reads)
    at_once = max(1, min(n, int(settings.memory_mb * 2**20 / one)))
    heads, head = d.n_layers * d.d_model, config.vocab_size * d.d_model
    block = 2 * heads * (d.n_heads + d.n_kv_heads) * d.d_head + 3 * heads * mlp_width(config)
    flops = 2 * block * tokens + 2 * head * reads + 4 * d.n_layers * d.n_heads * d.d_head * tokens**2
    gpus = torch.cuda.device_count() if gpus is None else gpus
    if gpus:
        each = max(flops * at_once / GPU_FLOPS, d.n_layers * GPU_LAUNCHES * GPU_LAUNCH) / at_once
    else:
        each = flops / (CPU_SHARE * matmul_flops())
    seconds = n_models * at_once * total_runs(settings, n_edges, n, at_once) * each
    weights = n_models * 4.0 * (block + head)
    return Need(found.name, n, tokens, n_edges, at_once * one, seconds, weights, available_memory(gpus, None))


def runs_per_prompt(settings: Search, n_edges: int) -> float:
    """Runs of the model that the readings of attention edges and heads need for one prompt, learnt masks aside."""
    asked, found = set(settings.readings) - {"components"}, 0.0
    if asked:
        found += 6  # the model's own answer, self-checks, the edges that lead to it
    for others in ALL_OTHERS:
        if others in asked:
            scored = sum(runs(ranking, n_edges) for ranking in RANKINGS[others])
            if settings.scope != "task":
                found += 2 * n_columns(settings.points) + scored + (13 if settings.random_control else 0)
            if settings.scope != "prompt":
                found += 0.5 * (2 * (settings.points + 12) + scored)
    if "share" in asked:
        found += runs("integrated", n_edges) + 2
    if "heads" in asked:
        found += 4 * (n_columns(settings.points) + GRADIENT)
    return found


def learnt_runs(settings: Search) -> int:
    """Runs that learnt masks need, for each of the prompts they are learnt on."""
    learnt = "learnt" in settings.readings or settings.alternatives > 0
    return learnt * (1 + settings.alternatives) * LEARNT_STEPS * GRADIENT


def total_runs(settings: Search, n_edges: int, n_prompts: int, at_once: int) -> float:
    """Runs of so many prompts at once, until everything is read."""
    few = min(n_prompts, settings.learnt_prompts)
    parts, of_few = (math.ceil(n / at_once) for n in (n_prompts, few))
    return parts * runs_per_prompt(settings, n_edges) + of_few * learnt_runs(settings)


@torch.no_grad()
def measured(name: str, decoders: list[Decoder], prompts: Prompts, settings: Search) -> Need:
    """From one timed run of every model on as many prompts as fit into memory."""
    seconds = 0.0
    for decoder in decoders:
        edges = AttentionEdges(decoder, prompts, "removed", settings.memory_mb)
        some = edges.some(edges.prompts.take(slice(0, edges.at_once)))
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            edges.metric(edges.all(some), some).sum().item()  # .item() waits for a GPU
            took = time.perf_counter() - began
        seconds += took * total_runs(settings, edges.n_possible, len(prompts), len(some.prompts))
    at_once = min(edges.at_once, len(prompts)) * bytes_per_prompt(decoders[0], prompts)
    return Need(name, len(prompts), edges.shape[-1], edges.n_possible, at_once, seconds)


def check_memory(decoder: Decoder, prompts: Prompts, name: str) -> None:
    """Refuse prompts of which not even one fits."""
    device = next(decoder.model.parameters()).device
    one = bytes_per_prompt(decoder, prompts)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if one > free:
        raise ValueError(
            f"{name}: the attention edges of one prompt of {prompts.clean.shape[1]} tokens need {one / GIB:.1f} GiB, "
            f"and {free / GIB:.1f} GiB are free; take shorter prompts, a smaller model, or --readings components"
        )
