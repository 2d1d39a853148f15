"""A Run's page and its figures for print; what the Run lacks for them is computed first."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ..reporting import payload, write_page
from ..reporting.figures.flow import Flow, draw_flow
from ..reporting.sections import open_runs, sections
from ..reporting.sections.attention import read_maps
from ..reporting.sections.attribution import read_trace, trace_files, traced_prompts
from ..reporting.sections.circuits import comparisons
from ..runs.run import Run, check_folder, check_writable, reading, write_bytes

FLOW_TOKENS = 32  # figure 1 is for prompts whose words fit beside each other, turned


def report(
    run: str | Path | Run, other: str | Path | Run | None = None, *, out: str | Path | None = None,
    prompts: Sequence[str] = (), say: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """One self-contained HTML page of a Run (or two, side by side); returns its path, RUN/report.html by default.

    prompts: shown in the attention explorer, before the built-in ones. Attention is computed once and kept in the Run.
    """
    runs = [Run(found.path if isinstance(found, Run) else found) for found in (run, other) if found is not None]
    path = Path(out) if out is not None else runs[0].path / "report.html"
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the page a file name, such as {path / 'report.html'}")
    check_writable(path)
    shown = open_runs(runs)
    payload(shown)  # damaged rows are found before any work
    for one in shown:
        with reading(one.run.path):
            look(one.run, prompts, say)
        one.forget("attention")  # all other rows are made once
    return write_page(payload(shown), path)


def look(run: Run, prompts: Sequence[str], say: Callable[[str], None]) -> None:
    """Attention rows, if the Run has models; torch is only imported where there is something to look at."""
    if (run.path / "model").is_dir() or (run.path / "base" / "model").is_dir():
        from ..evaluation.attention_maps import attention_rows

        attention_rows(run, tuple(prompts), traced_prompts(run.path), say)
    elif prompts:
        raise ValueError(f"{run.path} has no model yet to run a prompt through; finish it with --resume")


def figures(
    run: str | Path | Run, kind: str = "pdf", out: str | Path | None = None, threshold: float = 0.9,
    say: Callable[[str], None] = print,
) -> list[Path]:  # fmt: skip
    """Figures 1 to 4 of a Run for print, from the rows the report shows: the files that were drawn.

    kind: pdf, svg or png. out: their folder; default: the Run. say: hears which were left
    out, and which command would make them.
    """
    found = run if isinstance(run, Run) else Run(run)
    folder = found.path if out is None else Path(out)
    check_folder(folder)
    for path in trace_files(found.path):
        read_trace(path)  # before anything is drawn
    with reading(found.path), TemporaryDirectory() as fresh:  # all of them or none
        made = _draw(found, Path(fresh), kind, threshold)
        drawn = [folder / path.name for path in made]
        for path, final in zip(made, drawn, strict=True):
            write_bytes(final, path.read_bytes())
    if not drawn:
        raise ValueError(
            f"{found.path} has no rows to draw yet; `sparselens report {found.path}` says which commands would make "
            "them"
        )
    for sentence in _left_out(found, drawn):
        say(sentence)
    return drawn


def _draw(run: Run, folder: Path, kind: str, threshold: float) -> list[Path]:
    from ..reporting.figures.attribution import draw_trace
    from ..reporting.figures.circuits import draw_all

    drawn = []
    flow = run.read("figure1.json") if (run.path / "figure1.json").is_file() else flow_of(run)
    if flow is not None:
        drawn.append(folder / f"figure1.{kind}")
        draw_flow(flow, drawn[-1])
    for i, (_, comparison) in enumerate(comparisons(run.path)[0]):
        drawn += draw_all(comparison, folder, threshold, (kind,), f"-{i}" if i else "")
    traces = ((path, read_trace(path)) for path in trace_files(run.path))
    # Without `main` no edge was looked at closely.
    for i, (path, rows) in enumerate((path, rows) for path, rows in traces if "main" in rows):
        drawn.append(folder / f"figure4{f'-{path.parent.name}' if i else ''}.{kind}")
        draw_trace(rows, drawn[-1])
    return drawn


def flow_of(run: Run) -> dict[str, Flow] | None:
    """Figure 1's rows from the attention rows: the first prompt short enough, dense (or control) and sparse."""
    for prompt in run.find("attention/attention.json", {"prompts": []})["prompts"]:
        dense = next((role for role in ("dense", "control") if role in prompt["models"]), None)
        if dense is None or "sparse" not in prompt["models"] or len(prompt["tokens"]) > FLOW_TOKENS:
            continue
        tensors = read_maps(run.path / "attention" / Path(prompt["file"]).name)
        words = [_shown(token) for token in prompt["tokens"]]
        flow: dict[str, Flow] = {}
        for name, role in (("base", dense), ("sparse", "sparse")):
            weights = tensors[f"{role}.weights"].astype(float)
            answer = [*words[:-1], _shown(prompt["models"][role]["says"][-1])]
            n_open, attention = int((weights > 0).sum()), weights.tolist()
            flow[name] = {"input": words, "output": answer, "edges": n_open, "attention": attention}
            if role == "control":
                flow[name]["title"] = "Dense Control"
        return flow
    return None


def _shown(token: str) -> str:
    """What can be printed of it; half a character cannot."""
    return token.strip().replace("\n", "⏎").encode("utf-8", "replace").decode() or "␣"


def _left_out(run: Run, drawn: list[Path]) -> Iterator[str]:
    """Which figures were not drawn, and the command that would make what they lack."""
    wants = {
        "figure1": ("attention", f"a prompt of at most {FLOW_TOKENS} tokens that both models have read"),
        "figure2": ("circuits", "a comparison of circuits"), "figure3": ("circuits", "circuits that can be drawn"),
        "figure4": ("attribution", "a traced edge between clusters"),
    }  # fmt: skip
    for name, (section, lacks) in wants.items():
        if not any(path.name.startswith(name) for path in drawn):
            command = sections()[section].command(run)
            if name == "figure1" and (run.path / "attention").is_dir():
                command += " --prompt 'A SHORT PROMPT'"
            yield f"left out {name}: the Run has no {lacks.removeprefix('a ')}; `{command}` makes it"
