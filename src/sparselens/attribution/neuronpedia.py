"""A Graph as the JSON that Neuronpedia's and circuit-tracer's viewers open.

1. Nodes: what pruning kept. Features are `{layer}_{feature}_{position}`, errors `{layer}_error_mlp_{position}` (so that
   no error can be taken for a feature of layer 0), tokens `E_{vocabulary id}_{position}`, positions `P_...`, logits
   `{n_layers + 1}_{vocabulary id}_{position}`. `feature` is the pairing number (l + f)(l + f + 1) / 2 + f.
2. Links: the kept edges, each with `heads`, the smallest set of heads that brings 80 % of it (an extra key, which the
   schema allows), when the model is at hand.
3. Supernodes: clusters with two or more exported nodes.

`influence` is cumulative, as viewers expect of it: a node is shown when the threshold reaches it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .. import __version__
from ..runs.run import write_json
from .clusters import Cluster
from .graph import Graph, Node, node_name
from .head_shares import carry_heads
from .rows import HeadShare

FEATURES = "features"  # folder of the features' own files
FEATURE_TYPES = {
    "feature": "cross layer transcoder", "error": "mlp reconstruction error", "token": "embedding",
    "position": "embedding", "logit": "logit",
}  # fmt: skip


def pairing(layer: int, feature: int) -> int:
    """One number for (layer, feature), different for every pair (Cantor)."""
    return (layer + feature) * (layer + feature + 1) // 2 + feature


def graph_json(
    graph: Graph,
    clusters: Sequence[Cluster] = (),
    *,
    slug: str = "graph",
    scan: str = "model",
    heads: bool = True,
    labels: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """A graph by Neuronpedia's schema. slug: its name; scan: the model's. heads: name the carriers of every link.

    labels: of features, by "layer/feature".
    """
    kept = graph.node_kept.nonzero().flatten().tolist()
    names = {i: node_name(graph, i) for i in kept}
    cumulative = _cumulative(graph)
    edges = list(zip(*(column.tolist() for column in graph.edges()), strict=True))
    links = [{"source": names[s], "target": names[t], "weight": w} for s, t, w in edges]
    if heads and graph.live is not None:
        direct, shares = carry_heads(graph, [(s, t) for s, t, _ in edges])
        for link, along, by_head in zip(links, direct.tolist(), _needed(shares), strict=True):
            link |= {"direct": along, "heads": by_head}
    supernodes = [[c.name, *(names[n] for n in c.nodes if n in names)] for c in clusters]
    supernodes = [group for group in supernodes if len(group) > 2]
    return {
        "metadata": metadata(graph, slug, scan),
        "qParams": {
            "pinnedIds": [name for group in supernodes for name in group[1:]] + [names[i] for i in kept[-1:]],
            "supernodes": supernodes, "linkType": "both", "clickedId": names[kept[-1]], "sg_pos": "",
        },
        "nodes": [_node(graph, graph.node(i), names[i], cumulative[i], labels or {}) for i in kept],
        "links": links,
    }  # fmt: skip


def _needed(shares: torch.Tensor, share: float = 0.8) -> list[list[HeadShare]]:
    """`Carried.heads_for` of many edges at once, from shares [n, n_layers, n_heads]."""
    n_heads = shares.shape[-1]
    flat = shares.flatten(1).double()
    order = flat.abs().argsort(dim=1, descending=True, stable=True)
    ranked = flat.gather(1, order)
    total = ranked.sum(1, keepdim=True)
    before = (ranked.cumsum(1) / total < share - 1e-9).long().cumprod(1).sum(1)  # heads before the one that suffices
    enough = torch.where(total[:, 0] == 0, 0, before + 1).tolist()
    return [
        [{"layer": i // n_heads, "head": i % n_heads, "share": w} for i, w in zip(places[:n], weights[:n], strict=True)]
        for places, weights, n in zip(order.tolist(), ranked.tolist(), enough, strict=True)
    ]


def metadata(graph: Graph, slug: str, scan: str) -> dict[str, object]:
    """The part of a graph that a list of graphs shows."""
    nodes, edges = graph.settings.get("nodes", 0.8), graph.settings.get("edges", 0.98)
    return {
        "slug": slug, "scan": scan, "transcoder_list": [scan], "prompt_tokens": graph.tokens, "prompt": graph.prompt,
        "node_threshold": nodes, "schema_version": 1,
        "info": {"generator": {"name": "sparselens", "version": __version__}},
        "generation_settings": {k: v for k, v in graph.settings.items() if isinstance(v, str | int | float | bool)},
        "pruning_settings": {"node_threshold": nodes, "edge_threshold": edges},
    }  # fmt: skip


def _node(graph: Graph, node: Node, name: str, cumulative: float, labels: Mapping[str, str]) -> dict[str, object]:
    layer = {"token": "E", "position": "E", "logit": str(graph.n_layers + 1)}.get(node.kind, str(node.layer))
    numbers = {"feature": pairing(node.layer, node.index), "error": -1, "logit": node.index}
    feature = numbers.get(node.kind, node.position)
    token = graph.tokens[node.position]
    said = {"token": f'Emb: "{token}"', "position": f"Position {node.position}", "error": f'Err: mlp "{token}"',
            "feature": labels.get(f"{node.layer}/{node.index}", "")}  # fmt: skip
    row: dict[str, object] = {
        "node_id": name, "feature": feature, "layer": layer, "ctx_idx": node.position,
        "feature_type": FEATURE_TYPES[node.kind], "jsNodeId": "-".join(name.rsplit("_", 1)),
        "clerp": said.get(node.kind, ""),
        "influence": None if node.kind == "logit" else cumulative,
        "activation": node.value if node.kind == "feature" else None,
    }  # fmt: skip
    if node.kind == "logit":
        number = node.id - (graph.n_nodes - len(graph.targets))
        target = graph.targets[number]
        probability = target["probability"]
        # Viewers read the number behind "(p=" and stop without one; a difference or a direction has none to tell.
        said_label = target["label"].replace("(p=", "(p =")
        row["clerp"] = f'Output "{said_label}"' + (" (no probability)" if probability is None else "")
        row["clerp"] = f"{row['clerp']} (p={0 if probability is None else probability:.3f})"
        row |= {"token_prob": 0.0 if probability is None else probability, "is_target_logit": number == 0}
    return row


def _cumulative(graph: Graph) -> list[float]:
    """Per node, the share of all influence held by it and the more influential ones."""
    influence = graph.influence.double()
    order = influence.argsort(descending=True, stable=True)
    held = torch.empty_like(influence)
    held[order] = influence[order].cumsum(0) / influence.sum().clamp(min=1e-30)
    return held.tolist()


def write_graph(
    graph: Graph,
    clusters: Sequence[Cluster],
    folder: str | Path,
    *,
    slug: str,
    scan: str,
    heads: bool = True,
    labels: Mapping[str, str] | None = None,
) -> Path:
    """Write graph-neuronpedia.json; SLUG.json and graph-metadata.json for circuit-tracer's server; returns the first.

    Both files hold the same graph. In circuit-tracer's, a scan that begins with "./" says where its viewer finds the
    features (captions.py writes them): below the folder it serves as /data.
    """
    path, slug = Path(folder) / "graph-neuronpedia.json", slug_of(slug)
    found = graph_json(graph, clusters, slug=slug, scan=scan, heads=heads, labels=labels)
    write_json(path, found)
    told = metadata(graph, slug, scan if labels is None else f"./data/{FEATURES}/{scan}")
    write_json(path.with_name(f"{slug}.json"), found | {"metadata": told})
    write_json(path.with_name("graph-metadata.json"), {"graphs": [told]})
    return path


def slug_of(text: str) -> str:
    """A name that is safe in addresses and file names, and none of the other files' that a trace leaves."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "graph"
    return (
        f"{name}-1" if name in ("trace", "clusters", "cards", "graph", "graph-metadata", "graph-neuronpedia") else name
    )
