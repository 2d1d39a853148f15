"""Attention, for the page: what report_rows left in the Run, packed to a budget."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ...runs.about import about
from ...runs.run import Run
from ..packing import finite, pack_margins, pack_weights
from . import Section, Shown

BUDGET = 3_200_000  # characters of base64 for all prompts; the page stays under 5 MB


def attention(run: Run, budget: int = BUDGET) -> dict[str, Any] | None:
    """Prompts with tokens, answers, packed weights and margins; `left_out` says what the budget did not allow.

    Every prompt gets its share of the budget.
    """
    if not (run.path / "attention" / "attention.json").is_file():
        return None
    rows = run.read("attention/attention.json")
    prompts: list[dict[str, Any]] = []
    left_out, room = [], budget
    for i, prompt in enumerate(rows["prompts"]):
        share = room / (len(rows["prompts"]) - i)  # what earlier prompts did not need is there for later ones
        packed = _fitting(prompt, run.path / "attention", share)
        if packed is None and not prompts:
            packed = _fitting(prompt, run.path / "attention", room)  # rather one prompt than none
        if packed is None:
            left_out.append(f"the prompt {prompt['text'][:60]!r}")
            continue
        if len(packed["models"]) < len(prompt["models"]):
            left_out.append(f"the control's maps of {prompt['text'][:60]!r}")
        room -= _size(packed)
        prompts.append(packed)
    kept = {"shape": rows.get("shape"), "notes": rows.get("notes"), "filled": about(run)["filled"]}
    return finite(kept | {"prompts": prompts, "left_out": left_out})


def _fitting(prompt: dict[str, Any], folder: Path, room: float) -> dict[str, Any] | None:
    """The prompt in 16 bits, in 8, or in 8 without its control: the first that fits, or None."""
    tensors = read_maps(folder / Path(prompt["file"]).name)  # beside attention.json, wherever the name points
    for bits, without in ((16, ""), (8, ""), (8, "control")):
        packed = _prompt(prompt, tensors, bits, without)
        if _size(packed) <= room:
            return packed
    return None


def _size(packed: dict[str, Any]) -> int:
    return sum(len(array["data"]) for model in packed["models"].values() for array in _arrays(model))


def _arrays(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [model[name] for name in ("weights", "margin") if name in model]


def _prompt(prompt: dict[str, Any], tensors: dict[str, np.ndarray], bits: int, without: str) -> dict[str, Any]:
    models: dict[str, dict[str, Any]] = {}
    for role, answer in prompt["models"].items():
        if role == without:
            continue
        weights = tensors[f"{role}.weights"]
        n_open = int((weights > 0).sum())
        models[role] = answer | {"weights": pack_weights(weights, bits), "open": n_open}
        if f"{role}.margin" in tensors:
            models[role]["margin"] = pack_margins(tensors[f"{role}.margin"])
    return {"text": prompt["text"], "tokens": prompt["tokens"], "cut": prompt.get("cut", False), "models": models}


def read_maps(path: Path) -> dict[str, np.ndarray]:
    """A prompt's attention: ROLE.weights and, for a gated model, ROLE.margin, [layers, heads, queries, keys]."""
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors has its own error type; all mean a damaged or missing file
        raise ValueError(f"{path} cannot be read ({error}); remove its folder and build the report again") from error


def _shown(shown: Shown) -> dict[str, Any] | None:
    return attention(shown.run, int(BUDGET * shown.share))


SECTION = Section(
    "attention", "Attention", _shown, lambda run: f"sparselens report {shlex.quote(str(run.path))}", place=30
)
