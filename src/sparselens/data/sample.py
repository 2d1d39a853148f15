"""`sparselens text`: something to read for a first try, without a download.

Without a model: short stories that come with the package, sampled from a 15M-parameter model of TinyStories; free to
use under the package's licence. With one: text sampled from that model itself, which is what it knows best.
"""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import zstandard

from ..runs import distributed
from ..runs.run import check_folder, read_json, write_bytes, write_json

if TYPE_CHECKING:
    from ..models.loading import Source

STORIES = "stories.jsonl.zst"
ABOUT = "sampled.json"  # what the sampled files of a folder were made with
TOKENS_PER_FILE = 1 << 21  # a killed run loses no more than this
FEWEST_ROWS, MOST_ROWS = 32, 4096  # sequences sampled side by side


def write_text(
    out: str | Path, model: "Source | None" = None, *, tokens: int = 100_000, length: int = 256, seed: int = 0,
    say: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """A folder with .jsonl.zst files of documents; returns the first. tokens, length, seed: of what is sampled.

    The same command again goes on behind the files that are there.
    """
    from ..models.loading import name_of

    folder = Path(out)
    check_folder(folder)
    for name, number in (("tokens", tokens), ("length", length)):
        if number < 2:
            raise ValueError(f"{name}={number}: expected at least 2")
    if model is None:
        content = (files(__package__) / STORIES).read_bytes()
        write_bytes(folder / STORIES, content)
        _tell(folder / STORIES, _documents(content), say)
        return folder / STORIES
    paths = [folder / f"sampled-{i:05d}.jsonl.zst" for i in range(-(-tokens // TOKENS_PER_FILE))]
    settings = {"model": name_of(model), "tokens": tokens, "length": length, "seed": seed}
    if (folder / ABOUT).is_file() and read_json(folder / ABOUT) != settings:
        raise ValueError(
            f"{folder} holds text sampled with other settings ({ABOUT} says which); choose another --out, or remove "
            "that folder"
        )
    missing = [i for i, path in enumerate(paths) if not path.is_file()]
    if not missing:
        say(f"all of it is in {folder} already")
        return paths[0]
    sampler = Sampler(model, length, say)
    write_json(folder / ABOUT, settings)
    for i in missing:
        wanted = min(TOKENS_PER_FILE, tokens - i * TOKENS_PER_FILE)
        documents = sampler.documents(wanted, seed * 1_000_003 + i, f"file {i + 1} of {len(paths)}")
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        write_bytes(paths[i], zstandard.ZstdCompressor(level=9).compress(lines.encode()))
        _tell(paths[i], documents, say)
    return paths[0]


def _tell(path: Path, documents: list[str], say: Callable[[str], None]) -> None:
    words = sum(len(text.split()) for text in documents)
    say(f"{path}: {len(documents):,} documents, {words:,} words")


def _documents(content: bytes) -> list[str]:
    lines = zstandard.ZstdDecompressor().decompress(content).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


class Sampler:
    """Documents of up to `length` tokens as a model goes on from its first token, at temperature 1."""

    def __init__(self, model: "Source", length: int, say: Callable[[str], None] = print):
        from ..models.architectures import base_model, blocks, dimensions
        from ..models.loading import first_token, resolve

        self.model, tokenizer = resolve(model, say=say)
        first = None if tokenizer is None else first_token(tokenizer)
        if tokenizer is None or first is None:
            raise ValueError("sampling needs a tokenizer with a token to begin with (<|endoftext|>, BOS or EOS)")
        self.tokenizer, self.first = tokenizer, first
        config = base_model(self.model).config
        self.size, self.words, self.kind = dimensions(config), config.vocab_size, config.model_type
        self.length = min(length, self.size.max_tokens)
        self.device = distributed.device()
        distributed.place(self.model, self.device, blocks(self.model))

    def rows(self, tokens: int) -> int:
        """Sequences at once. A step of few costs a GPU nearly what one of thousands does: as many as half of its free
        memory holds, keys and values in bf16 and the logits a few times over."""
        import torch

        most = FEWEST_ROWS
        if self.device != "cpu":
            size = self.size
            one = 4 * size.n_layers * size.n_kv_heads * size.d_head * self.length + 16 * self.words
            most = max(FEWEST_ROWS, min(MOST_ROWS, torch.cuda.mem_get_info()[0] // 2 // one))
        return max(1, min(most, -(-tokens // self.length)))

    def documents(self, tokens: int, seed: int, name: str) -> list[str]:
        """At least so many tokens of them."""
        import torch
        from tqdm import tqdm

        torch.manual_seed(seed)
        start = torch.full((self.rows(tokens), 1), self.first, device=self.device)
        ends, ask = {self.first, self.tokenizer.eos_token_id}, cast(Any, self.model)
        documents: list[str] = []
        with tqdm(total=tokens, unit="tok", unit_scale=True, desc=f"sampled, {name}", leave=False) as bar:
            while bar.n < tokens:
                with torch.autocast(start.device.type, torch.bfloat16, enabled=start.is_cuda):
                    rows = ask.generate(
                        start, attention_mask=torch.ones_like(start), max_new_tokens=self.length - 1, do_sample=True,
                        temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=self.first,
                    )[:, 1:].tolist()  # fmt: skip
                for row in rows:
                    end = next((i for i, token in enumerate(row) if token in ends), len(row))
                    bar.update(end + 1)
                    if text := str(self.tokenizer.decode(row[:end], skip_special_tokens=True)).strip():
                        documents.append(text)
                if not documents:
                    raise ValueError(f"{self.kind} samples no text: every document is empty")
        return documents
