"""Score every edge by what removing it would change: EAP, EAP-IG on inputs, GIM, exact patching.

    score(u -> v) = < what u writes (clean) - what u writes (corrupted),  gradient of the metric at v's input >

summed over positions, averaged over prompts. It estimates m(model) - m(model with that one edge corrupted): positive
means the edge raises the metric. EAP takes the gradient on the clean prompt. EAP-IG takes it at points between the
corrupted and the clean embeddings, and averages:

    path="whole"   over the whole path, as published
    path="own"     over the part of the path that removing this edge would cover. An edge that carries a share r of all
                   that changes at its reader moves the reader by r of the way: the gradient is averaged over [1 - r, 1]
                   r = <what u changes, what all writers before v change> / |what all writers before v change|^2

With "own", small edges are scored by the clean gradient, which is exact for them, and an edge that carries everything
by the whole path, which it would cover. That ranks all edges more like exact patching; the few largest, which make the
circuit, are chosen better by "whole" (docs/circuits.md). GIM is EAP with other rules in the backward pass (GimDecoder).
Exact patching removes every edge in turn.

No copy of the residual stream is kept per head. Going back through a block:

1. Run the block again from its stored input, keeping a graph for this block alone.
2. The MLP's reader gradient is the vector-Jacobian product of norm and MLP.
3. One backward pass through attention gives the gradients at q, k, v; head h's reader gradient is
   LN^T(W_Q^h^T dq_h), made for a slice of the tokens at a time and multiplied with the writers' differences at once.
4. A head's difference is (z clean - z corrupted) W_O^h, made from the stored z for the same slice.

Stored per token: block inputs, differences of z, differences of MLP outputs: 3 * n_layers * d_model numbers.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..models.architectures import Dimensions, Parts, softcapped, unembedding
from ..models.decoder import Decoder, Norm
from ..runs import distributed
from ..tasks.prompts import Prompts
from .run import Ablation, Patcher

Path = Literal["own", "whole"]
MOST_EXACT = 4000  # edges; each costs a forward pass over all prompts
SLICES = 8  # reader gradients exist for an eighth of the tokens at a time
WRITERS_AT_ONCE = 48  # writers' differences in the residual stream, for the same slice


@dataclass(frozen=True)
class Memory:
    """What scoring will need beside the model's weights, in bytes."""

    per_token: float
    tokens: int
    logits: float  # logits at the reads, and the model's own on both prompts

    @property
    def total(self) -> float:
        return self.per_token * self.tokens + self.logits

    def __str__(self) -> str:
        each = f"{self.per_token / 2**20:.2f} MB per token, {self.tokens:,} tokens at a time"
        return f"{self.total / 2**20:,.0f} MB ({each})"


def estimate_memory(
    dims: Dimensions, d_mlp: int, n_prompts: int, tokens: int, reads: int = 1, vocabulary: int = 0, gated: bool = False
) -> Memory:
    """Peak memory of scoring n_prompts prompts of `tokens` tokens at once, fp32. d_mlp: width inside the MLP."""
    stored = 3 * dims.n_layers * dims.d_model
    # One block's graph: residual streams, norms, q/k/v with rotations; attention patterns (or flash statistics).
    width = dims.n_heads * dims.d_head
    patterns = dims.n_heads * tokens * 8 if gated else 0
    graph = max(8 * dims.d_model + 16 * width + patterns, 6 * dims.d_model + 9 * d_mlp)
    # Gradients at q, k, v, and one slice of reader gradients with their norm's temporaries.
    readers = 4 * width + (8 * dims.n_heads + 2 * min(WRITERS_AT_ONCE, 2 * dims.n_heads)) * dims.d_model / SLICES
    return Memory(4.0 * (stored + graph + readers), n_prompts * tokens, 4.0 * n_prompts * 6 * reads * vocabulary)


class Differences(NamedTuple):
    """What every writer writes on the clean prompts minus what it writes in the base. Per layer, but for the input."""

    at_input: Tensor  # [batch, tokens, d_model]
    z: list[Tensor]  # [batch, n_heads, tokens, d_head], post-norm factor included
    mlp: list[Tensor]  # [batch, tokens, d_model]


