"""A model and nothing to evaluate it on; known before torch is imported."""

from pathlib import Path


def is_run(source: object) -> bool:
    """Whether a name or path is that of a Run."""
    return isinstance(source, str | Path) and (Path(source) / "run.json").is_file()


def nothing_to_evaluate_on(source: object) -> ValueError:
    """What to answer to a model that is no Run, where no text, benchmark or prompt is given."""
    what = f"{str(source)!r}" if isinstance(source, str | Path) else "this model"
    return ValueError(
        f"there is nothing to evaluate {what} on: it is not a Run, which would bring its text along; "
        "give --data, --benchmarks or --behaviour"
    )
