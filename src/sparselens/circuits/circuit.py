"""Circuit: scored edges of the component graph, which of them are in, and MIB's JSON. No torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from ..models.component_graph import Components
from ..runs import pictures
from ..runs.run import read_json, reading, write_bytes
from .faithfulness import Curve
from .rows import Overlap, Results


class MibSizes(TypedDict):
    n_layers: int
    n_heads: int
    parallel_attn_mlp: bool
    d_model: int | None


class MibNode(TypedDict):
    in_graph: bool


class MibEdge(MibNode):
    score: float


class MibGraph(TypedDict):
    """circuit.json: MIB's (and EAP-IG's) graph."""

    cfg: MibSizes
    nodes: dict[str, MibNode]
    edges: dict[str, MibEdge]


@dataclass
class Circuit:
    """Scored edges, which of them are in, and everything measured on the way."""

    components: Components
    scores: np.ndarray  # [readers, writers] fp64; positive: the edge raises the metric; 0 where there is no edge
    mask: np.ndarray  # [readers, writers] bool: the edges in the circuit, dead ends removed
    d_model: int | None = None
    results: Results = field(default_factory=dict)  # type: ignore[assignment]  # what `discover` measured
    curves: dict[str, Curve] = field(default_factory=dict)  # by reading, where they were measured

    def __repr__(self) -> str:
        found = self.results
        asked = f"{found['task']} in {found['model']}: " if found else ""
        parts = [f"{self.n_edges:,} of {self.components.n_edges:,} edges between components"] if self.n_edges else []
        for name, row in found.get("readings", {}).items() if found else ():
            if "0.9" in row["edges_at"] and name != "components":
                parts.append(f"{name} {row['edges_at']['0.9']:,.0f} of {row['n_edges']:,}")
        return f"Circuit({asked}{', '.join(parts) or 'empty'}{'; 90 % of the effect' if parts and found else ''})"

    def _repr_html_(self) -> str:
        """For notebooks: explained effect over edges kept, and the edges of every head, where there is a graph."""
        curves = [(name, curve.edges.tolist(), curve.effects().tolist()) for name, curve in self.curves.items()]
        drawn = [pictures.lines(curves, "edges kept", "explained effect", log=True)]
        if self.n_edges:
            touched = dict(zip(self.components.writers, self.mask.sum(0).tolist(), strict=True))
            heads = [
                [touched.get(f"a{layer}.h{head}", 0) for head in range(self.components.n_heads)]
                for layer in range(self.components.n_layers)
            ]
            drawn.append(pictures.heat(heads, "head", "layer"))
        return pictures.page(repr(self), *drawn)

    @property
    def n_edges(self) -> int:
        """Edges in the circuit."""
        return int(self.mask.sum())

    @property
    def edges(self) -> list[tuple[str, float]]:
        """(name, score) of the edges in the circuit, largest first."""
        rows, columns = np.nonzero(self.mask)
        order = np.argsort(-np.abs(self.scores[rows, columns]), kind="stable")
        places = zip(rows[order], columns[order], strict=True)
        return [(self._name(reader, writer), float(self.scores[reader, writer])) for reader, writer in places]

    def _name(self, reader: int, writer: int) -> str:
        return f"{self.components.writers[writer]}->{self.components.readers[reader]}"

    @property
    def nodes(self) -> list[str]:
        """Heads and MLPs in the circuit."""
        return [self.components.writers[writer] for writer in np.flatnonzero(self.mask.any(0))][1:]

    def at(self, n: int, selection: str = "top", absolute: bool = True) -> "Circuit":
        """The circuit of the n best edges, dead ends removed."""
        mask = self.components.prune(self.components.mask(self.order(selection, absolute)[:n]))
        return Circuit(self.components, self.scores, mask, self.d_model)

    def order(self, selection: str = "top", absolute: bool = True) -> np.ndarray:
        """Flat indices of all edges in the order in which `selection` takes them."""
        if selection not in ("top", "greedy", "heads"):
            raise ValueError(f"selection={selection!r}: expected 'top', 'greedy' or 'heads'")
        return np.asarray(getattr(self.components, selection)(self.scores, absolute))

    def to_mib(self) -> MibGraph:
        """MIB's (and EAP-IG's) graph JSON."""
        c = self.components
        sizes: MibSizes = {
            "n_layers": c.n_layers,
            "n_heads": c.n_heads,
            "parallel_attn_mlp": c.parallel,
            "d_model": self.d_model,
        }
        nodes: dict[str, MibNode] = {
            name: {"in_graph": bool(self.mask[:, i].any())} for i, name in enumerate(c.writers)
        }
        edges: dict[str, MibEdge] = {
            self._name(r, w): {"score": float(self.scores[r, w]), "in_graph": bool(self.mask[r, w])}
            for r, w in zip(*np.nonzero(c.possible), strict=True)
        }
        return {"cfg": sizes, "nodes": nodes | {"logits": {"in_graph": True}}, "edges": edges}

    @classmethod
    def from_mib(cls, value: dict[str, Any]) -> "Circuit":
        """Read MIB's graph JSON; edges it does not mention score 0 and are out."""
        try:
            cfg, edges = value["cfg"], value["edges"]
            c = Components(int(cfg["n_layers"]), int(cfg["n_heads"]), bool(cfg["parallel_attn_mlp"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a circuit in MIB's format: {error} is missing") from error
        scores, mask = np.zeros((c.n_readers, c.n_writers)), np.zeros((c.n_readers, c.n_writers), bool)
        for name, edge in edges.items():
            at = c.edge(name)
            scores[at] = edge.get("score") or 0.0
            mask[at] = bool(edge.get("in_graph", False))
        return cls(c, scores, mask, cfg.get("d_model"))

    def save(self, path: str | Path) -> None:
        write_bytes(Path(path), json.dumps(self.to_mib()).encode())

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        with reading(path):
            return cls.from_mib(read_json(Path(path)))


def overlap(a: np.ndarray, b: np.ndarray) -> Overlap:
    """Shared edges of two circuits of the same graph, given as masks: number, over the union, over the smaller."""
    shared, union, smaller = int((a & b).sum()), int((a | b).sum()), min(int(a.sum()), int(b.sum()))
    return {"shared": shared, "jaccard": shared / max(union, 1), "of_smaller": shared / max(smaller, 1)}