def eap(
    decoder: Decoder, prompts: Prompts, steps: int = 0, n_at_once: int = 16,
    progress: Callable[[int], None] = lambda n: None, path: Path = "whole", ablation: Ablation = "corrupted",
) -> np.ndarray:  # fmt: skip
    """EAP (steps=0: gradient on the clean prompt) or EAP-IG scores, [readers, writers] fp64.

    Several processes share the prompts; the scores are the same in all of them.
    """
    c = decoder.components
    points = path_points(steps, path)
    own_path = len(points) > 1 and path == "own"
    scores = torch.zeros(len(points), c.n_readers, c.n_writers, dtype=torch.float64)
    products = torch.zeros(c.n_writers, c.n_writers, dtype=torch.float64)
    prompts = prompts.to(next(decoder.model.parameters()).device)
    base = None if ablation == "corrupted" else Patcher(decoder, prompts, ablation)
    own = torch.arange(len(prompts))[distributed.rank() :: distributed.world()]
    for first in range(0, len(own), n_at_once):
        some = own[first : first + n_at_once]
        part = prompts.take(some)
        clean, corrupted = decoder.begin(part.clean), decoder.begin(part.corrupted)
        if base is None:
            differences = _differences(decoder, part, clean, corrupted, _writes(decoder, corrupted))
        else:
            run = base.base_of(some)
            differences = _differences(decoder, part, clean, run.embedding, zip(run.z, run.mlp_out, strict=True))
        if own_path:
            _writer_products(decoder, differences, products)
        for point, at_point in zip(points, scores, strict=True):
            _score_once(decoder, part, clean * point + corrupted * (1 - point), differences, at_point)
            progress(len(part) * distributed.world())
    scores, products = distributed.total(scores), distributed.total(products)
    if own_path:
        scores *= torch.from_numpy(stretch_weights(reader_shares(c.possible, products.numpy()), points))
    else:
        scores /= len(points)
    return (scores.sum(0) / len(prompts)).numpy()


def path_points(steps: int, path: Path) -> list[float]:
    """Where gradients are taken: 0 is the corrupted prompt, 1 the clean one. Ascending."""
    if steps <= 1:
        return [1.0]
    if path == "whole":
        return [(i + 0.5) / steps for i in range(steps)]
    return [1 - (i / (steps - 1)) ** 2 for i in reversed(range(steps))]  # closer where most edges need them


def reader_shares(possible: np.ndarray, products: np.ndarray) -> np.ndarray:
    """[readers, writers]: which share of the change at a reader each writer carries, between 0 and 1.

    products [writers, writers]: inner products of what the writers change, summed over prompts and positions.
    """
    before = possible.astype(float)
    total = np.einsum("ru,uw,rw->r", before, products, before)
    shares = np.abs(before @ products) / np.maximum(total, np.finfo(float).tiny)[:, None]
    return np.asarray(shares.clip(1e-9, 1.0))


def stretch_weights(shares: np.ndarray, points: list[float]) -> np.ndarray:
    """[points, *shares.shape]: weights that average a function, linear between points, over [1 - share, 1]."""
    weights = np.zeros((len(points), *shares.shape))
    for i, (left, right) in enumerate(pairwise(points)):
        begin = np.clip(1 - shares, left, right)
        # The mean of a linear function is its value in the middle of the part that is covered.
        place = ((begin + right) / 2 - left) / (right - left)
        weights[i] += (right - begin) * (1 - place)
        weights[i + 1] += (right - begin) * place
    return np.asarray(weights / weights.sum(0))


def check_exact(n_edges: int) -> None:
    """Refuse exact patching of a big graph."""
    if n_edges > MOST_EXACT:
        raise ValueError(
            f"exact patching would need {n_edges:,} forward passes over all prompts (at most {MOST_EXACT:,}); "
            "use --method eap-ig"
        )


