"""From a finished Run to a Hugging Face folder that can be published: weights, gates, and a model card.

The card is made from the Run alone (data, loss table, density, settings, versions), so that nothing in it can be
claimed that was not measured.
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..data.documents import is_local
from ..models.access import access
from ..models.delta import LEVELS
from ..models.loading import first_token, load, save
from ..reporting.figures.flow import draw_flow
from ..runs.rows import EvaluationRow, budget_in_words
from ..runs.run import Run, check_folder, read_json, reading, whole_folder, write_bytes, write_json
from .deltas import export_delta
from .publish import flow_of, look

ADAPTER, FIGURE = "adapter_config.json", "figure1.png"
METRICS = {"loss": "cross-entropy in nats", "kl_to_base": "KL to base in nats", "density": "share of open edges"}
NOT_SETTINGS = ("model", "data", "text")  # they name files
WITHOUT_CONTROL = "There is no matched dense control: part of any difference to the base may be adaptation to the text."
TRAINED_CONTROL = (
    "The control is the same model with the same further training and no gates: compare the sparse model with it."
)
# Runs keep the metrics of a control that was trained; with KL to the base none is (training/sparsify.py).
CONTROL_IS_BASE = "Taught by the base, a control without gates has nothing to learn: it is the base, not trained."


def export(
    run: str | Path | Run, out: str | Path, merge: bool = True, *, license: str | None = None,
    repository: str | None = None, delta: int | None = None, say: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Write the sparse model of a Run as a Hugging Face folder with a README.md and figure 1; returns the folder.

    delta: 8 or 4: write its difference to the base in so many bits instead, and what the rounding costs (delta.json).

    merge: fold LoRA adapters into the weights. False keeps the adapter, which needs its base to be found again.
    license: its name on the hub (mit, apache-2.0, ...); by default the base model's, where that can be found.
    repository: what the card says the model is loaded by; by default the folder.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists already; choose another --out")
    source = Run(run)
    if not (source.path / "model").is_dir():
        raise ValueError(source.without_model())
    if not (source.path / "evaluation.json").is_file():
        raise ValueError(f"the run {source.path} is not finished; continue it with --resume, then export it")
    is_adapter = (source.path / "model" / ADAPTER).is_file()
    if not merge and not is_adapter:
        raise ValueError(f"the run {source.path} trained all weights: it has no adapter to export; leave out --adapter")
    if not merge and delta is not None:
        raise ValueError("an adapter is a difference to its base already; leave out --adapter or --delta")
    if delta not in (None, *LEVELS):
        raise ValueError(f"delta={delta}: expected {' or '.join(map(str, LEVELS))} bits")
    check_folder(out)
    if delta is not None:
        return export_delta(source, out, delta, say)
    model, tokenizer = load(source.path)
    first = first_token(tokenizer)
    if is_adapter and not merge and repository is not None and not _on_hub(source):
        raise ValueError("an adapter on the hub needs its base there, and this one's is a folder here; push it merged")
    if is_adapter and merge:
        model = model.merge_and_unload()  # type: ignore[operator]
    with whole_folder(out) as fresh:
        save(model, tokenizer, fresh)
        drawn = _figure1(source, fresh / FIGURE, say)
        with reading(source.path):
            name = None if first is None else str(tokenizer.convert_ids_to_tokens(first))
            license = license or _license_of(source)
            facts = Facts(repository or str(out), is_adapter and not merge, name, license, drawn)
            card = model_card(source, facts)
        write_bytes(fresh / "README.md", card.encode("utf-8", "replace"))
        _forget_places(fresh)
    return out


def push(
    run: str | Path | Run, repository: str, private: bool = False, merge: bool = True, *, license: str | None = None,
    say: Callable[[str], None] = print,
) -> str:  # fmt: skip
    """Publish the sparse model of a Run on the Hugging Face hub, as `export` writes it; returns its address.

    repository: "me/sparse-gpt2"; made if it is not there. `sl.load("me/sparse-gpt2")` brings it back. Needs to be
    logged in: `hf auth login`.
    """
    validate_repo_id(repository)  # before any work
    if repository.count("/") != 1:
        raise ValueError(f"repository={repository!r}: expected your name and the model's, as in me/sparse-gpt2")
    with TemporaryDirectory() as folder:
        exported = export(run, Path(folder) / "model", merge, license=license, repository=repository, say=say)
        hub = HfApi()
        try:
            address = hub.create_repo(repository, private=private, exist_ok=True)
            hub.upload_folder(repo_id=address.repo_id, folder_path=exported, commit_message="Upload with sparselens")
        except Exception as error:  # the hub's many ways of saying no
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = "log in with `hf auth login` to an account that may write there"
            raise ValueError(f"could not publish {repository} ({reason}); {advice}") from error
    return str(address)


class Facts(NamedTuple):
    """What a model card says that the Run does not know."""

    loaded_by: str  # its name on the hub, or its folder
    adapter: bool = False
    first: str | None = None  # the token that training sequences began with
    license: str | None = None
    figure: bool = False  # whether figure 1 lies beside the card


def _on_hub(run: Run) -> bool:
    """Whether the base is somebody's model on the hub, and no folder here."""
    base = str(run.record["config"]["model"])
    made_here = Path(base).exists() or (run.path / "base").is_dir()
    return not made_here and base.count("/") <= 1


