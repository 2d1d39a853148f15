"""Every setting: frozen dataclasses whose field texts are the command line's help.

Imports nothing else of the package.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from tyro.conf import arg

from .checks import check_kinds, expect, require


@dataclass(frozen=True)
class Gate:
    """How the gates of a model behave."""

    bias: float = 0.0
    """Start value of every head's gate bias. 0 opens a gate where the attention logit is positive; far above 0 no
    gate ever closes in training, so nothing is learnt. sparsify starts heads lower whose logits are nearly all
    positive, so that nine gates in ten are open."""
    normalise: Literal["all", "open"] = "all"
    """all: softmax over every allowed key, closed edges drop out. open: renormalise over the open edges."""

    def __post_init__(self) -> None:
        check_kinds(self)
        require(math.isfinite(self.bias), f"bias={self.bias}: expected a finite number")


@dataclass(frozen=True)
class Training:
    """How a model is trained: shared by the sparse model, its dense control and models made from scratch."""

    steps: int = 1200
    """Optimiser steps."""
    batch: int = 128
    """Sequences per step. Near the base's optimum a small batch's gradient is noise."""
    micro_batch: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Sequences per forward pass; gradients are accumulated up to `batch`. Default: the whole batch on a GPU (halved
    when memory runs out), about 8,000 tokens on a CPU."""
    lr: float = 6e-4
    """Learning rate of the weights. If the dense control ends up worse than the base, it is too high."""
    bias_lr: float = 2e-2
    """Learning rate of the gate biases. They must be able to travel some units while gates close: fewer steps, more."""
    warmup: float = 0.02
    """Share of the steps in which the learning rates rise from zero."""
    decay: float = 0.8
    """Share of the steps, at the end, in which the learning rates fall to a twentieth."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum for the matrices inside the blocks, AdamW for the rest. Learns several times faster
    from random weights. It multiplies in bf16, which most CPUs are slow at."""
    weight_decay: float = 0.0
    """Weight decay (never applied to gate biases; with muon: to the matrices it moves)."""
    clip: float = 1.0
    """Largest gradient norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes in bfloat16 with fp32 master weights. auto: bf16 on a GPU, fp32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Fuse each block's small operations with torch.compile: about a minute of compiling, then faster steps. auto: on a
    GPU, for 500 steps or more."""
    lora: int = 0
    """Rank of LoRA adapters on every linear layer; 0 trains all weights."""
    evaluate_every: int = 50
    """Steps between deterministic evaluations on held-out sequences."""
    evaluate_sequences: int = 32
    """Held-out sequences per evaluation; the slice moves on each time."""
    checkpoint_every: int = 200
    """Steps between checkpoints (Ctrl-C writes one as well)."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Also send the metrics to a tracker (metrics.jsonl is always written)."""
    seed: int = 0
    """Seed of data order, gates and adapters."""

    def __post_init__(self) -> None:
        check_kinds(self)
        expect(self, "at least 1", "steps", "batch", "evaluate_every", "evaluate_sequences", "checkpoint_every")
        expect(self, "a positive number", "lr", "bias_lr", "clip")
        expect(self, "a share between 0 and 1", "warmup", "decay")
        expect(self, "zero or a positive number below 2^63", "seed")
        expect(self, "zero or more", "weight_decay")
        require(self.lora >= 0, f"lora={self.lora}: expected a rank, or 0 for none")
        require(not self.lora or self.optimizer == "adamw", "optimizer=muon moves whole matrices: not with lora")
        micro = self.micro_batch
        if micro is not None and (micro < 1 or self.batch % micro):
            raise ValueError(f"micro_batch={micro} does not divide batch={self.batch}")


