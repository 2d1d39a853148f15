"""Where a model differs from its base: at which positions, before what kind of token, in which places of a text.

1. KL(base || model) at every position of held-out text, and how much more the token that really follows costs
2. means by position in the document, by what follows (a word, the rest of one, a number, a mark, ...), and by whether
   it was there before: nowhere, somewhere, or behind this very token
3. the places where the two differ most, one per sequence, with what each expected
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..data.batches import Batches
from ..runs import distributed
from ..tasks.registry import piece
from ..training.measure import forward, token_kl, token_losses

POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096)  # where groups of positions begin
PLACES, BEFORE, TOP = 20, 12, 3  # places shown, tokens in front of each, tokens each model expects
NEW, SEEN, PAIR = "not in the text so far", "in the text before", "followed this very token before"
START = "start of a document"


class Group(TypedDict):  # tokens that have something in common
    name: str
    tokens: int
    kl: float  # mean, nats
    kl_share: float  # of all KL there is
    loss_above_base: float  # mean, nats
    same_top1: float


class Expected(TypedDict):
    token: str
    p: float


class Place(TypedDict):
    text: str  # the tokens in front, the last of which asks
    follows: str
    kl: float
    base: list[Expected]
    model: list[Expected]


class Differences(TypedDict):
    tokens: int
    kl: float
    half: float  # the share of tokens, those with the most first, that hold half of all KL
    by_position: list[Group]
    by_next: list[Group]
    by_seen: list[Group]
    places: list[Place]


class Seen(TypedDict):  # what was measured, position by position: tensors [tokens], names of groups
    kl: list[Tensor]
    gap: list[Tensor]
    same: list[Tensor]
    position: list[str]
    next: list[str]
    seen: list[str]


@torch.no_grad()
def differences(
    base: nn.Module, model: nn.Module, tokenizer: PreTrainedTokenizerBase, batches: Batches, start: int, count: int, *,
    micro_batch: int = 8,
) -> Differences:  # fmt: skip
    """Where the model differs from the base on held-out sequences start ... start + count - 1.

    Both models' logits are there whole: a training's micro-batch would be too many sequences at once.
    """
    pieces = Pieces(tokenizer)
    found: Seen = {"kl": [], "gap": [], "same": [], "position": [], "next": [], "seen": []}
    places: list[Place] = []
    for first in range(start, start + count, micro_batch):
        made = batches.heldout(first, min(micro_batch, start + count - first))
        batch = {name: value.to(distributed.device()) for name, value in made.items()}
        ours, theirs = (forward(one, batch).logits.float() for one in (base, model))
        labels = batch["labels"]
        kl = token_kl(ours, theirs, labels).cpu()
        gap = (token_losses(theirs, labels) - token_losses(ours, labels)).cpu()
        same = (ours.argmax(-1) == theirs.argmax(-1)).cpu()
        for row in range(len(labels)):
            ids, wanted = made["input_ids"][row].tolist(), made["labels"][row].tolist()
            positions = made["position_ids"][row].tolist() if "position_ids" in made else list(range(len(ids)))
            used = [i for i, label in enumerate(wanted) if label != -100]
            if not used:
                continue
            for name, values in (("kl", kl), ("gap", gap), ("same", same.float())):
                found[name].append(values[row, used])  # type: ignore[literal-required]
            found["position"] += [position_group(positions[i]) for i in used]
            found["next"] += [next_kind(pieces, wanted[i]) for i in used]
            found["seen"] += [seen for i, seen in enumerate(seen_before(ids, wanted, positions)) if wanted[i] != -100]
            worst = max(used, key=lambda i: kl[row, i].item())
            begins = max(worst - positions[worst], worst + 1 - BEFORE)
            places.append({
                "text": pieces.text(ids[begins : worst + 1]), "follows": pieces[wanted[worst]],
                "kl": kl[row, worst].item(), "base": pieces.expected(ours[row, worst]),
                "model": pieces.expected(theirs[row, worst]),
            })  # fmt: skip
    kl, gap, same = (torch.cat(found[name]).double() for name in ("kl", "gap", "same"))  # type: ignore[literal-required]

    def grouped(names: list[str], order: Callable[[str], object]) -> list[Group]:
        return list(_groups(names, order, kl, gap, same))

    by_size = kl.sort(descending=True).values.cumsum(0)
    half = (int((by_size < by_size[-1] / 2).sum()) + 1) / len(kl)
    shares = {name: -kl[[one == name for one in found["next"]]].sum().item() for name in set(found["next"])}
    return {
        "tokens": len(kl), "kl": kl.mean().item(), "half": half,
        "by_position": grouped(found["position"], lambda name: int(name.split()[0])),
        "by_next": grouped(found["next"], lambda name: shares[name]),
        "by_seen": grouped(found["seen"], (NEW, SEEN, PAIR).index),
        "places": sorted(places, key=lambda place: -place["kl"])[:PLACES],
    }  # fmt: skip


def _groups(names: list[str], order: Callable[[str], object], kl: Tensor, gap: Tensor, same: Tensor) -> Iterator[Group]:
    for name in sorted(set(names), key=order):  # type: ignore[type-var,arg-type]
        here = torch.tensor([one == name for one in names])
        yield {
            "name": name, "tokens": int(here.sum()), "kl": kl[here].mean().item(),
            "kl_share": (kl[here].sum() / kl.sum().clamp(min=1e-12)).item(),
            "loss_above_base": gap[here].mean().item(), "same_top1": same[here].mean().item(),
        }  # fmt: skip


class Pieces:
    """Tokens of one tokenizer as text, each looked up once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self._known = tokenizer, dict[int, str]()
        self.special = frozenset(tokenizer.all_special_ids)

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = piece(self.tokenizer, token)
        return self._known[token]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self[i] for i in ids)

    def expected(self, logits: Tensor) -> list[Expected]:
        """The likeliest tokens and their probabilities."""
        best = logits.softmax(-1).topk(min(TOP, len(logits)))
        return [{"token": self[i], "p": p} for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def position_group(position: int) -> str:
    """The group of a token with so many in front of it: "0", "1 to 3", "4 to 15", ..."""
    at = max(i for i, first in enumerate(POSITIONS) if first <= position)
    if at == len(POSITIONS) - 1:
        return f"{POSITIONS[at]} and later"
    first, last = POSITIONS[at], POSITIONS[at + 1] - 1
    return str(first) if first == last else f"{first} to {last}"


def next_kind(pieces: Pieces, token: int) -> str:
    """What a token is, from its own letters: a word, a name, the rest of a word, a number, a mark, space."""
    if token in pieces.special:
        return START
    text = pieces[token]
    word = text.strip()
    if not word:
        return "line break" if "\n" in text else "space"
    if word[0].isdigit():
        return "number"
    if not word[0].isalpha():
        return "mark"
    if text[0].isspace():
        return "word with a capital" if word[0].isupper() else "word"
    return "rest of a word, or a word behind a mark"


def seen_before(ids: Sequence[int], wanted: Sequence[int], positions: Sequence[int]) -> list[str]:
    """Per position whether the token that follows was there before in its document, and behind the same token."""
    found, tokens, pairs = [], set[int](), set[tuple[int, int]]()
    for i, (now, follows) in enumerate(zip(ids, wanted, strict=True)):
        if positions[i] == 0:
            tokens, pairs = set(), set()
        elif i:
            pairs.add((ids[i - 1], now))
        tokens.add(now)
        found.append(PAIR if (now, follows) in pairs else SEEN if follows in tokens else NEW)
    return found
