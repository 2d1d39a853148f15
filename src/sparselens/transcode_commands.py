"""`sparselens transcode`: train, write, say."""

from pathlib import Path

from . import processes
from .config import Text, Transcode
from .run import Run, check_writable, write_json
from .transcoding import transcode


def transcode_command(
    model: str, data: list[str], out: Path, settings: Transcode, text: Text, resume: bool, json: Path | None
) -> None:
    check_writable(json)
    transcode(model, data=data, out=out, settings=settings, text=text, resume=resume)
    if json is not None and processes.is_main():
        run = Run(out)
        write_json(json, run.read("results.json") | {"provenance": run.record["provenance"]})
