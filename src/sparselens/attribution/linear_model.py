"""A model on one prompt, frozen: attention patterns, norm denominators and MLP outputs held, the rest linear.

1. Run the model once, block by block, in fp32 or fp64, and keep what is to be held: queries and keys (the pattern,
   softmax times gate, is made from them), the denominator of every norm, and what every MLP wrote.
2. What is left between the MLPs is affine: residual stream -> norm -> values -> pattern -> output -> residual stream.
3. `push` sends signals forward through it, `pull` gradients back: plain matrix products, many at a time.
4. Single steps of both (`to_values`, `from_mix`, `own`, ...) also work at one position per signal; head_shares.py keeps
   signals from leaving their position with them.

Shapes: T tokens, L layers, H heads, D = d_model, e = d_head; n signals or gradients at once are [n, T, D].
Signals enter at L + 1 write places: 0 is the embedding, l + 1 the output of MLP l (before a post-norm).
Gradients enter at 2 L + 1 read stages: 2 l is the input of block l (attention reads it), 2 l + 1 what MLP l reads,
before its norm, 2 L the end. In parallel blocks (GPT-NeoX) an MLP reads the input of its block.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ..gating import allowed_pairs, gated_pattern
from ..models.architectures import position_embeddings, rms_gain, softcapped, unembedding
from ..models.decoder import Decoder, Norm, pull_through, push_through

CACHE = 2**28  # bytes of attention patterns kept; larger ones are made again, a few heads at a time, when needed
TOLERANCE = 1e-4  # of the largest logit: how far our run may be from the model's own

P = ParamSpec("P")
R = TypeVar("R")
Link = tuple[int, int, int, int]  # layer, head, query, key


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run without gradients and with full fp32 products: TF32 would cost three digits of every sum."""

    @functools.wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                return function(*arguments, **keywords)
        finally:
            torch.set_float32_matmul_precision(before)

    return run


@dataclass
class Block:
    """What one block computed, and what is held of it."""

    attention_norm: Norm | None
    attention_post: Norm | None
    mlp_norm: Norm | None
    mlp_post: Norm | None
    into_values: Tensor  # [D, H * e]; values repeated for every query head
    out_of_mix: Tensor  # [H * e, D]
    out_bias: Tensor | None  # [D]
    open_values: Tensor | None  # [T, H * e]: 0 where a clip holds a value constant (OLMo's clip_qkv); None: nowhere
    q: Tensor  # [H, T, e] as compared: clipped, normed, rotated
    k: Tensor
    values: Tensor  # [T, H * e]
    residual: Tensor  # [T, D] entering the block
    constant: Tensor = field(init=False)  # [T, D]: what attention adds whatever the sources do (biases)
    mlp_read: Tensor = field(init=False)  # [T, D] what the MLP reads, before its norm
    mlp_in: Tensor = field(init=False)  # [T, D] what the MLP module receives
    mlp_out: Tensor = field(init=False)  # [T, D] what the MLP module returned, before a post-norm


@dataclass
class Reads:
    """What to pull back from: n linear readings of the residual stream, plus what each adds by itself."""

    stage: Tensor  # [n] see above
    position: Tensor  # [n]
    vector: Tensor  # [n, D] gradient at the residual stream
    constant: Tensor  # [n] bias of the reading itself

    def __getitem__(self, part: slice | Tensor) -> "Reads":
        return Reads(self.stage[part], self.position[part], self.vector[part], self.constant[part])

    def __len__(self) -> int:
        return len(self.stage)


@dataclass
class Pulled:
    """Gradients at one layer, on the way back. Layer -1: the embedding (place 0), nothing else."""

    layer: int
    place: Tensor  # [n, T, D] gradient at what is written at place layer + 1
    attention: Tensor | None = None  # [n, T, D] at what attention adds to the residual stream
    mix: Tensor | None = None  # [n, T, H, e] at the heads' value mixes


