"""GIM: the same scores from a forward pass written out by hand, EAP where its rules are switched off, every family."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairs import QUIET, chosen, random_prompts
from tiny_models import CONFIGS, tiny_model, tiny_tokenizer
from tracing_setup import biased_model

from sparselens.circuits.discover import discover, prepare, split
from sparselens.circuits.scores import BackwardRules, GimDecoder, _FrozenNorm, eap, estimate_memory
from sparselens.config import Gate, Search
from sparselens.models.architectures import mlp_width, norm_parts
from sparselens.models.component_graph import Components
from sparselens.models.decoder import Decoder
from sparselens.models.loading import add_gates, gate_biases
from sparselens.training.dry_run import PeakMemory

OFF = BackwardRules(temperature=1.0, freeze_norms=False, q=1.0, k=1.0, v=1.0, gated_mlp=1.0)
BIAS = -0.2  # of gates: where it is zero, no temperature could flip one


class Softmax(torch.autograd.Function):
    """Softmax whose backward pass is written out, at a temperature of its own."""

    @staticmethod
    def forward(ctx, x, temperature):
        ctx.save_for_backward(x)
        ctx.temperature = temperature
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        p = (ctx.saved_tensors[0] / ctx.temperature).softmax(-1)
        return p * (gradient - (p * gradient).sum(-1, keepdim=True)), None


def slowed(x, factor):
    return factor * x + ((1 - factor) * x).detach()


def causal(x):
    return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


class ByHand:
    """GPT-2 and Llama, head by head; every reader has a copy of the residual stream whose gradient can be asked for."""

    def __init__(self, model):
        self.model, self.c = model, Decoder(model).components
        self.llama = model.config.model_type == "llama"
        self.biases = gate_biases(model) if hasattr(model.config, "sparselens") else None
        self.body = model.model if self.llama else model.transformer

    def norm(self, module, x):
        if not self.llama:
            x = x - x.mean(-1, keepdim=True)
        epsilon = self.model.config.rms_norm_eps if self.llama else module.eps
        x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt().detach() * module.weight
        return x if self.llama else x + module.bias

    def projected(self, block, y, head):
        """q, k, v of one head from its three inputs."""
        if self.llama:
            attention, own = block.self_attn, (head, head // 2, head // 2)
            weights = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
            return [x @ w[8 * i : 8 * i + 8].T for x, w, i in zip(y, weights, own, strict=True)]
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        places = [slice(32 * i + 8 * head, 32 * i + 8 * head + 8) for i in range(3)]
        return [x @ weight[:, at] + bias[at] for x, at in zip(y, places, strict=True)]

    def turned(self, x):
        if not self.llama:
            return x
        angle = torch.arange(x.shape[1])[:, None] * 10000 ** (-torch.arange(4).double() / 4)
        a, b = x[..., :4], x[..., 4:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def head(self, layer, block, head, inputs):
        q, k, v = self.projected(block, [self.norm(self.first(block), x) for x in inputs], head)
        q, k, v = self.turned(slowed(q, 0.25)), self.turned(slowed(k, 0.25)), slowed(v, 0.5)
        scores = q @ k.transpose(1, 2) / 8**0.5
        weights = Softmax.apply(causal(scores), 2.0)
        if self.biases is not None:
            weights = weights * (scores + self.biases[layer][head] > 0)
        mixed = weights @ v
        if self.llama:
            return mixed @ block.self_attn.o_proj.weight[:, 8 * head : 8 * head + 8].T
        return mixed @ block.attn.c_proj.weight[8 * head : 8 * head + 8]

    def first(self, block):
        return block.input_layernorm if self.llama else block.ln_1

    def mlp(self, block, x):
        if not self.llama:
            return block.mlp(self.norm(block.ln_2, x))
        y = self.norm(block.post_attention_layernorm, x)
        gate, up = slowed(block.mlp.gate_proj(y), 0.5), slowed(block.mlp.up_proj(y), 0.5)
        return block.mlp.down_proj(F.silu(gate) * up)

    def run(self, ids):
        """(logits, what every writer writes, what every reader reads)."""
        c, body, reads = self.c, self.body, {}
        x = body.embed_tokens(ids) if self.llama else body.wte(ids) + body.wpe(torch.arange(ids.shape[1]))
        x = x.detach().requires_grad_()
        writes = [x]
        for layer, block in enumerate(body.layers if self.llama else body.h):
            for head in range(4):
                for through in "qkv":
                    reads[c.head_reader(layer, through, head)] = x.clone()
                inputs = [reads[c.head_reader(layer, through, head)] for through in "qkv"]
                writes.append(self.head(layer, block, head, inputs))
            x = x + sum(writes[-4:])
            if not self.llama:
                x = x + block.attn.c_proj.bias
            reads[c.mlp_reader(layer)] = x.clone()
            writes.append(self.mlp(block, reads[c.mlp_reader(layer)]))
            x = x + writes[-1]
        reads[c.output] = x.clone()
        last = self.norm(body.norm if self.llama else body.ln_f, reads[c.output])
        return self.model.lm_head(last), writes, reads

    def scores(self, prompts):
        logits, writes, reads = self.run(prompts.clean)
        metric = prompts.score(prompts.at_reads(logits)).mean()
        gradients = torch.autograd.grad(metric, list(reads.values()))
        with torch.no_grad():
            base = self.run(prompts.corrupted)[1]
        scores = np.zeros(self.c.possible.shape)
        for reader, gradient in zip(reads, gradients, strict=True):
            for writer, (clean, corrupted) in enumerate(zip(writes, base, strict=True)):
                if self.c.possible[reader, writer]:
                    scores[reader, writer] = ((clean - corrupted) * gradient).sum().item()
        return scores


@pytest.mark.parametrize("with_gates", [False, True])
@pytest.mark.parametrize("family, tolerance", [("gpt2", 1e-9), ("llama", 1e-5)])  # RMS norms and rotations are fp32
def test_scores_by_hand(family, tolerance, with_gates):
    model, prompts = biased_model(family, with_gates, gate_bias=BIAS), random_prompts(3, 7)
    wanted, found = ByHand(model).scores(prompts), eap(GimDecoder(model), prompts)
    c = Components(2, 4)
    assert np.abs(found - wanted)[c.possible].max() < tolerance * np.abs(wanted).max()
    plain = eap(Decoder(model), prompts)
    assert np.abs(found - plain).max() > 0.1 * np.abs(plain).max()


SETTINGS = [("all", False), ("all", True), ("open", True)]


@pytest.mark.parametrize("normalise, with_gates", SETTINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_switched_off_it_is_eap(family, normalise, with_gates):
    """Through the same code, every rule at one; and each rule alone changes something."""
    model, prompts = biased_model(family, with_gates, normalise=normalise), random_prompts(3, 7)
    wanted = eap(Decoder(model), prompts)
    assert np.isfinite(wanted).all() and wanted.any()
    assert np.abs(eap(GimDecoder(model, OFF), prompts) - wanted).max() <= 1e-12 * np.abs(wanted).max()
    for rule in ("temperature", "freeze_norms", "q", "k", "v", "gated_mlp"):
        rules = BackwardRules(**vars(OFF) | {rule: getattr(BackwardRules(), rule)})
        changed = np.abs(eap(GimDecoder(model, rules), prompts) - wanted).max() > 1e-6 * np.abs(wanted).max()
        assert changed == (rule != "gated_mlp" or family not in ("gpt2", "gpt_neox")), rule


@pytest.mark.parametrize("normalise, with_gates", SETTINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_of_attention(family, normalise, with_gates):
    """Logits capped, masked and gated by hand, then the written-out softmax."""
    model = biased_model(family, with_gates, normalise=normalise, gate_bias=BIAS)
    plain, decoder = Decoder(model), GimDecoder(model, BackwardRules(temperature=2.0, freeze_norms=False))
    for each in (plain, decoder):
        each.begin(random_prompts(2, 9).clean)
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    for layer in range(2):
        with torch.no_grad():
            forward = plain.mix(layer, *inputs)
        mixed = decoder.mix(layer, *inputs)
        assert torch.allclose(mixed, forward, atol=1e-12)
        found = torch.autograd.grad(mixed, inputs, g)
        part = plain.parts[layer]
        a, b, c = plain.prepared(layer, slowed(q, 0.25), slowed(k, 0.25), slowed(v, 0.5))
        x = a @ b.transpose(2, 3) * part.scale
        x = x if part.softcap is None else part.softcap * torch.tanh(x / part.softcap)
        far = torch.arange(9)[:, None] - torch.arange(9) >= (part.window or 9)
        gate = (
            torch.ones_like(x, dtype=torch.bool) if plain.gates is None else x + plain.gates[layer][:, None, None] > 0
        )
        gate = gate & ~far & (causal(x) > -torch.inf)
        if normalise == "open":
            alive = gate.any(-1, keepdim=True)
            weights = Softmax.apply(x.masked_fill(~gate & alive, -torch.inf), 2.0) * alive
        else:
            weights = Softmax.apply(causal(x).masked_fill(far, -torch.inf), 2.0) * gate
        for ours, theirs in zip(found, torch.autograd.grad(weights @ c, inputs, g), strict=True):
            assert theirs.abs().max() > 0.01 and (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("family", CONFIGS)
def test_every_norm_is_frozen(family):
    """Along x a frozen norm follows x; across x it is the norm itself. That is all of its derivative."""
    model = biased_model(family)
    decoder = GimDecoder(model)
    held = [module for part in decoder.parts for module in vars(part).values() if isinstance(module, _FrozenNorm)]
    held.append(decoder.last.norm)
    decoder.begin(random_prompts().clean)
    eap(decoder, random_prompts())  # every norm has seen its inputs
    own = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert own and {id(module) for module in own} == {id(module.norm) for module in held}
    generator = torch.Generator().manual_seed(0)
    for norm in held:
        width = norm.held.gain.numel()
        x, across, g = (torch.randn(3, width, generator=generator, dtype=torch.float64) for _ in range(3))
        _, bias, centred, _ = norm_parts(norm.norm, x)
        c = x - x.mean(-1, keepdim=True) if centred else x
        across = across - c * (across * c).sum(-1, keepdim=True) / c.square().sum(-1, keepdim=True)
        x.requires_grad_()
        (frozen,), (true,) = (torch.autograd.grad((f(x) * g).sum(), x) for f in (norm, norm.norm))
        assert torch.equal(norm(x), norm.norm(x))
        assert torch.allclose((frozen * across).sum(-1), (true * across).sum(-1), rtol=1e-4, atol=1e-5)
        assert torch.allclose((frozen * x).sum(-1), ((norm.norm(x) - bias) * g).sum(-1), rtol=1e-4, atol=1e-5)
        assert (true * x).sum(-1).abs().max() < 1e-2 < (frozen * x).sum(-1).abs().max()


@pytest.mark.parametrize("with_gates", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_discover(family, with_gates):
    model = tiny_model(family)
    model = add_gates(model, Gate(bias=0.3)) if with_gates else model
    task = chosen([model])
    settings = Search(readings=("components",), method="gim", prompts=8, points=4, random_control=False)
    circuit = discover(model, tiny_tokenizer(), task, settings=settings, **QUIET)
    scoring, _ = split(prepare([model], tiny_tokenizer(), task, settings, **QUIET).mixed)
    wanted = eap(GimDecoder(model), scoring)
    assert np.allclose(circuit.scores, wanted, atol=1e-5 * np.abs(wanted).max())
    assert not np.allclose(circuit.scores, eap(Decoder(model), scoring), atol=1e-2 * np.abs(wanted).max())
    row = circuit.results["readings"]["components"]
    assert row["n_edges_scored"] == row["n_edges"] == circuit.components.n_edges
    assert circuit.results["settings"]["method"] == "gim" and row["curve"]["effect"][-1] == pytest.approx(1.0)


@pytest.mark.parametrize("normalise", ["all", "open"])
def test_a_closed_head_writes_nothing_and_hears_nothing(normalise):
    model = biased_model("gpt2", True, normalise=normalise, gate_bias=1.0)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("h.1.attn.gate_bias"))[2] = -100.0
    decoder, c = GimDecoder(model), Decoder(model).components
    scores = eap(decoder, random_prompts(), ablation="mean")
    assert (scores[:, c.head_writer(1, 2)] == 0).all() and (scores[:, c.head_writer(1, 1)] != 0).any()
    for through in "qkv":
        assert (scores[c.head_reader(1, through, 2)] == 0).all() and (scores[c.head_reader(1, through, 1)] != 0).any()


@pytest.mark.parametrize("decoder", [Decoder, GimDecoder])
def test_rows_without_an_open_gate_have_finite_gradients(decoder):
    """normalise="open" divides by what is open; after a post-norm of nothing, gradients are large as well."""
    model = biased_model("olmo2", True, torch.float32, "open")
    with torch.no_grad():
        for bias in gate_biases(model):
            bias[:] = -100.0
    assert np.isfinite(eap(decoder(model), random_prompts())).all()


@pytest.mark.parametrize("with_gates", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "gemma2"])
def test_memory_stays_below_the_estimate_of_eap(family, with_gates):
    model = biased_model(family, with_gates, torch.float32)
    decoder, peak = GimDecoder(model), PeakMemory().ignore(model)
    with peak:
        eap(decoder, random_prompts(16, 12))
    estimate = estimate_memory(decoder.dims, mlp_width(decoder.config), 16, 12, 2, 64, with_gates)
    assert 0.3 * estimate.total < peak.peak < estimate.total
