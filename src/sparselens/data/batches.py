"""Text -> tokens -> packed batches, by number.

Everything that trains or evaluates asks for "sequences 640 to 655": the answer depends on nothing but that number,
the seed and the data. A run therefore resumes exactly where it stopped, a control sees the same order as the sparse
model, and several processes share a batch by each taking a part of the numbers.

Text is read as a stream, tokenised once into a cache of flat token shards (.npy, memory-mapped), and cut into
sequences when asked for. Documents in one sequence do not see each other: `position_ids` start again at every
document, which is how transformers recognises packing.
"""

import hashlib
import io
import itertools
import json
import math
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import NotRequired

from ..models.loading import first_token
from ..runs.run import give_back, read_json, reading, take_lock, write_bytes, write_json
from .documents import PIECE, dataset_documents, find_files, is_local, read_documents

PIECES_AT_ONCE = 32  # to tokenise
SHARD = 1 << 24  # tokens per cache file
HELDOUT_EVERY = 20  # one document in 20 is kept from training until there is enough held-out text
LANES = 16  # files read side by side
ROOM = 40  # sequences read at least, so that a tenth of them is some

Tokens = np.ndarray[Any, Any]  # flat
Part = Literal["train", "heldout", "later"]  # later: behind the last text to train on
Source = list[Any]  # [file, size, time of the last change], or [name of a dataset]


class Index(TypedDict):
    """index.json of a cache."""

    train: list[str]  # files of tokens
    heldout: list[str]
    later: NotRequired[list[str]]
    tokens: dict[str, int]  # in all files of each part
    pieces: int  # done so far
    documents: int
    part: NotRequired[Part]  # where the last document goes
    complete: bool
    separator: int
    sources: list[Source]


class Batches(Protocol):
    """Numbered training and held-out sequences. Anything with these four can be trained on."""

    n_heldout: int  # how many held-out sequences there are
    length: int  # tokens per sequence

    def train(self, start: int, count: int) -> dict[str, Tensor]:
        """Sequences `start` ... `start + count - 1`: input_ids, labels (aligned with the logits; -100 = none)."""

    def heldout(self, start: int, count: int) -> dict[str, Tensor]: ...

    def describe(self) -> Mapping[str, object]:
        """Where the data came from, for the record."""


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if (found := first_token(tokenizer)) is not None:
        return found
    raise ValueError("this tokenizer has no <|endoftext|>, BOS or EOS token to separate documents with")