def _license_of(run: Run) -> str | None:
    """The base model's, as its own card says: of a folder its README.md, else the hub's."""
    base = run.started_from
    card = Path(base) / "README.md" if Path(base).is_dir() else base
    if isinstance(card, Path) and not card.is_file():
        return None
    if isinstance(card, str) and access(card).trouble:
        return None
    try:
        found = ModelCard.load(card).data.get("license")
    except Exception:  # no card, no connection, no YAML: whatever the reason, it is not known
        return None
    return found if isinstance(found, str) else None


def _figure1(run: Run, path: Path, say: Callable[[str], None]) -> bool:
    """Figure 1 beside the card: the Run's own, or drawn now; False where its models or prompts do not allow it."""
    if (run.path / FIGURE).is_file():
        write_bytes(path, (run.path / FIGURE).read_bytes())
        return True
    try:
        if not (run.path / "figure1.json").is_file():
            look(run, (), say)
        rows = run.find("figure1.json", None) or flow_of(run)
    except (ValueError, OSError) as error:
        say(f"the card has no figure 1: {error}")
        return False
    if rows is not None:
        draw_flow(rows, path)
    return rows is not None


def _forget_places(folder: Path) -> None:
    """Where models lay on this machine is nobody's business."""
    for path in folder.glob("*.json"):
        settings = read_json(path)
        place = settings.get("name_or_path") if isinstance(settings, dict) else None
        if isinstance(place, str) and Path(place).exists():
            write_json(path, settings | {"name_or_path": short_name(place)})


def _header(run: Run, sparse: EvaluationRow, name: str, facts: Facts) -> str:
    """The card's YAML, as the hub reads it."""
    config = run.record["config"]
    base = str(config["model"]) if _on_hub(run) else None
    patterns = (config.get("text") or {}).get("patterns", [])
    datasets = sorted({one.partition(":")[0] for one in patterns if not is_local(one)})
    values = {"loss": sparse["loss"], "kl_to_base": sparse["kl_to_base"], "density": sparse["density"]}
    results = [
        EvalResult("text-generation", "text", "held-out text", metric, value, metric_name=METRICS[metric])
        for metric, value in values.items()
        if value is not None
    ]
    other: dict[str, Any] = {"license_name": "that-of-the-base-model"} if facts.license is None else {}
    header = ModelCardData(
        library_name="sparselens", tags=["sparselens", "sparse-attention", "interpretability"], base_model=base,
        pipeline_tag="text-generation", license=facts.license or "other", datasets=datasets or None,
        metrics=list(values), model_name=f"{name} with sparse attention", eval_results=results, **other,
    )  # fmt: skip
    return str(header.to_yaml())


