"""Attention edges of single prompts: the model with some of them, the others removed or carrying something else.

An edge (layer, head, query, key) carries softmax * gate * value from one token to another. A circuit is a set of edges;
embeddings, MLPs and norms are always live. The others carry

    removed     nothing: their weight is 0, softmax is not renormalised
    corrupted   what they carry on the corrupted prompt
    mean        their mean over the prompts at hand, at the same positions

Every prompt has a circuit of its own here: masks are [n, layer, head, query, key], and may be fractional, so that the
gradient of the metric with respect to the mask says what each edge does. Prompts are of one length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gating import allowed_pairs
from ..models.architectures import Dimensions
from ..models.decoder import Decoder
from ..models.hooks import patch
from ..tasks.prompts import Prompts

Others = Literal["removed", "corrupted", "mean"]
Layers = list[tuple[Tensor, Tensor]]  # per layer: weights [n, heads, queries, keys], values [n, heads, keys, d_head]
INTEGRATION = 5  # masks between none of the edges and all at which gradients are taken
TOLERANCE = 1e-4  # of the largest metric


@dataclass(frozen=True)
class Some:
    """Some of the prompts, on the device, with what their other edges carry."""

    prompts: Prompts
    embedding: Tensor  # [n, tokens, d_model]
    rest: Layers  # empty where the others carry nothing


class AttentionEdges:
    """Prompts of one length, ready to be run with some of their attention edges."""

    def __init__(self, decoder: Decoder, prompts: Prompts, others: Others = "removed", memory_mb: float = 1024):
        if prompts.lengths.unique().numel() != 1:
            raise ValueError("attention edges are counted on prompts of one length; choose them with of_common_length")
        device = next(decoder.model.parameters()).device
        self.decoder, self.prompts, self.others = decoder, prompts.to(device), others
        tokens, d = prompts.clean.shape[1], decoder.dims
        self.shape = (d.n_layers, d.n_heads, tokens, tokens)
        pairs = [allowed_pairs(tokens, tokens, window=part.window)[0] for part in decoder.parts]
        self.possible = torch.stack(pairs).expand(self.shape).to(device)
        self.n_possible = int(self.possible.sum())
        self.at_once = max(1, int(memory_mb * 2**20 / bytes_per_prompt(decoder, prompts)))
        self._mean: Layers = []

    # ---- running ----

    def parts(self) -> Iterator[Some]:
        """As many prompts at a time as memory allows."""
        for first in range(0, len(self.prompts), self.at_once):
            yield self.some(self.prompts.take(slice(first, first + self.at_once)))

    @torch.no_grad()
    def some(self, prompts: Prompts) -> Some:
        rest: Layers = []
        if self.others == "corrupted":
            rest = self.seen(self.decoder.begin(prompts.corrupted))
        elif self.others == "mean":
            self._mean = rest = self._mean or self._means()
        return Some(prompts, self.decoder.begin(prompts.clean), rest)

    @torch.no_grad()
    def seen(self, embedding: Tensor) -> Layers:
        """What every layer's edges weigh, and the values they carry, in the whole model."""
        seen: Layers = []

        def mix(layer: int, weights: Tensor, values: Tensor) -> Tensor:
            seen.append((weights, values))
            return weights @ values

        self.decoder.run(embedding, mix)
        return seen

    def _means(self) -> Layers:
        """What every edge carries on average over all prompts: (1, [heads, queries, keys, d_head])."""
        total: list[Tensor] = []
        for first in range(0, len(self.prompts), self.at_once):
            some = self.prompts.take(slice(first, first + self.at_once))
            for layer, (weights, values) in enumerate(self.seen(self.decoder.begin(some.clean))):
                carried = torch.einsum("nhqk,nhke->hqke", weights, values)
                if layer < len(total):
                    total[layer] += carried
                else:
                    total.append(carried)
        return [(torch.ones(1), carried / len(self.prompts)) for carried in total]

    def metric(self, mask: Tensor, some: Some) -> Tensor:
        """The metric of every prompt [n] fp64 with these edges; mask [n or 1, layer, head, query, key].

        Also [n or 1, layer, head, 1, 1], for whole heads.
        """

        def mix(layer: int, weights: Tensor, values: Tensor) -> Tensor:
            kept = (mask[:, layer] * weights) @ values
            if self.others == "removed":
                return kept
            old_weights, old_values = some.rest[layer]
            left = 1 - mask[:, layer]
            if self.others == "mean":
                return kept + torch.einsum("nhqk,hqke->nhqe", left.expand(weights.shape), old_values)
            return kept + (left * old_weights) @ old_values

        final = self.decoder.run(some.embedding, mix)
        return some.prompts.score(self.decoder.unembed(some.prompts.at_reads(final)).double())

    def all(self, some: Some, value: float = 1.0) -> Tensor:
        """The mask with every edge in (or that much of it), [1, layer, head, query, key]."""
        return some.embedding.new_full((1, *self.shape), value)

    # ---- what an edge does: [n, layer, head, query, key] ----

    def gradient(self, mask: Tensor, some: Some) -> Tensor:
        """d metric / d edge of every prompt, with these edges in."""
        mask = mask.expand(len(some.prompts), *self.shape).detach().clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.metric(mask, some).sum(), mask)
        return gradient * self.possible

    def integrated(self, some: Some) -> Tensor:
        """Integrated gradients over the mask, from none of the edges to all: what each contributes."""
        total = torch.zeros(len(some.prompts), *self.shape, device=some.embedding.device, dtype=some.embedding.dtype)
        for i in range(INTEGRATION):
            total += self.gradient(self.all(some, (i + 0.5) / INTEGRATION), some)
        return total / INTEGRATION

    def leading(self, some: Some) -> Tensor:
        """bool: the edge carries something, and what it changes can reach a position that is read.

        A closed edge carries nothing, but its key still counts in its query's softmax: what leads to that key leads on.
        """
        used = F.one_hot(some.prompts.position, self.shape[-1]).bool() & some.prompts.used[..., None]
        needed = used.any(1)  # [n, tokens]: positions whose residual stream matters
        layers = []
        for layer, (weights, _) in reversed(list(enumerate(self.seen(some.embedding)))):
            layers.append((weights > 0) & needed[:, None, :, None])
            needed = needed | (self.possible[layer, 0] & needed[..., None]).any(1)
        return torch.stack(layers[::-1], 1)

    # ---- does it hold together ----

    @torch.no_grad()
    def check(self, some: Some) -> dict[str, float]:
        """Relative errors of the metric; ValueError where one is not nothing.

        all: every edge kept is the model's own answer. none: every edge removed is the model with silent attention.
        leading: the edges that lead to the answer are enough. closed: removing what carries nothing changes nothing, to
        the last bit.
        """
        model, prompts = self.decoder.model, some.prompts

        def own() -> Tensor:
            return prompts.score(prompts.ask(model, prompts.clean).double())

        # A gate within rounding of its threshold may open here and close there: a few prompts may differ.
        flips = len(prompts) // 10 if self.decoder.gates is not None else 0
        whole = self.metric(self.all(some), some)
        found = {"all": _error(whole, own(), flips)}
        if self.others == "removed":
            silent = {f"a{layer}": 0.0 for layer in range(self.shape[0])}
            with patch(model, silent):
                found["none"] = _error(self.metric(self.all(some, 0.0), some), own())
            leading = self.metric(self.leading(some).to(some.embedding.dtype), some)
            found["leading"] = _error(leading, whole, flips)
            carrying = torch.stack([weights > 0 for weights, _ in self.seen(some.embedding)], 1)
            found["closed"] = _error(self.metric(carrying.to(some.embedding.dtype), some), whole)
        for name, error in found.items():
            if not error <= (0.0 if name == "closed" else TOLERANCE):
                raise ValueError(f"self-check failed: with {name} edges the metric is off by {error:.1e} of its size")
        return found


def bytes_per_prompt(decoder: Decoder, prompts: Prompts) -> float:
    """What one prompt needs while it is read."""
    return prompt_bytes(decoder.dims, decoder.vocabulary, prompts.clean.shape[1], prompts.position.shape[1])


def prompt_bytes(d: Dimensions, vocabulary: int, tokens: int, reads: int) -> float:
    """Masks, ranks, patterns and their gradients of all layers; residual streams; logits at the reads, several times.

    Peaks are measured in tests/circuits/test_attention_edges.py.
    """
    patterns = 56.0 * d.n_layers * d.n_heads * tokens**2
    streams = 80.0 * d.n_layers * d.d_model * tokens
    return patterns + streams + 60.0 * reads * vocabulary


def _error(a: Tensor, b: Tensor, but: int = 0) -> float:
    """The largest difference, but for so many, as a share of the largest value."""
    return float((a - b).abs().sort().values[len(a) - 1 - but] / b.abs().max().clamp(min=1e-9))
