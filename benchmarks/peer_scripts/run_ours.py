"""The same work by sparselens, measured as the peers are: spec["what"] says which."""

from typing import Any

import torch
from fit import fit
from measuring import serve, spec, versions
from safetensors.torch import load_file, save_file

import sparselens as sl
from sparselens.circuits.scores import eap
from sparselens.models.decoder import Decoder
from sparselens.tasks import Pair
from sparselens.tasks.prompts import Prompts
from sparselens.transcoders.mlp_hooks import observe

asked = spec()
VERSIONS = versions("sparselens", "torch", "transformers")


def of(*names: str) -> dict[str, Any]:
    return {name: asked[name] for name in names}


def discover() -> None:
    """Edge scores: model, prompts, steps, batch, scores."""
    p = load_file(asked["prompts"])
    n, tokens = p["clean"].shape
    prompts = Prompts(
        "logit", p["clean"], p["corrupted"], torch.full((n,), tokens), torch.full((n, 1), tokens - 1),
        p["right"].view(n, 1, 1), p["wrong"].view(n, 1, 1), torch.full((n, 1), -1),
        torch.ones(n, 1, dtype=torch.bool), tuple(Pair("", "", "", "") for _ in range(n)),
    )  # fmt: skip

    def tell(decoder: Decoder, scores: Any) -> dict[str, Any]:
        save_file({"scores": torch.from_numpy(scores).contiguous()}, asked["scores"])
        return {"edges": decoder.components.n_edges, "versions": VERSIONS}

    load = lambda: Decoder(sl.load(asked["model"])[0].eval())  # noqa: E731
    serve(asked, load, lambda decoder: eap(decoder, prompts, asked["steps"], asked["batch"]), tell)


def trace() -> None:
    """An attribution graph: model, transcoder, ids, budget, graph."""

    def work(loaded: Any) -> Any:
        # All edges of a row, as the peer keeps them, where they are compared; by default the 4,096 largest.
        every = {"edges_per_row": 10**9} if asked["graph"] else {}
        return sl.trace(*loaded, asked["ids"], budget=asked["budget"] or 10**9, **every)

    def tell(loaded: Any, graph: sl.Graph) -> dict[str, Any]:
        if asked["graph"]:
            names = ("kind", "layer", "position", "index", "value", "row_target", "first", "source", "weight")
            save_file({name: getattr(graph, name).contiguous() for name in names}, asked["graph"])
        return {"active": int((graph.kind == 0).sum()), "rows": len(graph.row_target), "versions": VERSIONS}

    serve(asked, lambda: (sl.load(asked["model"]), sl.Transcoder.load(asked["transcoder"])), work, tell)


def transcode() -> None:
    """A cross-layer transcoder: model, text, heldout, features, steps, batch, length, lr, sparsity, folder."""

    def work(loaded: Any) -> sl.Transcoder:
        return sl.transcode(
            *loaded, data=asked["text"], out=asked["folder"], show_progress=False, say=lambda text: None,
            evaluate_every=asked["steps"], checkpoint_every=asked["steps"], evaluate_sequences=1,
            **of("features", "steps", "batch", "length", "lr", "sparsity"),
        )  # fmt: skip

    def batches(model: Any, coder: sl.Transcoder) -> Any:
        for some in load_file(asked["heldout"])["tokens"].split(asked["batch"]):
            found = observe(model, {"input_ids": some}, coder.input_hook)
            inputs, outputs = (torch.stack([one[:, 1:].flatten(0, 1) for one in side], 1) for side in found)
            features = [coder.encode(layer, x) for layer, x in enumerate(inputs.unbind(1))]
            yield outputs, torch.stack(coder.decode(features), 1), torch.stack([(f > 0).sum() for f in features])

    serve(
        asked, lambda: sl.load(asked["model"]), work,
        lambda loaded, coder: {**fit(batches(loaded[0], coder)), "versions": VERSIONS},
    )  # fmt: skip


{"discover": discover, "trace": trace, "transcode": transcode}[asked["what"]]()
