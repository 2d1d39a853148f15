"""One pass of a model over a prompt, kept, so that the next one computes only what is new.

1. A prompt that begins like an earlier one: only its tokens from the first new one on are run.
2. Edges taken out: only the blocks from the lowest of them up, and in these only the tokens from the first that loses
   an edge on. In a causal model nothing else can change.
3. Gradients: block by block from the top, each run again on what it had read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gating import gated_pattern
from ..models.decoder import Decoder


@dataclass(frozen=True)
class Pass:
    """What one pass computed. Gate margins are -inf where there is no such pair; a model without gates has none."""

    residual: list[Tensor]  # entering every block, and at the end leaving the last one, [1, tokens, d_model]
    keys: list[Tensor]  # per layer, as attention uses them, [1, n_heads, tokens, d_head]
    values: list[Tensor]
    weights: Tensor  # what multiplies the values, [layer, head, query, key]
    margins: Tensor | None


@torch.no_grad()
def full_pass(decoder: Decoder, x: Tensor, mask: Tensor | None = None) -> Pass:
    """From the embeddings x [1, tokens, d_model]. mask [layer, head, query, key]: multiplies the weights."""
    return _run(decoder, _empty(decoder, x), x, 0, 0, mask)


@torch.no_grad()
def longer_pass(decoder: Decoder, earlier: Pass, x: Tensor, same: int) -> Pass:
    """The same for embeddings x whose first `same` tokens are those of an earlier pass."""
    return _run(decoder, earlier, x[:, same:], 0, same, None)


@torch.no_grad()
def touched_pass(decoder: Decoder, untouched: Pass, mask: Tensor) -> Pass:
    """A pass again with a mask that is 1 for all but a few edges."""
    changed = (mask != 1).nonzero()
    if not len(changed):
        return untouched
    layer, token = int(changed[:, 0].min()), int(changed[:, 2].min())
    return _run(decoder, untouched, untouched.residual[layer][:, token:], layer, token, mask)


def _empty(decoder: Decoder, x: Tensor) -> Pass:
    d = decoder.dims
    heads = x.new_zeros(1, d.n_heads, 0, d.d_head)
    none = x.new_zeros(d.n_layers, d.n_heads, 0, 0)
    return Pass([x[:, :0]] * (d.n_layers + 1), [heads] * d.n_layers, [heads] * d.n_layers, none, none)


def _run(decoder: Decoder, known: Pass, x: Tensor, first: int, start: int, mask: Tensor | None) -> Pass:
    """Blocks from `first` on, for the tokens x [1, new tokens, d_model] that enter it at positions from `start` on.

    Of the blocks below, and of the tokens before, everything is what is known.
    """
    d, tokens = decoder.dims, start + x.shape[1]
    places = torch.arange(start, tokens, device=x.device)
    weights = x.new_zeros(d.n_layers, d.n_heads, tokens, tokens)
    margins = None if decoder.gates is None else torch.full_like(weights, -torch.inf)
    keys, values, residual = (list(of) for of in (known.keys, known.values, known.residual))
    for new, old in ((weights, known.weights), (margins, known.margins)):
        if new is not None and old is not None:
            new[:first] = old[:first] if first else new[:first]
            new[first:, :, :start, :start] = old[first:, :, :start, :start]

    def heads(layer: int, x: Tensor) -> Tensor:
        y = decoder.read(layer, x)
        q, k, v = (decoder.project(layer, through, y) for through in "qkv")
        q, k, v = decoder.prepared(layer, q, k, v, at=places)
        k = keys[layer] = torch.cat([known.keys[layer][:, :, :start], k], 2)
        v = values[layer] = torch.cat([known.values[layer][:, :, :start], v], 2)
        bias = torch.inf if decoder.gates is None else decoder.gates[layer]
        pattern, _ = gated_pattern(q, k, bias, **decoder.looks(layer))
        seen = pattern.weights
        if mask is not None:
            seen = taken_out(decoder, seen, mask[layer, :, start:])
        weights[layer, :, start:] = seen[0]
        if margins is not None:
            margins[layer, :, start:] = pattern.margin[0]
        return seen @ v

    for block in decoder.walk(x, heads=heads, first=first):
        for at, new in ((block.layer, block.residual), (block.layer + 1, block.after)):
            residual[at] = torch.cat([known.residual[at][:, :start], new], 1)
    return Pass(residual, keys, values, weights, margins)


def taken_out(decoder: Decoder, weights: Tensor, mask: Tensor) -> Tensor:
    """Weights times a mask. Where gates renormalise, the open ones share what a closed one had."""
    weights = mask * weights
    if decoder.gates is None or decoder.normalise != "open":
        return weights
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def log_probabilities(decoder: Decoder, run: Pass, at: Sequence[int]) -> Tensor:
    """What follows these positions, [positions, vocabulary]."""
    return decoder.unembed(run.residual[-1][:, list(at)])[0].float().log_softmax(-1)


def edge_gradient(
    decoder: Decoder, run: Pass, position: int, measure: Callable[[Tensor], Tensor], pause: Callable[[], None]
) -> Tensor:
    """d measure / d mask, [layer, head, query, key]; measure: of the log-probabilities after `position`.

    pause: called between blocks; other work may be done there.
    """
    until = position + 1  # what comes later cannot matter
    found = torch.zeros_like(run.weights)
    with torch.enable_grad():
        end = run.residual[-1][:, position:until].detach().requires_grad_()
        (last,) = torch.autograd.grad(measure(decoder.unembed(end)[0, 0].float().log_softmax(-1)), end)
    gradient = torch.zeros_like(run.residual[-1][:, :until])
    gradient[:, position:] = last
    for layer in reversed(range(decoder.dims.n_layers)):
        pause()
        with torch.enable_grad():
            x = run.residual[layer][:, :until].detach().requires_grad_()
            mask = torch.ones_like(run.weights[layer, :, :until, :until]).requires_grad_()

            def heads(layer: int, x: Tensor, mask: Tensor = mask) -> Tensor:
                weights, v = decoder.attend(layer, x)
                return taken_out(decoder, weights, mask) @ v

            block = next(decoder.walk(x, heads=heads, first=layer))
            gradient, found[layer, :, :until, :until] = torch.autograd.grad(block.after, (x, mask), gradient)
    return found
