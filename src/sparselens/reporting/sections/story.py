"""How the page opens: what was done, what it cost, what became simpler, and the one number to remember.

Written from the Run's own numbers; where one is missing, the sentence says so and how to make it.
"""

from typing import Any

from ...circuits.rows import wording
from ...runs.rows import EvaluationRow
from ..readings import THRESHOLD, count, fewer, ordered, times

Row = dict[str, Any]
NB = "\N{NO-BREAK SPACE}"


def story(name: str, rows: dict[str, EvaluationRow], config: Row, task: Row | None) -> dict[str, Any] | None:
    """{"sentences": three, "number": {...} or None}; None where there is no sparse model to tell of."""
    sparse = rows.get("sparse")
    if sparse is None:
        return None
    row = _headline(task)
    return {"sentences": [_done(name, sparse, config), _cost(rows, config), _simpler(row)], "number": _number(row)}


def percent(share: float) -> str:
    return f"{share:.2%}".replace(".00%", "%").replace("%", f"{NB}%")


def _done(name: str, sparse: EvaluationRow, config: Row) -> str:
    steps = config.get("training", {}).get("steps")
    long = f" for {steps:,} steps" if steps else ""
    open_now = percent(sparse["density"])
    text = f"{name} was trained further{long} with a gate at every attention edge; {open_now} are open"
    each = sparse.get("edges_per_query")
    return f"{text}: {count(each)} per head and word." if each is not None else f"{text}."


def control_is_base(rows: dict[str, EvaluationRow], config: Row) -> bool:
    """Taught by the base alone (KL), a dense control has nothing to learn: it is not trained, and is the base."""
    base, control = rows.get("base"), rows.get("control")
    return config.get("loss") == "kl" and base is not None and control is not None and control["loss"] == base["loss"]


def _cost(rows: dict[str, EvaluationRow], config: Row) -> str:
    sparse, base, control = rows["sparse"], rows.get("base"), rows.get("control")
    error = sparse.get("loss_standard_error") or 0.0
    spread = f" ± {error:.2g}" if error >= 1e-4 else ""
    text = f"Its loss on {sparse['sequences']:,} held-out sequences is {_nats(sparse['loss'])}{spread} nats"
    if base is None:
        return f"{text}; what it was before is not known."
    text += f", {_nats(base['loss'])} before"
    if control is None:
        return f"{text}; no dense model was trained alike, so part of the change may be the text's."
    if control_is_base(rows, config):
        return f"{text}; a dense model trained alike would stay as it is."
    return f"{text}; a dense model trained alike has {_nats(control['loss'])}."


def _nats(loss: float) -> str:
    return f"{loss:.3f}" if loss >= 0.0005 else "under 0.001"


def _headline(task: Row | None) -> tuple[str, str, Row] | None:
    """(task, reading, the multiplier against the dense base at 90 %) of the first reading, as in figure 2."""
    for reading in ordered((task or {}).get("multipliers", {})):
        found = task["multipliers"][reading].get("dense", {}).get(THRESHOLD)  # type: ignore[index]
        if found and found.get("multiplier", 0) > 0:
            return task["name"], reading, found  # type: ignore[index]
    return None


def _simpler(row: tuple[str, str, Row] | None) -> str:
    if row is None:
        return "How much simpler a task became has not been measured yet: `sparselens compare` does that."
    task, reading, m = row
    edges = wording(reading).edges
    text = f"For 90{NB}% of what it does on {task}, {count(m['sparse_edges'])} {edges} are enough"
    return f"{text}; before, it took {count(m['dense_edges'])} (n = {m['n_prompts']} prompts)."


def _number(row: tuple[str, str, Row] | None) -> dict[str, str] | None:
    """What figure 2 says in one number; `care` where its interval holds 1."""
    if row is None:
        return None
    task, reading, m = row
    sure = m["low"] > 1 or m["high"] < 1
    text, _, interval = fewer(m).partition(" (")  # type: ignore[arg-type]
    value, _, word = text.partition(" ")
    told = f"{word} {wording(reading).edges} for {task}"
    between = f"95{NB}% interval {interval.rstrip(')')}, n = {m['n_prompts']} prompts"
    return {"value": value, "what": told, "spread": between if sure else f"{between}: not certain"}


def wanted(task: str, words: str, row: Row, baseline: str) -> str:
    """A verdict on a multiplier as one sentence."""
    if row["low"] > 1:
        return f"{task} needs {times(row['multiplier'])} fewer {words} than in the {baseline}."
    if row["high"] < 1:
        return f"{task} needs more {words} than in the {baseline}, not fewer."
    return f"Whether {task} needs fewer {words} than in the {baseline} is not certain."
