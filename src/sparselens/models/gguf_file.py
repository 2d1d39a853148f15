"""A .gguf file as a model like any other: dequantised by transformers, its tokenizer tried before it is believed."""

import mmap
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .access import SAFE, quiet, refusing


def load_gguf(path: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError("reading .gguf files needs the gguf package: pip install 'sparselens[gguf]'") from None
    folder, name = str(path.parent), path.name
    with refusing(f"{path} is not a readable GGUF file: "), quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, **SAFE)
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=getattr(torch, dtype), **SAFE)
    whole, words = whole_words(tokenizer)
    if whole < words / 2:
        raise ValueError(
            f"transformers {transformers.__version__} reads the tokenizer of {path} wrongly: of {words} words in its "
            f"vocabulary {whole} come back as one token. Update it (pip install -U transformers; 5.22 reads Gemma's)."
        )
    if _adds_bos(path) and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True  # type: ignore[misc]
    # transformers refuses to save a model that came from a gguf file; a fresh one of the same config is just a model.
    config = AutoConfig.for_model(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.config._name_or_path = str(path)
    return model, tokenizer


def whole_words(tokenizer: PreTrainedTokenizerBase, most: int = 200) -> tuple[int, int]:
    """(how many come back as one token, how many were tried) of the longer words in a vocabulary.

    All of them in GPT-2's and Gemma's, three quarters in Llama's, 1 % where merges were lost on the way.
    """
    vocabulary = tokenizer.get_vocab()
    words = [w for w in sorted(vocabulary) if len(w) > 5 and (bare := w.lstrip("▁Ġ")).isascii() and bare.isalpha()]
    tried = [vocabulary[word] for word in words[:: max(1, len(words) // most)]]
    found = [tokenizer(tokenizer.decode([i]), add_special_tokens=False)["input_ids"] for i in tried]
    return sum(ids == [i] for ids, i in zip(found, tried, strict=True)), len(tried)


def _adds_bos(path: Path) -> bool:
    """Whether a GGUF file wants BOS in front of texts; transformers does not look. Key, 4 bytes of type, 0 or 1."""
    key = b"tokenizer.ggml.add_bos_token"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(key)
        return at >= 0 and data[at + len(key) + 4 : at + len(key) + 5] == b"\1"