@dataclass(frozen=True)
class Sparsify:
    """Close nearly all attention edges and keep what the model can do."""

    loss: Literal["cross-entropy", "kl"] = "kl"
    """What is kept: the frozen base's distribution (KL divergence from it), on any text; or cross-entropy, which also
    lets the model adapt to the text."""
    density: float | None = 0.005
    """Share of the allowed (query, key) pairs that may stay open; the loss is minimised within it. None: as few as the
    loss target allows, which only works where the target can be met throughout."""
    edges: Annotated[float | None, arg(metavar="N", help_behavior_hint="")] = None
    """In place of --density: open edges per head and query, on average. It means the same at every length of text."""
    closing: float = 0.2
    """Share of the steps in which the gates close, sampled at random; after that gates are deterministic and the
    weights heal. (With --density.)"""
    target: str = "base"
    """What the held-out loss should not exceed, before `tolerance`: base (its own), control (the matched dense
    control's; implies --control), or a number of nats. (Without --density and with --loss kl: KL, and base is 0.)"""
    tolerance: float = 0.01
    """Nats allowed above the target."""
    slack: float = 0.1
    """Without --density: extra nats allowed at the start, when half-open gates are noisy; falls linearly to zero."""
    slack_until: float = 0.6
    """Without --density: share of the steps after which the slack is gone."""
    control: bool = False
    """Also train the matched dense control: same data, order, steps, optimiser and adapters, no gates. With --loss kl
    it has nothing to learn: it is the base, and not trained."""
    gate: Gate = field(default_factory=Gate)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.density is not None:
            require(0 < self.density <= 1, f"density={self.density}: expected a share between 0 and 1, or None")
        if self.edges is not None:
            expect(self, "a positive number", "edges")
        expect(self, "a share above 0, up to 1", "closing", "slack_until")
        expect(self, "a positive number", "tolerance")
        expect(self, "zero or more", "slack")
        if self.target not in ("base", "control"):
            try:
                number = float(self.target)
            except ValueError:
                number = math.nan
            require(math.isfinite(number), f"target={self.target!r}: expected base, control or a number of nats")

    @property
    def budget(self) -> float | None:
        """How many edges may stay open, in the unit that was chosen; None: the loss alone decides."""
        return self.density if self.edges is None else self.edges

    @property
    def trains_control(self) -> bool:
        """Whether a control is asked for and has something to learn: KL of the base to itself is 0 without training."""
        return self.control and not (self.loss == "kl" and self.training.weight_decay == 0)


@dataclass(frozen=True)
class Text:
    """Which text to train and evaluate on."""

    length: int = 512
    """Tokens per sequence."""
    shortest: int = 0
    """Cut every second training sequence into texts of so many tokens or more, all lengths alike in log, which do not
    see each other: prompts are short. 0: leave sequences whole."""
    heldout: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    """Held-out text. Default: every 20th document of the data, until there is enough."""
    heldout_tokens: int = 1 << 17
    """How much held-out text to keep."""
    text_field: str = "text"
    """Name of the text field in .jsonl, .parquet and datasets."""
    cache: Path = Path(".sparselens-cache")
    """Folder for tokenised text."""

    def __post_init__(self) -> None:
        check_kinds(self)
        require(self.length >= 2, f"length={self.length}: expected at least 2 tokens")
        fits = self.shortest == 0 or 2 <= self.shortest <= self.length
        require(fits, f"shortest={self.shortest}: expected 2 to {self.length} (--length) tokens, or 0 for none")
        expect(self, "at least 1", "heldout_tokens")


Ask = Literal["removed", "share", "heads", "components", "corrupted", "mean", "learnt"]


