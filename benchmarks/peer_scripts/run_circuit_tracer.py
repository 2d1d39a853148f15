"""An attribution graph by circuit-tracer, in its own environment: spec model, transcoder, ids, budget, batch, graph."""

from typing import Any

import torch
import yaml
from circuit_tracer.attribution.attribute import attribute
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
from circuit_tracer.transcoder.cross_layer_transcoder import load_clt
from hooked import load
from measuring import serve, spec, versions
from safetensors.torch import save_file

asked = spec()


def load_all() -> Any:
    with open(f"{asked['transcoder']}/config.yaml") as file:
        config = yaml.safe_load(file)
    hooks = {name: config[name] for name in ("feature_input_hook", "feature_output_hook")}
    # lazy_decoder is its default: decoders of the active features are read from disk when they are needed.
    transcoder = load_clt(asked["transcoder"], device=torch.device("cpu"), dtype=torch.float32, **hooks)
    model = load(asked["model"], into=TransformerLensReplacementModel)
    model._configure_replacement_model(transcoder)  # what from_pretrained_and_transcoders does next
    return model


def work(model: Any) -> Any:
    return attribute(asked["ids"], model, max_feature_nodes=asked["budget"], batch_size=asked["batch"])


def tell(model: Any, graph: Any) -> dict[str, Any]:
    if asked["graph"]:
        columns = {
            "features": graph.active_features, "values": graph.activation_values, "selected": graph.selected_features,
            "weights": graph.adjacency_matrix,
            "logits": torch.tensor([target.vocab_idx for target in graph.logit_targets]),
        }  # fmt: skip
        save_file({name: column.contiguous() for name, column in columns.items()}, asked["graph"])
    return {
        "active": len(graph.active_features), "rows": len(graph.selected_features) + len(graph.logit_targets),
        "versions": versions("torch", "transformers", "transformer-lens", "circuit-tracer"),
    }  # fmt: skip


serve(asked, load_all, work, tell)
