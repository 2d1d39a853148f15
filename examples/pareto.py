"""What density costs: one model made sparse at several budgets, beside one dense control of the same length.

    python examples/pareto.py MODEL --data prose.txt code.txt --heldout prose-val.txt code-val.txt --out runs/pareto \\
        --densities 0.05 0.02 0.01 0.005 0.0025 0.001 --json pareto.json --picture pareto.png

Every budget is a Run of its own, OUT/<density>; the control is trained with the first. Killed or stopped, the same
command goes on, also with more budgets; the file and the picture grow with each. 300 steps of 128 x 512 tokens are a
quarter of the recipe of examples/smollm2_135m.py: the gaps are larger than a full run leaves, their order is what the
picture is for.
"""

import argparse
from pathlib import Path
from typing import Any

import sparselens as sl
from sparselens.reporting.figures.style import BLUE, GREY, ORANGE
from sparselens.runs.run import Run, provenance, write_json


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--heldout", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.05, 0.02, 0.01, 0.005, 0.0025, 0.001])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, help="sequences per forward pass; halved where memory is short")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--closing", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    a = parser.parse_args(arguments)
    wrong = [density for density in a.densities if not 0 < density < 1]
    if wrong:
        parser.error(f"--densities: {wrong[0]} is not between 0 and 1 (0.5 % is 0.005)")
    folders = {density: a.out / f"{density:g}" for density in a.densities}
    first = next((density for density in folders if (folders[density] / "control").is_dir()), a.densities[0])
    rows: list[dict[str, Any]] = []
    for density in sorted(folders, key=lambda density: density != first):
        run = sl.sparsify(  # a finished run is only read and measured again
            a.model, a.data, folders[density], heldout=tuple(a.heldout), heldout_tokens=1 << 20,
            control=density == first, density=density, closing=a.closing, steps=a.steps, batch=a.batch,
            micro_batch=a.micro_batch, length=a.length, seed=a.seed,
            resume=(folders[density] / "run.json").is_file(),
        )  # fmt: skip
        rows += rows_of(run, density, first == density)
        found = {"model": a.model, "steps": a.steps, "batch": a.batch, "length": a.length, "closing": a.closing}
        if a.json:
            write_json(a.json, found | {"seeds": [a.seed], "rows": rows} | provenance())
        if a.picture:
            draw(rows, a.picture)
    print(table(rows))


def rows_of(run: Run, density: float, whole: bool) -> list[dict[str, Any]]:
    """The sparse model's row; if asked, the base's and the control's before it."""
    keys = ("kind", "loss", "kl_to_base", "top1_agreement", "density", "edges_per_query")
    rows = []
    for row in run.read("evaluation.json"):
        if whole or row["kind"] == "sparse":
            rows.append({key: row.get(key) for key in keys})
        if row["kind"] == "sparse":
            rows[-1] |= {"budget": density, "worst_layer_density": max(row["density_per_layer"])}
    return rows


def gaps(rows: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """(density, loss above the control's, KL to the base) of the sparse models, sparsest first."""
    control = next(row["loss"] for row in rows if row["kind"] == "control")
    sparse = [row for row in rows if row["kind"] == "sparse"]
    return sorted((row["density"], row["loss"] - control, row["kl_to_base"]) for row in sparse)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'density':>9}{'loss - control':>16}{'KL to base':>12}"]
    return "\n".join(lines + [f"{density:9.3%}{gap:16.4f}{kl:12.4f}" for density, gap, kl in gaps(rows)])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    density, gap, kl = zip(*gaps(rows), strict=True)
    percent = [100 * share for share in density]
    control_kl = next(row["kl_to_base"] for row in rows if row["kind"] == "control")
    figure, axis = plt.subplots(figsize=(4.6, 3.0), layout="constrained")
    axis.plot(percent, gap, color=ORANGE, marker="o", label="loss above the matched control's")
    axis.plot(percent, kl, color=BLUE, marker="s", label="KL to the base")
    axis.axhline(control_kl, color=BLUE, linestyle=":", linewidth=1, label="the control's KL to the base")
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set(xscale="log", xlabel="attention edges open, % of all", ylabel="nats per token")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=200)
    plt.close(figure)


if __name__ == "__main__":
    main()
