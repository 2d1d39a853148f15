"""The models of a studio side by side: what each says and looks at, and what changes when something is taken out.

1. One pass whose weights can be masked (passes.py): a closed gate carries nothing, and a silenced head has all its
   gates closed. The last passes are kept, so that a longer prompt costs its new tokens and a closed gate the blocks
   above it. Models with the same weights (a control that had nothing to learn) are one, and run once.
2. What the picture predicts is first order: the gradient of the answer's log-odds, log p - log(1 - p), with respect to
   the mask, summed over what was closed. Log-odds do not saturate where the model is sure, as log p does.
   A scaled feature adds its direct and indirect share in the frozen model (features.py).
3. What happens is measured: the model is run again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tasks
from ..models.decoder import Decoder
from ..models.loading import load, name_of
from ..reporting.sections import pack_margins, pack_weights
from ..runs import distributed
from ..runs.run import Run, about
from ..tasks.registry import Words, piece
from .passes import Pass, edge_gradient, full_pass, log_probabilities, longer_pass, touched_pass

MOST_TOKENS = 64  # of a prompt; more would be a wall of edges
NEXT = 8  # likeliest next tokens
REMEMBERED = 12  # answers and their gradients
PASSES = 4  # of one model, remembered: some tens of megabytes each with a prompt of 64 tokens
Edge = tuple[int, int, int, int]  # layer, head, query, key
Say = Callable[[str], None]
Pause = Callable[[], None]


class Question(NamedTuple):
    """How likely is token `answer` after (or, where answers are filled in, at) `position` of these tokens?"""

    ids: tuple[int, ...]
    position: int
    answer: int


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
    _passes: "OrderedDict[tuple[int, ...], Pass]" = field(default_factory=OrderedDict)

    @classmethod
    def load(cls, source: str | Path) -> "Member":
        model, tokenizer = load(source, device=distributed.device())
        member = cls(name_of(source), Decoder(model.float().eval().requires_grad_(False)), Words(tokenizer))
        member._know_positions(1)  # now, and not when the first prompt is typed
        return member

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
        self._know_positions(len(ids))
        return self.decoder.embed(torch.tensor([list(ids)], device=self.device))

    def _know_positions(self, tokens: int) -> None:
        """One pass through the model, for all prompts to come; a job on shorter sentences makes it forget."""
        if not self.decoder.knows_positions(tokens):
            self.decoder.begin(torch.zeros(1, self.most_tokens, dtype=torch.long, device=self.device))

    def run(self, ids: Sequence[int]) -> Pass:
        """A pass over these tokens; as much of it as an earlier one knows is looked up."""
        ids = tuple(ids)
        self._know_positions(len(ids))
        if ids not in self._passes:
            x = self.embed(ids)
            same, earlier = max(((_same(ids, known), known) for known in self._passes), default=(0, ()))
            if same := min(same, len(ids) - 1):
                self._passes[ids] = longer_pass(self.decoder, self._passes[earlier], x, same)
            else:
                self._passes[ids] = full_pass(self.decoder, x)
            while len(self._passes) > PASSES:
                self._passes.popitem(last=False)
        self._passes.move_to_end(ids)
        return self._passes[ids]

    def without(self, ids: Sequence[int], changes: "Changes") -> Pass:
        """The same with these edges and heads taken out."""
        return touched_pass(self.decoder, self.run(ids), self.mask(len(ids), changes))

    def log_p(self, run: Pass, at: Sequence[int]) -> Tensor:
        """Log-probabilities of what follows these positions, [positions, vocabulary]."""
        return log_probabilities(self.decoder, run, at)

    def mask(self, tokens: int, changes: Changes) -> Tensor:
        """1 for every edge but these, [layer, head, query, key]; ValueError for one that the model does not have."""
        d = self.decoder.dims
        mask = torch.ones(d.n_layers, d.n_heads, tokens, tokens, device=self.device)
        for place in (*changes.closed, *changes.silenced):
            if not all(0 <= i < n for i, n in zip(place, mask.shape, strict=False)) or place[3:] > place[2:3]:
                raise ValueError(f"the {self.name} model has no gate or head {list(place)} here; reset the changes")
            mask[place] = 0
        return mask

    def gradient(self, question: Question, pause: Pause = lambda: None) -> Tensor:
        """d log-odds / d mask, [layer, head, query, key]: to first order, closing an edge takes this away."""
        run = self.run(question.ids)
        return edge_gradient(
            self.decoder, run, question.position, lambda log_p: log_odds(log_p, question.answer), pause
        )

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
    pause: Pause = lambda: None  # called in the middle of a gradient, where quicker questions may be answered
    _asked: "OrderedDict[tuple[int, Question], tuple[Tensor, Tensor]]" = field(default_factory=OrderedDict)

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
            for other, known in models.members.items():
                if same_weights(member.decoder.model, known.decoder.model):
                    member = replace(known, name=member.name)
                    models.notes.append(f"The {role} model has the very weights of the {other} model: it runs once.")
                    break
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
        """What every model says next. What its heads look at: `maps`, which takes longer to send."""
        shown, tokens, at = dict[str, Any](), list[str](), 0
        known: dict[int, Any] = {}
        for role, member in self.members.items():
            ids = self.ids(role, text, more)
            at = len(ids) - 1 if position is None else self.question(role, text, 0, position, more).position
            if id(member.decoder) not in known:
                tokens = member.pieces(ids)
                known[id(member.decoder)] = self._said(member, ids, at)
            shown[role] = known[id(member.decoder)]
        n = len(tokens)
        return {"text": text, "tokens": tokens, "possible": n * (n + 1) // 2, "position": at, "models": shown}

    def _said(self, member: Member, ids: tuple[int, ...], at: int) -> dict[str, Any]:
        run = member.run(ids)
        said = list(range(max(0, len(ids) - max(1, self.filled)), len(ids)))
        log_p = member.log_p(run, said if said[-1] == at else [*said, at])
        best = log_p[: len(said)].max(-1)
        # As long as the prompt, as in the report; what is said before the answer nobody asked for.
        before = len(ids) - len(said)
        return {
            "next": member.likeliest(log_p[-1]), "open": int((run.weights > 0).sum()),
            "says": [""] * before + member.pieces(best.indices.tolist()),
            "probability": [0.0] * before + best.values.exp().tolist(),
        }  # fmt: skip

    def maps(self, role: str, text: str, more: Sequence[int] = ()) -> dict[str, Any]:
        """Attention weights and gate margins of one model, packed as in the report."""
        run = self.member(role).run(self.ids(role, text, more))
        found = {"weights": pack_weights(_array(run.weights), 8)}
        return found if run.margins is None else found | {"margin": pack_margins(_array(run.margins))}

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
        run = member.without(question.ids, changes)
        after = member.log_p(run, [question.position])[0]
        told = {"predicted": self.predicted(role, question, changes), "open": int((run.weights > 0).sum())}
        return answers(before, after, question.answer) | told | {"next": member.likeliest(after)}

    def untouched(self, role: str, question: Question) -> tuple[Tensor, Tensor]:
        """Log-probabilities [vocabulary] and their `gradient`; the last few are remembered: a touch costs neither."""
        member = self.member(role)
        key = (id(member.decoder), question)
        if key not in self._asked:
            with torch.no_grad():
                log_p = member.log_p(member.run(question.ids), [question.position])[0]
            self._asked[key] = log_p, member.gradient(question, self.pause)
            while len(self._asked) > REMEMBERED:
                self._asked.popitem(last=False)
        self._asked.move_to_end(key)
        return self._asked[key]


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two models are the same to the last bit."""
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(
        t.shape == other[name].shape and torch.equal(t, other[name]) for name, t in one.items()
    )


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
