"""How simple for how much: one model made sparse at several budgets, what each costs, how much smaller circuits get.

    python examples/pareto.py MODEL --data prose.txt code.txt --heldout prose-val.txt code-val.txt --out runs/pareto \\
        --edges 2 1 0.6 0.4 0.3 0.2 --tasks ioi greater-than --json pareto.json --picture pareto.png

--edges: budgets, in open edges per head and query. Every budget is a Run of its own, OUT/<edges>; the control is made
with the first. With --tasks each is compared with the dense model: how many times fewer attention edges are enough for
90 % of the effect, all others removed. Killed or stopped, the same command goes on, also with more budgets; the file
and the picture grow with each. 300 steps of 128 x 512 tokens are a quarter of the recipe of examples/smollm2_135m.py:
the gaps are larger than a full run leaves, their order is what the picture is for.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import sparselens as sl
from sparselens.reporting.figures.style import BLUE, GREY, ORANGE
from sparselens.runs.run import Run, provenance, write_json

THRESHOLD = "0.9"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--heldout", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--edges", type=float, nargs="+", default=[2, 1, 0.6, 0.4, 0.3, 0.2])
    parser.add_argument("--tasks", nargs="*", default=[], help="names or .jsonl files of prompt pairs")
    parser.add_argument("--prompts", type=int, default=40, help="per task")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, help="sequences per forward pass; halved where memory is short")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--closing", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    a = parser.parse_args(arguments)
    wrong = [edges for edges in a.edges if not edges > 0]
    if wrong:
        parser.error(f"--edges: {wrong[0]:g} is no number of edges per head and query (try 0.5)")
    folders = {edges: a.out / f"{edges:g}" for edges in a.edges}
    first = next((edges for edges in folders if (folders[edges] / "control").is_dir()), a.edges[0])
    rows: list[dict[str, Any]] = []
    for edges in sorted(folders, key=lambda edges: edges != first):
        run = sl.sparsify(  # a finished run is only read and measured again
            a.model, a.data, folders[edges], heldout=tuple(a.heldout), heldout_tokens=1 << 20,
            control=edges == first, edges=edges, closing=a.closing, steps=a.steps, batch=a.batch,
            micro_batch=a.micro_batch, length=a.length, seed=a.seed,
            resume=(folders[edges] / "run.json").is_file(),
        )  # fmt: skip
        rows += rows_of(run, edges, first == edges)
        if a.tasks:
            rows[-1]["removed"] = multipliers(a.model, run, a.tasks, a.prompts)
        found = {"model": a.model, "steps": a.steps, "batch": a.batch, "length": a.length, "closing": a.closing}
        if a.json:
            write_json(a.json, found | {"prompts": a.prompts, "seeds": [a.seed], "rows": rows} | provenance())
        if a.picture:
            draw(rows, a.picture)
    print(table(rows))


def rows_of(run: Run, edges: float, whole: bool) -> list[dict[str, Any]]:
    """The sparse model's row; if asked, the base's and the control's before it."""
    keys = ("kind", "loss", "kl_to_base", "top1_agreement", "density", "edges_per_query")
    rows = []
    for row in run.read("evaluation.json"):
        if whole or row["kind"] == "sparse":
            rows.append({key: row.get(key) for key in keys})
        if row["kind"] == "sparse":
            rows[-1] |= {"budget": edges, "worst_layer_density": max(row["density_per_layer"])}
    return rows


def multipliers(model: str, run: Run, tasks: list[str], prompts: int) -> dict[str, dict[str, Any]]:
    """Per task how many times fewer attention edges than in the dense model; kept in the Run, asked once."""
    found = {}
    for task in tasks:
        path = run.path / "circuits" / Path(task).stem / "results.json"
        if not path.is_file():
            sl.compare(model, run, [task], out=path.parent, prompts=prompts, readings=("removed",), scope="prompt")
        for name, row in json.loads(path.read_text())["tasks"].items():
            found[name] = row["multipliers"]["removed"]["dense"][THRESHOLD]
    return found


def gaps(rows: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """(edges per head and query, loss above the control's, KL to the base) of the sparse models, sparsest first."""
    control = next(row["loss"] for row in rows if row["kind"] == "control")
    return [(row["edges_per_query"], row["loss"] - control, row["kl_to_base"]) for row in sparse_rows(rows)]


def sparse_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((row for row in rows if row["kind"] == "sparse"), key=lambda row: row["edges_per_query"])


def table(rows: list[dict[str, Any]]) -> str:
    tasks = sorted({task for row in rows for task in row.get("removed", {})})
    lines = [f"{'edges/query':>11}{'loss - control':>16}{'KL to base':>12}" + "".join(f"{task:>16}" for task in tasks)]
    for row, (edges, gap, kl) in zip(sparse_rows(rows), gaps(rows), strict=True):
        fewer = [row.get("removed", {}).get(task, {}).get("multiplier") for task in tasks]
        ends = "".join(f"{'not reached' if x is None else f'{x:.1f}x fewer':>16}" for x in fewer)
        lines.append(f"{edges:11.3f}{gap:16.4f}{kl:12.4f}" + ends)
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """What each budget costs, above what it buys."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    edges, gap, kl = zip(*gaps(rows), strict=True)
    tasks = sorted({task for row in rows for task in row.get("removed", {})})
    figure, axes = plt.subplots(
        2 if tasks else 1, 1, figsize=(4.6, 5.2 if tasks else 3.0), layout="constrained", sharex=True, squeeze=False
    )
    cost = axes[0, 0]
    cost.plot(edges, gap, color=ORANGE, marker="o", label="loss above the control's")
    cost.plot(edges, kl, color=BLUE, marker="s", label="KL to the base")
    cost.axhline(0, color=GREY, linewidth=0.8)
    cost.set(ylabel="cost, nats per token")
    for task, style in zip(tasks, ("o-", "s--", "^:", "v-."), strict=False):
        known = [(row["edges_per_query"], row["removed"].get(task)) for row in sparse_rows(rows) if "removed" in row]
        points = [(x, found) for x, found in known if found and found["multiplier"]]
        if not points:
            continue
        x = [edges for edges, _ in points]
        middle = [found["multiplier"] for _, found in points]
        axes[1, 0].plot(x, middle, style, color=ORANGE, label=f"{task} (n = {points[0][1]['n_prompts']})")
        axes[1, 0].fill_between(
            x, [f["low"] for _, f in points], [f["high"] for _, f in points], color=ORANGE, alpha=0.15
        )
    if tasks:
        axes[1, 0].axhline(1, color=GREY, linewidth=0.8)
        axes[1, 0].set(yscale="log", ylabel="times fewer edges for 90 %,\nthe others removed")
        axes[1, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[1, 0].yaxis.set_major_formatter("{x:g}x")
        axes[1, 0].yaxis.set_minor_locator(plt.NullLocator())
    axes[-1, 0].set(xscale="log", xlabel="open attention edges per head and query")
    axes[-1, 0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[-1, 0].xaxis.set_major_formatter("{x:g}")
    axes[-1, 0].xaxis.set_minor_locator(plt.NullLocator())
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=200)
    plt.close(figure)


if __name__ == "__main__":
    main()
