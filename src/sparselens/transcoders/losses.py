"""What a transcoder minimises, and the units it does so in.

Training happens in normalised units: per layer, inputs and outputs are centred and divided by one number, so that their
mean square per dimension is 1. The squared error of a layer is then its fraction of variance unexplained (FVU), layers
weigh alike, and the settings mean the same for every model. `folded` puts mean and scale into the weights.

    loss = sum over layers of FVU
         + sparsity * mean over tokens of sum over active features of tanh(sharpness * a * |W_dec| / sqrt(d_model))
         + dead_penalty * mean over tokens, weighted by their error, of sum over dead features of relu(threshold - z)

The last term pulls dead features towards the tokens that are reconstructed worst.

One step, layer by layer: (1) all pre-activations, one dense product without gradient; (2) the entries that matter:
active, or near enough to a threshold to teach it; (3) from there on, forward and backward, nothing but these entries.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Transcode
from ..runs import distributed
from .decoding import Entries, batch_topk_mask, decode, entries, jumprelu, read, spread, topk_mask
from .transcoder import Transcoder

START_ERROR = 1e-6  # added under the square root of decoder norms: a decoder of zeros has a gradient, too


class Losses(NamedTuple):  # FSDP2 finds tensors in tuples, not in dataclasses
    """One step's terms. Several processes divide by their mean number of tokens: the mean of theirs is that of all."""

    errors: Tensor  # [n_layers] FVU of every layer, with gradient
    sparsity: Tensor  # the tanh penalty, unweighted
    dead: Tensor  # the penalty on dead features, unweighted
    l0: Tensor  # [n_layers] active features per token
    fired: list[Tensor]  # per layer [n_features] bool


