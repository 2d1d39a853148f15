"""A user's own pairs: one JSON object per line.

    {"clean": "The capital of France is", "corrupted": "The capital of Italy is", "answer": " Paris", "wrong": " Rome"}

`answer` and `wrong` are strings or lists of strings, with their leading space. Without `wrong` the metric is the
answer's log-probability. `"metric": "probability"` in the first line makes it P(answer) - P(wrong) for all of them.
"""

import json
from pathlib import Path
from typing import Any, get_args

from . import Metric, Pair, Task


def read_pairs(path: Path) -> Task:
    """A task of the pairs in a file; ValueError with the line where one cannot be used."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv") from None
    pairs: list[Pair] = []
    metric: Any = None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            row = _object(line, where)
            if pairs and bool(row.get("wrong")) != bool(pairs[0].wrong):
                raise ValueError(f"{where}: either every pair has a wrong answer to compare with, or none")
            metric = metric or row.get("metric") or ("logit" if row.get("wrong") else "log-probability")
            _check_metric(metric, bool(row.get("wrong")), where)
            pairs.append(_pair(row, where))
    if not pairs:
        raise ValueError(f"{path} holds no pairs")
    return Task(path.stem, None, metric, tuple(pairs))


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict) or not {"clean", "corrupted", "answer"} <= row.keys():
        raise ValueError(f"{where}: expected an object with clean, corrupted and answer (and wrong), got {line[:80]}")
    return row


def _check_metric(metric: Any, has_wrong: bool, where: str) -> None:
    if not isinstance(metric, str) or metric not in get_args(Metric):
        raise ValueError(f"{where}: metric {metric!r}; expected logit, probability or log-probability")
    if has_wrong == (metric == "log-probability"):
        needs = "takes no wrong answers" if has_wrong else "needs wrong answers to compare with"
        raise ValueError(f"{where}: metric {metric} {needs}")


def _pair(row: dict[str, Any], where: str) -> Pair:
    answer, wrong = (_texts(row.get(name) or [], f"{where}: {name}") for name in ("answer", "wrong"))
    if not answer:
        raise ValueError(f"{where}: no answer")
    for name in ("clean", "corrupted"):
        if not isinstance(row[name], str) or not row[name]:
            raise ValueError(f"{where}: {name} must be a text, got {row[name]!r}")
    try:
        "".join((row["clean"], row["corrupted"], *answer, *wrong)).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half a character, which no tokenizer can read") from None
    return Pair(row["clean"], row["corrupted"], answer, wrong)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in values):
        raise ValueError(f"{where} must be a text or a list of texts, got {value!r}")
    return tuple(values)
