"""Features with faces, for the page: the cards of traced prompts, and the features of a Run's transcoders to search in.

`sparselens trace --out` leaves cards.json beside its trace.json where the transcoder has faces; `sparselens features`
leaves the faces themselves. The page shows the cards of every trace, and of each transcoder its busiest features.
"""

import shlex
from pathlib import Path

import numpy as np

from ...faces.store import FOLDER, Card, Faces
from ...runs.run import Run, read_json, reading
from . import Section, Shown, short
from .attribution import trace_files

LISTED = 400  # features of one transcoder, over all layers
CONTEXTS, WEAKER = 3, 2  # of a listed feature's card


def features(shown: Shown) -> dict[str, object]:
    """{"cards": {trace: {"layer/feature": card}}, "sets": [{name, about, cards}]}; empty where there are no faces."""
    run, cards = shown.run, dict[str, object]()
    for path in trace_files(run.path):
        name = path.parent.name if path.parent != run.path else "trace"
        for place, called in ((path.parent, name), (path.parent / "against", f"{name}, against")):
            if (place / "cards.json").is_file():
                with reading(place / "cards.json"):
                    cards[called] = short(dict(read_json(place / "cards.json")), 4)
    sets = [_listed(Faces(folder), name, int(LISTED * shown.share)) for name, folder in faces_of(run)]
    return {"cards": cards, "sets": sets} if cards or sets else {}


def faces_of(run: Run) -> list[tuple[str, Path]]:
    """(name, folder) of the faces of this Run and of the transcoders in it."""
    folders = [(run.path.name, run.path), (run.path.name, run.path / FOLDER)]
    folders += [(path.name, path / FOLDER) for path in sorted(run.path.glob("transcoders/*"))]
    return [(name, folder) for name, folder in folders if (folder / "faces.json").is_file()]


def _listed(faces: Faces, name: str, most: int) -> dict[str, object]:
    """The features of each layer that are active most, fires times mean, as short cards."""
    each, cards = max(1, most // faces.n_layers), dict[str, object]()
    for layer in range(faces.n_layers):
        weight = faces.activity(layer)
        for feature in np.argsort(-weight, kind="stable")[:each].tolist():
            if weight[feature] > 0:
                cards[f"{layer}/{feature}"] = short(_short(faces.card(layer, feature), faces), 4)
    about = {key: faces.about.get(key) for key in ("model", "tokens", "fired", "n_layers", "n_features")}
    return {"name": name, "about": about, "cards": cards}


def _short(card: Card, faces: Faces) -> dict[str, object]:
    near = [[*one[:3], faces.label(*one[:2])] for one in card["nearest"][:3]]
    return {**card, "top": card["top"][:CONTEXTS], "lower": card["lower"][:WEAKER], "nearest": near}


def _command(run: Run) -> str:
    transcoder = run.path if run.record.get("kind") == "transcode" else "TRANSCODER"
    return f"sparselens features {shlex.quote(str(transcoder))} --data TEXT"


SECTION = Section("features", "Features", features, _command, place=55)
