"""From a model and a transcoder in memory to the attribution graph of a prompt (trace.py is the verb around it).

1. Freeze the model on the prompt (linear_model.py) and replace its MLPs by features and errors (sources.py).
2. Targets: the likeliest next tokens, a named token, a difference of two, or any direction; each a reading of the
   residual stream's end.
3. Rows of the targets: every source's exact share.
4. Grow: the feature through which most influence flows and which has no row yet gets one, in batches, up to the budget.
5. Prune to the nodes and edges that hold most of the influence.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..models.architectures import base_model, dimensions
from ..tasks.registry import Words
from ..transcoders.transcoder import Transcoder
from .graph import BIAS, KINDS, LOGIT, Graph
from .linear_model import TOLERANCE, Frozen, exact
from .rows import TargetRow
from .sources import Replacement

ROUNDS = 24  # influence is computed anew about this many times while the graph grows


@exact
def attribution_graph(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, transcoder: Transcoder,
    prompt: str | Sequence[int] | Tensor, target: Any = None, *,
    position: int | None = None, budget: int = 1000, edges_per_row: int = 4096, mass: float = 0.95,
    most_targets: int = 10, nodes: float = 0.8, edges: float = 0.98, memory_mb: float = 1024,
    show_progress: bool = False, step: Callable[[int, int], None] | None = None,
) -> Graph:  # fmt: skip
    """The attribution graph of a prompt: who feeds whom, and how much, with every row adding up exactly.

    prompt, target, mass, most_targets: as `sl.trace` takes them. position: whose output is explained; None: the last.
    budget: rows computed for features. edges_per_row: edges stored of each; the others are kept as exact sums.
    nodes, edges: shares of the influence that pruning keeps. step: hears (rows done, of how many).
    memory_mb: for gradients of rows computed together.
    Computes in fp32, or in fp64 when the model is fp64; a half-precision model is copied to fp32 first.
    """
    if budget < 0 or edges_per_row < 1:
        raise ValueError(f"budget={budget}, edges_per_row={edges_per_row}: expected at least 0 and 1")
    if not 0 < mass <= 1 or most_targets < 1:
        raise ValueError(f"mass={mass}, most_targets={most_targets}: expected a share up to 1, and at least 1")
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes every run another one: call model.eval()")
    ids = prompt_ids(model, tokenizer, prompt)
    if position is not None and not -len(ids) <= position < len(ids):
        raise ValueError(f"position={position}: the prompt has {len(ids)} tokens, positions 0 to {len(ids) - 1}")
    at = (-1 if position is None else position) % len(ids)
    if next(model.parameters()).dtype not in (torch.float32, torch.float64):
        model = copy.deepcopy(model).float()
    replacement = Replacement(_freeze(model, ids), transcoder)
    chosen = choose_targets(replacement.frozen, tokenizer, target, mass, most_targets, at)
    replacement.set_logits(torch.stack([t.direction for t in chosen]), torch.stack([t.constant for t in chosen]), at)
    text = prompt if isinstance(prompt, str) else text_of(tokenizer, ids.tolist())
    growing = _Growing(replacement, [t.row for t in chosen], text, tokenizer, edges_per_row)
    graph = growing.grow(budget, memory_mb, show_progress, step or (lambda done, of: None))
    graph.settings |= {"budget": budget, "edges_per_row": edges_per_row, "nodes": nodes, "edges": edges}
    graph.pause = None if step is None else functools.partial(step, budget, budget)
    return graph.prune(nodes, edges)


def prompt_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int] | Tensor) -> Tensor:
    """The prompt's tokens [T], where the model is. Text gets the token in front that training sequences start with."""
    tokens: Any = prompt
    if isinstance(prompt, str):  # nothing but the token put in front is no prompt
        tokens = Words(tokenizer).encode(prompt) if tokenizer(prompt, add_special_tokens=False)["input_ids"] else []
    ids = torch.as_tensor(tokens, device=next(model.parameters()).device).flatten()
    if len(ids) < 1:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    return ids


def _freeze(model: nn.Module, ids: Tensor) -> Frozen:
    longest = dimensions(base_model(model).config).max_tokens
    if longest < len(ids):
        raise ValueError(f"the prompt has {len(ids)} tokens, the model reads at most {longest}")
    frozen = Frozen(model, ids)
    if frozen.check > TOLERANCE:
        message = f"the model in pieces is {frozen.check:.1e} of the largest logit away from the model itself"
        if frozen.decoder.gates is None:
            raise ValueError(f"{message}; this transformers version computes something we do not know of")
        # A gate within rounding of its threshold may open in one order of summation and not in the other.
        warnings.warn(f"{message}: a gate close to its threshold fell the other way", stacklevel=3)
    return frozen


