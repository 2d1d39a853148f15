"""The summary, for the page: one sentence, one table, and what met its target and what did not.

Every verdict is a rule below, computed from the Run's own numbers: none is written by hand.
"""

from typing import Any

from ...circuits.rows import MEAN, MultiplierRow, Ratio, wording
from ...runs.rows import EvaluationRow, budget_in_words, open_in_words, over_budget
from ...runs.run import About, about
from ..readings import THRESHOLD, count, fewer, ordered
from . import Section, Shown, finite
from .story import control_is_base, percent as _percent, story, wanted
from .training import resume_command, title

ROLES = ("base", "control", "sparse")
OTHERS = {"dense": "dense base", "control": "dense control"}
GOOD_COMPLETENESS = 1e-3
CUT_AIMS = {"pearson_path": 0.9, "spearman_path": 0.8, "sign_agreement": 0.95}
Row = dict[str, Any]  # of a file of the Run: evaluation.json, summary.json, run.json's config
Verdict = dict[str, str]  # what a rule says


def summary(shown: Shown) -> dict[str, object]:
    """Title, sentence, table, verdicts, provenance."""
    run, circuits = shown.run, shown["circuits"]
    rows: dict[str, EvaluationRow] = {row["kind"]: row for row in run.find("evaluation.json", [])}
    results = run.find("results.json" if run.record.get("kind") == "transcode" else "summary.json", {})
    config, told, task = run.record.get("config", {}), about(run), next(iter((circuits or {}).get("tasks", [])), None)
    found = {
        "title": title(run), "kind": run.record.get("kind", "run"), "run": run.path.name, "exact": told.exact,
        "sentence": _sentence(title(run), rows, results, told),
        "table": [_table_row(role, rows[role], task) for role in ROLES if role in rows],
        "task": task["name"] if task else None, "counted": task["readings"][0]["edges"] if task else None,
        "story": story(told.name or title(run), rows, config, task),
        "verdicts": verdicts(rows, results, config, circuits, shown["attribution"]),
        # Every single number of a transcoder's results.
        "facts": [[key.replace("_", " "), value] for key, value in results.items() if isinstance(value, int | float)]
        if "fvu" in results else [],
        "per_head": rows["sparse"].get("density_per_head") if "sparse" in rows else None, "settings": _settings(config),
        "provenance": run.record.get("provenance", {}),
    }  # fmt: skip
    return finite(found)


def _sentence(name: str, rows: dict[str, EvaluationRow], summary: Row, told: About) -> str:
    sparse, base = rows.get("sparse"), rows.get("base")
    if "fvu" in summary:
        return (
            f"{summary['l0']:.1f} active features per layer explain {_percent(1 - summary['fvu'])} of what the MLPs of "
            f"{name} write."
        )
    if sparse is None:
        return f"{name}: this Run has not been evaluated yet."
    text = f"{told.name or name} keeps {_percent(sparse['density'])} of its attention edges"
    if told.exact:
        return f"{text} and gets {_percent(sparse['exact'])} of held-out sequences exactly right."
    if base is not None:
        return f"{text}; its held-out loss is {sparse['loss']:.3f} nats, the base model's {base['loss']:.3f}."
    return f"{text}."


def _table_row(role: str, row: EvaluationRow, task: Row | None) -> dict[str, object]:
    names = ("loss", "loss_standard_error", "kl_to_base", "density", "edges_per_query", "exact", "sequences")
    found = {"role": role} | {name: row.get(name) for name in names}
    name = "dense" if role == "base" else role
    if task:
        whole: Row = next((reading for reading in task["readings"] if reading["edges"] == "heads"), {"models": {}})
        for what, models in (("circuit", task["readings"][0]["models"]), ("heads", whole["models"])):
            model = models.get(name, {})
            found[f"{what}_edges"] = model.get("edges_at", {}).get(THRESHOLD)
            found[f"{what}_total"] = model.get("n_edges")
    return found


def verdicts(
    rows: dict[str, EvaluationRow], summary: Row, config: Row, circuits: Row | None, traces: list[Row]
) -> list[Verdict]:
    """What met its target and what did not: what became simpler, what it cost, how it went; what missed comes first."""
    circuits, same = circuits or {}, control_is_base(rows, config)
    found = [verdict for task in circuits.get("tasks", []) for verdict in _of_circuit(task, same)]
    found += _of_training(rows, summary, config)
    nothing = "For one task no circuit was found."
    found += [_verdict("missed", "Circuits", problem, nothing) for problem in circuits.get("problems", [])]
    for trace in traces:
        found += _of_trace(trace)
    return sorted(found, key=lambda verdict: verdict["state"] != "missed")


