"""Do predictions of a cut come true? The figures of attribution/cuts.py, several prompts, as a file for results/.

    python benchmarks/cuts.py addition RUN --json results/addition-cuts.json          RUN: of `sparselens demo`
    python benchmarks/cuts.py stories MODEL TRANSCODER --json results/stories15m-cuts.json

Per prompt and model: the 40 largest cluster edges between positions, up to 40 within one, 200 random feature edges;
the main edge; and what cutting the heads that carry 80 % of it does, as a share of cutting it at all of them.
"""

import argparse
from pathlib import Path
from typing import Any

import sparselens as sl
from sparselens.config import Trace
from sparselens.demo.task import prompt_of
from sparselens.runs.run import provenance, write_json

SUMS = [(36, 28), (7, 95), (50, 50), (86, 19)]
STORIES = [
    ("<s>The elephant is big, but the mouse is very", "small"), ("<s>The box was not empty. The box was", "full"),
    ("<s>Once upon a time, Sue and Ben had a cake. Ben gave a piece of cake to", "Sue"),
    ("<s>Tim had a red ball. He liked to play with his red", "ball"),
]  # fmt: skip
CHANGES = ("predicted_direct", "predicted_path", "measured_direct", "predicted", "measured")


def told(rows: Any) -> dict[str, Any]:
    """What is kept of a traced prompt."""
    main, cut = rows["main"], {k: v for k, v in rows["cut"].items() if not k.endswith("_rows")}
    edge = {"edge": f"{main['source']} -> {main['target']}", **{name: main[name] for name in CHANGES}}
    return {"target": rows["target"][0], "main": edge, "heads_for_80": main["n_heads_for_80"],
            "heads_cut": main["heads_cut"], "cut": cut, "agreement_direct": rows["agreement_direct"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["addition", "stories"])
    parser.add_argument("model", type=Path)
    parser.add_argument("transcoder", type=Path, nargs="?")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    found: dict[str, Any] = {}
    if a.which == "addition":
        coders, settings = a.model / "transcoders", Trace(position=9, checks=0)
        for left, right in SUMS:
            rows = sl.trace(
                a.model, coders / "sparse", prompt_of(f"{left}+{right}"), f"{left + right:05}"[-2], settings=settings,
                against=(a.model / "base" / "model", coders / "dense"), say=print,
            ).rows  # fmt: skip
            assert rows is not None
            found[f"{left}+{right}"] = {"sparse": told(rows), "dense": told(rows["against"])}
    else:
        for prompt, target in STORIES:
            rows = sl.trace(a.model, a.transcoder, prompt, target, settings=Trace(budget=500, checks=0), say=print).rows
            found[prompt] = {"dense": told(rows)}
    write_json(a.json, {"prompts": found, "seeds": [0], "hardware": "one CPU core", **provenance()})


if __name__ == "__main__":
    main()
