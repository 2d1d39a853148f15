"""Files and datasets -> documents, as a stream: nothing here needs a whole document in memory."""

import glob
import gzip
import io
import json
import lzma
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SEPARATOR_LINE = "<|endoftext|>"  # a line of its own separates the documents of a .txt file
PIECE = 1 << 20  # characters; longer documents are tokenised in pieces, so that no document must fit in memory
COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = (".txt", ".jsonl", ".parquet")


def find_files(patterns: list[str]) -> list[Path]:
    """The files the patterns name, sorted within each pattern; ValueError for a pattern that names none."""
    files: list[Path] = []
    for pattern in patterns:
        matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
        found = [path for path in matches if path.is_file()]
        for folder in (path for path in matches if path.is_dir()):
            found += sorted(path for path in folder.rglob("*") if path.is_file() and _format(path))
        if not found:
            raise ValueError(f"no text found: {pattern!r} names no file (and is not a Hugging Face dataset)")
        files += found
    for path in files:
        if not _format(path):
            expected = f"{', '.join(FORMATS)}, plain or with {', '.join(COMPRESSIONS)}"
            raise ValueError(f"cannot read {path}: expected {expected}")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty")
    return files


def _format(path: Path) -> str | None:
    name = path.name.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return next((kind for kind in FORMATS if name.endswith(kind)), None)


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True))
    return {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "rb")  # type: ignore


def read_documents(path: Path, field: str = "text") -> Iterator[tuple[str, bool]]:
    """(text, starts a new document) from one file, in pieces of bounded size."""
    try:
        with _open(path) as file:
            kind = _format(path)
            if kind == ".txt":
                yield from _documents_of_lines(io.TextIOWrapper(file, encoding="utf-8-sig"))
            elif kind == ".jsonl":
                for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), 1):
                    if line.strip():
                        yield _field(_json(line, f"{path}, line {number}"), field, f"{path}, line {number}"), True
            else:
                yield from _documents_of_parquet(file, field, path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv") from error
    except Exception as error:
        known = isinstance(error, lzma.LZMAError | gzip.BadGzipFile | zlib.error | EOFError)
        if not known and type(error).__name__ != "ZstdError":  # zstandard is imported where it is needed
            raise
        raise ValueError(f"{path} cannot be decompressed: {error}") from error


def _documents_of_lines(lines: io.TextIOWrapper) -> Iterator[tuple[str, bool]]:
    piece: list[str] = []
    size, fresh = 0, True
    while line := lines.readline(PIECE):  # bounded: a file without line breaks is a stream too
        if not (ends := line.strip() == SEPARATOR_LINE):
            piece.append(line)
            size += len(line)
        if piece and (ends or size >= PIECE):
            yield "".join(piece), fresh
            piece, size, fresh = [], 0, False
        fresh = fresh or ends
    if piece:
        yield "".join(piece), fresh


def _documents_of_parquet(file: IO[bytes], field: str, path: Path) -> Iterator[tuple[str, bool]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryFile() as plain:
        if path.suffix != ".parquet":  # it needs random access: its compressed form is unpacked to disk, not memory
            while block := file.read(PIECE):
                plain.write(block)
            file = plain
        try:
            table = pq.ParquetFile(file)
            if field not in table.schema_arrow.names:
                raise ValueError(f"{path} has no column {field!r}; it has {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(columns=[field], batch_size=256):
                for value in batch.column(0).to_pylist():
                    if value:
                        yield _field({field: value}, field, str(path)), True
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _json(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _field(row: object, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: no text in field {field!r}; found {names}. Choose one with --text-field")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character, which JSON can hold and no tokenizer can read
        text = text.encode("utf-8", "replace").decode()
    return text


def dataset_documents(name: str, field: str) -> Iterator[tuple[str, bool]]:
    """Documents of a Hugging Face dataset, streamed: "owner/name", "owner/name:config" or "owner/name:config:split"."""
    import datasets

    from ..models.access import access  # imports transformers, which takes seconds

    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    if trouble := access(repository).trouble:  # asked first: datasets would try again for half a minute
        raise ValueError(f"no text found: {name!r} names no file, and the hub cannot be asked for a dataset{trouble}")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the hub's many ways of saying no
        none = f"{name!r} names no file, and no Hugging Face dataset could be opened"
        raise ValueError(f"no text found: {none} ({error})") from error
    for row in rows:
        yield _field(row, field, name), True


def is_local(pattern: str) -> bool:
    """Whether a pattern means files. What is left is the name of a dataset, and those may have dots in them, too."""
    looks_like_a_file = pattern.endswith(FORMATS + COMPRESSIONS) or pattern.startswith((".", "/", "~"))
    return looks_like_a_file or any(c in pattern for c in "*?[") or bool(glob.glob(pattern))
