"""What a model does on held-out sequences: loss, KL to the base, density; as rows for tables and JSON."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..data.batches import Batches
from ..models.attention import Seed, drop_counts, keep_seeds, take_counts
from ..models.loading import is_gated
from ..runs import distributed
from ..runs.rows import EvaluationRow
from .compilation import in_one_graph
from .head import head_to_leave_out, without_head


@dataclass
class Measurement:
    """Sums and means over some sequences, gates deterministic."""

    losses: Tensor  # [sequences] mean cross-entropy of each, nats per token
    kl: Tensor | None  # [sequences] mean KL(base || model), where a base was given
    edges: Tensor | None  # [n_layers, n_heads] open edges, all sequences together
    pairs: Tensor | None  # [n_layers] allowed (query, key) pairs per head
    queries: int  # tokens
    correct: Tensor  # [sequences] bool: every label is the most likely token
    agreement: Tensor | None = None  # [sequences] share of positions with the base's likeliest token

    @property
    def loss(self) -> float:
        return self.losses.mean().item()

    @property
    def error(self) -> float | None:
        """Standard error of the loss; a single sequence has none."""
        return _standard_error(self.losses)

    @property
    def density(self) -> float | None:
        """Open edges over allowed pairs, all heads and layers together."""
        if self.edges is None or self.pairs is None:
            return None
        return (self.edges.sum() / (self.pairs.sum() * self.edges.shape[1])).item()

    @property
    def edges_per_query(self) -> float | None:
        """Open edges per head and query."""
        return None if self.edges is None else (self.edges.sum() / (self.queries * self.edges.numel())).item()

    def row(self, name: str, kind: str) -> EvaluationRow:
        """One object of `sparselens evaluate --json`. A dense model has density 1."""
        row: EvaluationRow = {
            "name": name, "kind": kind, "loss": self.loss, "sequences": len(self.losses),
            "loss_standard_error": self.error,
            "kl_to_base": None if self.kl is None else self.kl.mean().item(),
            "top1_agreement": None if self.agreement is None else self.agreement.mean().item(),
            "agreement_standard_error": _standard_error(self.agreement),
            "exact": self.correct.float().mean().item(),
            "density": 1.0, "density_per_layer": None, "density_per_head": None, "edges_per_query": None,
        }  # fmt: skip
        if self.edges is not None and self.pairs is not None and self.density is not None:
            per_head = self.edges / self.pairs[:, None]
            row["density"] = self.density
            row["density_per_layer"] = per_head.mean(1).tolist()
            row["density_per_head"] = per_head.tolist()
            row["edges_per_query"] = self.edges_per_query
        return row


def _standard_error(values: Tensor | None) -> float | None:
    return None if values is None or len(values) < 2 else (values.std() / len(values) ** 0.5).item()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every position, [batch, tokens]; 0 where the label is -100. Labels are aligned, not shifted."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)


def token_kl(base: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """KL(base || model) of every position, [batch, tokens]; 0 where the label is -100."""
    kl = F.kl_div(logits.float().log_softmax(-1), base.float().log_softmax(-1), log_target=True, reduction="none")
    return kl.sum(-1) * (labels != -100)


def _each(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Sequence by sequence: in fp32, several copies of all logits at once would need more memory than training."""
    return torch.cat([function(*parts) for parts in zip(*(t.split(1) for t in tensors), strict=True)])


class Passed(NamedTuple):
    """What came out of a forward pass."""

    logits: Tensor  # [batch, tokens, vocabulary]; without the head the last hidden states
    counts: Tensor | None  # [n_layers, batch, n_heads, 2]: open edges and allowed pairs, where there are gates


