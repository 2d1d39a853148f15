"""The models of a studio side by side: what each says and looks at, and what changes when something is taken out.

1. One pass through `Decoder.run`, whose weights can be masked: a closed gate carries nothing, and a silenced head has
   all its gates closed. Where gates renormalise, the open ones share what a closed one had.
2. What the picture predicts is first order: the gradient of the answer's log-odds, log p - log(1 - p), with respect to
   the mask, summed over what was closed. Log-odds do not saturate where the model is sure, as log p does.
   A scaled feature adds its direct and indirect share in the frozen model (features.py).
3. What happens is measured: the model is run again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tasks
from ..gating import gated_pattern
from ..models.decoder import Decoder
from ..models.loading import load, name_of
from ..reporting.sections import pack_margins, pack_weights
from ..runs import distributed
from ..runs.run import Run, about
from ..tasks.registry import Words, piece

MOST_TOKENS = 64  # of a prompt; more would be a wall of edges
NEXT = 8  # likeliest next tokens
REMEMBERED = 12  # answers and their gradients
Edge = tuple[int, int, int, int]  # layer, head, query, key
Say = Callable[[str], None]


class Question(NamedTuple):
    """How likely is token `answer` after (or, where answers are filled in, at) `position` of these tokens?"""

    ids: tuple[int, ...]
    position: int
    answer: int


class Ran(NamedTuple):
    """What one pass gave. Gate margins are -inf where there is no such pair, None where nobody needs them."""

    log_p: Tensor  # [positions asked for, vocabulary]
    weights: Tensor  # [layer, head, query, key]
    margins: Tensor | None


class Changes(NamedTuple):
    """What is taken out of a model or scaled in it."""

    closed: tuple[Edge, ...] = ()
    silenced: tuple[tuple[int, int], ...] = ()
    scaled: tuple[tuple[int, int, int, float], ...] = ()  # layer, position, feature, factor


@dataclass
class Member:
    """One of the models."""

    name: str
    decoder: Decoder
    words: Words
    transcoder: Path | None = None

    @classmethod
    def load(cls, source: str | Path) -> "Member":
        model, tokenizer = load(source, device=distributed.device())
        return cls(name_of(source), Decoder(model.float().eval().requires_grad_(False)), Words(tokenizer))

    @property
    def most_tokens(self) -> int:
        return min(MOST_TOKENS, self.decoder.dims.max_tokens)

    @property
    def device(self) -> torch.device:
        return next(self.decoder.model.parameters()).device

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [piece(self.words.tokenizer, i) for i in ids]

    def embed(self, ids: Sequence[int]) -> Tensor:
        """What the first block reads, [1, tokens, d_model]."""
        if not self.decoder.knows_positions(len(ids)):  # one pass through the model, for all prompts to come
            self.decoder.begin(torch.zeros(1, self.most_tokens, dtype=torch.long, device=self.device))
        return self.decoder.embed(torch.tensor([list(ids)], device=self.device))

    def run(self, ids: Sequence[int], mask: Tensor | None = None, at: Sequence[int] = (-1,)) -> Ran:
        """One pass with these edges; the answers are read at the positions `at`."""
        decoder, seen, margins = self.decoder, list[Tensor](), list[Tensor]()

        def heads(layer: int, x: Tensor) -> Tensor:
            weights, values, margin = self._attend(layer, x)
            margins.extend([] if margin is None else [margin[0]])
            if mask is not None:
                weights = mask[layer] * weights
                if decoder.gates is not None and decoder.normalise == "open":
                    total = weights.sum(-1, keepdim=True)
                    weights = weights / torch.where(total > 0, total, 1.0)
            seen.append(weights[0].detach())
            return weights @ values

        x = self.embed(ids)
        for block in decoder.walk(x, heads=heads):
            x = block.after
        log_p = decoder.unembed(x[:, list(at)])[0].float().log_softmax(-1)
        return Ran(log_p, torch.stack(seen), torch.stack(margins) if margins else None)

    def _attend(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(what multiplies the values, the values, gate margins where there are gates and no gradient is asked for)."""
        decoder = self.decoder
        if decoder.gates is None or torch.is_grad_enabled():
            return *decoder.attend(layer, x), None
        y = decoder.read(layer, x)
        q, k, v = decoder.prepared(layer, *(decoder.project(layer, through, y) for through in "qkv"))
        pattern, _ = gated_pattern(q, k, decoder.gates[layer], **decoder.looks(layer))
        return pattern.weights, v, pattern.margin

    def mask(self, tokens: int, changes: Changes) -> Tensor:
        """1 for every edge but these, [layer, head, query, key]; ValueError for one that the model does not have."""
        d = self.decoder.dims
        mask = torch.ones(d.n_layers, d.n_heads, tokens, tokens, device=self.device)
        for place in (*changes.closed, *changes.silenced):
            if not all(0 <= i < n for i, n in zip(place, mask.shape, strict=False)) or place[3:] > place[2:3]:
                raise ValueError(f"the {self.name} model has no gate or head {list(place)} here; reset the changes")
            mask[place] = 0
        return mask

    def gradient(self, question: Question) -> tuple[Tensor, Tensor]:
        """Log-probabilities [vocabulary], and d log-odds / d mask, [layer, head, query, key], from one pass.

        Closing an edge changes the log-odds by minus this, to first order.
        """
        mask = self.mask(len(question.ids), Changes()).requires_grad_()
        with torch.enable_grad():
            log_p = self.run(question.ids, mask, [question.position]).log_p[0]
            (gradient,) = torch.autograd.grad(log_odds(log_p, question.answer), mask)
        return log_p.detach(), gradient

    def likeliest(self, log_p: Tensor) -> list[dict[str, Any]]:
        best = log_p.topk(min(NEXT, len(log_p)))
        found = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
        return [{"id": i, "text": piece(self.words.tokenizer, i), "p": p} for i, p in found]


