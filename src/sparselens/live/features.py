"""Features in the studio: which are active, what scaling one does, and which opened a gate.

A prompt's graph with no rows but the answer's: the model frozen on the prompt, its MLPs replaced by features and
errors. The answer is read along the gradient of its log-odds, so that predictions are in nats, as for gates.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ..attribution.graph import FEATURE, Graph
from ..attribution.growth import attribution_graph
from ..attribution.interventions import intervene
from ..attribution.qk_terms import explain_look
from ..faces.store import FOLDER as FACES, Faces
from ..transcoders.transcoder import Transcoder
from .models import Changes, Edge, Member, Models, Question, answers

REMEMBERED = 3  # graphs: each holds a prompt's whole run
SHOWN = 60  # features, and terms of a look


class Features:
    """The transcoders of the models that have one."""

    def __init__(self, models: Models):
        self.models = models
        self._transcoders: dict[str, Transcoder] = {}
        self._faces: dict[str, Faces | None] = {}
        self._graphs: OrderedDict[tuple[str, Question], Graph] = OrderedDict()

    def check(self, role: str) -> Path:
        """Where the model's transcoder is; ValueError where there is none."""
        found = self.models.member(role).transcoder
        if found is None:
            made = "sparselens transcode --out RUN/transcoders/" + role
            raise ValueError(f"the {role} model has no transcoder, so no features; make one with `{made}`")
        return found

    def transcoder(self, role: str) -> Transcoder:
        if role not in self._transcoders:
            self._transcoders[role] = Transcoder.load(self.check(role)).to(self.models.member(role).device)
        return self._transcoders[role]

    def graph(self, role: str, question: Question) -> Graph:
        if (role, question) not in self._graphs:
            member = self.models.member(role)
            self._graphs[role, question] = attribution_graph(
                member.decoder.model, member.words.tokenizer, self.transcoder(role), list(question.ids),
                self._direction(member, question), position=question.position, budget=0,
            )  # fmt: skip
            while len(self._graphs) > REMEMBERED:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end((role, question))
        return self._graphs[role, question]

    @torch.no_grad()
    def _direction(self, member: Member, question: Question) -> torch.Tensor:
        """How the normed end of the residual stream moves the answer's log-odds, [d_model]."""
        log_p = member.log_p(member.run(question.ids), [question.position])[0]
        log_p[question.answer] = -torch.inf
        head: Any = member.decoder.model.get_output_embeddings()  # type: ignore[operator]
        weight: torch.Tensor = head.weight.float()
        return weight[question.answer] - log_p.softmax(0) @ weight

    def active(self, role: str, question: Question) -> list[dict[str, Any]]:
        """Active features, those with the largest direct share of the answer first."""
        graph = self.graph(role, question)
        source, weight = graph.row(graph.n_nodes - 1)
        found = [(int(s), float(w)) for s, w in zip(source, weight, strict=True) if int(graph.kind[int(s)]) == FEATURE]
        found.sort(key=lambda pair: -abs(pair[1]))
        return [self._row(role, graph, node) | {"share": share} for node, share in found[:SHOWN]]

    def _row(self, role: str, graph: Graph, node: int) -> dict[str, Any]:
        n = graph.node(node)
        told = {"kind": n.kind, "layer": n.layer, "position": n.position, "feature": n.index, "activation": n.value}
        return told | {"label": self._label(role, graph, node)}

    def _label(self, role: str, graph: Graph, node: int) -> str:
        """A node in words; a feature by its label where its transcoder has faces."""
        n, said = graph.node(node), graph.label(node)
        if role not in self._faces:
            folder = self.models.member(role).transcoder
            there = folder is not None and (folder / FACES / "faces.json").is_file()
            self._faces[role] = Faces(folder) if folder is not None and there else None
        faces = self._faces[role]
        return said if faces is None or n.kind != "feature" else f"{faces.label(n.layer, n.index)} ({said})"

    @torch.no_grad()
    def touch(self, role: str, question: Question, changes: Changes) -> dict[str, Any]:
        """As `Models.touch`, with features scaled, too."""
        graph, member = self.graph(role, question), self.models.member(role)
        member.mask(len(question.ids), changes)  # what is not there is refused in words
        nodes = {graph.find("feature", *place[:3]): place[3] for place in changes.scaled}
        heads = [f"a{layer}.h{head}" for layer, head in changes.silenced]
        done = intervene(graph, scale=nodes, close=changes.closed, ablate=heads)
        assert done.run is not None
        after = done.run.logits(capped=True, at=question.position).float().log_softmax(-1)
        before = member.log_p(member.run(question.ids), [question.position])[0]
        alone = intervene(graph, scale=nodes, frozen=True)
        predicted = float((alone.after - alone.before)[0]) + self.models.predicted(role, question, changes)
        told = {"predicted": predicted, "open": None, "next": member.likeliest(after)}
        return answers(before, after, question.answer) | told

    def opened(self, role: str, question: Question, edge: Edge) -> dict[str, Any]:
        """Why a head looks there: its logit as terms between sources, and without which single ones the gate closes."""
        graph = self.graph(role, question)
        self.models.member(role).mask(len(question.ids), Changes(closed=(edge,)))
        look = explain_look(graph, *edge, top=12)
        terms = [
            {
                "term": t["term"],
                "query": self._label(role, graph, t["query_source"]),
                "key": self._label(role, graph, t["key_source"]),
            }
            for t in look.terms
        ]
        closing = [self._row(role, graph, node) | {"without": look.without(node)} for node in look.closing()[:SHOWN]]
        told = {"logit": look.logit, "margin": look.margin, "rest": look.rest, "terms": terms}
        return told | {"closing": [row for row in closing if row["kind"] == "feature"]}
