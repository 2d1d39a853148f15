"""Look into a Hugging Face model while it runs, and change what it computes, at Sites. Forward hooks, nothing patched.

    with capture(model, ["a3.h1", "m4"]) as seen:         seen["m4"]: what the MLP wrote, [batch, tokens, d_model]
        model(ids)                                        seen["a3.h1"]: the head's value mix, [batch, tokens, d_head]
    with patch(model, {"a3.h1": 0.0, "m4": seen["m4"]}):  run with a head silenced and an MLP's output replaced
        model(ids)

A head's value mix z is the attention-weighted sum of its values; what it writes to the residual stream is z W_O.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .architectures import Site, base_model, dimensions, mlp_modules, output_projections

Value = Tensor | float | Callable[[Tensor], Tensor]


class Enough(Exception):
    """Everything asked for has been seen; the rest of the forward pass is not needed."""


@contextmanager
def hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Hooks that are there inside the block, and gone when it ends or `Enough` ends it."""
    try:
        yield
    except Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()


def check_site(model: nn.Module, site: "str | Site") -> Site:
    """The parsed site; ValueError when this model has no such part."""
    site, d = Site.parse(site), dimensions(base_model(model).config)
    if site.layer >= d.n_layers or (site.head is not None and site.head >= d.n_heads):
        raise ValueError(f"no site {site} in this model: it has {d.n_layers} layers of {d.n_heads} heads")
    return site


@contextmanager
def capture(model: nn.Module, sites: Iterable[str | Site]) -> Iterator[dict[str, Tensor]]:
    """What these sites compute in the forward passes inside the block (the last one wins), with gradient.

    `a3` gives the value mixes of all heads [batch, tokens, n_heads, d_head], `a3.h1` one of them, `m4` an MLP's output.
    """
    seen: dict[str, Tensor] = {}

    def keep(site: str, value: Tensor) -> Tensor:
        seen[site] = value  # what is kept is what is passed on, or no gradient would ever reach it
        return value

    with patch(model, {site: partial(keep, site) for site in map(str, map(Site.parse, sites))}):
        yield seen


@contextmanager
def patch(model: nn.Module, values: Mapping[str, Value] | Mapping[Site, Value]) -> Iterator[None]:
    """Replace what sites compute: by a tensor, a number, or a function of what they would have computed.

    Shapes as in `capture`. Patches of a layer's heads are applied in the order given.
    """
    d = dimensions(base_model(model).config)
    mixes, mlps = output_projections(model), mlp_modules(model)

    def apply(value: Value, old: Tensor) -> Tensor:
        new = value(old) if callable(value) else value
        return new.to(old) if isinstance(new, Tensor) else torch.full_like(old, new)

    def heads(site: Site, value: Value) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            old = torch.unflatten(arguments[0], -1, (d.n_heads, d.d_head))
            if site.head is None:
                z = apply(value, old).expand_as(old)
            else:
                z = old.clone()
                z[..., site.head, :] = apply(value, old[..., site.head, :])
            return (z.flatten(-2), *arguments[1:])

        return hook

    def mlp(value: Value) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        return lambda module, arguments, output: apply(value, output).expand_as(output)

    def put(site: Site, value: Value) -> RemovableHandle:
        if site.kind == "a":
            return mixes[site.layer].register_forward_pre_hook(heads(site, value))
        return mlps[site.layer].register_forward_hook(mlp(value))

    checked = [(check_site(model, name), value) for name, value in values.items()]
    with hooked([put(site, value) for site, value in checked]):
        yield
