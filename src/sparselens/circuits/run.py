"""Run circuits: every edge inside carries what its writer computes, every edge outside what it carries in another run.

    reader's input = base residual + sum over writers of mask * (what it writes now - what it writes in the base)

The base is the corrupted prompt (default), the mean over prompts, or nothing at all. Many circuits run at once; parts
of the model that no circuit reaches are not run at all, so small circuits are cheap.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..models.decoder import Decoder, Step
from ..runs import distributed
from ..tasks.prompts import Prompts

Ablation = Literal["corrupted", "mean", "zero"]
TOLERANCE = 1e-4  # of the largest logit
PROMPTS_AT_ONCE = 32  # through the model itself
LOGIT = 28  # bytes: a logit, the same in fp64, its log-probability and probability


@dataclass
class NodeValues:
    """What every node of the component graph reads and writes in one run. Per layer, where there is a list."""

    embedding: Tensor  # [batch, tokens, d_model]
    attention_in: list[Tensor]  # [batch, tokens, d_model]
    mlp_in: list[Tensor]  # [batch, tokens, d_model]
    z: list[Tensor]  # [batch, n_heads, tokens, d_head], post-norm factor included
    mlp_out: list[Tensor]  # [batch, tokens, d_model]
    final: Tensor  # [batch, tokens, d_model]


@torch.no_grad()
def run_nodes(decoder: Decoder, embedding: Tensor, heads: Step | None = None, mlp: Step | None = None) -> NodeValues:
    """Run the decoder from its embeddings and keep every node. heads, mlp: as in `Decoder.walk`."""
    run = NodeValues(embedding, [], [], [], [], embedding)
    for block in decoder.walk(embedding, heads=heads, mlp=mlp):
        run.attention_in.append(block.residual)
        run.z.append(decoder.scaled(block.layer, block.z))
        run.mlp_in.append(block.mlp_in)
        run.mlp_out.append(block.mlp_out)
        run.final = block.after
    return run


def _nothing(decoder: Decoder, embedding: Tensor) -> NodeValues:
    """A run in which nobody writes: only attention's output biases, which no head owns, are in the residual stream."""
    batch, tokens, _ = embedding.shape
    silent = embedding.new_zeros(batch, decoder.dims.n_heads, tokens, decoder.dims.d_head)
    nobody = torch.zeros_like(embedding)
    return run_nodes(decoder, nobody, heads=lambda layer, x: silent, mlp=lambda layer, x: nobody)


def _mean(run: NodeValues, other: NodeValues, real: Tensor) -> NodeValues:
    """The mean of two sets of runs over prompts, position by position, prompts that have ended left out. Batch of 1."""

    def mean(*values: Tensor) -> Tensor:
        weight = real.to(values[0].dtype).view(len(real), *([1] * (values[0].ndim - 3)), -1, 1)
        total = torch.stack([(value * weight).sum(0, keepdim=True) for value in values]).sum(0)
        return total / (len(values) * weight.sum(0, keepdim=True).clamp(min=1))

    return _merge(mean, run, other)


def _merge(function: Callable[..., Tensor], *runs: NodeValues) -> NodeValues:
    def merge(values: list[Any]) -> Any:
        per_layer = isinstance(values[0], list)
        return [function(*layer) for layer in zip(*values, strict=True)] if per_layer else function(*values)

    return NodeValues(*(merge([getattr(run, field.name) for run in runs]) for field in fields(NodeValues)))


