"""Pairs of text -> tensors: answer tokens and positions worked out, every pair checked, and what was dropped said.

Answers may be several tokens long. Right and wrong answers are followed token by token: a token that only right (wrong)
answers begin with decides; one that both begin with is appended to the prompts, and the next token decides. `Al|ice`
against `Al|bert` is read after `Al`; the year 3|3 against 3|1 after `3`.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .registry import Pair, Score, Task, Words, piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Read(NamedTuple):
    """One softmax the metric looks at."""

    position: int  # where in the prompt
    right: tuple[int, ...]  # tokens that settle it as right
    wrong: tuple[int, ...]
    through: int  # the token that leaves it open, read on at the next position; -1: none


class Item(NamedTuple):
    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    reads: tuple[Read, ...]
    pair: Pair


class Rejected(Exception):
    """Why a pair cannot be used."""


def tokenize(pair: Pair, words: Words) -> Item:
    """Token ids and reads of one pair; Rejected with the reason where it does not work out."""
    clean, corrupted = words.encode(pair.clean), words.encode(pair.corrupted)
    if len(clean) != len(corrupted):
        raise Rejected("clean and corrupted prompt differ in length")
    if clean == corrupted:
        raise Rejected("clean and corrupted prompt are the same")
    answers = (pair.answer,) if isinstance(pair.answer, str) else pair.answer
    wrongs = (pair.wrong,) if isinstance(pair.wrong, str) else pair.wrong
    if pair.filled:
        return Item(tuple(clean), tuple(corrupted), _filled_reads(words, clean, answers[0], wrongs[0]), pair)
    right = {tuple(words.after(pair.clean, clean, text)) for text in answers}
    wrong = {tuple(words.after(pair.clean, clean, text)) for text in wrongs}
    reads, forced = (_reads(right, wrong, len(clean) - 1)) if wrong else _chain(sorted(right), len(clean) - 1)
    return Item((*clean, *forced), (*corrupted, *forced), tuple(reads), pair)


def _reads(right: set[tuple[int, ...]], wrong: set[tuple[int, ...]], position: int) -> tuple[list[Read], list[int]]:
    if () in right | wrong or not right or not wrong:
        raise Rejected("right and wrong answers cannot be told apart by their tokens")
    first_right, first_wrong = ({tokens[0] for tokens in group} for group in (right, wrong))
    both = first_right & first_wrong
    if len(both) > 1:
        raise Rejected("right and wrong answers share more than one first token")
    through = both.pop() if both else -1
    read = Read(position, tuple(sorted(first_right - {through})), tuple(sorted(first_wrong - {through})), through)
    if through < 0:
        return [read], []
    rest = [{tokens[1:] for tokens in group if tokens[0] == through} for group in (right, wrong)]
    later, forced = _reads(rest[0], rest[1], position + 1)
    return [read, *later], [through, *forced]


def _chain(right: list[tuple[int, ...]], position: int) -> tuple[list[Read], list[int]]:
    """No wrong answers: read every token of the answer; of several, all must be one token, and any of them is right."""
    if not right or () in right:
        raise Rejected("an answer without tokens")
    if len(right) > 1:
        if any(len(tokens) > 1 for tokens in right):
            raise Rejected("several answers, some longer than a token, and no wrong one to compare with")
        return [Read(position, tuple(tokens[0] for tokens in right), (), -1)], []
    tokens = right[0]
    reads = [Read(position + i, (token,), (), token if i + 1 < len(tokens) else -1) for i, token in enumerate(tokens)]
    return reads, list(tokens[:-1])


def _filled_reads(words: Words, clean: list[int], answer: str, wrong: str) -> tuple[Read, ...]:
    right_ids, wrong_ids = (words.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (answer, wrong))
    if len(right_ids) != len(wrong_ids) or len(right_ids) > len(clean):
        raise Rejected("the answers to fill in differ in length")
    both = enumerate(zip(right_ids, wrong_ids, strict=True), len(clean) - len(right_ids))
    reads = tuple(Read(position, (a,), (b,), -1) for position, (a, b) in both if a != b)
    if not reads:
        raise Rejected("right and wrong answers are the same")
    return reads


@dataclass(frozen=True)
class Prompts:
    """Pairs as tensors. Shorter ones are padded on the right, where causal attention never looks back from."""

    metric: str  # a Metric, or the name of one's own
    clean: Tensor  # [n, tokens]
    corrupted: Tensor  # [n, tokens]
    lengths: Tensor  # [n]
    position: Tensor  # [n, reads]
    right: Tensor  # [n, reads, answers], -1 where there are fewer
    wrong: Tensor  # [n, reads, answers], -1 where there are fewer
    through: Tensor  # [n, reads] token that leaves it to the next read, -1: none
    used: Tensor  # [n, reads] False where a prompt has fewer reads
    pairs: tuple[Pair, ...]
    piece: Callable[[int], str] = str  # the text a token stands for
    own_score: Score | None = None

    def __len__(self) -> int:
        return len(self.clean)

    def take(self, index: Tensor | slice) -> "Prompts":
        """Some of the prompts."""
        chosen = torch.arange(len(self))[index] if isinstance(index, slice) else index.cpu()
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero()[:, 0]
        tensors = {name: getattr(self, name)[chosen.to(self.clean.device)] for name in _TENSORS}
        return replace(self, **tensors, pairs=tuple(self.pairs[i] for i in chosen.tolist()))

    def to(self, device: torch.device | str) -> "Prompts":
        return replace(self, **{name: getattr(self, name).to(device) for name in _TENSORS})

    def at_reads(self, hidden: Tensor) -> Tensor:
        """[..., n, tokens, d] -> [..., n, reads, d]: the positions the metric looks at."""
        index = self.position[..., None].expand(*hidden.shape[:-3], *self.position.shape, hidden.shape[-1])
        return hidden.gather(-2, index)

    @torch.no_grad()
    def ask(self, model: nn.Module, ids: Tensor) -> Tensor:
        """The model's logits at the reads [n, reads, vocabulary], on the clean or the corrupted tokens.

        None are made anywhere else: with a large vocabulary they would be most of the work.
        """
        positions, where = torch.unique(self.position, return_inverse=True)
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits
        return logits.gather(1, where[..., None].expand(*where.shape, logits.shape[-1]))

    def score(self, logits: Tensor) -> Tensor:
        """The metric of every prompt: [..., n, reads, vocabulary] at the reads -> [..., n]."""
        if self.own_score is not None:
            return self.own_score(self, logits)
        if self.metric == "logit":
            right, wrong = _pick(logits, self.right, -torch.inf), _pick(logits, self.wrong, -torch.inf)
            # A read that only one side can settle compares nothing (its token leads on to the next one).
            decided = self.used & (self.right >= 0).any(-1) & (self.wrong >= 0).any(-1)
            difference = right.amax(-1) - wrong.amax(-1)
            return torch.where(decided, difference, 0.0).sum(-1) / decided.sum(-1)
        log_p = logits.log_softmax(-1)
        through = log_p.gather(-1, self.through.clamp(min=0)[..., None].expand(*log_p.shape[:-1], 1))[..., 0]
        through = torch.where(self.used & (self.through >= 0), through, 0.0)
        if self.metric == "log-probability":
            last = torch.where(self.through < 0, _pick(log_p, self.right, -torch.inf).logsumexp(-1), 0.0)
            return torch.where(self.used, through + last, 0.0).sum(-1)
        p = log_p.exp()
        gain = _pick(p, self.right, 0.0).sum(-1) - _pick(p, self.wrong, 0.0).sum(-1)
        reach = (through.cumsum(-1) - through).exp()  # the probability of getting to this read at all
        return torch.where(self.used, reach * gain, 0.0).sum(-1)

    def correct(self, scores: Tensor, logits: Tensor | None = None) -> Tensor:
        """[n] bool: the clean prompt is answered rightly. Without wrong answers to beat: it is the likeliest token."""
        if self.metric != "log-probability":
            return scores > 0
        assert logits is not None
        best = logits.argmax(-1)
        return ((best[..., None] == self.right).any(-1) | ~self.used).all(-1)


def of_common_length(*groups: Prompts) -> list[Prompts]:
    """Of each group, the prompts of one length, cut to it: the one of which the smallest group has most, then all."""
    counts = [Counter(group.lengths.tolist()) for group in groups]
    length = max(sorted(set().union(*counts)), key=lambda n: (min(c[n] for c in counts), sum(c[n] for c in counts)))
    chosen = [group.take((group.lengths == length).cpu()) for group in groups]
    return [replace(p, clean=p.clean[:, :length], corrupted=p.corrupted[:, :length]) for p in chosen]


_TENSORS = ("clean", "corrupted", "lengths", "position", "right", "wrong", "through", "used")


def _pick(values: Tensor, tokens: Tensor, missing: float) -> Tensor:
    """values [..., n, reads, vocabulary] at tokens [n, reads, k] -> [..., n, reads, k]."""
    index = tokens.clamp(min=0).expand(*values.shape[:-1], tokens.shape[-1])
    return torch.where(tokens >= 0, values.gather(-1, index), missing)


def collate(items: list[Item], metric: str) -> Prompts:
    """Stack items of different lengths and numbers of reads."""
    tokens = max(len(item.clean) for item in items)
    reads = max(len(item.reads) for item in items)

    def fill(rows: list[list[list[int]]]) -> Tensor:
        width = max((len(cell) for row in rows for cell in row), default=0) or 1
        out = torch.full((len(rows), reads, width), -1)
        for i, row in enumerate(rows):
            for j, cell in enumerate(row):
                out[i, j, : len(cell)] = torch.tensor(cell, dtype=torch.long)
        return out

    def pad(rows: list[tuple[int, ...]]) -> Tensor:
        return torch.tensor([[*row, *[0] * (tokens - len(row))] for row in rows])

    return Prompts(
        metric, pad([item.clean for item in items]), pad([item.corrupted for item in items]),
        lengths=torch.tensor([len(item.clean) for item in items]),
        position=fill([[[read.position] for read in item.reads] for item in items])[..., 0].clamp(min=0),
        right=fill([[list(read.right) for read in item.reads] for item in items]),
        wrong=fill([[list(read.wrong) for read in item.reads] for item in items]),
        through=fill([[[read.through] for read in item.reads] for item in items])[..., 0],
        used=torch.tensor([[j < len(item.reads) for j in range(reads)] for item in items]),
        pairs=tuple(item.pair for item in items),
    )  # fmt: skip


def build(
    task: Task, tokenizer: "PreTrainedTokenizerBase", n: int, seed: int = 0, max_tokens: int | None = None,
    say: Callable[[str], None] = print,
) -> Prompts:  # fmt: skip
    """n different pairs of a task, each checked; says what was dropped and refuses to go on with nothing."""
    words, rng = Words(tokenizer), random.Random(seed)
    items: list[Item] = []
    seen: set[tuple[int, ...]] = set()
    dropped: Counter[str] = Counter()
    # A file's lines may be sorted by template or length: scoring and held-out halves must not part there.
    source = iter(rng.sample(task.pairs, len(task.pairs)))
    for _ in range(len(task.pairs) if task.generate is None else 20 * n):
        if len(items) == n:
            break
        pair = next(source) if task.generate is None else _generate(task, rng, words)
        try:
            item = tokenize(pair, words)
            if item.clean in seen:
                raise Rejected("the same prompt again")
            if max_tokens is not None and len(item.clean) > max_tokens:
                raise Rejected(f"longer than the model's {max_tokens} tokens")
        except Rejected as reason:
            dropped[str(reason)] += 1
            continue
        seen.add(item.clean)
        items.append(item)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    if not items:
        raise ValueError(f"task {task.name!r}: no usable pair with this tokenizer ({reasons})")
    if dropped:
        say(f"{task.name}: {len(items)} pairs kept, {dropped.total()} dropped ({reasons})")
    elif len(items) < n and task.generate is not None:
        say(f"{task.name}: {len(items)} different pairs, {n} were asked for")
    typed = items if task.generate is None else []
    if glued := [found for item in typed if (found := _without_space(item, words))]:
        count = f"{len(glued)} of {len(items)} pairs"
        say(f"warning: {task.name}: answers of {count} have no leading space, first {glued[0]}")
    own, name = (task.metric, task.metric.__name__) if callable(task.metric) else (None, task.metric)
    return replace(collate(items, name), piece=partial(piece, tokenizer), own_score=own)


def _without_space(item: Item, words: Words) -> str | None:
    """Where an answer would be glued to the prompt's last word: what is measured, and what with a space would be."""
    pair, prompt = item.pair, words.encode(item.pair.clean)
    end = pair.clean[-1:]
    answers = (pair.answer,) if isinstance(pair.answer, str) else pair.answer
    wrongs = (pair.wrong,) if isinstance(pair.wrong, str) else pair.wrong
    for text in () if pair.filled or not (end.isalnum() or end in ",.:;!?") else (*answers, *wrongs):
        if not text[:1].isalnum() or (end.isdigit() and text[0].isdigit()):  # the digits of one number
            continue
        glued, apart = (words.after(pair.clean, prompt, written)[0] for written in (text, f" {text}"))
        if glued != apart:
            measured, meant = (repr(piece(words.tokenizer, token)) for token in (glued, apart))
            return f"{text!r}: token {measured} is measured; write {' ' + text!r} for token {meant}"
    return None


def _generate(task: Task, rng: random.Random, words: Words) -> Pair:
    assert task.generate is not None
    try:
        return task.generate(rng, words)
    except ValueError as error:  # rng.sample from too few words
        raise ValueError(f"task {task.name!r} cannot be written with this tokenizer: {error}") from error
