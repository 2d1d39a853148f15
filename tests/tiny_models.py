"""Tiny random models of every supported family, and a tokenizer made on the spot."""

import torch
import transformers as hf

from sparselens.models.architectures import ARCHITECTURES

VOCABULARY = 64
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
# No padding token: token 0 is <|endoftext|>, which starts every prompt, and a padding token's embedding is all zeros.
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_GPT2 = dict(
    vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
)  # fmt: skip

CONFIGS = {
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZES),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=5),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=8),
    "olmo": lambda: hf.OlmoConfig(**_SIZES),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "gemma2": lambda: hf.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **_GROUPED, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
}
assert CONFIGS.keys() == ARCHITECTURES.keys(), "every supported family needs a tiny model here"


def tiny_model(family: str, seed: int = 0, attention: str = "eager") -> hf.PreTrainedModel:
    """A random model with weights large enough for its attention to be far from uniform."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(4)
    return model.eval()


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Words w0 ... w61, an <|endoftext|> and an unknown token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", "[UNK]"] + [f"w{i}" for i in range(VOCABULARY - 2)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<|endoftext|>")
