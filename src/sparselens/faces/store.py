"""The files of faces, and how they are read: safetensors and JSON, compressed, a budget of bytes per feature. No torch.

faces.json               what they are of: model, transcoder, text, tokens, sizes
index.json               {"labels": [layer][feature], "words": [layer][feature]}: what a search looks at
layer_i.safetensors      fires, mean, largest [n_features]; blob, offsets: cards of BLOCK features each, as deflated
                         JSON, so that one card is read without the others
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from typing_extensions import NotRequired

from ..runs.run import Run, read_json, reading, write_json
from .card import html

FOLDER = "faces"  # of a Run
BLOCK = 64
MOST = 1 << 26  # bytes of one block: a file that claims more is not ours
FORMAT = 1


class Excerpt(TypedDict):  # a context
    text: list[str]  # tokens
    activations: list[int]  # of each token, in 255ths of the feature's largest
    at: int  # which token is the strongest
    value: float  # its activation
    place: list[int]  # sequence and position in the text that was read


class Card(TypedDict):  # all that is known of a feature
    layer: int
    feature: int
    label: str
    fits: int  # of the contexts the label was made from, how many have what it says
    contexts: int  # how many these were; the card may have room for fewer
    fires: int  # tokens
    share: float  # of all tokens
    mean: float  # where it fires
    largest: float
    histogram: list[int]  # tokens by activation, in half octaves
    lowest: float  # where the histogram begins
    promoted: list[tuple[str, float]]  # words and how much, in standard deviations over the vocabulary
    suppressed: list[tuple[str, float]]
    nearest: list[tuple[int, int, float]]  # layer, feature, cosine
    top: list[Excerpt]
    lower: list[Excerpt]
    own: NotRequired[str]  # the label that another labeller gave


def write_layer(folder: Path, layer: int, cards: Sequence[Card], budget: int) -> float:
    """Write the cards of a layer; returns bytes per feature. Where a block is too big, contexts are left out of it."""
    from safetensors.numpy import save_file

    blocks = [_packed(list(cards[i : i + BLOCK]), budget) for i in range(0, len(cards), BLOCK)]
    offsets = np.cumsum([0, *map(len, blocks)])
    tensors = {name: np.array([card[name] for card in cards], kind) for name, kind in  # type: ignore[literal-required]
               (("fires", np.int64), ("mean", np.float32), ("largest", np.float32))}  # fmt: skip
    tensors |= {"blob": np.frombuffer(b"".join(blocks), np.uint8), "offsets": offsets.astype(np.int64)}
    save_file(tensors, folder / f"layer_{layer}.safetensors")
    return float(offsets[-1]) / max(len(cards), 1)


def _packed(cards: list[Card], budget: int) -> bytes:
    """A block as bytes, at most `budget` for each of its features."""
    share = 1.0
    for _ in range(6):
        fitted = [cast(Card, {**card, "top": _some(card["top"], share, 1), "lower": _some(card["lower"], share, 0)})
                  for card in cards]  # fmt: skip
        packed = zlib.compress(json.dumps(fitted, ensure_ascii=False, separators=(",", ":")).encode(), 6)
        if len(packed) <= budget * len(cards):
            break
        share *= 0.9 * budget * len(cards) / len(packed)
    return packed


def _some(found: list[Excerpt], share: float, least: int) -> list[Excerpt]:
    return found if share >= 1 else found[: max(least, int(len(found) * share))]


class Faces:
    """The faces of one transcoder's features, on disk."""

    def __init__(self, folder: str | Path | Run):
        path = folder.path if isinstance(folder, Run) else Path(folder)
        self.path = path if (path / "faces.json").is_file() or not (path / FOLDER).is_dir() else path / FOLDER
        if not (self.path / "faces.json").is_file():
            raise ValueError(f"no faces in {folder}; make them with `sparselens features {folder} --data TEXT`")
        self.about: dict[str, Any] = read_json(self.path / "faces.json")
        with reading(self.path / "faces.json"):
            if self.about["format"] != FORMAT:
                raise ValueError(f"{self.path} has faces of format {self.about['format']}, expected {FORMAT}")
            self.n_layers, self.n_features = int(self.about["n_layers"]), int(self.about["n_features"])
        self._index: dict[str, list[list[str]]] | None = None
        self._layer = lru_cache(maxsize=4)(self._read_layer)
        self._block = lru_cache(maxsize=64)(self._read_block)

    def __len__(self) -> int:
        return self.n_layers * self.n_features

    def __repr__(self) -> str:
        return f"Faces({self.n_layers} x {self.n_features} features, {self.about['tokens']:,} tokens, {self.path})"

    def __getitem__(self, place: tuple[int, int]) -> "Feature":
        return Feature(self, *place)

    @property
    def index(self) -> dict[str, list[list[str]]]:
        if self._index is None:
            self._index = read_json(self.path / "index.json")
            with reading(self.path / "index.json"):
                for name in ("labels", "words"):
                    layers = self._index[name]
                    if len(layers) != self.n_layers or any(len(layer) != self.n_features for layer in layers):
                        raise ValueError(f"{self.path / 'index.json'} is damaged: {name} are missing")
        return self._index

    def label(self, layer: int, feature: int) -> str:
        self._check(layer, feature)
        return self.index["labels"][layer][feature]

    def card(self, layer: int, feature: int) -> Card:
        self._check(layer, feature)
        return self._block(layer, feature // BLOCK)[feature % BLOCK]

    def search(self, text: str, most: int = 50) -> list["Feature"]:
        """Features whose label or words have this text, or that have this name (3/17); those that fire most first.

        ValueError where there is none, with what comes near.
        """
        if named := re.fullmatch(r"\s*(?:L|layer )?(\d+)\s*[/:, ]\s*F?(\d+)\s*", text, re.IGNORECASE):
            return [self[int(named[1]), int(named[2])]]
        wanted = text.strip().lower()
        if not wanted:
            raise ValueError("nothing to search for: give a word, part of a label, or layer/feature such as 3/17")
        found = []
        for layer in range(self.n_layers):
            fires = self._layer(layer)["fires"]
            for feature, (label, words) in enumerate(
                zip(self.index["labels"][layer], self.index["words"][layer], strict=True)
            ):
                if wanted in label.lower() or wanted in words.lower().split("\t"):
                    exact = f"“{wanted}”" in label.lower()
                    found.append((not exact, -int(fires[feature]), layer, feature))
        if not found:
            raise ValueError(f"no feature of {self.path} has {text!r} in its label or its words{self._near(wanted)}")
        return [self[layer, feature] for _, _, layer, feature in sorted(found)[:most]]

    def _near(self, wanted: str) -> str:
        from difflib import get_close_matches

        words = {word for layer in self.index["words"] for some in layer for word in some.split("\t") if word}
        near = get_close_matches(wanted, sorted(words), n=3, cutoff=0.6)
        return f"; near it: {', '.join(near)}" if near else "; try a part of a word, or another one"

    def activity(self, layer: int) -> np.ndarray:
        """[n_features] sum of all activations on the text that was read."""
        with reading(self.path / f"layer_{layer}.safetensors"):
            table = self._layer(layer)
            found: np.ndarray = table["fires"] * table["mean"]
        return found

    def _check(self, layer: int, feature: int) -> None:
        if not (0 <= layer < self.n_layers and 0 <= feature < self.n_features):
            raise ValueError(
                f"no feature {feature} in layer {layer}: {self.path} has {self.n_layers} layers (0 to "
                f"{self.n_layers - 1}) of {self.n_features:,} features"
            )

    def _read_layer(self, layer: int) -> Mapping[str, np.ndarray]:
        from safetensors.numpy import load_file

        path = self.path / f"layer_{layer}.safetensors"
        try:
            return load_file(path)
        except Exception as error:  # safetensors' own error type is not public
            raise ValueError(f"{path} cannot be read ({error}); make the faces again") from None

    def _read_block(self, layer: int, block: int) -> list[Card]:
        path = self.path / f"layer_{layer}.safetensors"
        with reading(path):
            table = self._layer(layer)
            first, last = (int(i) for i in table["offsets"][block : block + 2])
            try:
                text = zlib.decompressobj().decompress(table["blob"][first:last].tobytes(), MOST)
                cards: list[Card] = json.loads(text)
            except (zlib.error, ValueError) as error:
                raise ValueError(f"{path} is damaged ({error}); make the faces again") from None
            if cards[0]["feature"] != block * BLOCK:
                raise ValueError(f"{path} is damaged: another feature stands where {block * BLOCK} should")
            if len(cards) != min(BLOCK, self.n_features - block * BLOCK):
                raise ValueError(f"{path} is damaged: features from {block * BLOCK} on are missing")
            return cards


class Feature:
    """One feature of a transcoder and what it is about: `sl.Feature("runs/features", 3, 17)`; a card in a notebook."""

    def __init__(self, faces: "Faces | str | Path | Run", layer: int, feature: int):
        self.faces = faces if isinstance(faces, Faces) else Faces(faces)
        self.layer, self.feature = int(layer), int(feature)
        self.card = self.faces.card(self.layer, self.feature)

    @property
    def label(self) -> str:
        return self.card.get("own") or self.card["label"]

    def __repr__(self) -> str:
        return f"Feature({self.layer}/{self.feature}: {self.label}; {self.card['share']:.3%} of the tokens)"

    def _repr_html_(self) -> str:
        return html(cast(dict[str, Any], self.card), self.faces.label)


def write_index(folder: Path, labels: list[list[str]], words: list[list[str]]) -> None:
    write_json(folder / "index.json", {"labels": labels, "words": words})
