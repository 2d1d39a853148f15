"""What reading a task will need, before it starts: memory at a time, and minutes.

The unit of time is one run of the model over a prompt; a gradient counts as three. How long a run takes is measured on
the models at hand (`discover`, `compare`), or worked out from the speed of a matrix product (`plan`).
"""

import math
import time
from dataclasses import dataclass

import psutil
import torch

from ..config import Search
from ..models.decoder import Decoder
from ..tasks.prompts import Prompts
from .attention_edges import AttentionEdges, Others, bytes_per_prompt
from .prompt_curves import n_columns
from .rankings import GRADIENT, LEARNT_STEPS, RANKINGS, runs

ALL_OTHERS: tuple[Others, ...] = ("removed", "corrupted", "mean")
SPEED_SHARE = 0.35  # of a large matrix product's speed that runs on short prompts reach
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

    def __str__(self) -> str:
        minutes = "less than a minute" if self.seconds < 60 else f"about {self.seconds / 60:.0f} min"
        return (
            f"{self.task}: {self.n_prompts} prompts of {self.length} tokens, {self.n_edges:,} attention edges each; "
            f"{self.bytes_at_once / GIB:.2f} GiB at a time, {minutes}"
        )


def runs_per_prompt(settings: Search, n_edges: int) -> float:
    """Runs of the model that the readings of attention edges and heads need for one prompt."""
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
    if "learnt" in asked or settings.alternatives:
        share = min(1.0, settings.learnt_prompts / settings.prompts)
        found += (1 + settings.alternatives) * LEARNT_STEPS * GRADIENT * share
    return found


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
        parts = math.ceil(len(prompts) / len(some.prompts))
        seconds += took * parts * runs_per_prompt(settings, edges.n_possible)
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
