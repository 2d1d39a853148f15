"""From a finished Run to a Hugging Face folder that can be published: weights, gates, and a model card.

The card is made from the Run alone (data, loss table, density, settings, versions), so that nothing in it can be
claimed that was not measured.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..models.loading import first_token, load, save
from ..runs.rows import EvaluationRow
from ..runs.run import Run, check_folder, reading, whole_folder, write_bytes

ADAPTER = "adapter_config.json"
NOT_SETTINGS = ("model", "data", "text")  # they name files
WITHOUT_CONTROL = "There is no matched dense control: part of any difference to the base may be adaptation to the text."
WITH_CONTROL = (
    "The control is the same model with the same further training and no gates: compare the sparse model with it."
)


def export(run: str | Path | Run, out: str | Path, merge: bool = True) -> Path:
    """Write the sparse model of a Run as a Hugging Face folder with a README.md; returns the folder.

    merge: fold LoRA adapters into the weights. False keeps the adapter, which needs its base to be found again.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists already; choose another --out")
    source = run if isinstance(run, Run) else Run(run)
    if not (source.path / "model").is_dir():
        raise ValueError(source.without_model())
    if not (source.path / "evaluation.json").is_file():
        raise ValueError(f"the run {source.path} is not finished; continue it with --resume, then export it")
    is_adapter = (source.path / "model" / ADAPTER).is_file()
    if not merge and not is_adapter:
        raise ValueError(f"the run {source.path} trained all weights: it has no adapter to export; leave out --adapter")
    check_folder(out)
    model, tokenizer = load(source.path)
    first = first_token(tokenizer)
    with reading(source.path):
        name = None if first is None else str(tokenizer.convert_ids_to_tokens(first))
        card = model_card(source, adapter=is_adapter and not merge, first=name)
    if is_adapter and merge:
        model = model.merge_and_unload()  # type: ignore[operator]
    with whole_folder(out) as fresh:
        save(model, tokenizer, fresh)
        write_bytes(fresh / "README.md", card.encode("utf-8", "replace"))
    return out


def push(run: str | Path | Run, repository: str, private: bool = False, merge: bool = True) -> str:
    """Publish the sparse model of a Run on the Hugging Face hub, as `export` writes it; returns its address.

    repository: "me/sparse-gpt2"; made if it is not there. Needs to be logged in: `hf auth login`.
    """
    validate_repo_id(repository)  # before any work
    with TemporaryDirectory() as folder:
        exported = export(run, Path(folder) / "model", merge)
        hub = HfApi()
        try:
            address = hub.create_repo(repository, private=private, exist_ok=True)
            hub.upload_folder(repo_id=address.repo_id, folder_path=exported, commit_message="Upload with sparselens")
        except Exception as error:  # the hub's many ways of saying no
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = "log in with `hf auth login` to an account that may write there"
            raise ValueError(f"could not publish {repository} ({reason}); {advice}") from error
    return str(address)


def model_card(run: Run, adapter: bool = False, first: str | None = None) -> str:
    """The README.md of an exported model. first: the token that training sequences began with."""
    config = run.record["config"]
    rows: list[EvaluationRow] = run.read("evaluation.json")
    by_kind = {row["kind"]: row for row in rows}
    sparse, summary = by_kind["sparse"], run.read("summary.json")
    base, layers = str(config["model"]), sparse.get("density_per_layer")
    made_here = Path(base).exists() or (run.path / "base").is_dir()
    on_hub = not made_here and base.count("/") <= 1
    name = short_name(base)
    header = ModelCardData(
        library_name="transformers", tags=["sparselens", "sparse-attention"], base_model=base if on_hub else None
    )
    met = "met its target" if summary["met"] else "did **not** meet its target"
    quantity = summary.get("target_of") or ("KL to base" if config["loss"] == "kl" else "held-out loss")
    target = f"{quantity} at most {summary['target']:.4f} nats"
    if config.get("density") is not None:
        target += f" with at most {config['density']:.2%} of the edges"
    sections = [
        f"---\n{header.to_yaml()}\n---",
        f"# {name} with sparse attention",
        f"`{name}`, post-trained with [sparselens] so that {sparse['density']:.2%} of its attention edges are open "
        f"({_number(sparse['edges_per_query'], '.2f')} keys per query and head). A closed edge carries exactly "
        f"nothing. The run {met} ({target}).",
        "## Measured\n\n" + _table(rows),
        f"On {sparse['sequences']} held-out sequences that steered nothing; ± is one standard error. "
        + (WITH_CONTROL if "control" in by_kind else WITHOUT_CONTROL),
        layers and f"Density by layer: {', '.join(f'{share:.2%}' for share in layers)}.",
        "## How to load it\n\n```python\nimport sparselens as sl\n\n"
        f'model, tokenizer = sl.load("{"path/to/this/folder"}")\n```\n\n'
        "Plain `from_pretrained` refuses this folder: it would load a dense model without a word."
        + (" The folder holds an adapter and gates; its base is loaded by name." if adapter else "")
        + (f" Begin every prompt with `{first}`, as training sequences did: gates lean on it." if first else ""),
        "## How it was made\n\n" + _making(config, run.record.get("provenance", {}).get("versions", {})),
        "## Limits\n\nGates were trained and measured on the text above, at the length above; on other text density "
        "and loss differ. A sparse circuit is a claim about this model, not about the one it was made from. The base "
        "model's licence, biases and limits apply.",
        "[sparselens]: https://arxiv.org/abs/2512.05865",
    ]
    return str(ModelCard("\n\n".join(section for section in sections if section) + "\n"))


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
