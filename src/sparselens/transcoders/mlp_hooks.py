"""A model and its transcoder together: what the MLPs see, and the model run on reconstructions instead.

inputs, outputs = observe(model, batch, "mlp-input")     per layer [batch, tokens, d_model]: one forward pass, no logits
with replaced(model, transcoder):                        every MLP's output is what the transcoder makes of the
    model(ids)                                           inputs so far, layer by layer in one forward pass
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.architectures import base_model, dimensions, mlp_modules, parts
from ..models.hooks import Enough, hooked
from ..models.identity import same_model, sketch
from ..runs import distributed
from .transcoder import Transcoder


def check_fit(model: nn.Module, transcoder: Transcoder) -> None:
    """ValueError when the transcoder was made for another model: one of another shape, or with other weights."""
    d = dimensions(base_model(model).config)
    mine, its = (transcoder.n_layers, transcoder.d_model), (d.n_layers, d.d_model)
    if mine != its:
        named = f" ({transcoder.model_name})" if transcoder.model_name else ""
        raise ValueError(
            f"the transcoder has {mine[0]} layers of width {mine[1]}, the model {its[0]} of width {its[1]}: it was "
            f"made for another model{named}; use the one that was trained on this model"
        )
    its_own = transcoder.sketch and sketch(model)
    if transcoder.sketch and its_own and not same_model(transcoder.sketch, its_own):
        trained_on = transcoder.model_name or "another model"
        name = getattr(base_model(model).config, "_name_or_path", "") or "this model"
        kinds = [f"{'sparse' if one['gates'] else 'dense'}" for one in (transcoder.sketch, its_own)]
        raise ValueError(
            f"the transcoder was trained on {trained_on!r} ({kinds[0]}), not on {name!r} ({kinds[1]}), whose weights "
            "are others; use the transcoder that was trained on it (knowingly: set transcoder.sketch = None)"
        )


@contextmanager
def _reading(model: nn.Module, hook: str, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand what every layer's features read to `keep`, before its MLP runs."""
    modules = mlp_modules(model)
    if hook == "residual":
        norms = [parts(model, layer).mlp_norm for layer in range(len(modules))]
        modules = [mlp if norm is None else norm for mlp, norm in zip(modules, norms, strict=True)]

    def read(layer: int, module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
        keep(layer, arguments[0] if arguments else next(iter(keywords.values())))

    with hooked([m.register_forward_pre_hook(partial(read, i), with_kwargs=True) for i, m in enumerate(modules)]):
        yield


@torch.no_grad()
def observe(model: nn.Module, batch: dict[str, Tensor], hook: str) -> tuple[list[Tensor], list[Tensor]]:
    """(what the features read, what the MLPs return), per layer [batch, tokens, d_model]. Gates are deterministic."""
    n_layers = dimensions(base_model(model).config).n_layers
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def wrote(layer: int, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        outputs[layer] = output
        if layer + 1 == n_layers and not distributed.is_sharded(model):  # which would stay open if cut off
            raise Enough  # the logits are not needed

    handles = [m.register_forward_hook(partial(wrote, i)) for i, m in enumerate(mlp_modules(model))]
    with hooked(handles), _reading(model, hook, inputs.__setitem__):
        model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False)
    return [inputs[i] for i in range(n_layers)], [outputs[i] for i in range(n_layers)]


@contextmanager
def replaced(model: nn.Module, transcoder: Transcoder) -> Iterator[None]:
    """Inside the block, the model's MLPs return the transcoder's reconstruction of what they would have returned.

    1. before MLP l runs, its features read their input, which earlier reconstructions have already changed
    2. what they write to layers l, l + 1, ... is added to what these layers have been promised so far
    3. MLP l returns its promise plus b_dec[l]
    """
    check_fit(model, transcoder)
    promised: dict[int, Tensor] = {}

    def encode(layer: int, x: Tensor) -> None:
        if layer == 0:
            promised.clear()
        dtype = transcoder.W_enc[layer].dtype
        with torch.autocast(x.device.type, enabled=False):
            written = transcoder.written(layer, transcoder.encode(layer, x.to(dtype)))
        for j, one in enumerate(written.unbind(-2)):
            promised[layer + j] = promised[layer + j] + one if layer + j in promised else one

    def answer(layer: int, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Any:
        return (promised.pop(layer) + transcoder.b_dec[layer]).to(output.dtype)

    handles = [m.register_forward_hook(partial(answer, i)) for i, m in enumerate(mlp_modules(model))]
    with hooked(handles), _reading(model, transcoder.input_hook, encode):
        yield