@dataclass(frozen=True)
class Search:
    """How circuits are found and measured."""

    readings: tuple[Ask, ...] = ("removed", "share", "heads", "components")
    """Which questions to ask. removed: the fewest attention edges (head, query, key) of a prompt that do it alone, all
    others removed. share: the fewest that hold 90 % of all attribution. corrupted, mean: as removed, but the others
    carry the corrupted prompt's values or their mean over prompts. learnt: as removed, found by gradient descent: how
    little would do. heads: whole heads. components: edges between heads, MLPs, input and output (EAP-IG)."""
    scope: Literal["both", "prompt", "task"] = "both"
    """removed, corrupted, mean: rank and measure prompt by prompt; or one circuit for all, ranked on half of the
    prompts and measured on the other half; or both."""
    alternatives: int = 0
    """Search for so many more circuits per prompt with the edges already found made dear (learnt masks): is there one
    circuit, or are there many?"""
    learnt_prompts: int = 20
    """Prompts for learnt and for --alternatives: hundreds of runs on each."""
    method: Literal["eap-ig", "eap", "gim", "exact"] = "eap-ig"
    """How edges between components are scored: integrated gradients, one gradient, one gradient with interactions
    (GIM), or patching every edge in turn (small models)."""
    steps: int = 5
    """Points between the corrupted and the clean prompt at which eap-ig takes gradients; with path whole the midpoints
    of so many equal parts of the way."""
    path: Literal["whole", "own"] = "whole"
    """eap-ig averages gradients over the whole way between the prompts (as published), or over the part of it that
    removing this edge would cover: ranks all edges more like exact patching, but picks worse circuits."""
    prompts: int = 64
    """Prompt pairs. components: so many for scoring and as many others for the curve."""
    points: int = 20
    """Circuit sizes on the curve, evenly spaced in log; a few more are measured where it crosses a threshold."""
    ablation: Literal["corrupted", "mean", "zero"] = "corrupted"
    """What edges outside the circuit carry: the corrupted prompt's values, the mean over prompts, or nothing."""
    selection: Literal["top", "greedy", "heads"] = "top"
    """top: the best-scored edges. greedy: grown from the logits, so that no edge is taken before its reader is in.
    heads: whole heads one by one, each with all its edges; far smaller circuits in a model of 30 layers, larger ones
    in models of 6 and 18."""
    signed: bool = False
    """Rank edges by score instead of by its absolute value: only edges that help."""
    random_control: bool = True
    """Also measure random circuits of the same sizes."""
    memory_mb: int = 1024
    """Memory to use for runs side by side, beside the model's own."""
    seed: int = 0
    """Seed of prompts, bootstrap and random circuits."""

    def __post_init__(self) -> None:
        check_kinds(self)
        known = get_args(Ask)
        for reading in self.readings:
            require(reading in known, f"reading {reading!r}: expected some of {', '.join(known)}")
        require(bool(self.readings), f"no reading to take; name at least one of {', '.join(known)}")
        expect(self, "at least 1", "steps", "points", "memory_mb", "learnt_prompts")
        expect(self, "zero or more", "alternatives")
        expect(self, "zero or a positive number below 2^63", "seed")
        require(self.prompts >= 2, f"prompts={self.prompts}: expected at least 2")


@dataclass(frozen=True)
class Transcode:
    """Sparse features that stand in for a model's MLPs."""

    features: int = 4096
    """Features per layer."""
    cross_layer: bool = True
    """A feature writes to its own and all later layers; --no-cross-layer: to its own alone."""
    activation: Literal["jumprelu", "topk", "batchtopk"] = "jumprelu"
    """When a feature is active: above a learnt threshold, among the k largest of its token, or among the k * tokens
    largest of the batch (saved as jumprelu, with a threshold measured at the end)."""
    k: int = 16
    """Active features per token and layer: exactly for topk, on average for batchtopk, at the start for jumprelu."""
    reads: Literal["mlp-input", "residual"] = "mlp-input"
    """What features read: what the MLP receives, or the residual stream before the MLP's norm."""
    sparsity: float = 0.005
    """Weight of the sparsity penalty (jumprelu): the share of a layer's variance that one more active feature must
    explain to be worth it."""
    sharpness: float = 4.0
    """How soon the penalty tanh(sharpness * size) is full; size: what an active feature writes, in units of a layer's
    root mean square."""
    sparsity_warmup: float = 0.3
    """Share of the steps in which the penalty rises from zero."""
    threshold: float = 0.1
    """Start value of jumprelu's thresholds, in units of normalised pre-activations."""
    bandwidth: float = 0.2
    """Width of the window around a threshold from which it learns."""
    dead_after: int = 500_000
    """Tokens after which a feature that was never active counts as dead."""
    dead_penalty: float = 1e-3
    """Weight of the penalty that pulls dead features back to their threshold."""
    steps: int = 2000
    """Optimiser steps."""
    batch: int = 16
    """Sequences per step."""
    lr: float = 1e-3
    """Learning rate (Adam)."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises from zero."""
    decay: float = 0.5
    """Share of the steps, at the end, in which the learning rate falls to a twentieth."""
    clip: float = 1.0
    """Largest gradient norm."""
    normalise_over: int = 4
    """Batches from which the scale of inputs and outputs is measured, before the first step."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes in bfloat16 with fp32 master weights. auto: bf16 on a GPU, fp32 on a CPU."""
    evaluate_every: int = 500
    """Steps between evaluations on held-out sequences (the last step is always evaluated)."""
    evaluate_sequences: int = 64
    """Held-out sequences per evaluation."""
    checkpoint_every: int = 500
    """Steps between checkpoints (Ctrl-C writes one as well)."""
    seed: int = 0
    """Seed of weights and data order."""

    def __post_init__(self) -> None:
        check_kinds(self)
        expect(self, "at least 1", "features", "k", "steps", "batch", "normalise_over", "dead_after")
        expect(self, "at least 1", "evaluate_every", "evaluate_sequences", "checkpoint_every")
        expect(self, "a positive number", "lr", "clip", "sharpness", "threshold", "bandwidth")
        expect(self, "a share between 0 and 1", "warmup", "decay", "sparsity_warmup")
        expect(self, "zero or a positive number below 2^63", "seed")
        expect(self, "zero or more", "sparsity", "dead_penalty")
        require(self.k <= self.features, f"k={self.k}: expected at most the {self.features} features of a layer")