def model_card(run: Run, facts: Facts) -> str:
    """The README.md of an exported model."""
    config = run.record["config"]
    rows: list[EvaluationRow] = run.read("evaluation.json")
    by_kind = {row["kind"]: row for row in rows}
    sparse, summary = by_kind["sparse"], run.read("summary.json")
    layers, name = sparse.get("density_per_layer"), short_name(str(config["model"]))
    met = "met its target" if summary["met"] else "did **not** meet its target"
    quantity = summary.get("target_of") or ("KL to base" if config["loss"] == "kl" else "held-out loss")
    target = f"{quantity} at most {summary['target']:.4f} nats"
    if budget := budget_in_words(config):
        target += f" with at most {budget}"
    sections = [
        f"---\n{_header(run, sparse, name, facts)}\n---",
        f"# {name} with sparse attention",
        f"`{name}`, post-trained with [sparselens] so that {sparse['density']:.2%} of its attention edges are open "
        f"({_number(sparse['edges_per_query'], '.2f')} keys per query and head). A closed edge carries exactly "
        f"nothing. The run {met} ({target}).",
        facts.figure and f"![Which position reads which, layer by layer, before and after]({FIGURE})",
        "## Measured\n\n" + _table(rows),
        f"On {sparse['sequences']} held-out sequences that steered nothing; ± is one standard error. "
        + _about_control(run, by_kind),
        layers and f"Density by layer: {', '.join(f'{share:.2%}' for share in layers)}.",
        "## How to load it\n\n```python\nimport sparselens as sl\n\n"
        f'model, tokenizer = sl.load("{_loaded_by(facts)}")\n```\n\n'
        "Plain `from_pretrained` refuses this folder: it would leave the gates out."
        + (" The folder holds an adapter and gates; its base is loaded by name." if facts.adapter else "")
        + (
            f" Begin every prompt with `{facts.first}`, as training sequences did: gates lean on it."
            if facts.first
            else ""
        ),
        "## How it was made\n\n" + _making(config, run.record.get("provenance", {}).get("versions", {})),
        "## Limits\n\nGates were trained and measured on the text above, at the length above; on other text density "
        "and loss differ. A sparse circuit is a claim about this model, not about the one it was made from. The base "
        "model's licence, biases and limits apply"
        + ("." if facts.license else "; which licence that is could not be found out here."),
        "[sparselens]: https://arxiv.org/abs/2512.05865",
    ]
    return str(ModelCard("\n\n".join(section for section in sections if section) + "\n"))


def _about_control(run: Run, by_kind: dict[str, EvaluationRow]) -> str:
    if "control" not in by_kind:
        return WITHOUT_CONTROL
    return TRAINED_CONTROL if (run.path / "control" / "metrics.jsonl").is_file() else CONTROL_IS_BASE


def _loaded_by(facts: Facts) -> str:
    """A name on the hub as it is; a folder without the way to it."""
    return facts.loaded_by if not Path(facts.loaded_by).is_absolute() else Path(facts.loaded_by).name


def short_name(model: str) -> str:
    """A hub name as it is; of a path only its last part: where it lay on somebody's machine is nobody's business."""
    path = Path(model)
    local = path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1
    return (path.stem if path.suffix == ".gguf" else path.name) if local else model


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(rows: list[EvaluationRow]) -> str:
    lines = ["| | held-out loss | KL to base | density | keys per query |", "|---|---|---|---|---|"]
    for row in rows:
        loss = f"{row['loss']:.4f} ± {_number(row.get('loss_standard_error'), '.4f')}"
        cells = [_number(row["kl_to_base"], ".4f"), f"{row['density']:.2%}", _number(row["edges_per_query"], ".2f")]
        lines.append(f"| {row['kind']} | {loss} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _making(config: dict[str, Any], versions: dict[str, str]) -> str:
    training, data = config["training"], config.get("data")
    data = data if isinstance(data, dict) else {}  # the demo's sums are made, not read
    sources = data.get("sources")
    names = sorted({Path(str(one[0])).name for group in (sources or {}).values() for one in group})
    tokens = training["steps"] * training["batch"] * (data.get("length") or 0)
    settings = {k: v for k, v in config.items() if k not in NOT_SETTINGS}
    lines = [
        names and f"- text: {', '.join(f'`{name}`' for name in names)}",
        tokens and f"- {tokens:,} tokens in {training['steps']:,} steps, sequences of {data['length']} tokens",
        f"- settings: `{json.dumps(settings, default=str)}`",
        versions and "- versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    return "\n".join(line for line in lines if line)