def _of_trace(trace: Row) -> list[Verdict]:
    """Whether cutting an edge does what the picture says. That rows add up is bookkeeping: small print, if true."""
    error, cut, who = trace.get("completeness_error"), trace.get("cut") or {}, f"({trace['role']} model)"
    found = []
    adds_up = "" if error is None else f"; rows add up to {error:.1e}"
    if error is not None and error > GOOD_COMPLETENESS:
        text = f"largest relative residual of any row {error:.1e} (at most {GOOD_COMPLETENESS:.0e})"
        sentence = f"The attribution of the {trace['role']} model does not add up."
        found.append(_verdict("missed", f"Attribution adds up {who}", text, sentence))
    label = f"Cutting it does what the picture says {who}"
    if not cut.get("n"):
        text, sentence = f"trace the prompt again{adds_up}", f"No edge of the {trace['role']} model's picture was cut."
        return [*found, _verdict("open", label, text, sentence)]
    figures = [cut.get(name) for name in CUT_AIMS]
    if figures == [None] * len(figures):
        text = f"{cut['n']} edges cut: too few, or all alike{adds_up}"
        return [*found, _verdict("open", label, text, f"Cutting edges of the {trace['role']} model says nothing here.")]
    met = all(value is None or value >= aim for value, aim in zip(figures, CUT_AIMS.values(), strict=True))
    pearson, spearman, signs = ("–" if value is None else f"{value:.2f}" for value in figures)
    text = (
        f"{cut['n']} edges cut one by one, MLPs held: predicted along the cut against measured, Pearson {pearson} "
        f"(at least 0.9), Spearman {spearman} (0.8), sign right in a share of {signs} of {cut.get('n_signs')} large "
        f"effects (0.95){adds_up}"
    )
    does = "does what its picture says" if met else "does not always do what its picture says"
    sentence = f"Cutting an edge of the {trace['role']} model {does}."
    return [*found, _verdict("met" if met else "missed", label, text, sentence)]


def _verdict(state: str, label: str, detail: str, sentence: str) -> Verdict:
    """state: met, care, missed or open. sentence: for a newcomer; label and detail: for who opens it."""
    return {"state": state, "label": label, "detail": detail, "sentence": sentence}


def _of_training(rows: dict[str, EvaluationRow], summary: Row, config: Row) -> list[Verdict]:
    sparse, base, control = (rows.get(role) for role in ("sparse", "base", "control"))
    if "fvu" in summary:
        return _of_transcoder(summary)
    if sparse is None:
        return [
            _verdict(
                "open",
                "Not evaluated",
                "the Run has not finished; continue it with --resume",
                "The Run has not finished, so nothing is known yet.",
            )
        ]
    what = summary.get("target_of") or ("KL to base" if config.get("loss") == "kl" else "held-out loss")
    training, unseen = _constraint(sparse, summary, config, what), _on_unseen(rows, summary, config, what)
    return training + unseen + _control(base, control, control_is_base(rows, config)) + _layers(sparse)


def _constraint(sparse: EvaluationRow, summary: Row, config: Row, what: str) -> list[Verdict]:
    if "met" not in summary:
        return []
    word = "was met in training" if summary["met"] else "was never met; the closest state was kept"
    budget = budget_in_words(config)
    within = f" with at most {budget}" if budget else ""
    if not summary["met"] and over_budget(sparse, config):
        word += f", with {open_in_words(sparse, config)}"
    detail = f"{what} at most {summary['target']:.4g} nats{within} on the steering slice {word}"
    state = "met" if summary["met"] else "missed"
    how = "stayed as good as was asked" if summary["met"] else "never got as good as was asked"
    sentence = f"While it was made sparse, the model {how}."
    return [_verdict(state, "Constraint", f"{detail} (step {summary['best_step']})", sentence)]


def _control(base: EvaluationRow | None, control: EvaluationRow | None, same: bool) -> list[Verdict]:
    """Whether the recipe does harm by itself."""
    if same:
        detail = "taught by the base, a model without gates has nothing to learn: the control is the base, not trained"
        return [_verdict("met", "Control", detail, "Trained alike, a dense model would stay as it is: it is the base.")]
    if control is None:
        detail = "none was trained: the loss may only show adaptation to the text"
        return [_verdict("care", "Control", detail, "There is no dense model trained alike to compare with.")]
    if base is None:
        return []
    gap = control["loss"] - base["loss"]
    worse = gap > max(0.005, 0.005 * base["loss"])
    detail = f"dense control {gap:+.4f} nats against the base"
    detail += "; the recipe alone costs loss (learning rate?)" if worse else "; the recipe does no harm by itself"
    sentence = "A dense model trained alike " + (
        "got worse, too." if worse else "stayed as good: the training does no harm."
    )
    return [_verdict("care" if worse else "met", "Control", detail, sentence)]


def _layers(sparse: EvaluationRow) -> list[Verdict]:
    layers = sparse.get("density_per_layer")
    if not layers:
        return []
    stuck = ", ".join(str(i) for i, share in enumerate(layers) if share > 0.5)
    detail = f"{_percent(sparse['density'])} open; layers from {_percent(min(layers))} to {_percent(max(layers))}"
    if stuck:
        detail += f"; more than half open in layer {stuck}"
        return [_verdict("care", "Layers stuck open", detail, "Some layers did not become sparse.")]
    return [_verdict("met", "No layer stuck open", detail, "Every layer became sparse.")]


