"""Whole heads: which of them a task needs, and which tokens a sparse model's heads connect.

A set of heads is tested on the unmodified model: heads outside it write what they write on the corrupted prompt;
embeddings and MLPs are always kept. m(nothing) is then the clean prompt with every head corrupted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..gating import allowed_pairs
from ..models.architectures import base_model, dimensions, parts
from ..models.hooks import capture, patch
from ..runs import distributed
from ..tasks.prompts import Prompts, of_common_length


class HeadPatcher:
    """Runs the model with some heads kept and the others corrupted."""

    def __init__(self, model: nn.Module, prompts: Prompts, at_once: int = 32):
        self.model, self.at_once = model, at_once
        self.dims = dimensions(base_model(model).config)
        self.prompts = prompts.to(next(model.parameters()).device)

    @torch.no_grad()
    def run(self, sets: list[list[tuple[int, int]]], progress: Callable[[int], None] = lambda n: None) -> Tensor:
        """The metric of every set of kept heads on every prompt, [sets, n] fp64. Several processes share the sets."""
        layers = [f"a{layer}" for layer in range(self.dims.n_layers)]
        out = torch.zeros(len(sets), len(self.prompts), dtype=torch.float64)
        for first in range(0, len(self.prompts), self.at_once):
            part = self.prompts.take(slice(first, first + self.at_once))
            with capture(self.model, layers) as corrupted:
                part.ask(self.model, part.corrupted)
            for i, kept in distributed.mine(list(enumerate(sets))):
                mask = torch.zeros(self.dims.n_layers, self.dims.n_heads, 1, dtype=torch.bool, device=part.clean.device)
                for layer, head in kept:
                    mask[layer, head] = True
                changed = [(site, own) for site, own in zip(layers, mask, strict=True) if not own.all()]
                values = {site: partial(corrupted[site].where, ~own) for site, own in changed}
                with patch(self.model, values):
                    logits = part.ask(self.model, part.clean)
                out[i, first : first + len(part)] = part.score(logits.double()).cpu()
                if first + len(part) == len(self.prompts):
                    progress(distributed.world())
        return distributed.total(out)


@torch.no_grad()
def open_edges(model: nn.Module, prompts: Prompts, at_once: int = 16, most: int = 2000) -> dict[str, Any]:
    """Which (layer, head, query, key) a sparse model's gates leave open on these prompts, for the most common length.

    Every other pair is closed on all of them: nothing flows there, whatever the weights. Positions count from 0.
    """
    (chosen,) = of_common_length(prompts.to(next(model.parameters()).device))
    length = chosen.clean.shape[1]
    dims = dimensions(base_model(model).config)
    share = torch.zeros(dims.n_layers, dims.n_heads, length, length, dtype=torch.float64)
    weight = torch.zeros_like(share)
    for first in range(0, len(chosen), at_once):
        ids = chosen.clean[first : first + at_once]
        output = model(input_ids=ids, use_cache=False, output_attentions=True, gate_output="pattern", logits_to_keep=1)
        pattern = torch.stack(output.attentions).double().cpu()  # [layers, batch, heads, queries, keys]
        share += (pattern > 0).double().sum(1)
        weight += pattern.sum(1)
    n = len(chosen)
    windows = [parts(model, layer).window for layer in range(dims.n_layers)]
    n_possible = dims.n_heads * sum(int(allowed_pairs(length, length, window=window).sum()) for window in windows)
    opened = share.nonzero()
    order = weight[tuple(opened.T)].argsort(descending=True)[:most]
    listed = map(tuple, opened[order].tolist())
    return {
        "n_prompts": n, "length": length, "example": chosen.pairs[0].clean, "n_possible": n_possible,
        "n_open": len(opened), "n_proven_absent": n_possible - len(opened), "open_per_prompt": float(share.sum() / n),
        "columns": ["layer", "head", "query", "key", "share_of_prompts", "mean_weight"],
        "open": [[*at, round(float(share[at] / n), 4), round(float(weight[at] / n), 5)] for at in listed],
    }  # fmt: skip
