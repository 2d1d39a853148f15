"""Attention, for the page: what report_rows left in the Run, packed to a budget."""

import shlex
from pathlib import Path

import numpy as np

from ...runs.rows import AttentionRows, PromptRow
from ...runs.run import Run, about
from . import Section, finite, pack_margins, pack_weights, read_tensors

BUDGET = 3_200_000  # characters of base64 for all prompts; the page stays under 5 MB


def attention(run: Run, budget: int = BUDGET) -> dict[str, object] | None:
    """Prompts with tokens, answers, packed weights and margins; `left_out` says what the budget did not allow.

    Every prompt gets its share of the budget.
    """
    if not (run.path / "attention" / "attention.json").is_file():
        return None
    rows: AttentionRows = run.read("attention/attention.json")
    prompts, left_out, room = list[dict[str, object]](), list[str](), budget
    for i, prompt in enumerate(rows["prompts"]):
        share = room / (len(rows["prompts"]) - i)  # what earlier prompts did not need is there for later ones
        found = _fitting(prompt, run.path / "attention", share)
        if found is None and not prompts:
            found = _fitting(prompt, run.path / "attention", room)  # rather one prompt than none
        if found is None:
            left_out.append(f"the prompt {prompt['text'][:60]!r}")
            continue
        packed, size, whole = found
        if not whole:
            left_out.append(f"the control's maps of {prompt['text'][:60]!r}")
        room -= size
        prompts.append(packed)
    told = {"shape": rows.get("shape"), "notes": rows.get("notes"), "filled": about(run).filled}
    return finite(dict[str, object](told) | {"prompts": prompts, "left_out": left_out})


def _fitting(prompt: PromptRow, folder: Path, room: float) -> tuple[dict[str, object], int, bool] | None:
    """The prompt in 16 bits, in 8, or in 8 without its control: the first that fits, its size, if it is whole."""
    tensors = read_maps(folder / Path(prompt["file"]).name)  # beside attention.json, wherever the name points
    for bits, without in ((16, ""), (8, ""), (8, "control")):
        packed, size = _prompt(prompt, tensors, bits, without)
        if size <= room:
            return packed, size, without not in prompt["models"]
    return None


def _prompt(row: PromptRow, tensors: dict[str, np.ndarray], bits: int, without: str) -> tuple[dict[str, object], int]:
    """The prompt without one of its models, and how many characters its maps take."""
    models, size = dict[str, object](), 0
    for role, answer in row["models"].items():
        weights, margins = tensors[f"{role}.weights"], tensors.get(f"{role}.margin")
        if role != without:
            maps = {"weights": pack_weights(weights, bits)}
            maps |= {} if margins is None else {"margin": pack_margins(margins)}
            models[role] = {**answer, **maps, "open": int((weights > 0).sum())}
            size += sum(len(array["data"]) for array in maps.values())
    told = {"text": row["text"], "tokens": row["tokens"], "cut": row.get("cut", False), "models": models}
    return told, size


def read_maps(path: Path) -> dict[str, np.ndarray]:
    """A prompt's attention: ROLE.weights and, for a gated model, ROLE.margin, [layers, heads, queries, keys]."""
    return read_tensors(path, "remove its folder and build the report again")


def _command(run: Run) -> str:
    return f"sparselens report {shlex.quote(str(run.path))}"


SECTION = Section("attention", "Attention", lambda s: attention(s.run, int(BUDGET * s.share)), _command, place=30)
