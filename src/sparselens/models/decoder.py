"""A Hugging Face decoder whose heads and MLPs can be fed separately: what per-edge patching and scoring run on.

The model is not changed and not copied: its own norms, MLPs, rotations and weights are called, block by block, with
inputs of our choosing. Whether the pieces add up to the model is checked on every run (run.py), not believed.

Shapes: x [batch, tokens, d_model] residual stream; q, k, v, z [batch, heads, tokens, d_head]. Keys and values are kept
per query head, also where the model shares them: an edge belongs to a query head.

Post-norms (OLMo 2, Gemma): what attention writes is gain * o / rms(o) with o the sum over heads, so a head's share is
its own z W_O times that one factor. The factor is taken from the run at hand, never frozen: shares add up to exactly
what the block writes, in the clean run, in the corrupted run and in every circuit between them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..gating import PatternOptions, gated_attention, gated_pattern
from .architectures import (
    attention_modules,
    base_model,
    blocks,
    dimensions,
    norm_parts,
    parallel_blocks,
    parts,
    rms_gain,
    unembed,
)
from .component_graph import Components
from .hooks import Enough, hooked
from .loading import gate_biases, is_gated

Step = Callable[[int, Tensor], Tensor]  # (layer, what a part reads) -> what it makes of it
Mix = Callable[[int, Tensor, Tensor], Tensor]  # (layer, weights [..., queries, keys], values) -> the heads' value mixes


class BlockValues(NamedTuple):
    """What one block read and wrote. [batch, tokens, d_model] where nothing else is said."""

    layer: int
    residual: Tensor  # entering the block
    z: Tensor  # [batch, n_heads, tokens, d_head]
    mlp_in: Tensor  # the residual stream as the MLP reads it, before its norm
    mlp_out: Tensor  # what the MLP added
    after: Tensor  # the residual stream leaving the block


class Decoder:
    """The pieces of one model.

    straight_through: gradients of gates, for scoring. False: gates are constants, which is the derivative where no
    gate flips, and ranks edges better. True: a gate behaves as sigmoid(G) in the backward pass, as in training.
    """

    def __init__(self, model: nn.Module, straight_through: bool = False):
        self.model, self.config = model, base_model(model).config
        self.dims = dimensions(self.config)
        self.vocabulary: int = self.config.vocab_size
        self.straight_through = straight_through
        self.group = self.dims.n_heads // self.dims.n_kv_heads
        self.parts = [parts(model, layer) for layer in range(self.dims.n_layers)]
        self.components = Components(self.dims.n_layers, self.dims.n_heads, parallel_blocks(self.config))
        self.gates = [b.detach() for b in gate_biases(model)] if is_gated(base_model(model)) else None
        self.normalise = self.config.sparselens["normalise"] if self.gates else "all"
        self._rotations: list[tuple[Tensor, Tensor] | None] = [None] * self.dims.n_layers  # cos, sin [1, tokens, d]
        self.gains = [None if p.attention_post is None else rms_gain(p.attention_post) for p in self.parts]
        norm = self.parts[0].query_norm
        self.wide_norm = norm is not None and next(norm.parameters()).numel() != self.dims.d_head
        if self.gains[0] is not None and self.parts[0].output[1] is not None:
            raise ValueError("attention with an output bias under a post-norm is not supported: no head owns the bias")
        if next(model.parameters()).dtype not in (torch.float32, torch.float64):
            raise ValueError("circuits need float32 weights (small edges drown in bfloat16): use model.float()")

    @property
    def couples_heads(self) -> bool:
        """Heads of one layer share a norm, so that none can be computed without the others."""
        return self.wide_norm or self.gains[0] is not None

    def begin(self, ids: Tensor) -> Tensor:
        """What the model feeds its first block, [batch, tokens, d_model]; later runs rotate as it does for these ids.

        The model itself stops before its last attention.
        """
        return self._begin(ids, logits=False)[0]

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """The same without running the model, after a `begin` with at least as many tokens (`knows_positions`)."""
        found: list[Tensor] = []

        def embedding(module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
            found.append(arguments[0] if arguments else keywords["hidden_states"])
            raise Enough

        with hooked([blocks(self.model)[0].register_forward_pre_hook(embedding, with_kwargs=True)]):
            self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return found[0]

    def knows_positions(self, tokens: int) -> bool:
        """Whether the last `begin` had at least this many tokens, or positions are not rotated at all."""
        turned = zip(self.parts, self._rotations, strict=True)
        return all(part.rotate is None or (r is not None and r[0].shape[1] >= tokens) for part, r in turned)

    def begin_with_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the model's own logits after the last token, [batch, 1, vocabulary]."""
        embedding, logits = self._begin(ids, logits=True)
        return embedding, logits

    @torch.no_grad()
    def _begin(self, ids: Tensor, logits: bool) -> list[Tensor]:
        found: list[Tensor] = []
        attentions = attention_modules(self.model)

        def embedding(module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
            found.append(arguments[0] if arguments else keywords["hidden_states"])

        def rotation(layer: int, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
            turned = keywords.get("position_embeddings")
            self._rotations[layer] = None if turned is None else (turned[0][:1], turned[1][:1])
            if layer + 1 == self.dims.n_layers and not logits:
                raise Enough

        handles = [blocks(self.model)[0].register_forward_pre_hook(embedding, with_kwargs=True)]
        handles += [
            m.register_forward_pre_hook(partial(rotation, i), with_kwargs=True) for i, m in enumerate(attentions)
        ]
        with hooked(handles):
            found.append(self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits)
        return found

    def rotate(self, layer: int, q: Tensor, k: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q and k; `at` [tokens]: their positions, where they are not 0, 1, 2 and so on."""
        rotation, rotate = self._rotations[layer], self.parts[layer].rotate
        if rotation is None or rotate is None:
            return q, k
        cos, sin = (t[:, : q.shape[2]] if at is None else t[:, at] for t in rotation)
        return rotate(q, k, cos, sin)

    def read(self, layer: int, x: Tensor) -> Tensor:
        """What attention sees of the residual stream."""
        norm = self.parts[layer].attention_norm
        return x if norm is None else norm(x)

    def project(self, layer: int, through: str, y: Tensor) -> Tensor:
        """q, k or v of all heads from one input y [batch, tokens, d_model]; k and v repeated for every query head."""
        weight, bias = self.parts[layer].weights[through]
        out = torch.einsum("btd,hde->bhte", y, weight)
        if bias is not None:
            out = out + bias[:, None]
        return out if through == "q" else out.repeat_interleave(self.group, 1)

    def project_each(self, layer: int, through: str, y: Tensor, heads: Tensor) -> Tensor:
        """q, k or v where every head has an input of its own, y [heads, batch, tokens, d_model]."""
        weight, bias = self.parts[layer].weights[through]
        own = heads if through == "q" else heads // self.group
        n, batch, tokens, _ = y.shape
        out = torch.bmm(y.flatten(1, 2), weight[own]).view(n, batch, tokens, -1)
        if bias is not None:
            out = out + bias[own][:, None, None]
        return out.transpose(0, 1)

    def unproject(self, layer: int, through: str, gradient: Tensor) -> Tensor:
        """Gradient at q, k or v [batch, heads, tokens, d_head] -> at each head's input, [heads, batch, ...]."""
        weight = self.parts[layer].weights[through][0]
        if through != "q":
            weight = weight.repeat_interleave(self.group, 0)
        batch, n, tokens, _ = gradient.shape
        return torch.bmm(gradient.transpose(0, 1).flatten(1, 2), weight.transpose(1, 2)).view(n, batch, tokens, -1)

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor, heads: Tensor | None = None) -> Tensor:
        """Attention: the value mix z of these heads (all of them by default), gates deterministic."""
        p = self.parts[layer]
        q, k, v = self.prepared(layer, q, k, v)
        if self.gates is not None:
            bias = self.gates[layer] if heads is None else self.gates[layer][heads]
            if self.straight_through or not torch.is_grad_enabled():
                return gated_attention(q, k, v, bias, **self.looks(layer))[0]
            return (self._weights(layer, q, k, bias) @ v.to(q.dtype)).to(v.dtype)
        tokens = q.shape[2]
        if p.softcap is None and (p.window is None or tokens <= p.window):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=p.scale)
        return self._weights(layer, q, k, None) @ v

    def attend(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """All heads reading the same x: (what multiplies the values [batch, heads, queries, keys], the values)."""
        y = self.read(layer, x)
        q, k, v = self.prepared(layer, *(self.project(layer, through, y) for through in "qkv"))
        return self._weights(layer, q, k, None if self.gates is None else self.gates[layer]), v

    def prepared(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention uses them: clipped, normed, rotated, where the family does so.

        at: as in `rotate`.
        """
        p = self.parts[layer]
        if p.clip is not None:
            q, k, v = (t.clamp(-p.clip, p.clip) for t in (q, k, v))
        if p.query_norm is not None and p.key_norm is not None:
            if self.wide_norm:
                q, k = self._wide(p.query_norm, q, 1), self._wide(p.key_norm, k, self.group)
            else:
                q, k = p.query_norm(q), p.key_norm(k)
        return *self.rotate(layer, q, k, at), v

    def _weights(self, layer: int, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """What multiplies the values; gates (bias given) count as constants."""
        options = self.looks(layer)
        # A bias of +inf closes nothing: softmax comes from the same code as the gated pattern.
        everything = torch.full((q.shape[1],), torch.inf, device=q.device)
        weights = gated_pattern(q, k, everything, **options)[0].weights
        if bias is None:
            return weights
        weights = weights * gated_pattern(q.detach(), k.detach(), bias, **options)[0].gate
        if self.normalise == "open":
            total = weights.sum(-1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1.0)  # by almost nothing: gradients of infinity times 0
        return weights

    def looks(self, layer: int) -> PatternOptions:
        """How the heads of a layer look, beside their queries, keys and gates."""
        p = self.parts[layer]
        return {"scale": p.scale, "window": p.window, "softcap": p.softcap, "normalise": self.normalise}

    def _wide(self, norm: nn.Module, t: Tensor, group: int) -> Tensor:
        """A norm over all (key) heads at once. Keys of the j-th query heads of every group are normed together."""
        batch, n_heads, tokens, d_head = t.shape
        t = t.view(batch, n_heads // group, group, tokens, d_head).permute(0, 2, 3, 1, 4)
        normed: Tensor = norm(t.flatten(3)).view(t.shape)
        return normed.permute(0, 3, 1, 2, 4).reshape(batch, n_heads, tokens, d_head)

    def scaled(self, layer: int, z: Tensor) -> Tensor:
        """z times the factor a post-norm applies to everything attention writes; z itself where there is none."""
        gain = self.gains[layer]
        if gain is None:
            return z
        total = torch.einsum("bhte,hed->btd", z, self.parts[layer].output[0])
        factor = torch.rsqrt(total.pow(2).mean(-1) + gain[1])
        return z * factor[:, None, :, None]

    def write_each(self, layer: int, z: Tensor, heads: Tensor | None = None) -> Tensor:
        """What every head adds to the residual stream, [heads, batch, tokens, d_model], from its scaled z. No bias."""
        weight = self.parts[layer].output[0] if heads is None else self.parts[layer].output[0][heads]
        batch, n, tokens, _ = z.shape
        out = torch.bmm(z.transpose(0, 1).reshape(n, batch * tokens, -1), weight).view(n, batch, tokens, -1)
        gain = self.gains[layer]
        return out if gain is None else out * gain[0]

    def write(self, layer: int, z: Tensor) -> Tensor:
        """What attention as a whole adds to the residual stream, [batch, tokens, d_model]."""
        weight, bias = self.parts[layer].output
        out = z.transpose(1, 2).flatten(2) @ weight.flatten(0, 1)  # einsum would copy the weight
        if bias is not None:
            out = out + bias
        post = self.parts[layer].attention_post
        return out if post is None else post(out)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """What the MLP adds to the residual stream when it reads x, norms included."""
        p = self.parts[layer]
        out: Tensor = p.mlp(x if p.mlp_norm is None else p.mlp_norm(x))
        return out if p.mlp_post is None else p.mlp_post(out)

    def heads(self, layer: int, x: Tensor) -> Tensor:
        """The value mix of all heads reading the same x."""
        y = self.read(layer, x)
        return self.mix(layer, *(self.project(layer, through, y) for through in "qkv"))

    def walk(
        self, x: Tensor, heads: Step | None = None, write: Step | None = None, mlp: Step | None = None, first: int = 0
    ) -> Iterator[BlockValues]:
        """The forward pass, block by block, from the embeddings x (or from what enters the block `first`).

        Parts given here take the place of the model's own:

        heads(layer, residual stream) -> z; write(layer, z) -> what attention adds; mlp(layer, what it reads) -> what it
        adds. Whoever brings them chooses the shapes.
        """
        heads, write, mlp = heads or self.heads, write or self.write, mlp or self.mlp
        for layer in range(first, self.dims.n_layers):
            z = heads(layer, x)
            after = x + write(layer, z)
            mlp_in = x if self.components.parallel else after
            mlp_out = mlp(layer, mlp_in)
            values = BlockValues(layer, x, z, mlp_in, mlp_out, after + mlp_out)
            x = values.after
            yield values

    def run(self, x: Tensor, mix: Mix) -> Tensor:
        """The last residual stream, from the embeddings x, when `mix` takes the place of weights @ values.

        The weights are softmax times gate, [batch, n_heads, queries, keys].
        """
        for block in self.walk(x, heads=lambda layer, x: mix(layer, *self.attend(layer, x))):
            x = block.after
        return x

    def unembed(self, x: Tensor) -> Tensor:
        return unembed(self.model, x)


class Norm:
    """x -> gain * c(x) / d(x) + bias, with denominators d that can be held. c subtracts the mean (LayerNorm) or not."""

    def __init__(self, module: nn.Module, like: Tensor):
        self.gain, self.bias, self.centred, self.epsilon = norm_parts(module, like)
        self.scale = like.new_zeros(0)  # [T, 1]: 1 / d, once held

    def __call__(self, x: Tensor) -> Tensor:
        """The norm itself, in the dtype of x (Hugging Face's RMS norms round to fp32), keeping its denominators."""
        c = self._centre(x)
        self.scale = (c.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return self.gain * c * self.scale + self.bias

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def push(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """The linear part, denominators held. x [..., T, D], or [n, D] at positions `at` [n]."""
        return self._centre(x) * (self.scale if at is None else self.scale[at]) * self.gain

    def pull(self, g: Tensor, at: Tensor | None = None) -> Tensor:
        """The transpose of `push`."""
        return self._centre(g * self.gain) * (self.scale if at is None else self.scale[at])


def push_through(norm: Norm | None, x: Tensor, at: Tensor | None = None) -> Tensor:
    """`norm.push`, or x where the family has no such norm."""
    return x if norm is None else norm.push(x, at)


def pull_through(norm: Norm | None, g: Tensor, at: Tensor | None = None) -> Tensor:
    """`norm.pull`, or g where the family has no such norm."""
    return g if norm is None else norm.pull(g, at)