# ---- targets ---------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """One thing to explain, and how the normed end of the residual stream is read for it."""

    row: TargetRow
    direction: Tensor  # [d_model]
    constant: Tensor  # []


def choose_targets(
    frozen: Frozen, tokenizer: PreTrainedTokenizerBase, target: Any, mass: float = 0.95, most: int = 10, at: int = -1
) -> list[Target]:
    """What to explain at a position, weights summing to 1; `target` as `sl.trace` takes it."""
    probability = frozen.logits(capped=True, at=at).softmax(-1)
    if isinstance(target, Tensor):
        if target.shape != (frozen.dims.d_model,):
            raise ValueError(f"a direction must have shape [{frozen.dims.d_model}]; got {list(target.shape)}")
        direction = target.to(frozen.final)
        return [_target("direction", None, None, 1.0, direction, direction.new_zeros(()))]
    weight = frozen.unembed_weight
    bias = weight.new_zeros(weight.shape[1]) if frozen.unembed_bias is None else frozen.unembed_bias
    if isinstance(target, str) and " - " in target:
        target = tuple(target.split(" - ", 1))
    if isinstance(target, tuple):
        if len(target) != 2:
            raise ValueError(f"target={target!r}: a difference takes two tokens, ('small', 'large')")
        plus, minus = (_token(tokenizer, t, weight.shape[1]) for t in target)
        direction = weight[:, plus] - weight[:, minus]
        label = f"{text_of(tokenizer, [plus])} - {text_of(tokenizer, [minus])}"
        return [_target(label, None, None, 1.0, direction, bias[plus] - bias[minus])]
    if target is None:
        ranked, order = probability.sort(descending=True)
        enough = int((ranked.cumsum(0) < mass).sum()) + 1
        tokens = order[: min(enough, most)].tolist()
    else:
        tokens = [_token(tokenizer, t, weight.shape[1]) for t in (target if isinstance(target, list) else [target])]
    total = float(probability[tokens].sum()) or 1.0
    mean, mean_bias = weight.mean(1), bias.mean()
    return [
        _target(text_of(tokenizer, [t]), t, p, p / total, weight[:, t] - mean, bias[t] - mean_bias)
        for t, p in zip(tokens, probability[tokens].tolist(), strict=True)
    ]


