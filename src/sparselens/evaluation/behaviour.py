"""Is it still the same model? What a base, a control and a sparse model say, side by side.

1. text: how often the likeliest next token is the base's, and KL(base || model), over held-out sequences
2. tasks: the share of prompts each model answers rightly
3. ordinary prompts: the likeliest next tokens of each, with their probabilities
4. where on the text the others differ from the first (differences.py)

The first model is the one the others are compared with.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import NotRequired

from .. import tasks as registry
from ..circuits.discover import answered
from ..data.batches import Batches
from ..models.architectures import base_model, dimensions
from ..runs.rows import EvaluationRow
from ..tasks.prompts import build
from ..tasks.registry import Words
from ..training.measure import measure
from .differences import Differences, Group, differences


class Likely(TypedDict):
    token: str
    p: float


class SaidRow(TypedDict):  # what every model says after a prompt
    prompt: str
    next: dict[str, list[Likely]]
    kl: dict[str, float]


class Behaviour(TypedDict):  # behaviour.json: everything by the names of the models
    models: list[str]
    compared_with: str
    text: NotRequired[Mapping[str, EvaluationRow]]
    differences: NotRequired[dict[str, Differences]]  # model -> where it differs from the first on the text
    tasks: dict[str, dict[str, dict[str, float]]]  # task -> model -> accuracy, standard_error, prompts
    prompts_same_top1: dict[str, int]
    prompts: list[SaidRow]


def read_prompts(path: Path | None = None) -> list[str]:
    """One prompt per line; without a file, fifty ordinary ones."""
    if path is not None and not path.is_file():
        raise ValueError(f"no such file of prompts: {path}")
    try:
        text = (path or files(__package__) / "ordinary_prompts.txt").read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv") from None
    prompts = [line.rstrip() for line in text.split("\n") if line.strip()]  # a space at the end would be a token
    if not prompts:
        raise ValueError(f"{path} holds no prompts; expected one per line")
    return prompts


def behaviour(
    models: dict[str, nn.Module], tokenizer: PreTrainedTokenizerBase, prompts: list[str] | None = None, *,
    batches: Batches | None = None, sequences: tuple[int, int] | None = None,
    tasks: Sequence[str | registry.Task] = (), task_prompts: int = 200, top: int = 3, seed: int = 0,
    micro_batch: int = 8, say: Callable[[str], None] = print,
) -> Behaviour:  # fmt: skip
    """Everything side by side; see the top of this file. All models share one tokenizer.

    prompts: default, the fifty ordinary ones. batches: held-out text (data.TextBatches), `sequences` (first, count) of
    it or all; without it that part is left out. tasks: names or Tasks, `task_prompts` prompts of each.
    """
    check_one_vocabulary(models)
    first = next(iter(models))
    longest = min(dimensions(base_model(model).config).max_tokens for model in models.values())
    found = [registry.find(task) for task in tasks]
    built = {task.name: build(task, tokenizer, task_prompts, seed, longest, say) for task in found}
    texts = _next_tokens(models, tokenizer, read_prompts() if prompts is None else prompts, top)
    right = {
        task: {name: _share(answered(model, pairs)) for name, model in models.items()} for task, pairs in built.items()
    }
    same = {name: [one["next"][name][0]["token"] == one["next"][first][0]["token"] for one in texts] for name in models}
    result: Behaviour = {
        "models": list(models), "compared_with": first, "tasks": right, "prompts": texts,
        "prompts_same_top1": {name: sum(hits) for name, hits in same.items()},
    }  # fmt: skip
    if batches is not None:
        start, count = sequences or (0, batches.n_heldout)
        result["text"] = {
            name: measure(model, batches, start, count, micro_batch=micro_batch, base=models[first]).row(name, name)
            for name, model in models.items()
        }
        result["differences"] = {
            name: differences(models[first], model, tokenizer, batches, start, count, micro_batch=micro_batch)
            for name, model in models.items()
            if name != first
        }
    return result


def check_one_vocabulary(models: dict[str, nn.Module]) -> None:
    """ValueError where the models' tokens cannot be the same."""
    sizes = {name: base_model(model).config.vocab_size for name, model in models.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"models with different vocabularies cannot be compared token by token: {sizes}")


def _share(right: torch.Tensor) -> dict[str, float]:
    share, n = right.float().mean().item(), len(right)
    return {"accuracy": share, "standard_error": (share * (1 - share) / n) ** 0.5, "prompts": n}


