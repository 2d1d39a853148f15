"""The component graph of a decoder: who writes, who reads, who comes before whom; choosing and pruning edges. No torch.

Writers put something into the residual stream: the input, every head, every MLP. Readers take it out: every head's q, k
and v, every MLP, the logits. An edge is one writer's share of what one reader sees. Names are MIB's: `input->a0.h1<q>`,
`a3.h0->m3`, `m11->logits`.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

QKV = "qkv"


@dataclass(frozen=True)
class Components:
    """The component graph of a decoder: who writes, who reads, who can come before whom."""

    n_layers: int
    n_heads: int
    parallel: bool = False  # attention and MLP of a block read the same residual stream

    @property
    def n_writers(self) -> int:
        return 1 + self.n_layers * (self.n_heads + 1)

    @property
    def n_readers(self) -> int:
        return self.n_layers * (3 * self.n_heads + 1) + 1

    @property
    def n_edges(self) -> int:
        return int(self.possible.sum())

    def head_writer(self, layer: int, head: int = 0) -> int:
        return 1 + layer * (self.n_heads + 1) + head

    def mlp_writer(self, layer: int) -> int:
        return 1 + layer * (self.n_heads + 1) + self.n_heads

    def head_reader(self, layer: int, through: str, head: int = 0) -> int:
        return layer * (3 * self.n_heads + 1) + QKV.index(through) * self.n_heads + head

    def mlp_reader(self, layer: int) -> int:
        return layer * (3 * self.n_heads + 1) + 3 * self.n_heads

    @property
    def output(self) -> int:
        return self.n_readers - 1

    @cached_property
    def possible(self) -> np.ndarray:
        """[readers, writers] bool: the writer comes before the reader."""
        possible = np.zeros((self.n_readers, self.n_writers), bool)
        for layer in range(self.n_layers):
            before = self.head_writer(layer)
            possible[self.head_reader(layer, "q") : self.mlp_reader(layer), :before] = True
            possible[self.mlp_reader(layer), : before if self.parallel else self.mlp_writer(layer)] = True
        possible[self.output] = True
        return possible

    @cached_property
    def node_of_reader(self) -> np.ndarray:
        """[readers]: the writer that is the same node (a head's q, k and v all belong to it); -1 for the logits."""
        node = np.full(self.n_readers, -1)
        for layer in range(self.n_layers):
            heads = self.head_writer(layer) + np.arange(self.n_heads)
            node[self.head_reader(layer, "q") : self.mlp_reader(layer)] = np.tile(heads, 3)
            node[self.mlp_reader(layer)] = self.mlp_writer(layer)
        return node

    @cached_property
    def writers(self) -> list[str]:
        names = ["input"]
        for layer in range(self.n_layers):
            names += [f"a{layer}.h{head}" for head in range(self.n_heads)] + [f"m{layer}"]
        return names

    @cached_property
    def readers(self) -> list[str]:
        names = []
        for layer in range(self.n_layers):
            names += [f"a{layer}.h{head}<{letter}>" for letter in QKV for head in range(self.n_heads)] + [f"m{layer}"]
        return [*names, "logits"]

    def edge(self, name: str) -> tuple[int, int]:
        """(reader, writer) of an edge name; ValueError when there is no such edge."""
        source, arrow, target = name.partition("->")
        if not arrow or source not in self._writer_index or target not in self._reader_index:
            raise ValueError(
                f"unknown edge {name!r} for {self.n_layers} layers of {self.n_heads} heads: expected writer->reader, "
                "such as input->a0.h1<q>, a3.h0->m3 or m2->logits"
            )
        reader, writer = self._reader_index[target], self._writer_index[source]
        if not self.possible[reader, writer]:
            raise ValueError(f"no edge {name!r}: {source} does not come before {target}")
        return reader, writer

    @cached_property
    def _writer_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.writers)}

    @cached_property
    def _reader_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.readers)}

    def prune(self, mask: np.ndarray) -> np.ndarray:
        """Drop dead ends of a mask [readers, writers]: every edge left lies on a path from the input to the logits."""
        mask = mask & self.possible
        node = self.node_of_reader
        fed = np.zeros(self.n_writers, bool)  # something from the input arrives
        fed[0] = True
        for layer in range(self.n_layers):
            for first, last in ((self.head_reader(layer, "q"), self.mlp_reader(layer)), (self.mlp_reader(layer),) * 2):
                rows = slice(first, max(last, first + 1))
                alive = (mask[rows] & fed).any(1)
                fed[node[rows][alive]] = True
        mask &= fed
        used = np.zeros(self.n_writers, bool)  # something of it reaches the logits
        used |= mask[self.output]
        for reader in range(self.output - 1, -1, -1):  # MLP before heads, last layer first
            if used[node[reader]]:
                used |= mask[reader]
        mask[:-1] &= used[node[:-1]][:, None]
        return mask

    def top(self, scores: np.ndarray, absolute: bool = True) -> np.ndarray:
        """Flat indices of the possible edges, best first; ties in a fixed order."""
        flat = np.flatnonzero(self.possible)
        value = scores.ravel()[flat]
        return flat[np.argsort(-(np.abs(value) if absolute else value), kind="stable")]

    def greedy(self, scores: np.ndarray, absolute: bool = True) -> np.ndarray:
        """Flat indices in the order in which a circuit grown from the logits takes them: never an unread writer."""
        value = np.where(self.possible, np.abs(scores) if absolute else scores, -np.inf)
        rows: dict[int, list[int]] = {}
        for reader, writer in enumerate(self.node_of_reader):
            rows.setdefault(int(writer), []).append(reader)
        queue: list[tuple[float, int]] = []
        order: list[int] = []
        opened: set[int] = set()

        def open_node(node: int) -> None:
            if node in opened:
                return
            opened.add(node)
            for reader in rows.get(node, []):
                for writer in np.flatnonzero(self.possible[reader]):
                    heapq.heappush(queue, (-float(value[reader, writer]), reader * self.n_writers + int(writer)))

        open_node(-1)
        while queue:
            _, flat = heapq.heappop(queue)
            order.append(flat)
            open_node(flat % self.n_writers)
        return np.array(order)

    def rank_heads(self, scores: np.ndarray, absolute: bool = True) -> list[tuple[int, int]]:
        """(layer, head), most important first: by the summed score of its outgoing edges, the effect of removing it."""
        total = np.abs(scores.sum(0)) if absolute else scores.sum(0)
        heads = [(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]
        return sorted(heads, key=lambda at: -total[self.head_writer(*at)])

    def heads(self, scores: np.ndarray, absolute: bool = True) -> np.ndarray:
        """Flat indices when whole heads come in one by one, each with all its edges to what is in already.

        Input, MLPs and logits are in from the start.
        """
        rank = np.zeros(self.n_writers + 1, int)  # the last one is the logits', whose node is -1
        for i, at in enumerate(self.rank_heads(scores, absolute)):
            rank[self.head_writer(*at)] = i + 1
        comes = np.maximum(rank[:-1], rank[self.node_of_reader][:, None]).ravel()
        order = self.top(scores, absolute)
        return order[np.argsort(comes[order], kind="stable")]

    def mask(self, flat: np.ndarray) -> np.ndarray:
        mask = np.zeros(self.n_readers * self.n_writers, bool)
        mask[flat] = True
        return mask.reshape(self.n_readers, self.n_writers)

    def random_circuit(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """A circuit of at least n live edges made of random paths from the input to the logits."""
        mask = np.zeros_like(self.possible)
        node, count = self.node_of_reader, 0
        readers_of: dict[int, np.ndarray] = {}
        fed, used = {0}, {-1}
        for flat in rng.permutation(np.flatnonzero(self.possible)):
            if count >= n:
                break
            reader, writer = divmod(int(flat), self.n_writers)
            added = [(reader, writer)]
            while writer not in fed:  # back to the input
                fed.add(writer)
                into = rng.choice(np.flatnonzero(node == writer))
                writer = int(rng.choice(np.flatnonzero(self.possible[into])))
                added.append((into, writer))
            at = int(node[reader])
            while at not in used:  # on to the logits
                used.add(at)
                if at not in readers_of:
                    readers_of[at] = np.flatnonzero(self.possible[:, at])
                reader = int(rng.choice(readers_of[at]))
                added.append((reader, at))
                at = int(node[reader])
            fed.update(int(node[r]) for r, _ in added if node[r] >= 0)
            used.update(w for _, w in added)
            for edge in added:
                count += not mask[edge]
                mask[edge] = True
        return self.prune(mask)
