"""Attention, for the page: what report_rows left in the Run, packed to a budget."""

import shlex
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from ...runs.rows import AnswerRow, AttentionRows, PromptRow
from ...runs.run import Run, about
from . import Packed, Section, finite, pack_margins, pack_weights, read_tensors

BUDGET = 3_200_000  # characters of base64 for all prompts; the page stays under 5 MB


class PackedMaps(TypedDict):
    weights: Packed
    open: int  # edges
    margin: NotRequired[Packed]  # of a gated model


class PackedModel(AnswerRow, PackedMaps): ...


class PackedPrompt(TypedDict):
    text: str
    tokens: list[str]
    cut: bool
    models: dict[str, PackedModel]


def attention(run: Run, budget: int = BUDGET) -> dict[str, object] | None:
    """Prompts with tokens, answers, packed weights and margins; `left_out` says what the budget did not allow.

    Every prompt gets its share of the budget.
    """
    if not (run.path / "attention" / "attention.json").is_file():
        return None
    rows: AttentionRows = run.read("attention/attention.json")
    prompts, left_out, room = list[PackedPrompt](), list[str](), budget
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
    told = {"shape": rows.get("shape"), "notes": rows.get("notes"), "filled": about(run).filled}
    return finite(dict[str, object](told) | {"prompts": prompts, "left_out": left_out})


def _fitting(prompt: PromptRow, folder: Path, room: float) -> PackedPrompt | None:
    """The prompt in 16 bits, in 8, or in 8 without its control: the first that fits, or None."""
    tensors = read_maps(folder / Path(prompt["file"]).name)  # beside attention.json, wherever the name points
    for bits, without in ((16, ""), (8, ""), (8, "control")):
        packed = _prompt(prompt, tensors, bits, without)
        if _size(packed) <= room:
            return packed
    return None


def _size(packed: PackedPrompt) -> int:
    arrays = (array for model in packed["models"].values() for array in (model["weights"], model.get("margin")))
    return sum(len(array["data"]) for array in arrays if array is not None)


def _prompt(prompt: PromptRow, tensors: dict[str, np.ndarray], bits: int, without: str) -> PackedPrompt:
    models: dict[str, PackedModel] = {}
    for role, answer in prompt["models"].items():
        weights, margins = tensors[f"{role}.weights"], tensors.get(f"{role}.margin")
        if role != without:
            maps: PackedMaps = {"weights": pack_weights(weights, bits), "open": int((weights > 0).sum())}
            if margins is not None:
                maps["margin"] = pack_margins(margins)
            models[role] = {**answer, **maps}
    return {"text": prompt["text"], "tokens": prompt["tokens"], "cut": prompt.get("cut", False), "models": models}


def read_maps(path: Path) -> dict[str, np.ndarray]:
    """A prompt's attention: ROLE.weights and, for a gated model, ROLE.margin, [layers, heads, queries, keys]."""
    return read_tensors(path, "remove its folder and build the report again")


def _command(run: Run) -> str:
    return f"sparselens report {shlex.quote(str(run.path))}"


SECTION = Section("attention", "Attention", lambda s: attention(s.run, int(BUDGET * s.share)), _command, place=30)
