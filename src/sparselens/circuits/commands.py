"""`sparselens discover` and `sparselens compare`: load, run, write, draw, say."""

from pathlib import Path
from typing import Any

from .. import tasks as registry
from ..config import Search
from ..models.loading import load
from ..runs import distributed
from ..runs.run import check_folder, check_writable, provenance, write_json
from .compare import compare, table
from .discover import discover


def _name(model: str) -> str:
    """A file or folder by its own name (SmolLM2-1.7B has a dot, but no suffix), a hub name as it is."""
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def discover_command(model: str, task: str, settings: Search, out: Path | None, json: Path | None) -> None:
    registry.find(task)  # before the model is loaded
    check_folder(out)
    check_writable(json)
    distributed.start()
    loaded, tokenizer = load(model, device=distributed.device())
    circuit = discover(loaded, tokenizer, task, settings=settings, show_progress=True)
    if not distributed.is_main():
        return
    found = circuit.results | {"model": _name(model)} | _about()
    print(
        f"\nmetric: {found['m_model']:.3f} on the prompts, {found['m_nothing']:.3f} on the corrupted ones "
        f"(n = {found['n_prompts']} held-out prompts)"
    )
    for threshold, edges in found["edges_at"].items():
        low, high = found["edges_at_interval"][threshold]
        heads = f", {found['heads_at'][threshold]} heads" if "heads_at" in found else ""
        count = f"{edges:,} of {found['n_edges']:,} edges ({low:,.0f} to {high:,.0f})"
        print(f"{float(threshold):.0%} of the effect: {count}{heads}")
    if "token_edges" in found:
        tokens = found["token_edges"]
        print(
            f"gates open {tokens['n_open']:,} of {tokens['n_possible']:,} (head, query, key) edges on "
            f"{tokens['n_prompts']} prompts of {tokens['length']} tokens; "
            f"{tokens['n_proven_absent']:,} are proven absent"
        )
    if json is not None:
        write_json(json, found)
    if out is not None:
        from ..reporting.figures.circuits import draw_all

        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "results.json", found)
        circuit.save(out / "circuit.json")
        draw_all({"names": {"dense": found["model"]}, "tasks": {found["task"]: {"models": {"dense": found}}}}, out)
        print(f"circuit, results and figures are in {out}")


def compare_command(
    dense: str,
    sparse: str,
    tasks: list[str],
    control: str | None,
    settings: Search,
    out: Path | None,
    json: Path | None,
) -> None:
    check_folder(out)
    check_writable(json)
    result = compare(dense, sparse, tasks, control=control, settings=settings, show_progress=True)
    print("\n" + table(result))
    if json is not None:
        write_json(json, {task: row["thresholds"] for task, row in result["tasks"].items()})
    if out is not None:
        from ..reporting.figures.circuits import draw_all

        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "results.json", result | _about())
        for task, circuits in result.circuits.items():
            for role, circuit in circuits.items():
                circuit.save(out / f"circuit-{task}-{role}.json")
        draw_all(result, out)
        print(f"circuits, results and figures are in {out}")


def _about() -> dict[str, Any]:
    return {"provenance": provenance()}