@torch.no_grad()
def _next_tokens(
    models: dict[str, nn.Module], tokenizer: PreTrainedTokenizerBase, prompts: list[str], top: int
) -> list[SaidRow]:
    """Per prompt and model: the likeliest next tokens, and KL(first || model) of that one distribution."""
    words, rows = Words(tokenizer), list[SaidRow]()
    for prompt in prompts:
        row: SaidRow = {"prompt": prompt, "next": {}, "kl": {}}
        reference = None
        for name, model in models.items():
            ids = torch.tensor([words.encode(prompt)], device=next(model.parameters()).device)
            log_p = model(input_ids=ids, use_cache=False).logits[0, -1].double().log_softmax(-1).cpu()
            reference = log_p if reference is None else reference
            row["kl"][name] = (reference.exp() * (reference - log_p)).sum().item()
            best = log_p.topk(top)
            row["next"][name] = [
                {"token": str(tokenizer.decode([token])), "p": value}
                for token, value in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
            ]
        rows.append(row)
    return rows


def markdown(result: Behaviour) -> str:
    """The same as tables."""
    names = result["models"]
    parts = []
    if "text" in result:
        rows = []
        for name, row in result["text"].items():
            same = _percent(row["top1_agreement"], row["agreement_standard_error"])
            rows.append([name, f"{row['loss']:.4f}", f"{row['kl_to_base']:.4f}", same])
        n = next(iter(result["text"].values()))["sequences"]
        header = ["", "loss", f"KL to {names[0]}", f"top-1 token as {names[0]}"]
        parts.append(f"Held-out text, {n} sequences:\n\n{_table(header, rows)}")
    if result["tasks"]:
        rows = []
        for task, cells in result["tasks"].items():
            shares = [_percent(cell["accuracy"], cell["standard_error"]) for cell in cells.values()]
            rows.append([task, str(cells[names[0]]["prompts"]), *shares])
        parts.append("Right answers:\n\n" + _table(["task", "prompts", *names], rows))
    n = len(result["prompts"])
    same = ", ".join(f"{name} {count}" for name, count in result["prompts_same_top1"].items() if name != names[0])
    rows = []
    for one in result["prompts"]:
        said = [", ".join(f"{_code(t['token'])} {t['p']:.2f}" for t in one["next"][name]) for name in names]
        rows.append([_code(one["prompt"]), *said])
    title = f"Next tokens after {n} prompts" + (f"; the likeliest is that of {names[0]} in: {same}" if same else "")
    parts.append(f"{title}:\n\n" + _table(["prompt", *names], rows))
    for name, found in result.get("differences", {}).items():
        parts += _where(found, name, names[0])
    return "\n\n".join(parts) + "\n"


def _where(found: Differences, name: str, first: str) -> list[str]:
    """Where a model differs from the first one, as tables."""
    if found["kl"] < 1e-6:
        return [f"{name} says what {first} says on all of the text."]
    parts = [
        f"Where {name} differs from {first}: {found['tokens']:,} tokens, KL {found['kl']:.4f} nats in the mean; "
        f"{found['half']:.1%} of the tokens hold half of it."
    ]
    by: list[tuple[str, list[Group]]] = [
        ("tokens in front", found["by_position"]), ("what follows", found["by_next"]),
        ("the token that follows was", found["by_seen"]),
    ]  # fmt: skip
    for title, groups in by:
        rows = [
            [g["name"], f"{g['tokens']:,}", f"{g['kl']:.4f}", f"{g['kl_share']:.0%}", f"{g['loss_above_base']:+.4f}",
             f"{g['same_top1']:.1%}"] for g in groups
        ]  # fmt: skip
        header = [title, "tokens", "KL, nats", "share of all KL", f"loss above {first}", "same top-1"]
        parts.append(_table(header, rows))
    rows = []
    for place in found["places"]:
        said = [", ".join(f"{_code(t['token'])} {t['p']:.2f}" for t in place[who]) for who in ("base", "model")]
        rows.append([_code(place["text"]), _code(place["follows"]), *said, f"{place['kl']:.2f}"])
    return [*parts, "Where they differ most, one place per sequence:\n\n"
            + _table(["text", "what follows", first, name, "KL"], rows)]  # fmt: skip


def _percent(share: float | None, error: float | None) -> str:
    return f"{share:.1%}" if error is None else f"{share:.1%} ± {error:.1%}"


def _code(text: str) -> str:
    """Text as it is, in a cell: spaces and line breaks visible, nothing that ends the cell."""
    quoted = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("`", "'").replace("|", "\\|")
    return f"`{quoted}`"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
