"""What a trace explains: tokens, a difference of two, any direction; each a reading of the residual stream's end."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .linear_model import Frozen
from .rows import TargetRow


class Target(NamedTuple):
    """One thing to explain, and how the normed end of the residual stream is read for it."""

    row: TargetRow
    direction: Tensor  # [d_model]
    constant: Tensor  # []


def choose_targets(
    frozen: Frozen, tokenizer: PreTrainedTokenizerBase, target: Any, mass: float = 0.95, most: int = 10, at: int = -1
) -> list[Target]:
    """What to explain at a position, weights summing to 1; `target` as `sl.trace` takes it."""
    probability = frozen.logits(capped=True, at=at).softmax(-1)
    if isinstance(target, Tensor):
        if target.shape != (frozen.dims.d_model,):
            raise ValueError(f"a direction must have shape [{frozen.dims.d_model}]; got {list(target.shape)}")
        direction = target.to(frozen.final)
        return [_target("direction", None, None, 1.0, direction, direction.new_zeros(()))]
    weight = frozen.unembed_weight
    bias = weight.new_zeros(weight.shape[1]) if frozen.unembed_bias is None else frozen.unembed_bias
    if isinstance(target, str) and " - " in target:
        target = tuple(target.split(" - ", 1))
    if isinstance(target, tuple):
        if len(target) != 2:
            raise ValueError(f"target={target!r}: a difference takes two tokens, ('small', 'large')")
        plus, minus = (_token(tokenizer, t, weight.shape[1]) for t in target)
        direction = weight[:, plus] - weight[:, minus]
        label = f"{text_of(tokenizer, [plus])} - {text_of(tokenizer, [minus])}"
        return [_target(label, None, None, 1.0, direction, bias[plus] - bias[minus])]
    if target is None:
        ranked, order = probability.sort(descending=True)
        enough = int((ranked.cumsum(0) < mass).sum()) + 1
        tokens = order[: min(enough, most)].tolist()
    else:
        tokens = [_token(tokenizer, t, weight.shape[1]) for t in (target if isinstance(target, list) else [target])]
    total = float(probability[tokens].sum()) or 1.0
    mean, mean_bias = weight.mean(1), bias.mean()
    return [
        _target(text_of(tokenizer, [t]), t, p, p / total, weight[:, t] - mean, bias[t] - mean_bias)
        for t, p in zip(tokens, probability[tokens].tolist(), strict=True)
    ]


def _target(
    label: str, token: int | None, probability: float | None, weight: float, direction: Tensor, constant: Tensor
) -> Target:
    return Target({"label": label, "token": token, "probability": probability, "weight": weight}, direction, constant)


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Tokens as text."""
    return str(tokenizer.decode(ids))


def _token(tokenizer: PreTrainedTokenizerBase, text: str | int, vocabulary: int) -> int:
    if isinstance(text, int):
        if not 0 <= text < vocabulary:
            raise ValueError(f"target token {text}: the vocabulary has {vocabulary} tokens")
        return text
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        pieces = [text_of(tokenizer, [i]) for i in ids]
        raise ValueError(
            f"target {text!r} is {len(ids)} tokens, {pieces}: name a single one "
            "(with its leading space, if it has one), or give its id"
        )
    return int(ids[0])
