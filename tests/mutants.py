"""Change one token of the numeric core at a time and see whether a test notices: `make mutants`.

A test that runs a line does not yet check it. A mutant that survives shows a number that nobody looks at.

1. Every test file runs once in a child that notes which test runs which line (kept in build/mutants until the file or
   the package changes).
2. For every mutant, a child forked from a parent that has imported torch already runs the tests of its line until one
   fails: the quickest first, and one case of each before another. A child that takes far too long has noticed too.

Survivors that no test can or should notice are listed, with the reason, in mutants_explained.txt.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from importlib.machinery import SourceFileLoader

from mutant_tests import BUILD, ROOT, SOURCE, TESTS, Watch, child, coverage, run_tests
from mutations import Mutant, mutants_of, reach

# Relative to src/sparselens: whatever computes a number of a result.
CORE = [
    "attribution/clusters", "attribution/cuts", "attribution/graph", "attribution/growth", "attribution/head_shares",
    "attribution/interventions", "attribution/linear_model", "attribution/qk_terms", "attribution/sources",
    "circuits/attention_edges", "circuits/circuit", "circuits/estimate", "circuits/faithfulness",
    "circuits/prompt_curves", "circuits/rankings", "circuits/readings", "circuits/run", "circuits/scores",
    "evaluation/parity", "faces/collect", "faces/finish", "faces/labels", "faces/store", "gating/op",
    "gating/reference", "live/circuit", "live/features", "live/models", "live/passes", "models/component_graph",
    "models/decoder", "models/delta", "models/identity", "tasks/prompts", "training/controllers", "training/engine",
    "training/head", "training/loop", "training/measure", "transcoders/decoding", "transcoders/evaluation",
    "transcoders/losses", "transcoders/transcoder",
]  # fmt: skip
SLOWEST = 15.0  # seconds; a slower test is not asked
PATIENCE = 60.0  # seconds of tests for one mutant
ENOUGH = 0.9  # share of the unexplained mutants that have to be noticed


def survives(mutant: Mutant, tests: dict[str, dict], users: set[tuple[str, int]]) -> bool:
    """Whether every test that runs one of these lines passes on the mutant."""
    lines = {f"{name}:{line}" for name, line in users}
    near = [name for name, test in tests.items() if not lines.isdisjoint(test["lines"])]
    near.sort(key=lambda name: tests[name]["seconds"])
    turn: dict[str, int] = {}
    cases: Counter[str] = Counter()
    for name in near:
        test = name.partition("[")[0]
        cases[test] += 1
        turn[name] = cases[test]
    chosen, seconds = [], 0.0
    # One case of every test before another case of the same, unless that is quicker than what it would wait for.
    for name in sorted(near, key=lambda name: turn[name] * max(tests[name]["seconds"], 0.05)):
        if seconds < PATIENCE and tests[name]["seconds"] < SLOWEST:
            chosen.append(name)
            seconds += tests[name]["seconds"]
    if not chosen:
        return True
    path = str(SOURCE / f"{mutant.file}.py")
    code = compile(mutant.text, path, "exec")
    load = SourceFileLoader.get_code

    def work() -> int:
        SourceFileLoader.get_code = lambda self, name: code if self.path == path else load(self, name)
        return run_tests(Watch(chosen), sorted({name.split("::")[0] for name in chosen}))

    return child(work, 30 + 4 * seconds, BUILD / "last.log") == 0


def explained() -> dict[str, str]:
    """{"- before" or "+ after": why no test notices it}; with "- before" alone, all mutants of that line are meant."""
    lines = (TESTS / "mutants_explained.txt").read_text().splitlines()
    reasons: dict[str, str] = {}
    waiting: list[str] = []
    for line in lines:
        if line.startswith(("- ", "+ ")):
            waiting = [*waiting, line] if line.startswith("- ") else [line]
        elif line.startswith("  "):
            reasons |= dict.fromkeys(waiting, line.strip())
            waiting = []
    return reasons


def lot(mutant: Mutant, seed: int) -> bytes:
    """Decides who is drawn: a mutant keeps its lot when lines or files around it move."""
    return hashlib.sha256(f"{seed} {mutant.before} {mutant.after}".encode()).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, help="how many; default: 200, or with --only all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[""], help="mutants whose file:line begins with one of these")
    parser.add_argument("--tests", nargs="*", default=[""], help="tests whose path begins with one of these, no others")
    options = parser.parse_args()
    os.chdir(ROOT)
    BUILD.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "src"))
    os.environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    tests, reasons = coverage(CORE, tuple(options.tests)), explained()
    texts = {name: (SOURCE / f"{name}.py").read_text() for name in CORE}
    every = sorted((m for name, text in texts.items() for m in mutants_of(name, text)), key=lambda m: (m.file, m.line))
    wanted = [m for m in every if f"{m.file}:{m.line}".startswith(tuple(options.only))]
    count = options.count or (200 if options.only == [""] else len(wanted))
    chosen = sorted(wanted, key=lambda m: lot(m, options.seed))[:count]
    print(f"{len(chosen)} of {len(every):,} mutants, {len(tests)} tests", flush=True)
    for stale in reasons.keys() - {key for m in every for key in (f"- {m.before}", f"+ {m.after}")}:
        print(f"mutants_explained.txt: no such line any more: {stale}")
    asked = [m for m in chosen if f"- {m.before}" not in reasons and f"+ {m.after}" not in reasons]
    gc.collect()
    gc.freeze()  # or every child would copy what it only looks at
    begin, survivors = time.monotonic(), []
    if asked and not survives(replace(asked[0], text=texts[asked[0].file]), tests, reach(asked[0], texts)):
        raise SystemExit(f"without any mutant, a test fails: see {BUILD / 'last.log'}")
    for i, mutant in enumerate(asked):
        if survives(mutant, tests, reach(mutant, texts)):
            survivors.append({"at": f"{mutant.file}.py:{mutant.line}", "before": mutant.before, "after": mutant.after})
            left = (time.monotonic() - begin) / (i + 1) * (len(asked) - i - 1) / 60
            print(f"[{i + 1}/{len(asked)}, {left:.0f} min left] {mutant.file}.py:{mutant.line}")
            print(f"  - {mutant.before}\n  + {mutant.after}", flush=True)
    share = 1 - len(survivors) / len(asked) if asked else 1.0
    summary = {"seed": options.seed, "mutants": len(chosen), "explained": len(chosen) - len(asked), "noticed": share}
    (BUILD / "report.json").write_text(json.dumps(summary | {"survivors": survivors}, indent=1))
    print(f"{len(asked) - len(survivors)} of {len(asked)} noticed ({share:.1%}), {summary['explained']} explained")
    sys.stdout.flush()
    os._exit(int(share < ENOUGH))  # libraries that were only loaded complain when they are put away in order


if __name__ == "__main__":
    main()
