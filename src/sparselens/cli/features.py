"""Features and the prompts they explain: transcode, features, trace."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

from tyro.conf import OmitArgPrefixes, arg

from ..config import Faces, Text, Trace, Transcode
from ..runs import distributed
from ..runs.run import Run, write_json
from .common import File, Folder, Model, Name, OnDevice, RunFolder


@dataclasses.dataclass(frozen=True)
class TranscodeCommand(OnDevice):
    """Train sparse features that stand in for a model's MLPs (a cross-layer transcoder)."""

    model: Model
    """Hugging Face name, model folder, Run or .gguf file; dense or sparse."""
    data: Annotated[tuple[str, ...], arg(metavar="TEXT ...")]
    """Text: files or globs (.txt, .jsonl, .parquet, plain or .gz/.xz/.zst) or a Hugging Face dataset name."""
    out: Path
    """Folder of the Run; must not exist yet, unless with --resume."""
    resume: bool = False
    """Go on where an interrupted run stopped (same settings)."""
    json: File = None
    """Also write the results to this file."""
    settings: OmitArgPrefixes[Transcode] = dataclasses.field(default_factory=Transcode)
    text: OmitArgPrefixes[Text] = dataclasses.field(default_factory=Text)

    def __call__(self) -> None:
        from ..transcoders.transcode import transcode

        transcode(self.model, data=list(self.data), **self.options("model", "data", "json"))
        if self.json is not None and distributed.is_main():
            run = Run(self.out)
            write_json(self.json, run.read("results.json") | {"provenance": run.record["provenance"]})


@dataclasses.dataclass(frozen=True)
class FeaturesCommand(OnDevice):
    """Read text and give every feature of a transcoder a face: contexts, words, neighbours and a label."""

    transcoder: RunFolder
    """A Run of `transcode`, or a folder in circuit-tracer's layout."""
    data: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    """Text: files or globs (.txt, .jsonl, .parquet, plain or .gz/.xz/.zst) or a Hugging Face dataset name. Default:
    what the transcoder was trained on, where that is made and not read (the addition model)."""
    out: Folder = None
    """Folder of the faces; must not exist yet, unless with --resume. Default: faces, beside the transcoder."""
    model: Name = None
    """The model the transcoder belongs to. Default: what its Run says."""
    resume: bool = False
    """Go on where an interrupted pass stopped (same settings)."""
    labeller: Name = None
    """MODULE:FUNCTION of your own that is given a card and returns a label or None. Default: none is asked."""
    settings: OmitArgPrefixes[Faces] = dataclasses.field(default_factory=Faces)
    text: OmitArgPrefixes[Text] = dataclasses.field(default_factory=Text)

    def __call__(self) -> None:
        from ..faces.features import features

        options = {name: getattr(self, name) for name in ("out", "model", "resume", "settings", "text")}
        features(self.transcoder, list(self.data) or None, labeller=_function(self.labeller), **options)


def _function(name: str | None) -> Callable[[Any], str | None] | None:
    """MODULE:FUNCTION, imported; the working folder counts."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--labeller {name}: expected MODULE:FUNCTION that can be imported ({error})") from None
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ValueError(f"--labeller {name}: it is no function")
    return cast(Callable[[Any], str | None], found)


@dataclasses.dataclass(frozen=True)
class TraceCommand(OnDevice):
    """Take one prompt apart: which features feed the answer, and which heads carry them (figure 4)."""

    model: Model
    """Hugging Face name, model folder, Run or .gguf file; dense or sparse."""
    transcoder: Path
    """The model's transcoder: a Run of `transcode`, or a folder in circuit-tracer's layout."""
    prompt: str
    """The prompt. (For an addition Run: 36+28=?????)"""
    target: Name = None
    """What to explain: a token ('small'), a difference ('small - large'). Default: the likeliest next token."""
    against: Name = None
    """A second model on the same prompt, to put beside the first."""
    against_transcoder: Folder = None
    """The second model's transcoder."""
    clusters: File = None
    """Clusters edited by hand (clusters.json, as --out writes it)."""
    faces: Folder = None
    """What `features` left for the transcoder: labels and cards. Default: what lies beside it, if anything."""
    edge: Name = None
    """The cluster edge to look at closely, source->target. Default: the strongest from elsewhere into the answer."""
    out: Folder = None
    """Folder for trace.json, the graph, figure 4, clusters.json and the graph in Neuronpedia's format."""
    json: File = None
    """Write the rows to this file."""
    settings: OmitArgPrefixes[Trace] = dataclasses.field(default_factory=Trace)

    def __call__(self) -> None:
        against = (self.against, self.against_transcoder) if self.against and self.against_transcoder else None
        if against is None and (self.against is not None or self.against_transcoder is not None):
            raise ValueError("--against needs its own transcoder, --against-transcoder, and the other way round")
        from ..attribution.trace import trace
        from ..reporting.figures.attribution import draw_trace_all

        graph = trace(
            self.model, self.transcoder, self.prompt, self.target, settings=self.settings, clusters=self.clusters,
            against=against, edge=self.edge, faces=self.faces, out=self.out, json=self.json, say=print,
        )  # fmt: skip
        if self.out is not None and graph.rows is not None:
            draw_trace_all(graph.rows, self.out)
            print(f"trace.json, figure 4, the graph and clusters.json are in {self.out}")
