"""Circuit: scored edges of the component graph, which of them are in, and MIB's JSON. No torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..models.component_graph import Components
from ..runs.run import read_json, reading, write_bytes
from .faithfulness import Curve
from .rows import Overlap, Results


@dataclass
class Circuit:
    """Scored edges, which of them are in, and everything measured on the way."""

    components: Components
    scores: np.ndarray  # [readers, writers] fp64; positive: the edge raises the metric; 0 where there is no edge
    mask: np.ndarray  # [readers, writers] bool: the edges in the circuit, dead ends removed
    d_model: int | None = None
    results: Results = field(default_factory=dict)  # type: ignore[assignment]  # what `discover` measured
    curves: dict[str, Curve] = field(default_factory=dict)  # by reading, where they were measured

    @property
    def n_edges(self) -> int:
        """Edges in the circuit."""
        return int(self.mask.sum())

    @property
    def edges(self) -> list[tuple[str, float]]:
        """(name, score) of the edges in the circuit, largest first."""
        rows, columns = np.nonzero(self.mask)
        order = np.argsort(-np.abs(self.scores[rows, columns]), kind="stable")
        names = self.components
        return [
            (f"{names.writers[columns[i]]}->{names.readers[rows[i]]}", float(self.scores[rows[i], columns[i]]))
            for i in order
        ]

    @property
    def nodes(self) -> list[str]:
        """Heads and MLPs in the circuit."""
        return [name for name, alive in zip(self.components.writers, self._written(), strict=True) if alive][1:]

    def _written(self) -> np.ndarray:
        """[writers] bool: somebody in the circuit reads it."""
        return np.asarray(self.mask.any(0))

    def at(self, n: int, selection: str = "top", absolute: bool = True) -> "Circuit":
        """The circuit of the n best edges, dead ends removed."""
        mask = self.components.prune(self.components.mask(self.order(selection, absolute)[:n]))
        return Circuit(self.components, self.scores, mask, self.d_model)

    def order(self, selection: str = "top", absolute: bool = True) -> np.ndarray:
        """Flat indices of all edges in the order in which `selection` takes them."""
        if selection not in ("top", "greedy", "heads"):
            raise ValueError(f"selection={selection!r}: expected 'top', 'greedy' or 'heads'")
        order: np.ndarray = getattr(self.components, selection)(self.scores, absolute)
        return order

    def to_mib(self) -> dict[str, Any]:
        """MIB's (and EAP-IG's) graph JSON."""
        c = self.components
        alive = self._written()
        edges = {
            f"{c.writers[w]}->{c.readers[r]}": {"score": float(self.scores[r, w]), "in_graph": bool(self.mask[r, w])}
            for r, w in zip(*np.nonzero(c.possible), strict=True)
        }
        return {
            "cfg": {
                "n_layers": c.n_layers,
                "n_heads": c.n_heads,
                "parallel_attn_mlp": c.parallel,
                "d_model": self.d_model,
            },
            "nodes": {name: {"in_graph": bool(alive[i])} for i, name in enumerate(c.writers)}
            | {"logits": {"in_graph": True}},
            "edges": edges,
        }

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
    """Shared edges of two circuits of the same graph, given as masks."""
    shared = int((a & b).sum())
    return {
        "shared": shared,
        "jaccard": shared / max(int((a | b).sum()), 1),
        "of_smaller": shared / max(min(int(a.sum()), int(b.sum())), 1),
    }