def exact(patcher: Patcher, progress: Callable[[int], None] = lambda n: None) -> np.ndarray:
    """m(model) - m(model with that one edge corrupted), for every edge, averaged over prompts."""
    c = patcher.decoder.components
    edges = np.flatnonzero(c.possible)
    check_exact(len(edges))
    scores = np.zeros(c.possible.size)
    together = 512  # masks to hold in memory at once
    for first in range(0, len(edges), together):
        some = edges[first : first + together]
        masks = np.repeat(c.possible[None], len(some), 0).reshape(len(some), -1)
        masks[np.arange(len(some)), some] = False
        effect = patcher.m_model.mean() - patcher.run(masks.reshape(len(some), *c.possible.shape), progress).mean(1)
        scores[some] = effect.numpy()
    # Circuits run in batches of different shapes round differently; an edge that does nothing should score nothing.
    noise = 1e-6 * float((patcher.m_model - patcher.m_nothing).abs().mean())
    return np.where(np.abs(scores) > noise, scores, 0.0).reshape(c.possible.shape)


@torch.no_grad()
def _writes(decoder: Decoder, embedding: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What each layer writes: (z, post-norm factor included, and what the MLP adds)."""
    for block in decoder.walk(embedding):
        yield decoder.scaled(block.layer, block.z), block.mlp_out


@torch.no_grad()
def _differences(
    decoder: Decoder, prompts: Prompts, clean: Tensor, base: Tensor, writes: Iterable[tuple[Tensor, Tensor]]
) -> Differences:
    """Clean prompts minus a base, of which the embeddings and what each layer writes are given.

    Nothing changes after a prompt's end: padding has no say in what share of a reader's input an edge carries.
    """
    real = (torch.arange(clean.shape[1], device=clean.device) < prompts.lengths[:, None])[..., None].to(clean.dtype)
    pairs = zip(_writes(decoder, clean), writes, strict=True)
    layers = [((a - b) * real[:, None], (c - d) * real) for (a, c), (b, d) in pairs]
    return Differences((clean - base) * real, [z for z, _ in layers], [mlp for _, mlp in layers])


def _score_once(
    decoder: Decoder, prompts: Prompts, embedding: Tensor, differences: Differences, scores: Tensor
) -> None:
    """Add the scores that the gradient at one point gives."""
    c = decoder.components
    with torch.no_grad():
        inputs = [embedding, *(block.after for block in decoder.walk(embedding))]
    final = inputs.pop().requires_grad_()
    with torch.enable_grad():
        metric = prompts.score(decoder.unembed(prompts.at_reads(final))).sum()
        (gradient,) = torch.autograd.grad(metric, final)
    del final
    for part in _slices(len(gradient)):
        _contract(decoder, gradient[None, part], [c.output], c.n_layers, differences, scores, part)
    for layer in reversed(range(decoder.dims.n_layers)):
        gradient = _back(decoder, layer, inputs.pop(), gradient, differences, scores)


def _back(
    decoder: Decoder, layer: int, x: Tensor, gradient: Tensor, differences: Differences, scores: Tensor
) -> Tensor:
    """Score the readers of one block; gradient after the block -> gradient before it."""
    c, heads = decoder.components, range(decoder.dims.n_heads)
    with torch.no_grad():
        y = decoder.read(layer, x)
        qkv = [decoder.project(layer, through, y).requires_grad_() for through in "qkv"]
        middle = x if c.parallel else x + decoder.write(layer, decoder.mix(layer, *qkv))
    middle = middle.detach().requires_grad_()
    with torch.enable_grad():
        (at_mlp,) = torch.autograd.grad(decoder.mlp(layer, middle), middle, gradient)
    del middle
    if not c.parallel:
        gradient = gradient + at_mlp
    with torch.enable_grad():
        written = decoder.write(layer, decoder.mix(layer, *qkv))
        at_qkv = torch.autograd.grad(written, qkv, gradient)
    del written, qkv
    gradient = gradient + at_mlp if c.parallel else gradient
    rows = [c.head_reader(layer, through, head) for through in "qkv" for head in heads] + [c.mlp_reader(layer)]
    for part in _slices(len(x)):
        readers = [at_mlp[None, part]]
        for through, at in zip("vkq", reversed(at_qkv), strict=True):
            readers.insert(0, _through_norm(decoder, layer, x[part], decoder.unproject(layer, through, at[part])))
            gradient[part] += readers[0].sum(0)
        # All readers of the block together: what writers wrote is made from z once for all of them.
        _contract(decoder, torch.cat(readers), rows, layer, differences, scores, part)
        if not c.parallel:  # the MLP also reads the heads of its own block
            own = [_written(decoder, layer, differences, part)]
            _add(at_mlp[None, part], rows[-1:], own, c.head_writer(layer), scores)
    return gradient


def _through_norm(decoder: Decoder, layer: int, x: Tensor, gradient: Tensor) -> Tensor:
    """LN^T: gradients after the norm, one per head [heads, batch, tokens, d_model], to gradients before it."""
    if decoder.parts[layer].attention_norm is None:
        return gradient
    copies = x.detach().expand_as(gradient).requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(decoder.read(layer, copies), copies, gradient)[0]


@torch.no_grad()
def _writer_products(decoder: Decoder, differences: Differences, products: Tensor) -> None:
    """Add the inner products of what all writers change to products [writers, writers]."""
    c = decoder.components
    at_input, mlps = differences.at_input, differences.mlp
    before = products.clone()
    for part in _slices(len(at_input)):
        products[0, 0] += at_input[part].double().square().sum().cpu()
        for layer in range(c.n_layers):
            own = torch.cat([_written(decoder, layer, differences, part), mlps[layer][part].flatten()[None]])
            rows = list(range(c.head_writer(layer), c.mlp_writer(layer) + 1))
            _contract(decoder, own, rows, layer + 1, differences, products, part)
    # Only earlier (or equal) columns were filled in; within a layer all of them.
    added = products - before
    layer_of = torch.tensor([0] + [1 + (i - 1) // (c.n_heads + 1) for i in range(1, c.n_writers)])
    later = layer_of[None, :] > layer_of[:, None]
    products.copy_(before + torch.where(later, added.T, added))


def _slices(batch: int) -> list[slice]:
    size = -(-batch // SLICES)
    return [slice(i, i + size) for i in range(0, batch, size)]


@torch.no_grad()
def _contract(
    decoder: Decoder, readers: Tensor, rows: list[int], n_layers: int, differences: Differences, scores: Tensor,
    part: slice,
) -> None:  # fmt: skip
    """Inner products of reader gradients [readers, batch, tokens, d_model] with everything the first n_layers write."""
    block, first = [differences.at_input[part].flatten()[None]], 0
    for layer in range(n_layers):
        block += [_written(decoder, layer, differences, part), differences.mlp[layer][part].flatten()[None]]
        # A handful of writers at a time is slow, all of them at once is a copy of the residual stream for each.
        if sum(map(len, block)) >= WRITERS_AT_ONCE and layer + 1 < n_layers:
            first = _add(readers, rows, block, first, scores)
            block = []
    _add(readers, rows, block, first, scores)


def _written(decoder: Decoder, layer: int, differences: Differences, part: slice) -> Tensor:
    """What the heads of one layer wrote, [heads, batch * tokens * d_model]."""
    return decoder.write_each(layer, differences.z[layer][part]).flatten(1)


@torch.no_grad()
def _add(readers: Tensor, rows: list[int], block: list[Tensor], first: int, scores: Tensor) -> int:
    """Add the scores of consecutive writers, the first of them being `first`; returns the one after them."""
    products = torch.cat(block) @ readers.flatten(1).T
    scores[rows, first : first + len(products)] += products.T.double().cpu()
    return first + len(products)


@dataclass(frozen=True)
class BackwardRules:
    """Where GIM's backward pass is not the derivative. All ones and no frozen norm: EAP."""

    temperature: float = 2.0  # of attention's softmax
    freeze_norms: bool = True  # denominators are constants; the mean that a LayerNorm subtracts is not
    q: float = 0.25  # factors of gradients: a product shares its gradient among its two factors, and q and k come
    k: float = 0.25  # in by two products, q k and weights v
    v: float = 0.5
    gated_mlp: float = 0.5  # act(gate) * up


class GimDecoder(Decoder):
    """The same forward pass, with GIM's rules in the backward pass: `eap` with this decoder gives GIM's scores.

    The rules are those of Edin et al., arXiv:2505.17630, as github.com/corticph/gim has them (its TransformerLens path;
    no code is taken from there). Softmax: dx = p (g - <p, g>) with p = softmax(x / T), x as attention uses it (capped,
    masked) and no 1 / T. Factors on q, k and v of every head. Frozen: all norms, those of queries and keys, after a
    part and before the logits included. Their edge score is EAP's: (clean - corrupted) * gradient on the clean prompt.
    Differences: gate and up have one factor (both are halved, so that the MLP is); a softmax in the metric keeps its
    derivative, theirs does not; gates, which they have not, are constants, and p is what the heads' weights would be at
    x / T behind the same gates. Their package left gated MLPs alone up to 0.1.4, the paper's own code halves them.
    """

    def __init__(self, model: nn.Module, rules: BackwardRules | None = None):
        super().__init__(model)
        self.rules = rules = rules or BackwardRules()
        self.last = unembedding(model)
        if rules.freeze_norms:
            self.parts = [_with_frozen_norms(part) for part in self.parts]
            self.last = self.last._replace(norm=_FrozenNorm(self.last.norm))
        # T times the derivative of attention at x / T is the rule for q and k; gates S + b > 0 stay as they are.
        self._soft, t = copy.copy(self), rules.temperature
        soft = [(part.scale / t, part.softcap and part.softcap / t) for part in self.parts]
        self._soft.parts = [replace(p, scale=s, softcap=c) for p, (s, c) in zip(self.parts, soft, strict=True)]
        self._soft.gates = self.gates and [bias / t for bias in self.gates]

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor, heads: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return super().mix(layer, q, k, v, heads)
        rules = self.rules
        q, k, v = _slower(q, rules.q), _slower(k, rules.k), _slower(v, rules.v)
        z = super().mix(layer, q.detach(), k.detach(), v, heads)
        soft = Decoder.mix(self._soft, layer, q, k, v.detach(), heads)
        return z.add(soft - soft.detach(), alpha=rules.temperature)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gated = any(hasattr(self.parts[layer].mlp, name) for name in ("gate_proj", "gate_up_proj"))
        return _slower(super().mlp(layer, x), self.rules.gated_mlp if gated else 1.0)

    def unembed(self, x: Tensor) -> Tensor:
        logits = self.last.norm(x) @ self.last.weight
        return softcapped(logits if self.last.bias is None else logits + self.last.bias, self.last.softcap)


def _slower(x: Tensor, factor: float) -> Tensor:
    """x itself, with `factor` times its gradient."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: factor * gradient)
    return x


def _with_frozen_norms(part: Parts) -> Parts:
    names = ("attention_norm", "attention_post", "mlp_norm", "mlp_post", "query_norm", "key_norm")
    frozen: dict[str, Any] = {n: _FrozenNorm(norm) for n in names if (norm := getattr(part, n)) is not None}
    return replace(part, **frozen)


class _FrozenNorm(nn.Module):
    """A norm whose denominators are constants in the backward pass."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm
        self.held: Norm | None = None  # asked of the norm once, when it is clear how wide it is

    def forward(self, x: Tensor) -> Tensor:
        if self.held is None:
            with torch.no_grad():
                self.held = Norm(self.norm, x[(0,) * (x.ndim - 1)])
        out: Tensor = _Freeze.apply(x, self.norm, copy.copy(self.held))  # type: ignore[no-untyped-call]
        return out


class _Freeze(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.Module, held: Norm) -> Any:
        held(x)  # keeps the denominators
        ctx.held = held
        return norm(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.held.pull(gradients[0]), None, None
