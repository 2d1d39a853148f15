"""A frozen model whose MLPs are replaced by a transcoder: sources, readings, and the rows of edges between them.

1. MLP output of layer l = what features write + decoder bias + error. The error is whatever is missing, so the replaced
   model computes exactly what the model computes on this prompt.
2. Sources, in this order (the node ids of graph.py): active features sorted by layer and position, errors [layer,
   position], tokens, positions (GPT-2), biases (attention of every layer, decoder of every layer, own). Logits follow.
3. `rows`: gradients of many readings are pulled back at once; an edge is a source's write times the gradient there,
   summed over the places it writes to. One matrix product per layer and position, whatever the number of features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import Norm
from ..transcoders.mlp_hooks import check_fit
from ..transcoders.transcoder import Transcoder
from .graph import BIAS, ERROR, FEATURE, LOGIT, POSITION, TOKEN
from .linear_model import Frozen, Reads, join

CACHE = 2**28  # bytes of decoder rows kept at hand
TOKENS_AT_ONCE = 512  # while encoding


class Replacement:
    """One prompt's replaced model. Everything in the dtype of the frozen model, whatever the transcoder's."""

    @torch.no_grad()
    def __init__(self, frozen: Frozen, transcoder: Transcoder):
        dims = frozen.dims
        check_fit(frozen.decoder.model, transcoder)
        if transcoder.W_enc[0].device != frozen.final.device:
            raise ValueError(
                f"the transcoder is on {transcoder.W_enc[0].device}, the model on {frozen.final.device}: "
                "move one of them with .to(device)"
            )
        self.frozen, self.transcoder = frozen, transcoder
        self.n_layers, self.n_tokens = dims.n_layers, frozen.n_tokens
        like = frozen.final
        outputs = [transcoder.b_dec[layer].to(like).repeat(self.n_tokens, 1) for layer in range(self.n_layers)]
        found = []
        for layer in range(self.n_layers):
            activation = self.encode(layer, self.received(layer))
            position, index = activation.nonzero(as_tuple=True)
            found.append((torch.full_like(position, layer), position, index, activation[position, index]))
            for j, written in enumerate(transcoder.written(layer, activation).unbind(1)):
                outputs[layer + j] = outputs[layer + j] + written
        self.layer, self.position, self.index, self.activation = (torch.cat(t) for t in zip(*found, strict=True))
        self.error = torch.stack([b.mlp_out - y for b, y in zip(frozen.blocks, outputs, strict=True)])  # [L, T, D]
        # Features of one layer at one position stand together: where each such group begins.
        counts = torch.bincount(self.layer * self.n_tokens + self.position, minlength=self.n_layers * self.n_tokens)
        self.group_ends = counts.cumsum(0).tolist()
        self._rows: dict[int, Tensor] = {}
        self._cached = 0
        self._logits: tuple[Tensor, Tensor] = (like.new_zeros(0, dims.d_model), like.new_zeros(0))
        self.logit_position = self.n_tokens - 1
        t, n_positions = self.n_tokens, 0 if frozen.positions is None else self.n_tokens
        sizes = [len(self.layer), self.n_layers * t, t, n_positions, 2 * self.n_layers + 1]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.columns = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]  # by kind
        self.n_sources = ends[-1]

    def received(self, layer: int, run: Frozen | None = None) -> Tensor:
        """What the features of a layer read, [T, D]; `run`: in another run of the model."""
        block = (run or self.frozen).blocks[layer]
        return block.mlp_in if self.transcoder.input_hook == "mlp-input" else block.mlp_read

    def encode(self, layer: int, x: Tensor) -> Tensor:
        """Activations [T, n_features] of a layer's features."""
        weight, bias = self.transcoder.W_enc[layer].to(x), self.transcoder.b_enc[layer].to(x)
        # BatchTopK compares all tokens with each other; the others need no such thing.
        step = len(x) if self.transcoder.activation == "batchtopk" else TOKENS_AT_ONCE
        parts = [self.transcoder.activate(layer, F.linear(part, weight, bias)) for part in torch.split(x, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # ---- nodes ----

    def node_columns(self) -> dict[str, Tensor]:
        """Graph's columns of nodes, for all sources."""
        t, n_layers = self.n_tokens, self.n_layers
        positions, layers = torch.arange(t), torch.arange(n_layers)
        n_positions = self.columns[POSITION].stop - self.columns[POSITION].start
        before, everywhere = torch.full((t,), -1), torch.full((2 * n_layers + 1,), -1)
        kinds = [torch.full((c.stop - c.start,), kind) for kind, c in enumerate(self.columns)]
        of_errors, of_biases = layers.repeat_interleave(t), [layers, layers, before[:1]]
        layer = [self.layer.cpu(), of_errors, before, before[:n_positions], *of_biases]
        position = [self.position.cpu(), positions.repeat(n_layers), positions, positions[:n_positions], everywhere]
        which = torch.tensor([0] * n_layers + [1] * n_layers + [2])
        index = [self.index.cpu(), torch.zeros_like(of_errors), self.frozen.ids.cpu(), positions[:n_positions], which]
        value = torch.zeros(self.n_sources, dtype=self.activation.dtype)
        value[self.columns[FEATURE]] = self.activation.cpu()
        columns = {"layer": layer, "position": position, "index": index}
        numbers = {name: torch.cat(parts).to(torch.int32) for name, parts in columns.items()}
        return {"kind": torch.cat(kinds).to(torch.int8), **numbers, "value": value}

    def kind_of(self, ids: Tensor) -> Tensor:
        """Kinds [n] of node ids [n]."""
        ends = torch.tensor([c.stop for c in self.columns], device=ids.device)
        return torch.bucketize(ids.contiguous(), ends, right=True)

    def feature(self, id: int) -> tuple[int, int, int]:
        """(layer, position, index) of a feature."""
        return int(self.layer[id]), int(self.position[id]), int(self.index[id])

    def set_logits(self, directions: Tensor, constants: Tensor, at: int = -1) -> None:
        """The logit targets: readings of the normed end of the residual stream at a position, [n, D] and [n]."""
        self._logits, self.logit_position = (directions, constants), at % self.n_tokens

    def places(self, ids: Tensor) -> Tensor:
        """Positions [n] of node ids; ValueError for biases, which are everywhere."""
        kind = self.kind_of(ids)
        if bool((kind == BIAS).any()):
            raise ValueError("a bias has no position: head shares and interventions are for the other kinds of nodes")
        position = torch.full_like(ids, self.logit_position)
        feature = kind == FEATURE
        position[feature] = self.position[ids[feature]]
        for k in (ERROR, TOKEN, POSITION):
            here = kind == k
            position[here] = (ids[here] - self.columns[k].start) % self.n_tokens
        return position

    def writes(self, ids: Tensor) -> Tensor:
        """What sources write at every place, [n, L + 1, D]: place 0 the embedding, l + 1 the output of MLP l."""
        kind, at = self.kind_of(ids), self.places(ids)
        out = self.error.new_zeros(len(ids), self.n_layers + 1, self.error.shape[-1])
        features = (kind == FEATURE).nonzero()[:, 0]
        for layer in torch.unique(self.layer[ids[features]]).tolist():
            here = features[self.layer[ids[features]] == layer]
            rows = self.transcoder.W_dec[layer][self.index[ids[here]]].to(out)
            out[here, layer + 1 : layer + 1 + rows.shape[1]] = rows * self.activation[ids[here], None, None]
        here = (kind == ERROR).nonzero()[:, 0]
        layer_of = (ids[here] - self.columns[ERROR].start) // self.n_tokens
        out[here, layer_of + 1] = self.error[layer_of, at[here]]
        here = (kind == TOKEN).nonzero()[:, 0]
        out[here, 0] = self.frozen.embedding[at[here]]
        if self.frozen.positions is not None:
            here = (kind == POSITION).nonzero()[:, 0]
            out[here, 0] = self.frozen.positions[at[here]]
        return out

    def _by_layer(self, ids: Tensor) -> list[tuple[int, Tensor]]:
        """Targets among ids, sorted: (layer, which of ids are its features) for every layer, (n_layers, logits)."""
        kind = self.kind_of(ids)
        if bool(((kind != FEATURE) & (kind != LOGIT)).any()):
            raise ValueError("only features and logits are targets; errors, tokens, positions and biases are sources")
        layer = torch.full_like(ids, self.n_layers)
        layer[kind == FEATURE] = self.layer[ids[kind == FEATURE]]
        return [(int(one), (layer == one).nonzero()[:, 0]) for one in torch.unique(layer)]

    def _norm(self, layer: int) -> Norm | None:
        """The norm between the residual stream and what features read."""
        return self.frozen.blocks[layer].mlp_norm if self.transcoder.input_hook == "mlp-input" else None

    def _encoders(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(positions [n], encoder rows [n, D], biases [n]) of features of one layer."""
        at, index, t = self.position[ids], self.index[ids], self.transcoder
        return at, t.W_enc[layer][index].to(self.error), t.b_enc[layer][index].to(self.error)

    def reads(self, ids: Tensor) -> Reads:
        """How targets (features and logits) read the residual stream."""
        parts, order = [], []
        for layer, here in self._by_layer(ids):
            order.append(here)
            if layer == self.n_layers:
                direction, constant = (t[ids[here] - self.n_sources] for t in self._logits)
                at = torch.full_like(here, self.logit_position)
                parts.append(self.frozen.reads(2 * layer, self.frozen.final_norm, at, direction, constant))
            else:
                parts.append(self.frozen.reads(2 * layer + 1, self._norm(layer), *self._encoders(layer, ids[here])))
        return join(parts)[torch.cat(order).argsort()]

    def values(self, ids: Tensor, run: Frozen | None = None) -> Tensor:
        """Values [n] of targets, pre-activations and logits, in the traced run or in another one."""
        out = self.error.new_zeros(len(ids))
        for layer, here in self._by_layer(ids):
            if layer == self.n_layers:
                direction, constant = (t[ids[here] - self.n_sources] for t in self._logits)
                out[here] = direction @ (run or self.frozen).final[self.logit_position] + constant
            else:
                at, encoder, constant = self._encoders(layer, ids[here])
                out[here] = (self.received(layer, run)[at] * encoder).sum(-1) + constant
        return out

    # ---- rows ----

    def _decoder_rows(self, layer: int, part: slice) -> Tensor:
        """What features of one layer write, activation included, [features, targets * D]."""
        if layer in self._rows:
            start = self._layer_part(layer).start
            return self._rows[layer][part.start - start : part.stop - start]
        rows: Tensor = self.transcoder.W_dec[layer][self.index[part]].to(self.error).flatten(1)
        return rows.mul_(self.activation[part, None])

    def _layer_part(self, layer: int) -> slice:
        """Which features are of this layer."""
        first, last = layer * self.n_tokens, (layer + 1) * self.n_tokens
        return slice(self.group_ends[first - 1] if layer else 0, self.group_ends[last - 1])

    def _feature_edges(self, out: Tensor, gradients: Tensor, layer: int) -> None:
        """Fill the columns of one layer's features. gradients [n, T, L + 1, D]: pulled back to every place."""
        targets, part = self.transcoder.n_targets(layer), self._layer_part(layer)
        size = (part.stop - part.start) * targets * self.error.shape[-1] * self.error.element_size()
        if layer not in self._rows and self._cached + size <= CACHE:
            self._rows[layer], self._cached = self._decoder_rows(layer, part), self._cached + size
        start = part.start
        for position in range(self.n_tokens):
            end = self.group_ends[layer * self.n_tokens + position]
            if start < end:
                waiting = gradients[:, position, layer + 1 : layer + 1 + targets].flatten(1)
                out[:, start:end] = waiting @ self._decoder_rows(layer, slice(start, end)).T
            start = end

    @torch.no_grad()
    def rows(self, reads: Reads) -> Tensor:
        """Edges from every source to n readings, [n, n_sources]; a row sums to the reading's value."""
        n, top = len(reads), int(reads.stage.max())
        out = reads.vector.new_zeros(n, self.n_sources)
        gradients = reads.vector.new_zeros(n, self.n_tokens, self.n_layers + 1, self.error.shape[-1])
        errors, biases = out[:, self.columns[ERROR]], out[:, self.columns[BIAS]]
        biases[:, -1] = reads.constant
        for pulled in self.frozen.pull(reads):
            layer = pulled.layer
            gradients[:, :, layer + 1] = pulled.place
            if layer < 0:
                break
            assert pulled.attention is not None
            errors[:, layer * self.n_tokens : (layer + 1) * self.n_tokens] = (pulled.place * self.error[layer]).sum(-1)
            biases[:, layer] = torch.einsum("ntd,td->n", pulled.attention, self.frozen.blocks[layer].constant)
            biases[:, self.n_layers + layer] = pulled.place.sum(1) @ self.transcoder.b_dec[layer].to(out)
        for layer in range(top // 2):  # features above do not reach the readings
            self._feature_edges(out, gradients, layer)
        out[:, self.columns[TOKEN]] = (gradients[:, :, 0] * self.frozen.embedding).sum(-1)
        if self.frozen.positions is not None:
            out[:, self.columns[POSITION]] = (gradients[:, :, 0] * self.frozen.positions).sum(-1)
        return out

    def at_once(self, memory_mb: float) -> int:
        """How many rows fit into memory together."""
        d, size = self.error.shape[-1], self.error.element_size()
        each = size * (self.n_tokens * d * (self.n_layers + 9) + 3 * self.n_sources)
        return max(1, min(256, int(memory_mb * 2**20 / each)))