@dataclass
class Models:
    """The models of a Run, or one alone. Not for several threads at once."""

    members: dict[str, Member] = field(default_factory=dict)
    run: Run | None = None
    prompts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    task: str = ""
    filled: int = 0
    _asked: "OrderedDict[tuple[str, Question], tuple[Tensor, Tensor]]" = field(default_factory=OrderedDict)

    @classmethod
    def open(cls, source: str | Path | Run, say: Say) -> "Models":
        """Base, control and sparse model of a Run, or the one model that a name or folder stands for."""
        path = source.path if isinstance(source, Run) else Path(source)
        if not (path / "run.json").is_file():
            say(f"loading {source}")
            member = Member.load(str(source))
            return cls({"dense" if member.decoder.gates is None else "sparse": member})
        run = Run(path)
        told = about(run)
        models = cls(run=run, prompts=told.prompts, task=told.task, filled=told.filled)
        for role, place in _places(run).items():
            say(f"loading the {role} model")
            try:
                member = Member.load(place)
            except ValueError as error:
                if role == "sparse":
                    raise
                models.notes.append(f"The {role} model is not shown: {error}")
                continue
            transcoder = path / "transcoders" / role
            member.transcoder = transcoder if (transcoder / "results.json").is_file() else None
            models.members[role] = member
        if not models.members:
            raise ValueError(run.without_model())
        return models

    def describe(self) -> dict[str, Any]:
        shown = {}
        for role, member in self.members.items():
            d = member.decoder.dims
            about_it = {"name": member.name, "n_layers": d.n_layers, "n_heads": d.n_heads}
            shown[role] = about_it | {"gated": member.decoder.gates is not None, "features": bool(member.transcoder)}
        told = {"models": shown, "prompts": self.prompts, "notes": self.notes, "filled": self.filled}
        return told | {"most_tokens": min(m.most_tokens for m in self.members.values())}

    def member(self, role: str) -> Member:
        if role not in self.members:
            raise ValueError(f"there is no {role[:20]!r} model here; there are {', '.join(self.members)}")
        return self.members[role]

    def ids(self, role: str, text: str, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The prompt's tokens, and those generated after it."""
        member = self.member(role)
        if not text.strip():
            raise ValueError("type a prompt first")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt holds half a character, which no tokenizer can read") from None
        # A Run must not name a file for us to read: only tasks that are known by their name.
        typed = tasks.find(self.task).prompt if self.task in tasks.names() else None
        ids = (*member.words.encode(text if typed is None else typed(text)), *more)
        if len(ids) > member.most_tokens:
            raise ValueError(f"the prompt has {len(ids)} tokens; the studio shows up to {member.most_tokens}")
        if not all(0 <= i < member.decoder.vocabulary for i in ids):
            raise ValueError("the prompt has a token that this model does not know")
        return ids

    def question(
        self, role: str, text: str, answer: int, position: int | None = None, more: Sequence[int] = ()
    ) -> Question:
        ids = self.ids(role, text, more)
        at = len(ids) - 1 if position is None else position
        if not 0 <= at < len(ids):
            raise ValueError(f"the prompt has no position {at}: it has {len(ids)} tokens")
        if not 0 <= answer < self.member(role).decoder.vocabulary:
            raise ValueError(f"the model has no token {answer}")
        return Question(ids, at, answer)

    @torch.no_grad()
    def look(self, text: str, more: Sequence[int] = (), position: int | None = None) -> dict[str, Any]:
        """What every model says next, and what its heads look at: as in the report, with the next tokens beside."""
        shown, tokens, at = dict[str, Any](), list[str](), 0
        for role, member in self.members.items():
            ids = self.ids(role, text, more)
            at = len(ids) - 1 if position is None else self.question(role, text, 0, position, more).position
            said = range(max(0, len(ids) - max(1, self.filled)), len(ids))
            log_p, weights, margins = member.run(ids, at=[*said, at])
            tokens = member.pieces(ids)
            best = log_p[:-1].max(-1)
            # As long as the prompt, as in the report; what is said before the answer nobody asked for.
            before = len(ids) - len(said)
            shown[role] = {
                "next": member.likeliest(log_p[-1]), "open": int((weights > 0).sum()),
                "says": [""] * before + member.pieces(best.indices.tolist()),
                "probability": [0.0] * before + best.values.exp().tolist(),
                "weights": pack_weights(_array(weights), 8),
            }  # fmt: skip
            if margins is not None:
                shown[role]["margin"] = pack_margins(_array(margins))
        n = len(tokens)
        return {"text": text, "tokens": tokens, "possible": n * (n + 1) // 2, "position": at, "models": shown}

    def effects(self, role: str, question: Question) -> list[list[float]]:
        """What closing each edge should do to the answer's log-odds, largest first: [layer, ..., key, change]."""
        change = -self.untouched(role, question)[1]
        flat = change.flatten()
        order = flat.abs().topk(min(400, len(flat))).indices
        order = order[flat[order] != 0]
        where = torch.stack(torch.unravel_index(order, change.shape), 1).tolist()
        return [[*at, value] for at, value in zip(where, flat[order].tolist(), strict=True)]

    def predicted(self, role: str, question: Question, changes: Changes) -> float:
        """Change of the log-odds to first order, of gates and heads."""
        mask = self.member(role).mask(len(question.ids), changes)
        return float((self.untouched(role, question)[1] * (mask - 1)).sum())

    @torch.no_grad()
    def touch(self, role: str, question: Question, changes: Changes) -> dict[str, Any]:
        """The answer's log-odds and probability before and after, what was predicted, and what the model says now."""
        member = self.member(role)
        before, _ = self.untouched(role, question)
        mask = member.mask(len(question.ids), changes)
        after, weights, _ = member.run(question.ids, mask, [question.position])
        told = {"predicted": self.predicted(role, question, changes), "open": int((weights > 0).sum())}
        return answers(before, after[0], question.answer) | told | {"next": member.likeliest(after[0])}

    def untouched(self, role: str, question: Question) -> tuple[Tensor, Tensor]:
        """As `Member.gradient`; the last few are remembered, so that a touch costs one pass."""
        if (role, question) not in self._asked:
            self._asked[role, question] = self.member(role).gradient(question)
            while len(self._asked) > REMEMBERED:
                self._asked.popitem(last=False)
        self._asked.move_to_end((role, question))
        return self._asked[role, question]


def log_odds(log_p: Tensor, answer: int) -> Tensor:
    """log p - log(1 - p) of a token, without loss of digits where p is nearly 1."""
    others = log_p.index_fill(0, torch.tensor(answer, device=log_p.device), -torch.inf)
    return log_p[answer] - others.logsumexp(0)


def answers(before: Tensor, after: Tensor, answer: int) -> dict[str, Any]:
    """Log-odds and probability of a token in two distributions [vocabulary] (log-probabilities)."""
    odds = {"before": float(log_odds(before, answer)), "after": float(log_odds(after, answer))}
    return odds | {"p_before": float(before[answer].exp()), "p_after": float(after[answer].exp())}


def _places(run: Run) -> dict[str, Path | str]:
    """Where the Run's models are. A sparsify Run names its base; a demo has trained its own."""
    places = {"dense": run.path / "base/model", "control": run.path / "control/model", "sparse": run.path / "model"}
    found: dict[str, Path | str] = {role: folder for role, folder in places.items() if folder.is_dir()}
    if "dense" not in found and run.record["kind"] == "sparsify" and run.record["config"].get("model"):
        return {"dense": str(run.record["config"]["model"]), **found}
    return found


def _array(values: Tensor) -> "np.ndarray[Any, Any]":
    return values.float().cpu().numpy()