def _of_transcoder(results: Row) -> list[Verdict]:
    """What a transcoder is good for: the model must still work with its MLPs replaced."""
    share, dead = results.get("loss_recovered"), results.get("dead_share")
    found = []
    if share is not None:
        state = "met" if share >= 0.9 else "care" if share >= 0.5 else "missed"
        detail = (
            f"with all MLPs replaced the loss is {results['replacement_loss']:.3f} nats, the model's own "
            f"{results['model_loss']:.3f}, without MLPs {results['zero_loss']:.3f}: {_percent(share)} recovered"
        )
        how = {"met": "well", "care": "in part", "missed": "badly"}[state]
        found.append(_verdict(state, "Stands in for the MLPs", detail, f"The features stand in for the MLPs {how}."))
    if dead is not None:
        sentence = "Most features are in use." if dead <= 0.2 else "Many features are never used."
        state = "met" if dead <= 0.2 else "care"
        found.append(_verdict(state, "Features in use", f"{_percent(dead)} are dead", sentence))
    return found


def _on_unseen(rows: dict[str, EvaluationRow], summary: Row, config: Row, what: str) -> list[Verdict]:
    """The constraint again, on held-out sequences that steered nothing."""
    if "target" not in summary or "base" not in rows:
        return []
    sparse, base = rows["sparse"], rows["base"]
    sequences = f"{sparse['sequences']:,} held-out sequences that steered nothing"
    if what == "KL to base":
        value, limit = sparse["kl_to_base"], summary["target"]
        detail = f"KL to base {value:.4g} nats, allowed {limit:.4g} ({sequences})"
    elif config.get("target") not in ("base", "control", None):
        value, limit = sparse["loss"], summary["target"]
        detail = f"loss {value:.4g} nats, allowed {limit:.4g} ({sequences})"
    else:
        other = rows.get("control", base) if config.get("target") == "control" else base
        value, limit = sparse["loss"] - other["loss"], config.get("tolerance", 0.0)
        detail = f"loss {value:+.4g} nats against {other['kind']}, allowed {limit:+.4g} ({sequences})"
    how = "as good as was asked" if value <= limit else "worse than was asked"
    sentence = f"On text it had never seen, the model is {how}."
    return [_verdict("met" if value <= limit else "missed", "On unseen text", detail, sentence)]


def _of_circuit(task: Row, control_is_base: bool) -> list[Verdict]:
    """The headline reading against both models, all that leads to the answer, and the component graph; no more."""
    multipliers, name = task.get("multipliers", {}), task["name"]
    found, readings = [], ordered(multipliers)
    for reading in readings[:1]:
        for baseline in ("dense",) if control_is_base else ("dense", "control"):
            found += _of_reading(name, reading, baseline, multipliers[reading].get(baseline, {}))
    found += _of_open_edges(task)
    if "components" in readings[1:]:
        found += _of_reading(name, "components", "dense", multipliers["components"].get("dense", {}))
    return found


def _of_reading(task: str, reading: str, baseline: str, thresholds: dict[str, MultiplierRow]) -> list[Verdict]:
    m, mean, words = thresholds.get(THRESHOLD), thresholds.get(MEAN), wording(reading)
    if not m:
        return []
    detail = (
        f"for 90 % of the effect {count(m['dense_edges'])} {words.edges} in the {OTHERS[baseline]}, "
        f"{count(m['sparse_edges'])} in the sparse model: {fewer(m)}, n = {m['n_prompts']} prompts"
    )
    if mean:
        detail += f"; mean from 50 to 95 %: {fewer(mean, interval=False)}"
    against = "" if baseline == "dense" else f", against the {baseline}"
    sentence = wanted(task, words.edges, m, OTHERS[baseline])  # type: ignore[arg-type]
    return [_verdict(_state(m), f"{words.label} of {task}{against}", detail, sentence)]


def _of_open_edges(task: Row) -> list[Verdict]:
    row = task.get("open_edges")
    if not row:
        return []
    detail = (
        f"{count(row['dense'])} edges lead to the answer in the dense base, {count(row['sparse'])} in the sparse "
        f"model: {fewer(row)}, n = {row['n_prompts']} prompts; no search involved"
    )
    sentence = f"Counting every edge that leads to the answer, {wanted(task['name'], 'of them', row, 'dense base')}"
    return [_verdict(_state(row), f"All of it, {task['name']}", detail, sentence)]


def _state(row: Ratio) -> str:
    return "met" if row["low"] > 1 else "missed" if row["high"] < 1 else "care"


def _settings(config: Row) -> list[list[str]]:
    """The settings worth seeing, in order."""
    training = config.get("training", {})
    wanted = [
        ("loss", config.get("loss")), ("target", config.get("target")), ("tolerance", config.get("tolerance")),
        ("slack", config.get("slack")), ("steps", training.get("steps")), ("batch", training.get("batch")),
        ("learning rate", training.get("lr")), ("adapter rank", training.get("lora") or None),
        ("sequence length", config.get("text", {}).get("length")), ("seed", training.get("seed", config.get("seed"))),
    ]  # fmt: skip
    return [[name, str(value)] for name, value in wanted if value is not None]


SECTION = Section("summary", "Summary", summary, resume_command, place=10)