def forward(
    model: nn.Module, batch: dict[str, Tensor], *, head: nn.Linear | None = None, sample: bool = False, seed: Seed = 0
) -> Passed:
    """Run the model on a batch: no cache (it would hide packing from transformers), edge counts where it has gates.

    head: leave this out, which is its last part. sample, seed: of the gates.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    plain = getattr(model, "module", model)  # seen through DDP
    with without_head(head) if head is not None else nullcontext():
        if not is_gated(plain):
            return Passed(model(**inputs, use_cache=False).logits, None)
        if in_one_graph(plain):
            if sample:
                keep_seeds(plain, seed)
            try:
                output = model(**inputs, use_cache=False, gate_sample=sample, gate_seed=None, gate_output="kept")
            except BaseException:
                drop_counts(plain)  # or a pass that ran out of memory would hold on to it while a smaller one is tried
                raise
            return Passed(output.logits, take_counts(plain))
        output = model(
            **inputs, use_cache=False, gate_sample=sample, gate_seed=seed, gate_output="edges", output_attentions=True
        )
        return Passed(output.logits, torch.stack(output.attentions))


def in_bf16(precision: str, device: str | None = None) -> bool:
    """Whether matrix products are in bf16: where the settings say so, or leave it open and there is a GPU."""
    return {"fp32": False, "bf16": True, "auto": (device or distributed.device()) == "cuda"}[precision]


def measure(
    model: nn.Module, batches: Batches, start: int, count: int, *, micro_batch: int = 8, base: nn.Module | None = None,
    autocast: AbstractContextManager[Any] | None = None, progress: str = "",
) -> Measurement:  # fmt: skip
    """Deterministic evaluation on held-out sequences start ... start + count - 1, shared by all processes.

    Where `micro_batch` sequences at once are too many for the memory, half of them are tried. progress: what a bar
    says, if there is to be one.
    """
    was_training = model.training
    model.eval()
    try:
        return _measure(model, batches, start, count, micro_batch, base, autocast, progress)
    except (RuntimeError, MemoryError) as error:
        if micro_batch == 1 or not out_of_memory(error) or distributed.world() > 1:
            raise
    finally:
        model.train(was_training)
    torch.cuda.empty_cache()  # not in the handler: the traceback holds the tensors that were too many
    fewer = micro_batch // 2
    return measure(model, batches, start, count, micro_batch=fewer, base=base, autocast=autocast, progress=progress)


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out, on a GPU or in PyTorch's and Python's words for a CPU."""
    words = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory", "alloc_failed")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def _logits(found: Tensor, head: nn.Linear | None) -> Tensor:
    """What a pass with or without the head gave, as logits."""
    return found if head is None else head(found)  # type: ignore[no-any-return]


def _row(logits: Tensor, reference: Tensor | None, labels: Tensor) -> Tensor:
    """Loss, KL to the reference, agreement with it, all right: [4, sequences]. Without reference two rows of zeros."""
    labelled = labels != -100
    used, likeliest = labelled.sum(1), logits.argmax(-1)
    losses = _each(token_losses, logits, labels).sum(1) / used
    right = ((likeliest == labels) | ~labelled).all(1).float()
    if reference is None:
        return torch.stack([losses, torch.zeros_like(losses), torch.zeros_like(losses), right])
    divergence = _each(token_kl, reference, logits, labels).sum(1) / used
    agreement = ((likeliest == reference.argmax(-1)) & labelled).sum(1) / used
    return torch.stack([losses, divergence, agreement, right])


@torch.no_grad()
def _measure(
    model: nn.Module, batches: Batches, start: int, count: int, micro_batch: int, base: nn.Module | None,
    autocast: AbstractContextManager[Any] | None, progress: str,
) -> Measurement:  # fmt: skip
    device = next(model.parameters()).device
    gated = is_gated(model)
    tokens = micro_batch * batches.length
    head, base_head = (None if one is None else head_to_leave_out(one, tokens) for one in (model, base))
    losses, divergences, agreement, correct = (torch.zeros(count, device=device) for _ in range(4))
    queries = torch.zeros((), dtype=torch.int64, device=device)
    counts = torch.zeros((), dtype=torch.float64, device=device)
    bar = tqdm(
        total=count, desc=progress, unit="sequence", leave=False, disable=not (progress and distributed.is_main())
    )
    for first, n in distributed.rounds(count, micro_batch):
        # A process with nothing left to do keeps the others company: a split model needs all of them to run.
        batch = batches.heldout(start + first, max(n, 1))
        batch = {name: value.to(device) for name, value in batch.items()}
        labels = batch["labels"]
        mine = slice(first, first + n)
        with autocast or nullcontext():
            output = forward(model, batch, head=head)
            reference = output.logits if base is model else None
            if base is not None and reference is None:
                reference = forward(base, batch, head=base_head).logits
        rows = torch.zeros(4, len(labels), device=device)
        # Without heads a sequence at a time: its logits are made here.
        step = len(labels) if head is None and base_head is None else 1
        for i in range(0, len(labels), step):
            here = slice(i, i + step)
            with autocast or nullcontext():
                logits = _logits(output.logits[here], head)
                wanted = None if reference is None else _logits(reference[here], base_head)
            rows[:, here] = _row(logits, wanted, labels[here])
        losses[mine], divergences[mine], agreement[mine], correct[mine] = rows[:, :n]
        queries += labels[:n].numel()
        if output.counts is not None:
            counts = counts + output.counts[:, :n].double().sum(1)  # [n_layers, n_heads, 2]
        bar.update(n * distributed.world())
    bar.close()
    counts = distributed.total(counts).cpu()
    return Measurement(
        losses=distributed.total(losses).cpu(), kl=distributed.total(divergences).cpu() if base is not None else None,
        edges=counts[..., 0] if gated else None, pairs=counts[:, 0, 1] if gated else None,
        queries=int(distributed.total(queries)), correct=distributed.total(correct).cpu() > 0,
        agreement=distributed.total(agreement).cpu() if base is not None else None,
    )  # fmt: skip
