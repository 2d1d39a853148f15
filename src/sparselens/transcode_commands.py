"""`sparselens transcode`: train, write, say."""

from pathlib import Path

from .config import Text, Transcode
from .run import Run, write_json
from .transcoding import transcode


def transcode_command(
    model: str, data: list[str], out: Path, settings: Transcode, text: Text, resume: bool, json: Path | None
) -> None:
    transcode(model, data=data, out=out, settings=settings, text=text, resume=resume)
    if json is not None:
        run = Run(out)
        write_json(json, run.read("results.json") | {"provenance": run.record["provenance"]})
