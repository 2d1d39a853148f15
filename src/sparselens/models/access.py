"""How transformers is asked for a model: safely, quietly, and without waiting for a hub that does not answer."""

import functools
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from transformers.utils import logging as transformers_logging

from ..runs.run import one_line, read_json, reading

SAFE: Any = {"trust_remote_code": False}  # said aloud: left open, transformers asks the user to run a stranger's code
PATIENCE = 3  # seconds to wait for the hub
WEIGHTS = "transformers_weights"  # which file from_pretrained reads, where a config says so
NOT_THIS_WAY = "none, for this model has gates in its attention: load it with sparselens.load()"


# Oldest and newest that our tests have run with (docs/install.md). Older ones lack what we call.
TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.23")}


@functools.cache
def check_versions() -> None:
    """ValueError for versions that are too old, a warning for ones that are newer than what was tested; once."""
    for package, (oldest, newest) in TESTED.items():
        found = version(package)
        if _number(found) < _number(oldest):
            raise ValueError(f"{package} {found} is too old: sparselens needs {oldest}; pip install -U {package}")
        if _number(found) > _number(newest):
            text = f"{package} {found} is newer than what sparselens was tested with ({oldest} to {newest})"
            warnings.warn(f"{text}; `sparselens parity` says whether logits are still the same", stacklevel=3)


def _number(text: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


class Access(NamedTuple):
    """How transformers is to look for a model."""

    options: dict[str, Any]
    trouble: str = ""  # what to add where nothing is found


def access(source: str) -> Access:
    """A name is looked for on the hub; where that does not answer within seconds, in the local cache alone.

    Left to itself, huggingface_hub tries again for half a minute and prints every attempt.
    """
    try:
        if Path(source).exists():
            return Access(SAFE)
        huggingface_hub.utils.validate_repo_id(source)  # type: ignore[attr-defined]
    except (OSError, ValueError):  # no name at all: transformers says so without asking anybody
        return Access(SAFE)
    address = huggingface_hub.constants.ENDPOINT
    try:
        huggingface_hub.get_session().head(address, timeout=PATIENCE)
    except Exception as error:  # every HTTP library has its own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Access(SAFE | {"local_files_only": True}, f"; {address} does not answer: {why}")
    return Access(SAFE)


@contextmanager
def refusing(before: str, after: str = "") -> Iterator[None]:
    """Any error as one sentence with its first line in it: what is damaged shows as any kind of error."""
    try:
        yield
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        line = text.splitlines()[0].rstrip()
        if line.endswith(":"):  # what it announces is in the next lines
            line = one_line(error, 300)
        raise ValueError(f"{before}{line}{after}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own bars and its report of unexpected weights (the gates, which are read afterwards)."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def stop_from_pretrained(path: Path) -> None:
    """Name no weights in a config.json, so that from_pretrained stops there with our sentence; left to itself it loads
    a sparse model without its gates when it is told which attention to use.

    It drops the mark whenever it saves, so that the mark can stand in the file alone.
    """
    with reading(path):
        marked = read_json(path) | {WEIGHTS: NOT_THIS_WAY}
    path.write_text(json.dumps(marked, indent=2, sort_keys=True) + "\n")


def may_be_loaded(config: Any) -> None:
    """Take the mark off a config, for sparselens.load()."""
    vars(config).pop(WEIGHTS, None)
