"""Edge scores by EAP-IG, in its own environment: spec model, prompts, method, steps, batch, scores."""

from typing import Any

import eap.attribute
import torch
from eap.graph import Graph
from hooked import load
from measuring import serve, spec, versions
from safetensors.torch import load_file, save_file

asked = spec()
prompts = load_file(asked["prompts"])


def metric(logits: torch.Tensor, clean_logits: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> Any:
    """Its scores are (corrupted - clean) x gradient: with minus the metric, what removing an edge takes away."""
    last = logits[torch.arange(len(logits)), lengths - 1]
    return -(last.gather(1, labels[:, :1]) - last.gather(1, labels[:, 1:])).sum()


def as_they_are(model: Any, tokens: torch.Tensor, max_length: int | None = None) -> tuple:
    """In place of its tokenising: the very tokens that all tools get."""
    return tokens, torch.ones_like(tokens), torch.full((len(tokens),), tokens.shape[1]), tokens.shape[1]


def load_all() -> Any:
    model = load(asked["model"], use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True)
    return model, Graph.from_model(model)


def work(loaded: Any) -> Any:
    model, graph = loaded
    labels = torch.stack([prompts["right"], prompts["wrong"]], 1)
    batches = list(
        zip(*(p.split(asked["batch"]) for p in (prompts["clean"], prompts["corrupted"], labels)), strict=True)
    )
    steps = {"ig_steps": asked["steps"]} if asked["steps"] else {}
    method = "EAP-IG-inputs" if asked["steps"] else "EAP"
    eap.attribute.attribute(model, graph, batches, metric, method=method, quiet=True, **steps)
    return graph


def tell(loaded: Any, graph: Any) -> dict[str, Any]:
    scores = torch.where(graph.real_edge_mask, graph.scores, 0).T.double().contiguous()
    save_file({"scores": scores}, asked["scores"])
    return {"edges": int(graph.real_edge_mask.sum()), "versions": versions("torch", "transformers", "transformer-lens")}


eap.attribute.tokenize_plus = as_they_are
serve(asked, load_all, work, tell)
