"""Which tokens a sparse model's heads connect: what its gates leave open on the prompts of a task."""

import torch
from torch import nn

from ..gating import allowed_pairs
from ..models.architectures import base_model, dimensions, parts
from ..tasks.prompts import Prompts, of_common_length
from .rows import OpenEdges


@torch.no_grad()
def open_edges(model: nn.Module, prompts: Prompts, at_once: int = 16, most: int = 2000) -> OpenEdges:
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
