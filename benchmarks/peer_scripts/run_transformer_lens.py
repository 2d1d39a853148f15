"""Edge scores by TransformerLens' own attribution patching (4.x): spec model, prompts, scores.

It takes the gradient on the run it calls corrupt. Called with both runs exchanged it gives EAP's scores, negated; its
edges are one per position, and are summed here.
"""

from functools import partial
from typing import Any

import torch
from measuring import serve, spec, versions
from safetensors.torch import load_file, save_file
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

asked = spec()
prompts = load_file(asked["prompts"])


def load() -> Any:
    return TransformerBridge.boot_transformers(asked["model"], device="cpu", dtype=torch.float32).eval()


def difference(right: int, wrong: int, logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, right] - logits[0, -1, wrong]


def work(model: Any) -> dict:
    total: dict = {}
    for i in range(len(prompts["clean"])):  # one prompt at a time, as it does itself: answers differ between prompts
        metric = partial(difference, int(prompts["right"][i]), int(prompts["wrong"][i]))
        found = attribution_patch(
            model, prompts["corrupted"][i : i + 1], prompts["clean"][i : i + 1],
            metric,
            EdgeAttributionConfig(granularity="edge"),
        )  # fmt: skip
        for edge, score in found.edge_scores.items():
            total[edge] = total.get(edge, 0.0) - score
    return total


def tell(model: Any, total: dict) -> dict[str, Any]:
    n_layers, heads = model.cfg.n_layers, model.cfg.n_heads
    scores = torch.zeros(n_layers * (3 * heads + 1) + 1, 1 + n_layers * (heads + 1), dtype=torch.float64)
    for (writer, reader), score in total.items():
        column = 0
        if writer.kind != "embed":
            column = 1 + writer.layer * (heads + 1) + (heads if writer.head is None else writer.head)
        row = -1
        if reader.kind != "logits":
            own = 3 * heads if reader.kind == "mlp_in" else "qkv".index(reader.kind[0]) * heads + reader.head
            row = reader.layer * (3 * heads + 1) + own
        scores[row, column] += score / len(prompts["clean"])
    save_file({"scores": scores}, asked["scores"])
    return {"edges": len(total), "versions": versions("torch", "transformers", "transformer-lens")}


serve(asked, load, work, tell)