def _target(
    label: str, token: int | None, probability: float | None, weight: float, direction: Tensor, constant: Tensor
) -> Target:
    return Target({"label": label, "token": token, "probability": probability, "weight": weight}, direction, constant)


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Tokens as text."""
    return str(tokenizer.decode(ids))


def _token(tokenizer: PreTrainedTokenizerBase, text: str | int, vocabulary: int) -> int:
    if isinstance(text, int):
        if not 0 <= text < vocabulary:
            raise ValueError(f"target token {text}: the vocabulary has {vocabulary} tokens")
        return text
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        pieces = [text_of(tokenizer, [i]) for i in ids]
        raise ValueError(
            f"target {text!r} is {len(ids)} tokens, {pieces}: name a single one "
            "(with its leading space, if it has one), or give its id"
        )
    return int(ids[0])


# ---- growth ----------------------------------------------------------------------------------------------------------


class _Growing:
    """A graph whose rows are computed one after the other: the largest edges of each, exact sums of the others."""

    def __init__(
        self, replacement: Replacement, targets: list[TargetRow], prompt: str, tokenizer: PreTrainedTokenizerBase,
        most: int,
    ):  # fmt: skip
        self.replacement, self.targets, self.prompt, self.most = replacement, targets, prompt, most
        self.tokens = [text_of(tokenizer, [i]) for i in replacement.frozen.ids.tolist()]
        self.n_free = replacement.columns[BIAS].start  # columns before the biases
        self.row_targets: list[Tensor] = []
        self.lengths: list[Tensor] = []
        self.parts: dict[str, list[Tensor]] = {
            name: [] for name in ("source", "weight", "row_value", "row_sum", "row_abs", "rest", "rest_abs")
        }

    def grow(self, budget: int, memory_mb: float, show_progress: bool, step: Callable[[int, int], None]) -> Graph:
        """Rows of the logits, then of the most influential features without one, until the budget is spent."""
        replacement, device = self.replacement, self.replacement.error.device
        at_once = replacement.at_once(memory_mb)
        n_features = len(replacement.layer)
        budget = min(budget, n_features)
        logits = replacement.n_sources + torch.arange(len(self.targets), device=device)
        for part in torch.split(logits, at_once):
            self.add(part)
        graph = self.graph()
        done, bar = 0, tqdm(total=budget, desc="rows", disable=not show_progress)
        while done < budget:
            has_row = torch.zeros(n_features, dtype=torch.bool)
            has_row[graph.row_target[len(self.targets) :]] = True
            influence = graph.influence[:n_features].masked_fill(has_row, -1)
            wanted = influence.topk(min(max(at_once, budget // ROUNDS), budget - done))
            chosen = wanted.indices[wanted.values > 0]
            if not len(chosen):
                break  # what is left does not reach the targets
            # By layer: a row needs the blocks below its target only.
            chosen = chosen[replacement.layer[chosen.to(device)].cpu().argsort()]
            for part in torch.split(chosen.to(device), at_once):
                self.add(part)
                bar.update(len(part))
            done += len(chosen)
            step(done, budget)
            graph = self.graph()
        bar.close()
        return graph

    def add(self, ids: Tensor) -> None:
        """Compute the rows of these targets and keep what is worth keeping."""
        values = self.replacement.values(ids)
        rows = self.replacement.rows(self.replacement.reads(ids))
        edges, biases = rows[:, : self.n_free], rows[:, self.n_free :]
        magnitude = edges.abs()
        # Exact zeros (later positions, higher layers, closed gates) are no edges.
        most = min(self.most, int((magnitude > 0).sum(1).max()) if len(edges) else 0, self.n_free)
        kept = magnitude.topk(most, 1).indices.sort(1).values
        mask = torch.zeros_like(edges, dtype=torch.bool).scatter_(1, kept, True) & (magnitude > 0)
        dropped = edges.masked_fill(mask, 0)
        rest = torch.zeros(len(ids), len(KINDS), dtype=torch.float64)
        rest_abs = rest.clone()
        for kind, columns in enumerate(self.replacement.columns[:BIAS]):
            rest[:, kind] = dropped[:, columns].sum(1, dtype=torch.float64).cpu()
            rest_abs[:, kind] = dropped[:, columns].abs().sum(1, dtype=torch.float64).cpu()
        full = torch.cat([mask, torch.ones_like(biases, dtype=torch.bool)], 1)
        self.row_targets.append(ids.cpu())
        self.lengths.append(full.sum(1).cpu())
        found = dict(
            source=full.nonzero()[:, 1], weight=rows[full], row_value=values, row_sum=rows.sum(1, dtype=torch.float64),
            row_abs=magnitude.sum(1), rest=rest, rest_abs=rest_abs,
        )  # fmt: skip
        for name, value in found.items():
            self.parts[name].append(value.cpu())

    def graph(self) -> Graph:
        """The graph of all rows so far."""
        frozen, transcoder = self.replacement.frozen, self.replacement.transcoder
        edges, nodes, tail = self._edge_columns(), self.replacement.node_columns(), len(self.targets)
        logits = {
            "kind": torch.full((tail,), LOGIT), "layer": torch.full((tail,), frozen.dims.n_layers),
            "position": torch.full((tail,), self.replacement.logit_position),
            "index": torch.tensor([-1 if t["token"] is None else t["token"] for t in self.targets]),
            "value": edges["row_value"][:tail],
        }  # fmt: skip
        columns = {n: torch.cat([nodes[n], logits[n].to(nodes[n])]) for n in nodes} | edges
        settings: dict[str, str | float] = {
            "cross_layer": transcoder.cross_layer, "input_hook": transcoder.input_hook,
            "gated": frozen.decoder.gates is not None, "dtype": str(frozen.final.dtype).removeprefix("torch."),
            "n_active": len(self.replacement.layer), "n_features": transcoder.n_features, "self_check": frozen.check,
        }  # fmt: skip
        n_layers, n_heads = frozen.dims.n_layers, frozen.dims.n_heads
        return Graph(
            self.prompt, self.tokens, self.targets, n_layers, n_heads, settings, **columns, live=self.replacement,
            rows=None, pause=None,
        )  # fmt: skip

    def _edge_columns(self) -> dict[str, Tensor]:
        lengths = torch.cat(self.lengths)
        first = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        # Joined once and kept joined: growth asks again and again.
        self.parts = {name: [torch.cat(parts)] for name, parts in self.parts.items()}
        columns = {name: parts[0] for name, parts in self.parts.items()}
        columns |= {name: columns[name].to(columns["weight"].dtype) for name in ("rest", "rest_abs")}
        return columns | {"row_target": torch.cat(self.row_targets), "first": first}
