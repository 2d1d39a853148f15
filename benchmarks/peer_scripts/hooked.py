"""A Hugging Face folder (GPT-2 or Llama) as TransformerLens' HookedTransformer (before 4.0), without a hub."""

import json
from pathlib import Path
from typing import Any

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def settings(config: Any) -> dict[str, Any]:
    """The config that TransformerLens wants, from Hugging Face's."""
    d_model, heads = config.hidden_size, config.num_attention_heads
    shared = dict(
        n_layers=config.num_hidden_layers, d_model=d_model, n_heads=heads, d_head=d_model // heads,
        d_vocab=config.vocab_size, n_ctx=config.max_position_embeddings, dtype=torch.float32, device="cpu",
        model_name=config.model_type,
    )  # fmt: skip
    if config.model_type == "gpt2":
        return shared | dict(
            d_mlp=4 * d_model, act_fn="gelu_new", normalization_type="LN", eps=config.layer_norm_epsilon
        )
    if config.num_key_value_heads != heads:
        raise ValueError("grouped heads are not converted here")
    # Where the base of the rotation is said differs between versions of transformers.
    base = config.rope_parameters["rope_theta"] if hasattr(config, "rope_parameters") else config.rope_theta
    return shared | dict(
        d_mlp=config.intermediate_size, act_fn="silu", normalization_type="RMS", eps=config.rms_norm_eps,
        positional_embedding_type="rotary", rotary_adjacent_pairs=False, rotary_dim=d_model // heads,
        rotary_base=int(base), final_rms=True, gated_mlp=True,
    )  # fmt: skip


def tokenizer_of(folder: Path) -> Any:
    """From tokenizer.json: tokenizer_config.json as newer transformers write it is not read by older ones."""
    named = json.loads((folder / "tokenizer_config.json").read_text())
    special = {key: named[key] for key in ("bos_token", "eos_token", "unk_token") if isinstance(named.get(key), str)}
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token=special["eos_token"], **special
    )


def load(folder: str, into: Any = None, **flags: Any) -> Any:
    """A HookedTransformer, or what `into(config)` makes, with the folder's own weights: nothing folded."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    config = HookedTransformerConfig(**settings(theirs.config), **flags)
    model = (into or HookedTransformer)(config)
    model.tokenizer = tokenizer_of(Path(folder))  # its set_tokenizer would look for the folder's name on a hub
    convert = convert_gpt2_weights if theirs.config.model_type == "gpt2" else convert_llama_weights
    with torch.no_grad():
        state = {name: value.detach().clone() for name, value in convert(theirs, config).items()}
    own = dict(model.named_parameters())
    lacking = sorted(set(own) - set(state))
    if lacking != [name for name in lacking if name == "unembed.b_U"]:
        raise ValueError(f"weights that were not converted: {lacking}")
    with torch.no_grad():
        for name, value in state.items():
            if name in own:
                own[name].copy_(value)
        if lacking:
            own["unembed.b_U"].zero_()
        ids = torch.arange(16)[None] + 5
        error = (model(ids) - theirs(ids).logits).abs().max() / theirs(ids).logits.abs().max()
    if error > 1e-4:
        raise ValueError(f"the converted model is {float(error):.1e} away from Hugging Face's")
    return model.eval()
