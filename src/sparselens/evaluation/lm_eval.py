"""Multiple-choice benchmarks through EleutherAI's lm-eval: its prompts, its scoring, its standard errors, our models.

Questions come from the Hugging Face hub, as lm-eval has it, or from files: FOLDER/NAME/SPLIT.jsonl (or .parquet,
.arrow), e.g. questions/piqa/validation.jsonl, with the columns of the dataset on the hub. For files, lm-eval's own task
definition is included and only the source of its questions replaced.
"""

import difflib
import logging
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..runs.rows import EvaluationRow
from ..tasks.registry import Words

FORMATS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}  # suffix -> loader of the datasets library
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


def find_benchmarks(names: list[str], questions: Path | None = None) -> list[Any]:
    """lm-eval's tasks of these names with their questions; one sentence where a package, name or file is missing."""
    if questions is not None and not questions.is_dir():
        raise ValueError(f"no such folder of questions: {questions}")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("benchmarks need the lm-eval package: pip install 'sparselens[benchmarks]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager()
    for name in names:
        if name not in manager.all_subtasks:
            similar = difflib.get_close_matches(name, manager.all_subtasks, 3)
            hint = f"did you mean {' or '.join(similar)}?" if similar else "`lm_eval ls subtasks` lists them all."
            raise ValueError(f"lm-eval has no benchmark {name!r}; {hint}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            definition = name
            if questions is not None:
                import yaml

                entry = manager.task_index[name]
                path = Path(folder) / f"{name}.yaml"
                path.write_text(yaml.safe_dump({"include": str(entry.yaml_path), **_from_files(entry, questions)}))
                definition = str(path)
            try:
                found += manager.load([definition])["tasks"].values()
            except Exception as error:  # the hub's, the datasets library's and lm-eval's many ways of saying no
                advice = "check their columns" if questions else "without the hub, give them as files with --questions"
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ValueError(f"the questions of {name} cannot be read ({reason}); {advice}") from error
    return found


def _from_files(entry: Any, questions: Path) -> dict[str, object]:
    """What to change in lm-eval's definition of a task so that it reads files."""
    name, splits = entry.name, {key: entry.cfg.get(key) for key in SPLITS}
    files: dict[str, str] = {}
    kinds = set()
    for split in filter(None, splits.values()):
        for suffix, kind in FORMATS.items():
            path = questions / name / f"{split}{suffix}"
            if path.is_file():
                files[split] = str(path.absolute())
                kinds.add(kind)
    asked = splits["test_split"] or splits["validation_split"]  # lm-eval's own choice
    if asked not in files or len(kinds) > 1:
        expected = f"{questions / name / f'{asked}.jsonl'} (or .parquet, .arrow; all splits in one format)"
        raise ValueError(f"no questions for {name}: expected {expected}")
    # Splits that are not there serve only to draw examples from, which zero-shot evaluation does not.
    missing = {key: None for key, split in splits.items() if split is not None and split not in files}
    source = {"dataset_path": kinds.pop(), "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    return {"task": name, **source, **missing}


def answer_benchmarks(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, benchmarks: list[Any], *, limit: int | None = None,
    batch: int = 16,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Per benchmark: every metric of lm-eval with its standard error (acc, acc_stderr, ...), and the questions asked.

    benchmarks: as `find_benchmarks` gives them. limit: only the first so many questions of each.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = Words(tokenizer)

    class FromTheStart(HFLM):  # type: ignore[misc]  # untyped
        """Contexts begin as all other prompts here do."""

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            asked, answered = super()._encode_pair(context, continuation)
            return words.begin(asked), answered

    known = TaskManager(include_defaults=False)  # the tasks are here already: no need to search for them again
    lm = FromTheStart(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    found = simple_evaluate(model=lm, tasks=list(benchmarks), limit=limit, log_samples=False, task_manager=known)
    return benchmark_rows(found)


def benchmark_rows(found: Any) -> dict[str, dict[str, float]]:
    """lm-eval's results, {"acc,none": ...} per task, as rows of ours."""
    rows = {}
    for name, metrics in found["results"].items():
        values = {key.removesuffix(",none"): value for key, value in metrics.items() if isinstance(value, float)}
        rows[name] = {"questions": found["n-samples"][name]["effective"], **values}
    return rows


def benchmark_table(rows: list[EvaluationRow]) -> str:
    """One line per model, one column per benchmark and metric, as text."""
    first = rows[0]["benchmarks"]
    columns = [(name, metric) for name, values in first.items() for metric in values if f"{metric}_stderr" in values]
    asked = ", ".join(f"{name} {values['questions']:,}" for name, values in first.items())
    lines = [" " * 10 + "".join(f"{f'{name} {metric}':>22}" for name, metric in columns)]
    for row in rows:
        cells = [row["benchmarks"][name] for name, _ in columns]
        texts = [f"{c[m]:.3f} ± {c[f'{m}_stderr']:.3f}" for c, (_, m) in zip(cells, columns, strict=True)]
        lines.append(f"{row['kind']:10}" + "".join(f"{text:>22}" for text in texts))
    return "\n".join([*lines, f"± one standard error; questions: {asked}"])