class Patcher:
    """Prompts made ready for running circuits on them.

    Checks on construction that the pieces are the model: the full circuit gives the model's own logits on the clean
    prompts, the empty one its logits on the corrupted prompts, both to 1e-4 of the largest logit.
    """

    def __init__(self, decoder: Decoder, prompts: Prompts, ablation: Ablation = "corrupted", memory_mb: float = 768):
        if ablation not in ("corrupted", "mean", "zero"):
            raise ValueError(f"ablation={ablation!r}: expected 'corrupted', 'mean' or 'zero'")
        device = next(decoder.model.parameters()).device
        self.decoder, self.prompts, self.ablation = decoder, prompts.to(device), ablation
        self.memory = memory_mb * 2**20
        # What the model feeds its first block, on both prompts.
        parts = (torch.split(ids, PROMPTS_AT_ONCE) for ids in (self.prompts.clean, self.prompts.corrupted))
        self.clean, self.corrupted = (torch.cat([decoder.begin(some) for some in part]) for part in parts)
        self._base: NodeValues | None = None  # of all prompts, where it is worth keeping; else made for every batch
        if ablation == "mean":
            real = torch.arange(self.clean.shape[1], device=device) < self.prompts.lengths[:, None]
            self._base = _mean(run_nodes(decoder, self.clean), run_nodes(decoder, self.corrupted), real)
        elif 4 * decoder.dims.n_layers * self.clean.nbytes <= self.memory:
            self._base = self.base_of(slice(None))
        self.m_model, self.m_nothing, self.checks = self._check()
        # All processes have computed these; from here on they compare with the very same numbers.
        self.m_model, self.m_nothing = distributed.mean(self.m_model), distributed.mean(self.m_nothing)

    def base_of(self, some: slice | Tensor) -> NodeValues:
        """What edges outside a circuit carry, for these prompts."""
        if self._base is None:
            return (run_nodes if self.ablation == "corrupted" else _nothing)(self.decoder, self.corrupted[some])
        if self.ablation == "mean":
            n = len(self.clean[some])
            return _merge(lambda value: value.expand(n, *value.shape[1:]), self._base)
        return _merge(lambda value: value[some], self._base)

    def run(self, masks: np.ndarray | Tensor, progress: Callable[[int], None] = lambda n: None) -> Tensor:
        """The metric of every circuit on every prompt: masks [circuits, readers, writers] -> [circuits, n], fp64.

        Masks may be fractional: an edge then carries that share of the difference. Several processes share the work.
        """
        masks = torch.as_tensor(masks)
        masks = masks if masks.is_floating_point() else masks.float()
        order = sorted(range(len(masks)), key=lambda i: float(masks[i].count_nonzero()))  # alike circuits share passes
        out = torch.zeros(len(masks), len(self.prompts), dtype=torch.float64)
        for group in self._groups(masks, distributed.mine(order)):
            out[group] = self._run(masks[group])
            progress(len(group) * distributed.world())
        return distributed.total(out)

    def _groups(self, masks: Tensor, order: list[int]) -> list[list[int]]:
        """Circuits to run together, as many as the memory allows with all prompts in one batch."""
        groups: list[list[int]] = []
        most = 0.0  # nodes: the first of a group is its largest
        for i in reversed(order):
            if not groups or (len(groups[-1]) + 1) * self._bytes(len(self.prompts), most) > self.memory:
                groups.append([])
                most = masks[i].any(0).sum().item()
            groups[-1].append(i)
        return groups

    def _bytes(self, n_prompts: int, nodes: float) -> float:
        """Memory of one circuit: every node's share of the residual stream, and one layer's separate inputs; logits."""
        d, reads, vocabulary = self.decoder.dims, self.prompts.position.shape[1], self.decoder.vocabulary
        heads = min(nodes, d.n_heads)
        stream = self.prompts.clean.shape[1] * d.d_model * 4 * (nodes + 8 * heads + 6)
        return n_prompts * (stream + LOGIT * reads * vocabulary)

    def _run(self, masks: Tensor) -> Tensor:
        most = float(masks.any(1).sum(1).max())
        n = max(1, min(len(self.prompts), int(self.memory / len(masks) / self._bytes(1, most))))
        return torch.cat([self._logits(masks, some)[1] for some in self._parts(n)], 1)

    def _parts(self, n: int) -> list[slice]:
        return [slice(i, i + n) for i in range(0, len(self.prompts), n)]

    @torch.no_grad()
    def _logits(self, masks: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Logits at the reads [circuits, n, reads, vocabulary] and metrics [circuits, n] on some of the prompts."""
        clean, prompts = self.clean[some], self.prompts.take(some)
        hidden = run_circuits(self.decoder, masks.to(clean), clean, self.base_of(some))
        logits = self.decoder.unembed(prompts.at_reads(hidden))
        return logits, prompts.score(logits.double()).cpu()

    def _check(self) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Metrics of the full and of the empty circuit, both compared with the model's own logits."""
        c = self.decoder.components
        full = torch.from_numpy(c.possible).float()[None]
        n = max(1, min(PROMPTS_AT_ONCE, int(self.memory / self._bytes(1, c.n_writers))))
        metrics, checks = [], {}
        whole, empty = ("full", full, self.prompts.clean), ("empty", torch.zeros_like(full), self.prompts.corrupted)
        for name, masks, ids in (whole, empty):
            scores, errors = [], []
            for some in self._parts(n):
                logits, score = self._logits(masks, some)
                scores.append(score[0])
                errors.append(self._errors(logits[0], ids[some], self.prompts.take(some)))
            metrics.append(torch.cat(scores))
            if name == "full" or self.ablation == "corrupted":
                checks[name] = self._judge(name, torch.cat(errors))
        return metrics[0], metrics[1], checks

    def _errors(self, logits: Tensor, ids: Tensor, prompts: Prompts) -> Tensor:
        """[n] distance of these logits from the model's own on these tokens, in units of its largest."""
        own, used = prompts.ask(self.decoder.model, ids), prompts.used[..., None]
        return ((logits - own) * used).abs().amax((1, 2)) / (own * used).abs().amax((1, 2))

    def _judge(self, name: str, error: Tensor) -> float:
        """The largest error; ValueError where it is too large."""
        # A gate within rounding of its threshold may open here and close there: a few prompts may differ.
        allowed = len(error) // 10 if self.decoder.gates is not None else 0
        worst = float(error.sort().values[len(error) - 1 - allowed])
        if not worst <= TOLERANCE:
            other = "the model's logits" if name == "full" else "the corrupted prompts' logits"
            raise ValueError(
                f"self-check failed: the {name} circuit differs from {other} by {worst:.1e} of the largest logit "
                f"(allowed: {TOLERANCE:.0e}). This model does something sparselens does not know of; please report its "
                f"type ({self.decoder.config.model_type})."
            )
        return worst


@torch.no_grad()
def run_circuits(decoder: Decoder, masks: Tensor, embedding: Tensor, base: NodeValues) -> Tensor:
    """The last residual stream [circuits, batch, tokens, d_model] of every circuit.

    1. Live writers: those with an edge out and, unless it is the input, an edge in, in any of the circuits.
    2. `difference` holds, for every live writer so far, what it writes now minus what it writes in the base.
    3. Layer by layer: inputs of the live heads' q, k and v (each its own) and of the MLP are the base's residual stream
       plus mask times difference; what the parts make of them gives the next differences.
    """
    c, dims = decoder.components, decoder.dims
    n, (batch, tokens, d_model) = len(masks), embedding.shape
    live = _live_writers(decoder, masks)
    index = {writer: i for i, writer in enumerate(live)}
    masks = masks[:, :, live]
    difference = embedding.new_empty(n, len(live), batch * tokens * d_model)
    filled = 0

    def put(value: Tensor, at: int) -> None:  # value [circuits * batch, tokens, d_model]
        nonlocal filled
        difference[:, at] = value.reshape(n, -1)
        filled = at + 1

    def inputs(rows: list[int], residual: Tensor, written: int) -> Tensor:  # [circuits, rows, batch, tokens, d_model]
        if not written:
            return residual.expand(n, len(rows), *residual.shape)
        added = masks[:, rows, :written] @ difference[:, :written]
        return added.view(n, len(rows), *residual.shape).add_(residual)

    if 0 in index:
        put((embedding - base.embedding).expand(n, batch, tokens, d_model), 0)
    for layer in range(dims.n_layers):
        heads = [h for h in range(dims.n_heads) if c.head_writer(layer, h) in index]
        before = filled
        if heads:
            # Where heads share a norm, the others are needed for it even if nothing reads them.
            computed = list(range(dims.n_heads)) if decoder.couples_heads else heads
            which = torch.tensor(computed, device=embedding.device)
            rows = [c.head_reader(layer, through, h) for through in "qkv" for h in computed]
            own = inputs(rows, base.attention_in[layer], before).transpose(0, 1).flatten(1, 2)
            own = torch.unflatten(decoder.read(layer, own), 0, (3, len(computed)))  # [3, heads, circuits * batch, ...]
            qkv = [decoder.project_each(layer, through, own[i], which) for i, through in enumerate("qkv")]
            z = decoder.scaled(layer, decoder.mix(layer, qkv[0], qkv[1], qkv[2], which))
            old = base.z[layer][:, computed].expand(n, -1, -1, -1, -1).flatten(0, 1)
            written = decoder.write_each(layer, z - old, which)
            for i, head in enumerate(computed):
                if head in heads:
                    put(written[i], index[c.head_writer(layer, head)])
        if c.mlp_writer(layer) in index:
            mlp_in = inputs([c.mlp_reader(layer)], base.mlp_in[layer], before if c.parallel else filled)
            out = decoder.mlp(layer, mlp_in.flatten(0, 2))
            put(out.view(n, batch, tokens, d_model) - base.mlp_out[layer], index[c.mlp_writer(layer)])
    return inputs([c.output], base.final, filled)[:, 0]


def _live_writers(decoder: Decoder, masks: Tensor) -> list[int]:
    c = decoder.components
    read = masks.any(1)  # [circuits, writers]
    node = torch.from_numpy(c.node_of_reader[:-1])
    hears = masks[:, :-1].any(2)  # [circuits, readers]
    fed = torch.zeros(read.shape, device=masks.device)
    fed.index_add_(1, node.to(masks.device), hears.float())
    fed[:, 0] = 1
    return (read & (fed > 0)).any(0).nonzero()[:, 0].tolist()
