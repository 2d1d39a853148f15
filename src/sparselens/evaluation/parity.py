"""`sparselens parity`: the largest difference of any logit between a family's model here and in transformers alone.

- dense: our forward pass (models/decoder.py), which circuits and traces are made with
- open: transformers' own forward pass with gates in it that are all open
- cached: the same, token by token with a key-value cache, after half of the tokens
- padded: the same, with padding on the left of one of two sequences

Models are small and random, one per family, with sliding windows, grouped keys and soft-caps where the family has
them; or a model by name. Everything in float32 on the CPU.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from ..config import Gate
from ..models.architectures import ARCHITECTURES
from ..models.decoder import Decoder
from ..models.loading import add_gates, is_gated, load
from ..runs.run import check_writable, provenance, write_json

ALLOWED = 1e-4  # of the largest logit: what float32 rounds away, and a mistake does not
TOKENS, PADDING, OPEN = 24, 5, Gate(bias=1e4)
VOCABULARY = 96
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 5}
OWN: dict[str, dict[str, Any]] = {  # what else a family's random model has
    "llama": GROUPED,
    "mistral": GROUPED | WINDOW,
    "qwen2": GROUPED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GROUPED | {"head_dim": 12},
    "olmo2": GROUPED,
    "gemma2": GROUPED | WINDOW | {"head_dim": 12, "attn_logit_softcapping": 2.0},
    "gemma3_text": GROUPED | WINDOW | {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"]},
}


class ParityRow(TypedDict):
    """Largest differences of any logit, as shares of the largest logit."""

    model: str
    dense: float
    open: float
    cached: float
    padded: float


def parity(
    models: Sequence[str] = (), *, json: str | Path | None = None, say: Callable[[str], None] = print
) -> list[ParityRow]:
    """A row per family (or per model named); ValueError, after the table, where any is above `ALLOWED`."""
    check_writable(None if json is None else Path(json))
    rows = []
    for name in models or sorted(ARCHITECTURES):
        random = name in ARCHITECTURES
        model: Any = random_model(name) if random else load(name)[0]
        if is_gated(model):
            raise ValueError(f"{name} is sparse already; parity is about the dense model, before and after gates")
        rows.append(differences(name, model))
    if json is not None:
        write_json(Path(json), {"rows": rows, "allowed": ALLOWED, "provenance": provenance()})
    say(table(rows))
    # NaN is above and below nothing.
    wrong = [row["model"] for row in rows if not all(row[column] <= ALLOWED for column in COLUMNS)]
    if wrong:
        raise ValueError(f"not the same as in transformers: {', '.join(wrong)} (more than {ALLOWED:g} of a logit)")
    return rows


def random_model(family: str, seed: int = 0) -> nn.Module:
    """A random model whose attention is far from uniform, as far as norms of queries and keys allow that."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SIZES, **OWN.get(family, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(12)
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def differences(name: str, model: Any) -> ParityRow:
    """The four differences of one dense model. The model itself stays as it is."""
    model = copy.deepcopy(model).float().cpu().eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(1, model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    plain = model(ids, use_cache=False).logits
    behind_padding = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    decoder = Decoder(model)
    mine = decoder.unembed(decoder.run(decoder.begin(ids), lambda layer, weights, values: weights @ values))
    add_gates(model, OPEN)
    opened = model(ids, use_cache=False).logits
    padded = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    real = mask.bool()
    return {
        "model": name, "dense": _share(mine, plain), "open": _share(opened, plain),
        "cached": _share(_with_cache(model, ids), plain[:, TOKENS // 2 :]),
        "padded": _share(padded[real], behind_padding[real]),
    }  # fmt: skip


def _with_cache(model: Any, ids: Tensor) -> Tensor:
    """Logits of the second half, one token at a time."""
    half, cache, found = TOKENS // 2, DynamicCache(config=model.config), []
    model(ids[:, :half], past_key_values=cache, use_cache=True)
    for i in range(half, TOKENS):
        found.append(model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, 1)


def _share(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


COLUMNS: tuple[Literal["dense", "open", "cached", "padded"], ...] = ("dense", "open", "cached", "padded")


def table(rows: Sequence[ParityRow]) -> str:
    """As text."""
    width = max(len(row["model"]) for row in rows) + 2
    lines = [f"{'':{width}}" + "".join(f"{column:>10}" for column in COLUMNS)]
    lines += [f"{row['model']:{width}}" + "".join(f"{row[column]:10.1e}" for column in COLUMNS) for row in rows]
    return "\n".join(
        [*lines, f"largest difference of any logit to transformers {transformers.__version__}, over the largest logit"]
    )
