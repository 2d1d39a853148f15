"""Labels and cards of a traced prompt's features: what trace.json, the page and other viewers call them.

cards.json                       {"layer/feature": card} of the kept features, the most influential first, cut short
features/SCAN/NUMBER.json        the same for circuit-tracer's and Neuronpedia's viewers; NUMBER pairs layer and feature
"""

from collections.abc import Sequence
from pathlib import Path

from ..faces.store import Card, Excerpt, Faces
from ..runs.run import write_json
from .clusters import Cluster
from .graph import FEATURE, Graph
from .neuronpedia import FEATURES, pairing

MOST = 400  # features whose cards are written
TOP, LOWER = 8, 5  # contexts of a card
VOTES = 0.3  # of a cluster's influence that one label must have to name it
BANDS = "Weaker activations"


def check_faces(faces: Faces, n_layers: int, n_features: int) -> None:
    """ValueError for the faces of another transcoder."""
    if (faces.n_layers, faces.n_features) != (n_layers, n_features):
        raise ValueError(
            f"{faces.path} has faces of {faces.n_layers} layers of {faces.n_features} features, the transcoder has "
            f"{n_layers} of {n_features}: make them with `sparselens features` for this transcoder"
        )


def kept_features(graph: Graph) -> list[tuple[int, int]]:
    """(layer, feature) of the features that pruning kept, the most influential first."""
    kept = (graph.node_kept & (graph.kind == FEATURE)).nonzero()[:, 0]
    kept = kept[graph.influence[kept].argsort(descending=True, stable=True)]
    names = zip(graph.layer[kept].tolist(), graph.index[kept].tolist(), strict=True)
    return list(dict.fromkeys(names))


def labels_of(graph: Graph, faces: Faces) -> dict[str, str]:
    """The labels of all active features, kept or not: any may be named in a row."""
    active = (graph.kind == FEATURE).nonzero()[:, 0]
    names = dict.fromkeys(zip(graph.layer[active].tolist(), graph.index[active].tolist(), strict=True))
    return {f"{layer}/{feature}": faces.label(layer, feature) for layer, feature in names}


def cluster_label(graph: Graph, cluster: Cluster, labels: dict[str, str]) -> str | None:
    """What most of a cluster's influence is called; None where its features have too many names."""
    votes: dict[str, float] = {}
    for node in map(graph.node, cluster.nodes):
        if node.kind == "feature" and (label := labels.get(f"{node.layer}/{node.index}")):
            votes[label] = votes.get(label, 0.0) + max(node.influence, 0.0)
    total = sum(votes.values())
    best = max(votes, key=votes.__getitem__, default=None)
    return best if best is not None and total > 0 and votes[best] >= VOTES * total else None


def write_cards(graph: Graph, faces: Faces, folder: Path, scan: str) -> None:
    """cards.json, and a file per feature for other viewers."""
    chosen = kept_features(graph)[:MOST]
    cards = {f"{layer}/{feature}": faces.card(layer, feature) for layer, feature in chosen}
    write_json(folder / "cards.json", {name: _short(card, faces) for name, card in cards.items()})
    for (layer, feature), card in zip(chosen, cards.values(), strict=True):
        write_json(folder / FEATURES / scan / f"{pairing(layer, feature)}.json", viewer_json(card, scan))


def _short(card: Card, faces: Faces) -> dict[str, object]:
    near = [[*one[:2], one[2], faces.label(*one[:2])] for one in card["nearest"]]
    return {**card, "top": card["top"][:TOP], "lower": card["lower"][:LOWER], "nearest": near}


def viewer_json(card: Card, scan: str) -> dict[str, object]:
    """A feature as circuit-tracer's and Neuronpedia's viewers read it."""
    groups = [("Top activations", card["top"]), (BANDS, card["lower"])]
    return {
        "transcoder_id": scan, "index": card["feature"], "layer": card["layer"],
        "label": card.get("own") or card["label"], "act_min": 0.0, "act_max": card["largest"],
        "activation_frequency": card["share"], "histogram": [float(count) for count in card["histogram"]],
        "quantile_values": [card["lowest"] * 2 ** (i / 2) for i in range(len(card["histogram"]) + 1)],
        "top_logits": [word for word, _ in card["promoted"]], "bottom_logits": [word for word, _ in card["suppressed"]],
        "examples_quantiles": [
            {"quantile_name": name, "examples": [_example(one, card["largest"]) for one in some]}
            for name, some in groups if some
        ],
    }  # fmt: skip


def _example(one: Excerpt, largest: float) -> dict[str, object]:
    activations: Sequence[float] = [round(level / 255 * largest, 4) for level in one["activations"]]
    return {"tokens": one["text"], "tokens_acts_list": activations, "train_token_ind": one["at"],
            "is_repeated_datapoint": False}  # fmt: skip