class Learner(nn.Module):
    """A transcoder in normalised units, its log-thresholds and the constants that fold it back."""

    input_mean: Tensor  # [n_layers, d_model]
    input_scale: Tensor  # [n_layers]
    output_mean: Tensor
    output_scale: Tensor
    silent: Tensor  # [n_layers, n_features]: tokens since a feature was last active

    def __init__(self, n_layers: int, d_model: int, settings: Transcode, model_name: str = ""):
        super().__init__()
        self.settings = settings
        n_features = settings.features
        self.transcoder = Transcoder(
            n_layers, n_features, d_model, cross_layer=settings.cross_layer, activation=settings.activation,
            k=settings.k, input_hook=settings.reads, model_name=model_name,
        )  # fmt: skip
        self.transcoder.threshold = nn.ParameterList()  # learnt as logarithms, so that they stay positive
        count = n_layers if settings.activation == "jumprelu" else 0
        start = torch.full((n_features,), settings.threshold).log()
        self.log_threshold = nn.ParameterList(nn.Parameter(start.clone()) for _ in range(count))
        self.register_buffer("input_mean", torch.zeros(n_layers, d_model))
        self.register_buffer("input_scale", torch.ones(n_layers))
        self.register_buffer("output_mean", torch.zeros(n_layers, d_model))
        self.register_buffer("output_scale", torch.ones(n_layers))
        self.register_buffer("silent", torch.zeros(n_layers, n_features))

    @torch.no_grad()
    def begin(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Measure the scale on these tokens, per layer [tokens, d_model], and put the features where the data is.

        A feature starts as the direction of one random token's input and is active on k / n_features of the tokens, so
        that a step costs little, and no feature is dead, from the start.
        """
        for layer, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            self.input_mean[layer], self.input_scale[layer] = _scale(x)
            self.output_mean[layer], self.output_scale[layer] = _scale(y)
        generator = torch.Generator().manual_seed(self.settings.seed)
        n_features, k = self.settings.features, self.settings.k
        for layer, x in enumerate(inputs):
            x = (x - self.input_mean[layer]) / self.input_scale[layer]
            some = torch.randint(len(x), (n_features,), generator=generator).to(x.device)
            noise = torch.randn(n_features, x.shape[1], generator=generator).to(x.device)
            W_enc = F.normalize(F.normalize(x[some], dim=1) + 0.5 * F.normalize(noise, dim=1), dim=1)
            self.transcoder.W_enc[layer].copy_(distributed.split_like(W_enc, self.transcoder.W_enc[layer]))
            rank = max(1, round(len(x) * k / n_features))
            levels = [(x @ rows.T).topk(rank, 0).values[-1] for rows in W_enc.split(1024)]
            # Twice the threshold at that rank: many equal inputs would else sit exactly on it, neither on nor off.
            b_enc = 2 * self.settings.threshold - torch.cat(levels)
            self.transcoder.b_enc[layer].copy_(distributed.split_like(b_enc, self.transcoder.b_enc[layer]))

    def forward(self, inputs: list[Tensor], outputs: list[Tensor], compute: torch.dtype | None = None) -> Losses:
        """The loss terms on raw MLP inputs and outputs, per layer [tokens, d_model]; matrix products in `compute`."""
        t, settings = self.transcoder, self.settings
        n_layers, d_model = t.n_layers, t.d_model
        total: Tensor | None = None  # [tokens, layers still to come, d_model]
        errors, l0, fired = [], [], []
        dtype = self.input_mean.dtype  # of the master weights
        n_tokens = distributed.mean(torch.tensor(float(len(inputs[0])))).item()
        sparsity = dead = self.input_mean.new_zeros(())
        for layer in range(n_layers):
            x = (inputs[layer].to(dtype) - self.input_mean[layer]) / self.input_scale[layer]
            pre = self._pre_activations(layer, x, compute)
            threshold = self.log_threshold[layer].exp() if self.log_threshold else None
            at = entries(self._mask(layer, pre, threshold))
            z = read(x, t.W_enc[layer], t.b_enc[layer], pre, at)
            a = jumprelu(z, spread(threshold, at), settings.bandwidth) if threshold is not None else z

            written = decode(a.to(compute or a.dtype), at, t.W_dec[layer]).to(dtype)
            total = written if total is None else total + written if t.cross_layer else written
            y = (outputs[layer].to(dtype) - self.output_mean[layer]) / self.output_scale[layer]
            error = (total[:, 0] + t.b_dec[layer] - y).pow(2).mean(1)  # [tokens]
            errors.append(error.sum() / n_tokens)
            total = total[:, 1:]

            on = a > 0
            l0.append(on.sum() / n_tokens)
            fired.append(torch.zeros(settings.features, device=x.device, dtype=torch.bool))
            fired[-1][at.features[on]] = True
            if threshold is not None:
                size = (t.W_dec[layer].flatten(1).pow(2).sum(1) / d_model + START_ERROR).sqrt()
                sparsity = sparsity + torch.tanh(settings.sharpness * a * spread(size, at)).sum() / n_tokens
            dead = dead + self._dead_penalty(layer, x, error.detach(), pre, threshold, at)
        return Losses(torch.stack(errors), sparsity, dead, torch.stack(l0), fired)

    def loss(self, losses: Losses, sparsity: float) -> Tensor:
        return losses.errors.sum() + sparsity * losses.sparsity + self.settings.dead_penalty * losses.dead

    @torch.no_grad()
    def note_fired(self, fired: list[Tensor], tokens: int) -> None:
        """Keep count of how long each feature has been silent; fired: `Losses.fired`."""
        for silent, here in zip(self.silent, fired, strict=True):
            silent.add_(tokens).masked_fill_(distributed.total(here.int()) > 0, 0)

    @property
    def dead(self) -> Tensor:
        """[n_layers, n_features] bool."""
        return self.silent >= self.settings.dead_after

    @torch.no_grad()
    def _pre_activations(self, layer: int, x: Tensor, compute: torch.dtype | None) -> Tensor:
        weight, bias = self.transcoder.W_enc[layer], self.transcoder.b_enc[layer]
        if compute is None:
            return F.linear(x, weight, bias)
        return F.linear(x.to(compute), weight.to(compute)).to(bias.dtype) + bias  # type: ignore[no-any-return]

    @torch.no_grad()
    def _mask(self, layer: int, pre: Tensor, threshold: Tensor | None) -> Tensor:
        if threshold is not None:
            # Just below the threshold nothing is written, but the gradient there is what can lower it.
            return pre > threshold - self.settings.bandwidth / 2
        assert self.transcoder.k is not None
        return (topk_mask if self.settings.activation == "topk" else batch_topk_mask)(pre, self.transcoder.k)

    def _dead_penalty(
        self, layer: int, x: Tensor, error: Tensor, pre: Tensor, threshold: Tensor | None, at: Entries
    ) -> Tensor:
        features = self.dead[layer].nonzero()[:, 0]
        if len(features) == 0 or self.settings.dead_penalty == 0:
            return x.new_zeros(())
        z = F.linear(x, self.transcoder.W_enc[layer][features], self.transcoder.b_enc[layer][features])
        if threshold is not None:
            level = threshold.detach()[features]
        else:  # the smallest pre-activation that was chosen
            level = pre[at.tokens, at.features].min() if len(at.tokens) else pre.new_zeros(())
        return (F.relu(level - z).sum(1) * error).sum() / distributed.mean(error.sum()).clamp(min=1e-12)

    @torch.no_grad()
    def folded(self) -> Transcoder:
        """The transcoder in the model's own units: reads raw MLP inputs, gives raw MLP outputs."""
        t, whole = self.transcoder, distributed.whole
        made = Transcoder(t.n_layers, t.n_features, t.d_model, **vars(t.kind)).to(self.silent.device)
        for layer in range(t.n_layers):
            # In fp64: centred inputs are small differences of larger numbers.
            W_enc = whole(t.W_enc[layer]).double() / self.input_scale[layer].double()
            made.W_enc[layer].copy_(W_enc)
            made.b_enc[layer].copy_(
                whole(t.b_enc[layer]).double() - made.W_enc[layer].double() @ self.input_mean[layer].double()
            )
            targets = slice(layer, layer + t.n_targets(layer))
            made.W_dec[layer].copy_(whole(t.W_dec[layer]) * self.output_scale[targets, None])
            made.b_dec[layer].copy_(whole(t.b_dec[layer]) * self.output_scale[layer] + self.output_mean[layer])
            if self.log_threshold:
                made.threshold[layer].copy_(whole(self.log_threshold[layer]).exp())
        return made.requires_grad_(False).eval()


def _scale(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(mean [d_model], the root mean square of what is left) of rows [tokens, d_model]."""
    mean = rows.double().mean(0)
    scale = (rows.double() - mean).pow(2).mean().sqrt()
    return mean.float(), scale.clamp(min=1e-12).float()
