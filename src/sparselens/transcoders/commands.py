"""`sparselens transcode`: train, write, say."""

from pathlib import Path

from ..config import Text, Transcode
from ..runs import distributed
from ..runs.run import Run, check_writable, write_json
from .transcode import transcode


def transcode_command(
    model: str, data: list[str], out: Path, settings: Transcode, text: Text, resume: bool, json: Path | None
) -> None:
    check_writable(json)
    transcode(model, data=data, out=out, settings=settings, text=text, resume=resume)
    if json is not None and distributed.is_main():
        run = Run(out)
        write_json(json, run.read("results.json") | {"provenance": run.record["provenance"]})
