"""What the report shows of a Run's attention and the Run does not hold yet: weights and gate margins on a few prompts.

1. Find the Run's models: the dense base, its matched control, the sparse one. One that cannot be read is noted.
2. Run every model once per prompt, gates deterministic: attention [layer, head, query, key], gate margins, next tokens.
3. Keep them in the Run: attention/attention.json (texts, tokens, answers), attention/prompt-N.safetensors (tensors).

A Run with newer models is looked at again; otherwise what is there is used.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from .. import tasks
from ..models.architectures import base_model, dimensions
from ..models.loading import is_gated, load
from ..runs import distributed
from ..runs.rows import AnswerRow, AttentionRows, PromptRow
from ..runs.run import Run, about, as_readable_as_others, write_json
from ..tasks.registry import Words, piece

TEXTS = ('The opposite of "large" is "', "When Mary and John went to the store, John gave a drink to")
FORMAT = 2  # of attention.json; 1 had no token in front of prompts
MOST_TOKENS = 64  # a page shows this many without becoming a wall


def attention_rows(
    run: Run | Path | str, prompts: tuple[str, ...] = (), traced: Sequence[str] = (), say: Callable[[str], None] = print
) -> AttentionRows | None:
    """The Run's attention/attention.json, made first if it is missing or old; None if the Run has no models yet.

    prompts: shown first, before those that were traced and the Run's own (about.json) or the built-in ones. Where the
    Run's task knows how its prompts are typed, they are: "36+28" for an addition Run.
    """
    run = run if isinstance(run, Run) else Run(run)
    folders = _folders(run)
    if "sparse" not in folders and "dense" not in folders:
        return None
    told = about(run)
    typed = _typing(told.task)
    asked = tuple(_checked(typed(text)) for text in prompts)
    asked += tuple(typed(text) for text in traced if text.strip())
    wanted = list(dict.fromkeys((*asked, *(told.prompts or TEXTS))))
    if (kept := _kept(run, folders, asked)) is not None:
        return kept
    say(f"looking at the attention of {', '.join(folders)} on {len(wanted)} prompts")
    rows = _look(folders, wanted, run.path / "attention", say)
    write_json(run.path / "attention" / "attention.json", rows)
    return rows


def _folders(run: Run) -> dict[str, Path | str]:
    """Where the Run's models are. A sparsify Run names its base; a demo has trained its own."""
    places = {"dense": run.path / "base/model", "control": run.path / "control/model", "sparse": run.path / "model"}
    found: dict[str, Path | str] = {role: folder for role, folder in places.items() if folder.is_dir()}
    if "dense" not in found and run.record["kind"] == "sparsify" and run.record["config"].get("model"):
        return {"dense": str(run.record["config"]["model"]), **found}
    return found


def _kept(run: Run, folders: dict[str, Path | str], texts: tuple[str, ...]) -> AttentionRows | None:
    """What an earlier call left, if it has these prompts and is not older than the models."""
    path = run.path / "attention" / "attention.json"
    if not path.is_file():
        return None
    rows: AttentionRows = run.read("attention/attention.json")
    weights = [file for folder in folders.values() for file in Path(folder).glob("*.safetensors")]
    newest = max((file.stat().st_mtime for file in weights), default=0.0)
    fresh = rows.get("format") == FORMAT and path.stat().st_mtime >= newest
    return rows if fresh and {prompt["text"] for prompt in rows["prompts"]}.issuperset(texts) else None


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {text!r} holds half a character ({error.reason}); no tokenizer can read it") from None
    if not text.strip():
        raise ValueError("an empty prompt has nothing to look at; give some text with --prompt")
    return text


def _typing(task: str) -> Callable[[str], str]:
    """What makes a prompt of a text that somebody typed, where the Run's task is one that we know and that has it."""
    found = tasks.find(task).prompt if task in tasks.names() else None  # a Run must not name a file for us to read
    return found or (lambda text: text)


def _look(folders: dict[str, Path | str], texts: list[str], out: Path, say: Callable[[str], None]) -> AttentionRows:
    prompts: list[PromptRow] = [
        {"text": text, "models": {}, "file": f"prompt-{i}.safetensors"} for i, text in enumerate(texts)
    ]
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in texts]
    notes, shape = [], None
    for role, folder in folders.items():
        try:
            model, tokenizer = load(folder, device=distributed.device())
        except ValueError as error:
            notes.append(f"The {role} model is not shown: {error}")
            say(notes[-1])
            continue
        d = dimensions(base_model(model).config)
        shape = shape or {"n_layers": d.n_layers, "n_heads": d.n_heads}
        for prompt, kept in zip(prompts, tensors, strict=True):
            ids, prompt["tokens"], prompt["cut"] = _tokens(tokenizer, prompt["text"], d.max_tokens)
            prompt["models"][role], found = look(model, tokenizer, ids)
            kept |= {f"{role}.{name}": tensor for name, tensor in found.items()}
        del model
    out.mkdir(parents=True, exist_ok=True)
    for prompt, kept in zip(prompts, tensors, strict=True):
        save_file(kept, out / prompt["file"])
        as_readable_as_others(out / prompt["file"])
    return {"format": FORMAT, "shape": shape, "prompts": prompts, "notes": notes}


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, longest: int) -> tuple[torch.Tensor, list[str], bool]:
    """(ids [1, tokens], the piece of text each stands for, whether the prompt was cut)."""
    tokens = Words(tokenizer).encode(text)
    found = tokenizer(text, return_offsets_mapping=tokenizer.is_fast)
    offsets = list(found.get("offset_mapping") or [(0, 0)] * len(found["input_ids"]))
    offsets = [(0, 0)] * (tokens[:1] != found["input_ids"][:1]) + offsets  # the token put in front is no text of theirs
    offsets = offsets[: len(tokens)]
    pieces, last = [], 0
    for i, (start, end) in zip(tokens, offsets, strict=True):
        # The prompt's own characters, with the space before a word that some tokenizers swallow.
        pieces.append(text[last if start > last else start : end] if end > start else piece(tokenizer, i))
        last = max(last, end)
    most = min(MOST_TOKENS, longest)
    return torch.tensor([tokens[:most]]), pieces[:most], len(tokens) > most


Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def look(model: nn.Module, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> tuple[AnswerRow, Tensors]:
    """(what the model says at every position, attention): `weights` fp16 and, for a gated model, `margin` fp32.

    ids: [1, tokens]. Tensors are [n_layers, n_heads, queries, keys]; masked pairs are 0, their margin -inf.
    """
    ids = ids.to(next(model.parameters()).device)
    gated = is_gated(base_model(model))
    if not gated:
        base_model(model).set_attn_implementation("eager")  # the one that returns its weights
    common = {"use_cache": False, "output_attentions": True}
    output = model(ids, **common, **({"gate_output": "pattern"} if gated else {}))
    weights = torch.stack(output.attentions)[:, 0]
    # fp16 rounds the weakest edges to nothing; the picture must not lose an edge that is there.
    kept = torch.where(weights > 0, weights.clamp(min=torch.finfo(torch.float16).tiny), weights)
    found = {"weights": kept.half().cpu().contiguous()}
    if gated:
        margins = model(ids, **common, gate_output="margin").attentions
        found["margin"] = torch.stack(margins)[:, 0].float().cpu().contiguous()
    probability, best = output.logits[0].float().softmax(-1).max(-1)
    said = [piece(tokenizer, i) for i in best.tolist()]
    return {"says": said, "probability": [round(p, 4) for p in probability.tolist()]}, found