class TokenCache:
    """Flat token shards on disk, training and held-out apart, made once per (data, tokenizer, number of tokens).

    Each shard ends at a document piece and is published by renaming it, together with an index that says how many
    pieces are done; an interrupted tokenisation goes on from the last shard.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = _read_index(folder)

    def shards(self, part: Part) -> list[Tokens]:
        """The tokens, not read yet. ValueError where a file is cut off, missing or not what was written."""
        try:
            with reading(self.folder / "index.json"):
                names = self.index.get(part, [])
                found = [np.load(self.folder / name, mmap_mode="r", allow_pickle=False) for name in names]
                if sum(len(shard) for shard in found) != self.index["tokens"].get(part, 0):
                    raise ValueError("tokens are missing")
        except (OSError, ValueError) as error:
            raise _damaged(self.folder, error) from error
        return found

    @classmethod
    def build(
        cls, patterns: list[str], tokenizer: PreTrainedTokenizerBase, cache: Path, *, need: int, heldout: int,
        field: str = "text", progress: bool = True, read_on: bool = True,
    ) -> "TokenCache":  # fmt: skip
        """Tokenise until there are `need` training and (read_on) `heldout` other tokens, or the text ends."""
        read_on = read_on and heldout > 0
        key, sources = _fingerprint(patterns, tokenizer, need, heldout, field, read_on)
        folder = cache / key
        index_path = folder / "index.json"
        index: Index = {
            "train": [], "heldout": [], "pieces": 0, "documents": 0, "tokens": {"train": 0, "heldout": 0},
            "complete": False, "separator": separator_id(tokenizer), "sources": sources,
        }  # fmt: skip
        if not (index_path.is_file() and _read_index(folder)["complete"]):
            was_there = cache.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(folder / ".lock", wait=True)  # another run may be tokenising the same text
            assert lock is not None
            try:
                if index_path.is_file():
                    index = _read_index(folder)
                if not index["complete"]:
                    _tokenise(patterns, tokenizer, folder, index, need, heldout, field, progress, read_on)
            finally:
                give_back(lock)
                with suppress(OSError):  # text that was refused leaves nothing
                    folder.rmdir()
                    if not was_there:
                        cache.rmdir()
        return cls(folder)


def _read_index(folder: Path) -> Index:
    try:
        index: Index = read_json(folder / "index.json")
        with reading("the index"):
            assert index["separator"] >= 0 and isinstance(index["complete"], bool) and index["sources"]
    except (ValueError, AssertionError) as error:
        raise _damaged(folder, error) from error
    return index


def _damaged(folder: Path, why: object) -> ValueError:
    return ValueError(f"the tokenised text in {folder} is damaged ({why}); remove that folder: it is made anew")


def _fingerprint(
    patterns: list[str], tokenizer: PreTrainedTokenizerBase, need: int, heldout: int, field: str, read_on: bool
) -> tuple[str, list[Source]]:
    """A name for the cache that changes whenever the tokens would, and what went into it."""
    sources: list[Source] = []
    for pattern in patterns:
        if is_local(pattern):
            sources += [[str(path), *_stamp(path)] for path in find_files([pattern])]
        else:
            sources.append([pattern])
    # How a fast tokenizer cuts text, beside its vocabulary: two with the same words may cut differently.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {} if backend is None else json.loads(backend.to_str())
    rules = {key: parts.get(key) for key in ("normalizer", "pre_tokenizer", "model")}
    words = json.dumps([sorted(tokenizer.get_vocab().items()), separator_id(tokenizer), rules])
    order = [PIECE, SHARD, LANES, HELDOUT_EVERY, *(["read on"] if read_on else [])]
    text = json.dumps([sources, hashlib.sha256(words.encode()).hexdigest(), need, heldout, field, order])
    return hashlib.sha256(text.encode()).hexdigest()[:16], sources


def refuse_overlap(patterns: list[str], heldout: list[str]) -> None:
    """ValueError where held-out text would be trained on."""
    files, apart = (
        {str(path.resolve()) for pattern in some if is_local(pattern) for path in find_files([pattern])}
        | {pattern for pattern in some if not is_local(pattern)}
        for some in (patterns, heldout)
    )
    if both := files & apart:
        named = f"{min(both)} is named by --data and by --heldout"
        raise ValueError(f"{named}: held-out text would be trained on; name it once")


def _stamp(path: Path) -> list[int]:
    """[size, time of the last change]; nothing of a file that is not there."""
    try:
        return [path.stat().st_size, path.stat().st_mtime_ns]
    except OSError:
        return []


def _documents(sources: list[Source], field: str) -> Iterator[tuple[str, bool]]:
    """Documents of all sources in turn, each in proportion to its size on disk: a short run sees a fair mix, too.

    Many files are read in `LANES` rows of neighbours, one after another in each row, so that few are open at a time.
    A dataset, whose size is not known, counts as much as the average file. Documents stay whole: a .txt file without
    separators is one.
    """
    sizes = [stamp[0] for _, *stamp in sources if stamp]
    average = sum(sizes) / len(sizes) if sizes else 1
    n = min(LANES, len(sources))
    lanes = [sources[len(sources) * i // n : len(sources) * (i + 1) // n] for i in range(n)]
    size = [sum(stamp[0] if stamp else average for _, *stamp in lane) for lane in lanes]
    streams = [itertools.chain.from_iterable(_read(*source, field=field) for source in lane) for lane in lanes]
    read = [0.0] * len(lanes)  # share of each
    ahead = {i: document for i, stream in enumerate(streams) if (document := next(stream, None))}
    while ahead:
        i = min(ahead, key=read.__getitem__)
        piece: tuple[str, bool] | None = ahead.pop(i)
        while piece:
            yield piece
            read[i] += len(piece[0]) / size[i]
            piece = next(streams[i], None)
            if piece and piece[1]:  # the next document waits for its turn
                ahead[i] = piece
                break


def _read(name: str, *stamp: int, field: str) -> Iterator[tuple[str, bool]]:
    if not stamp:
        yield from dataset_documents(name, field)
        return
    try:
        yield from read_documents(Path(name), field)
    except FileNotFoundError:
        raise ValueError(f"{name} has disappeared") from None


def _encoded(
    pieces: Iterator[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], bool]]:
    """(token numbers, starts a new document) of each piece; many at a time, so that all cores have something to do."""
    while batch := list(itertools.islice(pieces, PIECES_AT_ONCE)):
        ids = tokenizer([text for text, _ in batch], add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(ids, (fresh for _, fresh in batch), strict=True)


def _is_heldout(document: int) -> bool:
    """One in every HELDOUT_EVERY, at a place drawn anew each time: files that take turns all have their share."""
    block, place = divmod(document, HELDOUT_EVERY)
    return place == random.Random(block).randrange(HELDOUT_EVERY)


def _tokenise(
    patterns: list[str], tokenizer: PreTrainedTokenizerBase, folder: Path, index: Index, need: int, heldout: int,
    field: str, progress: bool, read_on: bool,
) -> None:  # fmt: skip
    from tqdm import tqdm

    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    separator, done = index["separator"], index["pieces"]
    buffers: dict[Part, list[Tokens]] = {"train": [], "heldout": [], "later": []}
    part, document, counts = index.get("part", "train"), index["documents"], index["tokens"]

    def flush() -> None:
        for name, buffer in buffers.items():
            if buffer:
                files = index.setdefault(name, [])
                file, content = f"{name}-{len(files):05d}.npy", io.BytesIO()
                np.save(content, np.concatenate(buffer), allow_pickle=False)
                write_bytes(folder / file, content.getvalue())
                files.append(file)
                buffer.clear()
        write_json(folder / "index.json", index)

    bar = tqdm(total=need, initial=index["tokens"]["train"], unit="tok", unit_scale=True, desc="tokenise",
               disable=not progress, leave=False)  # fmt: skip
    with bar:
        pieces = itertools.islice(_documents(index["sources"], field), done, None)
        for number, (ids, fresh) in enumerate(_encoded(pieces, tokenizer), done):
            enough = counts["train"] >= need
            if enough and (not read_on or counts["heldout"] + counts.get("later", 0) >= heldout):
                break
            if fresh:
                document += 1
                part = "heldout" if counts["heldout"] < heldout and _is_heldout(document) else "train"
            to: Part = "later" if enough and part == "train" else part
            tokens = np.asarray([separator, *ids] if fresh else ids, dtype=dtype)
            buffers[to].append(tokens)
            counts[to] = counts.get(to, 0) + len(tokens)
            bar.update(len(tokens) if to == "train" else 0)
            index |= {"pieces": number + 1, "documents": document, "part": part}
            if sum(sum(map(len, buffer)) for buffer in buffers.values()) >= SHARD:
                flush()
    if sum(counts.values()) == 0:
        raise ValueError(f"no text found in {', '.join(patterns)}: every document is empty")
    changed = [name for name, *stamp in index["sources"] if stamp and _stamp(Path(name)) != stamp]
    if changed:  # the cache has tokens of neither the old nor the new text
        shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(f"{changed[0]} changed or disappeared while it was being read; start again when it is whole")
    index["complete"] = True
    flush()


class TextBatches:
    """Packed sequences of `length` tokens from text: training and held-out (see `Batches`)."""

    def __init__(
        self, patterns: list[str], tokenizer: PreTrainedTokenizerBase, length: int, *, cache: Path, need: int,
        heldout_patterns: list[str] | None = None, heldout_tokens: int = 1 << 18, field: str = "text", seed: int = 0,
        progress: bool = True, read_on: bool = True, shortest: int = 0,
    ):  # fmt: skip
        """read_on: behind the text to train on, where what is held out of that falls short of `heldout_tokens`.
        shortest: cut every second training sequence into texts of so many tokens or more; 0: none."""
        self.length, self.seed, self.vocabulary, self.shortest = length, seed, len(tokenizer), shortest
        if length < 1:
            raise ValueError(f"length={length}: expected at least 1 token")
        self._asked = max(1, heldout_tokens // length)  # held-out sequences
        self._orders: dict[int, Tokens] = {}  # epoch -> order of its sequences
        for pattern in (*patterns, *(heldout_patterns or ())):
            if is_local(pattern):
                find_files([pattern])  # a missing file before any is read
        if heldout_patterns and heldout_patterns != patterns:  # the same: nothing is trained on, all of it is held out
            refuse_overlap(patterns, heldout_patterns)
        take = 0 if heldout_patterns else heldout_tokens
        if not heldout_patterns:
            need = max(need, ROOM * length)  # a trial of two steps also holds something out
        options = {"field": field, "progress": progress}
        self.cache = TokenCache.build(
            patterns, tokenizer, cache, need=need, heldout=take, read_on=read_on, **options  # type: ignore[arg-type]
        )  # fmt: skip
        self.separator = self.cache.index["separator"]
        self.half_start_bare = tokenizer("a")["input_ids"][:1] != [self.separator]
        self._train = self._rows(self.cache.shards("train"))
        if heldout_patterns:
            apart = TokenCache.build(heldout_patterns, tokenizer, cache, need=heldout_tokens, heldout=0, **options)  # type: ignore
            rows = self._rows(apart.shards("train"))
            # The first sequences steer: all kinds of text should, also where it is one long document after another.
            self._heldout = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
            self.sources = {"train": self.cache.index["sources"], "heldout": apart.index["sources"]}
        else:
            self._heldout = self._rows(self.cache.shards("heldout"))
            self.sources = {"train": self.cache.index["sources"]}
            if not self._heldout and len(self._train) >= 10:
                # Too few documents to set whole ones aside: the last tenth of the sequences is held out instead.
                cut = len(self._train) - len(self._train) // 10
                self._train, self._heldout = self._train[:cut], self._train[cut:]
            missing = max(0, self._asked - len(self._heldout))
            self._heldout += self._rows(self.cache.shards("later"))[:missing]
        if not self._train:
            raise ValueError(f"the text is shorter than one sequence of {length} tokens; lower --length or add text")
        if not self._heldout:
            raise ValueError("the text is too short to hold any of it out; give other text with --heldout")
        self.n_train, self.n_heldout = len(self._train), len(self._heldout)

    def heldout_note(self) -> str | None:
        """Where less text is held out than was asked for: how much it is."""
        if self.n_heldout >= self._asked:
            return None
        asked = f"instead of the {self._asked * self.length:,} asked for (--heldout-tokens)"
        return (
            f"held-out text: {self.n_heldout * self.length:,} tokens {asked}, as there is no more of it; "
            "give more text, or some with --heldout"
        )

    def _rows(self, shards: list[Tokens]) -> list[tuple[Tokens, int]]:
        """(shard, first token) of every sequence: they follow one another."""
        return [(shard, first) for shard in shards for first in range(0, len(shard) - self.length + 1, self.length)]

    def train(self, start: int, count: int) -> dict[str, Tensor]:
        n = len(self._train)
        for epoch in set(range(start // n, (start + count - 1) // n + 1)) - self._orders.keys():
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(n)
        numbers = range(start, start + count)
        cuts = [self._cuts(number) if self.shortest and number % 2 else [] for number in numbers]
        return self._batch([self._train[self._orders[i // n][i % n]] for i in numbers], cuts)

    def heldout(self, start: int, count: int) -> dict[str, Tensor]:
        return self._batch([self._heldout[i % self.n_heldout] for i in range(start, start + count)])

    def _batch(self, rows: list[tuple[Tokens, int]], cuts: Sequence[list[tuple[int, bool]]] = ()) -> dict[str, Tensor]:
        # Models lean on their first token. Sequences start with the separator, also in mid-document; where the
        # tokenizer would put nothing there, as in most users' prompts, every second one starts with whatever comes.
        tokens = torch.from_numpy(np.stack([self._stretch(*row) for row in rows]))
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:]
        first = inputs == self.separator
        for row, some in enumerate(cuts):
            for at, bare in some:
                first[row, at] = True
                if not bare:
                    inputs[row, at] = self.separator  # the token before is still asked for what stood here
        position = torch.arange(self.length).expand_as(inputs)
        start = torch.where(first, position, 0).cummax(1).values
        return {"input_ids": inputs, "labels": labels, "position_ids": position - start}

    def _cuts(self, number: int) -> list[tuple[int, bool]]:
        """(first token, whether it starts bare) of the shorter texts that a training sequence is cut into."""
        draw, cuts = np.random.default_rng([self.seed, number]), []
        low, high = math.log(self.shortest), math.log(self.length)
        at = 0
        while (at := at + round(math.exp(draw.uniform(low, high)))) < self.length:
            cuts.append((at, self.half_start_bare and bool(draw.random() < 0.5)))
        return cuts

    def _stretch(self, shard: Tokens, first: int) -> Tokens:
        """The `length` + 1 tokens of a sequence: its text with the separator in front, or with the token after it."""
        bare = self.half_start_bare and first // self.length % 2 == 1 and first + self.length < len(shard)
        text = shard[first : first + self.length + bare].astype(np.int64)
        if text.max() >= self.vocabulary:
            raise _damaged(self.cache.folder, f"token {text.max()} of {self.vocabulary}")
        return text if bare else np.insert(text, 0, self.separator)

    def describe(self) -> dict[str, object]:
        found = {"sources": self.sources, "train_sequences": len(self._train), "heldout_sequences": self.n_heldout,
                 "length": self.length, "half_start_bare": self.half_start_bare,
                 "tokens": self.cache.index["tokens"]}  # fmt: skip
        return found | ({"shortest": self.shortest} if self.shortest else {})
