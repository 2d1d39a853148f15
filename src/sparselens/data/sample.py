"""`sparselens text`: something to read for a first try, without a download.

Without a model: short stories that come with the package, sampled from a 15M-parameter model of TinyStories; free to
use under the package's licence. With one: text sampled from that model itself, which is what it knows best.
"""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

from ..runs.run import check_folder, write_bytes

if TYPE_CHECKING:
    from ..models.loading import Source

STORIES = "stories.jsonl.zst"
AT_ONCE = 32  # sequences sampled side by side


def write_text(
    out: str | Path, model: "Source | None" = None, *, tokens: int = 100_000, length: int = 256, seed: int = 0,
    say: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """A folder with one .jsonl.zst file of documents; returns the file. tokens, length, seed: of what is sampled."""
    folder = Path(out)
    check_folder(folder)
    for name, number in (("tokens", tokens), ("length", length)):
        if number < 2:
            raise ValueError(f"{name}={number}: expected at least 2")
    if model is None:
        path = folder / STORIES
        content = (files(__package__) / STORIES).read_bytes()
        documents = _documents(content)
    else:
        documents = _sampled(model, tokens, length, seed, say)
        path = folder / "sampled.jsonl.zst"
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        content = zstandard.ZstdCompressor(level=19).compress(lines.encode())
    write_bytes(path, content)
    words = sum(len(text.split()) for text in documents)
    say(f"{path}: {len(documents):,} documents, {words:,} words")
    return path


def _documents(content: bytes) -> list[str]:
    lines = zstandard.ZstdDecompressor().decompress(content).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def _sampled(model: "Source", tokens: int, length: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Documents of up to `length` tokens as the model goes on from its first token, at temperature 1."""
    import torch

    from ..models.architectures import base_model, dimensions
    from ..models.loading import first_token, resolve

    found, tokenizer = resolve(model, say=say)
    first = None if tokenizer is None else first_token(tokenizer)
    if tokenizer is None or first is None:
        raise ValueError("sampling needs a tokenizer with a token to begin with (<|endoftext|>, BOS or EOS)")
    torch.manual_seed(seed)
    length = min(length, dimensions(base_model(found).config).max_tokens)
    start = torch.full((AT_ONCE, 1), first, device=next(found.parameters()).device)
    ends = {first, tokenizer.eos_token_id}
    ask: Any = found
    documents: list[str] = []
    made = 0
    while made < tokens:
        rows = ask.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=length - 1, do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=first,
        )[:, 1:].tolist()  # fmt: skip
        for row in rows:
            end = next((i for i, token in enumerate(row) if token in ends), len(row))
            made += end + 1
            if text := str(tokenizer.decode(row[:end], skip_special_tokens=True)).strip():
                documents.append(text)
        if not documents:
            raise ValueError(f"{base_model(found).config.model_type} samples no text: every document is empty")
        say(f"{made:,} of {tokens:,} tokens sampled")
    return documents