class Frozen:
    """One model, one prompt. ids: [T]."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, ids: Tensor):
        self.decoder = Decoder(model)
        self.dims, self.n_tokens, self.ids = self.decoder.dims, len(ids), ids
        embedding, logits = (t[0] for t in self.decoder.begin_with_logits(ids[None]))
        self.own_logits = logits[-1]
        self.parallel = self.decoder.components.parallel
        final, self.unembed_weight, self.unembed_bias, self.softcap = unembedding(model)
        self.final_norm = Norm(final, embedding)
        positions = position_embeddings(model, self.n_tokens)
        self.positions = None if positions is None else positions.detach().to(embedding)
        self.embedding = embedding if self.positions is None else embedding - self.positions
        self.run()
        self.check = float((self.logits(capped=True) - self.own_logits).abs().max() / self.own_logits.abs().max())

    def run(self, rewrite: "Rewrite | None" = None) -> "Frozen":
        """The real forward pass, all nonlinearities at work; what it computes is held from then on.

        rewrite: changes to make on the way (interventions.py); None: the model as it is.
        """
        self.rewrite = rewrite or Rewrite()
        self._patterns: dict[int, Tensor] = {}
        self.blocks: list[Block] = []
        x = self.embedding if self.positions is None else self.embedding + self.positions
        x = self.rewrite.embedding(x)
        for block in self.decoder.walk(x, self._heads, self._write, self._mlp):
            x = block.after
        self.final_norm = copy.copy(self.final_norm)  # a copy of this object may be run again, with other denominators
        self.final = self.final_norm(x)
        return self

    def _heads(self, layer: int, x: Tensor) -> Tensor:
        """The value mixes [T, H * e] of heads reading x [T, D]; begins the layer's Block."""
        p, decoder = self.decoder.parts[layer], self.decoder
        norm, attention_post, mlp_norm, mlp_post = (
            None if m is None else Norm(m, x) for m in (p.attention_norm, p.attention_post, p.mlp_norm, p.mlp_post)
        )
        y = x if norm is None else norm(x)
        q, k, v = (decoder.project(layer, through, y[None])[0] for through in "qkv")
        bias = torch.zeros_like(x) if norm is None else norm.bias.expand_as(x)
        steady = decoder.project(layer, "v", bias[None])[0]  # values without any signal
        free = None
        if p.clip is not None:
            free = v.abs() < p.clip
            q, k, v = (t.clamp(-p.clip, p.clip) for t in (q, k, v))
            steady, free = torch.where(free, steady, v), free.to(v).transpose(0, 1).flatten(1)
        q, k = self.aim(layer, q, k)
        into = p.weights["v"][0].repeat_interleave(decoder.group, 0).permute(1, 0, 2).flatten(1)
        values, steady = (t.transpose(0, 1).flatten(1) for t in (v, steady))
        out_of, out_bias = p.output[0].flatten(0, 1), p.output[1]
        block = Block(norm, attention_post, mlp_norm, mlp_post, into, out_of, out_bias, free, q, k, values, residual=x)
        self.blocks.append(block)
        block.constant = self.rewrite.mix(layer, self.mix(layer, steady[None])[0])
        return self.rewrite.mix(layer, self.mix(layer, values[None])[0])

    def _write(self, layer: int, z: Tensor) -> Tensor:
        """What attention adds to the residual stream [T, D], and how much of it no source has a say in."""
        block = self.blocks[layer]
        written, block.constant = (
            mixed @ block.out_of_mix + (0 if block.out_bias is None else block.out_bias)
            for mixed in (z, block.constant)
        )
        post = block.attention_post
        if post is not None:
            written, block.constant = post(written), post.push(block.constant) + post.bias
        return written

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        """What the MLP adds to the residual stream [T, D] when it reads x."""
        block = self.blocks[layer]
        block.mlp_read = x
        block.mlp_in = x if block.mlp_norm is None else block.mlp_norm(x)
        block.mlp_out = self.decoder.parts[layer].mlp(block.mlp_in[None])[0]
        block.mlp_out = self.rewrite.mlp(layer, block)
        return block.mlp_out if block.mlp_post is None else block.mlp_post(block.mlp_out)

    # ---- attention ----

    def aim(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [H, T, e] as they are compared: normed and rotated."""
        q, k = (t * factor for t, factor in zip((q, k), self.aim_scales(layer, q, k), strict=True))
        return self.rotate(layer, q, k)

    def aim_scales(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """What the norms of queries and keys (Qwen 3, Gemma 3, OLMo 2) multiply them by, [H, T, e]; 1 without norms."""
        p = self.decoder.parts[layer]
        if p.query_norm is None or p.key_norm is None:
            return 1.0, 1.0
        factors = []
        for norm, t, group in ((p.query_norm, q, 1), (p.key_norm, k, self.decoder.group)):
            gain, epsilon = rms_gain(norm)
            square = t.pow(2).mean(-1, keepdim=True)
            if self.decoder.wide_norm:  # over all heads at once; keys are repeated, which leaves their mean as it is
                square = square.mean(0, keepdim=True)
                gain = gain.to(t).view(-1, 1, self.dims.d_head).repeat_interleave(group, 0)
            factors.append(gain.to(t) * (square + epsilon).rsqrt())
        return factors[0], factors[1]

    def rotate(self, layer: int, q: Tensor, k: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q and k [H, T, e]; `at`: the positions of the T rows instead of 0 .. T - 1."""
        q, k = self.decoder.rotate(layer, q[None], k[None], at)
        return q[0], k[0]

    def pattern(self, layer: int, heads: slice = slice(None)) -> Tensor:
        """What multiplies the values: softmax, times the gate in a sparse model. [heads, T queries, T keys]."""
        if layer in self._patterns:
            return self._patterns[layer][heads]
        weights = self.looks(layer, heads)[0]
        size = self.dims.n_layers * self.dims.n_heads * self.n_tokens**2 * weights.element_size()
        if heads == slice(None) and size <= CACHE:
            self._patterns[layer] = weights
        return weights

    def looks(self, layer: int, heads: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """(pattern, gate margin S + b or None in a dense model), both [heads, T, T], from queries and keys."""
        p, block, decoder = self.decoder.parts[layer], self.blocks[layer], self.decoder
        q, k = block.q[heads], block.k[heads]
        if decoder.gates is not None:
            found = gated_pattern(q[None], k[None], decoder.gates[layer][heads].to(q), **decoder.looks(layer))[0]
            weights, margin = found.weights[0], found.margin[0]
        else:
            logits = softcapped(q @ k.transpose(-1, -2) * p.scale, p.softcap)
            allowed = allowed_pairs(self.n_tokens, self.n_tokens, window=p.window, device=q.device)[0]
            weights, margin = logits.masked_fill_(~allowed, -torch.inf).softmax(-1), None
        return self.rewrite.pattern(layer, heads, weights, decoder.normalise == "open"), margin

    def head_chunks(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """The pattern of all heads, as many at a time as memory allows."""
        n_heads, one = self.dims.n_heads, self.n_tokens**2 * self.blocks[layer].q.element_size()
        if layer in self._patterns or n_heads * self.dims.n_layers * one <= CACHE:
            yield slice(0, n_heads), self.pattern(layer)
            return
        step = max(1, CACHE // (6 * one))  # the pattern and its temporaries
        for first in range(0, n_heads, step):
            heads = slice(first, min(first + step, n_heads))
            yield heads, self.pattern(layer, heads)

    def mix(self, layer: int, values: Tensor, back: bool = False, rewrite: "Rewrite | None" = None) -> Tensor:
        """Values [n, T, H * e] mixed by the pattern, head by head; `back`: its transpose; `rewrite`: a changed one."""
        n = len(values)
        # All signals side by side: one product per head, and the pattern is not repeated for each signal.
        split = self.by_head(values).permute(2, 1, 0, 3).flatten(2)  # [H, T, n * e]
        mixed = torch.empty_like(split)
        for heads, pattern in self.head_chunks(layer):
            if rewrite is not None:
                pattern = rewrite.pattern(layer, heads, pattern, renormalise=False)
            mixed[heads] = (pattern.transpose(-1, -2) if back else pattern) @ split[heads]
        return torch.unflatten(mixed, 2, (n, self.dims.d_head)).permute(2, 1, 0, 3).flatten(2)

    def by_head(self, t: Tensor) -> Tensor:
        """[..., H * e] -> [..., H, e]."""
        return torch.unflatten(t, -1, (self.dims.n_heads, self.dims.d_head))

    def to_values(self, layer: int, x: Tensor, at: Tensor | None = None) -> Tensor:
        """Signals in the residual stream [n, T, D] (or [n, D] at positions) -> in the values [n, T, H * e]."""
        block = self.blocks[layer]
        v = push_through(block.attention_norm, x, at) @ block.into_values
        if block.open_values is None:
            return v
        return v * (block.open_values if at is None else block.open_values[at])

    def from_values(self, layer: int, g: Tensor, at: Tensor | None = None) -> Tensor:
        """The transpose of `to_values`."""
        block = self.blocks[layer]
        if block.open_values is not None:
            g = g * (block.open_values if at is None else block.open_values[at])
        return pull_through(block.attention_norm, g @ block.into_values.T, at)

    def from_mix(self, layer: int, z: Tensor, at: Tensor | None = None) -> Tensor:
        """Signals in the value mixes -> what attention adds to the residual stream."""
        return push_through(self.blocks[layer].attention_post, z @ self.blocks[layer].out_of_mix, at)

    def to_mix(self, layer: int, g: Tensor, at: Tensor | None = None) -> Tensor:
        """The transpose of `from_mix`."""
        return pull_through(self.blocks[layer].attention_post, g, at) @ self.blocks[layer].out_of_mix.T

    def own(self, layer: int, at: Tensor) -> Tensor:
        """How much each head looks from a position at itself, [n, H * e], repeated over d_head."""
        diagonal = torch.cat([p.diagonal(dim1=-2, dim2=-1) for _, p in self.head_chunks(layer)])  # [H, T]
        return diagonal[:, at].T.repeat_interleave(self.dims.d_head, 1)

    # ---- everything between write places and read stages ----

    def write(self, place: int, w: Tensor, at: Tensor | None = None) -> Tensor:
        """What is written at a place -> what enters the residual stream there (a post-norm lies between)."""
        return w if place == 0 else push_through(self.blocks[place - 1].mlp_post, w, at)

    @torch.no_grad()
    def pull(self, reads: Reads) -> Iterator[Pulled]:
        """Gradients of n readings, layer by layer from the top down to the embedding (layer -1)."""
        n, top = len(reads), int(reads.stage.max())
        g = reads.vector.new_zeros(n, self.n_tokens, self.dims.d_model)
        every = torch.arange(n, device=g.device)

        def inject(stage: int) -> None:
            here = every[reads.stage == stage]
            g[here, reads.position[here]] += reads.vector[here]

        inject(2 * self.dims.n_layers)
        for layer in range(min(top // 2, self.dims.n_layers - 1), -1, -1):
            at_mlp = pull_through(self.blocks[layer].mlp_post, g)
            if at_mlp is g:
                at_mlp = g.clone()  # g goes on changing
            if not self.parallel:
                inject(2 * layer + 1)
            mix = self.to_mix(layer, g)
            attention = g.clone()
            g = g + self.from_values(layer, self.mix(layer, mix, back=True))
            if self.parallel:
                inject(2 * layer + 1)
            inject(2 * layer)
            yield Pulled(layer, at_mlp, attention, self.by_head(mix))
        yield Pulled(-1, g)

    @torch.no_grad()
    def push(self, writes: Callable[[int], Tensor | None], at: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Signals of n sources at positions `at`, layer by layer: (layer, residual entering it, values [n, T, H, e]).

        writes(place): what the sources write there, [n, D], or None. The last yield is (n_layers, end, empty).
        """
        n = len(at)
        every = torch.arange(n, device=at.device)
        x = self.final.new_zeros(n, self.n_tokens, self.dims.d_model)

        def add(place: int) -> None:
            w = writes(place)
            if w is not None:
                x[every, at] += self.write(place, w, at)

        add(0)
        for layer in range(self.dims.n_layers):
            values = self.to_values(layer, x)
            yield layer, x, self.by_head(values)
            x = x + self.from_mix(layer, self.mix(layer, values))
            add(layer + 1)
        yield self.dims.n_layers, x, x.new_zeros(0)

    # ---- readings ----

    def logits(self, capped: bool = False, at: int = -1) -> Tensor:
        """Logits at a position, the last by default, [vocabulary]; before the softcap (Gemma) unless `capped`."""
        raw = self.final[at] @ self.unembed_weight
        raw = raw if self.unembed_bias is None else raw + self.unembed_bias
        return softcapped(raw, self.softcap) if capped else raw

    def reads(self, stage: int, norm: Norm | None, at: Tensor, vectors: Tensor, constants: Tensor) -> Reads:
        """n readings of the normed residual stream at a stage: vectors [n, D], at positions [n], plus constants [n]."""
        extra = 0 if norm is None else vectors @ norm.bias
        return Reads(torch.full_like(at, stage), at, pull_through(norm, vectors, at), constants + extra)


class Rewrite:
    """What to change while the real model runs. This one changes nothing; interventions.py has the one that does."""

    def embedding(self, x: Tensor) -> Tensor:
        return x

    def mix(self, layer: int, z: Tensor) -> Tensor:
        return z

    def mlp(self, layer: int, block: Block) -> Tensor:
        return block.mlp_out

    def pattern(self, layer: int, heads: slice, weights: Tensor, renormalise: bool) -> Tensor:
        return weights


def join(reads: Sequence[Reads]) -> Reads:
    """Several sets of readings as one."""
    columns = zip(*((r.stage, r.position, r.vector, r.constant) for r in reads), strict=True)
    return Reads(*(torch.cat(column) for column in columns))