@dataclass(frozen=True)
class Faces:
    """What is kept of every feature while text is read."""

    tokens: int = 1_000_000
    """Tokens to read."""
    batch: int = 16
    """Sequences at once."""
    contexts: int = 20
    """Strongest contexts per feature, each from a sequence of its own."""
    samples: int = 2
    """Contexts from each of five lower bands of activation."""
    before: int = 15
    """Tokens shown before the strongest one of a context."""
    after: int = 5
    """Tokens shown after it."""
    words: int = 10
    """Words a feature promotes and suppresses most."""
    nearest: int = 5
    """Features that read and write most alike."""
    budget: int = 2048
    """Bytes per feature on disk, compressed; contexts are left out beyond that."""
    checkpoint_minutes: float = 5.0
    """Minutes between states to go on from (Ctrl-C writes one as well)."""
    seed: int = 0
    """Seed of the samples and of the order of the text."""

    def __post_init__(self) -> None:
        check_kinds(self)
        expect(self, "at least 1", "tokens", "batch", "contexts", "samples", "words", "budget")
        expect(self, "zero or more", "before", "after", "nearest")
        expect(self, "a positive number", "checkpoint_minutes")
        expect(self, "zero or a positive number below 2^63", "seed")


@dataclass(frozen=True)
class Trace:
    """How a prompt is taken apart."""

    position: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Position whose output is explained. Default: the last token of the prompt."""
    budget: int = 1000
    """Features whose incoming edges are computed, the most influential first."""
    nodes: float = 0.8
    """Share of the influence that kept nodes hold."""
    edges: float = 0.98
    """Share of the influence that kept edges hold."""
    layer_share: float = 0.9
    """Share of a cluster's influence that lies in the layers it is said to span."""
    cluster_edges: int = 200
    """Edges between clusters to examine, those through which most influence passes."""
    links: int = 32
    """Links (layer, head, query, key) listed per edge for departure and for arrival; the rest is given as a sum."""
    checks: int = 20
    """Strongest edges between single features to test by intervention, beside all edges between clusters."""
    cuts: int = 200
    """Random edges of single features to cut, beside the 40 largest between clusters: do predictions come true?"""
    heads: bool = True
    """Put the carrying heads on every link of the exported graph."""
    memory_mb: int = 1024
    """Memory to use for gradients, beside the model's own."""

    def __post_init__(self) -> None:
        check_kinds(self)
        expect(self, "at least 1", "cluster_edges", "links", "memory_mb")
        expect(self, "zero or more", "budget", "checks", "cuts")
        expect(self, "a share above 0, up to 1", "nodes", "edges", "layer_share")


Settings = TypeVar("Settings")


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The same with some fields by name: prompts=8. ValueError where there is no such field."""
    known = [field.name for field in fields(settings)]  # type: ignore[arg-type]
    if unknown := changes.keys() - set(known):
        raise ValueError(unknown_setting(min(unknown), known))
    return replace(settings, **changes)  # type: ignore[type-var]


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """A sentence about a setting that does not exist."""
    near = get_close_matches(name, known := sorted(known), n=1)
    return f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else f": expected one of {known}")
