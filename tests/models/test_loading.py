"""Gates inside real Hugging Face modules: wide open = untouched, cache = full pass, saved sparse = loaded sparse."""

import copy
import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from tiny_models import CONFIGS, VOCABULARY, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import sparselens as sl
from sparselens.gating import allowed_pairs
from sparselens.models import loading as huggingface
from sparselens.models.attention import bounded, count_pairs, document_mask
from sparselens.models.gguf_file import whole_words
from sparselens.models.loading import add_gates, gate_biases, is_gated

FAMILIES = list(CONFIGS)
WIDE_OPEN = sl.Gate(bias=1e4)


def tokens(batch=3, length=17, seed=0):
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def layouts(length=17):
    """Left padding, right padding, packed documents, and nothing special."""
    left, right = torch.ones(3, length, dtype=torch.long), torch.ones(3, length, dtype=torch.long)
    left[0, :4], left[2, :1] = 0, 0
    right[1, -5:], right[2, -2:] = 0, 0
    packed = torch.cat([torch.arange(6), torch.arange(4), torch.arange(length - 10)]).expand(3, -1)
    return {
        "plain": {},
        "left padding": {"attention_mask": left},
        "right padding": {"attention_mask": right},
        "packing": {"position_ids": packed},
    }


def gated(family: str, gate: sl.Gate | None = None, seed: int = 0):
    """A tiny model with gates; by default half open."""
    model = add_gates(tiny_model(family, seed), gate or sl.Gate())
    if gate is None:
        with torch.no_grad():
            for bias in gate_biases(model):
                bias.normal_()
    return model


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("family", FAMILIES)
def test_wide_open_gates_equal_the_untouched_model(family, layout):
    dense, sparse, inputs = tiny_model(family), gated(family, WIDE_OPEN), layouts()[layout]
    with torch.no_grad():
        expected = dense(tokens(), use_cache=False, **inputs).logits
        output = sparse(tokens(), use_cache=False, output_attentions=True, gate_output="edges", **inputs)
    real = inputs.get("attention_mask", torch.ones(3, 17)).bool()
    assert (expected - output.logits)[real].abs().max() < 1e-5
    edges, pairs = torch.stack(output.attentions).unbind(-1)
    assert torch.equal(edges, pairs), "every allowed pair is open, and nothing else is counted"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family):
    """Each document alone gives the same logits as in the pack, gates half open."""
    model, ids = gated(family), tokens()
    with torch.no_grad():
        packed = model(ids, use_cache=False, **layouts()["packing"]).logits
        alone = torch.cat([model(ids[:, a:b], use_cache=False).logits for a, b in ((0, 6), (6, 10), (10, 17))], 1)
    assert (packed - alone).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["dense", "gated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_cache_equals_the_full_forward_pass(family, kind):
    """Greedy generation with the KV cache, left padding included, token by token against full passes."""
    model = tiny_model(family) if kind == "dense" else gated(family)
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    full = out.sequences
    mask = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(full, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for step, scores in enumerate(out.scores):
        torch.testing.assert_close(scores, logits[:, 6 + step].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family):
    """Sampled gates are redrawn identically when activations are recomputed."""
    results = []
    for checkpointing in (False, True):
        model = gated(family).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        options = {"output_attentions": True, "gate_output": "edges", "gate_sample": True, "gate_seed": 3}
        output = model(tokens(), use_cache=False, **options)
        (output.logits.square().mean() + torch.stack(output.attentions)[..., 0].mean()).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert any(name.endswith("gate_bias") and g.abs().sum() > 0 for name, g in results[0].items())
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_keep_the_gates(family, tmp_path):
    model = gated(family)
    sl.save(model, tiny_tokenizer(), tmp_path / "model")
    loaded, tokenizer = sl.load(tmp_path / "model")
    assert is_gated(loaded) and len(tokenizer) == VOCABULARY
    with torch.no_grad():
        a, b = (m(tokens(), use_cache=False, output_attentions=True, gate_output="edges") for m in (model, loaded))
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(torch.stack(a.attentions), torch.stack(b.attentions))
    assert torch.stack(a.attentions)[..., 0].sum() < torch.stack(a.attentions)[..., 1].sum(), "some gates are closed"


@pytest.mark.parametrize("imported", ["", "import sparselens.models.loading"])
def test_from_pretrained_refuses_a_sparse_folder_whatever_attention_it_is_told_to_use(tmp_path, imported):
    """It must stop, not load a dense model, and say what would load it."""
    sl.save(gated("llama"), tiny_tokenizer(), tmp_path / "model")
    code = f"""
{imported}
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for cls in (AutoModelForCausalLM, LlamaForCausalLM):
    for options in ({{}}, {{"attn_implementation": "eager"}}, {{"attn_implementation": "sdpa", "dtype": "bfloat16"}}):
        try:
            cls.from_pretrained({str(tmp_path / "model")!r}, **options)
            print("LOADED")
        except ValueError as error:
            print("refused:", "sparselens.load()" in str(error))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["refused:", "True"] * 6, result.stdout + result.stderr
    AutoTokenizer.from_pretrained(tmp_path / "model")  # it is the same with gates and without
    assert not hasattr(sl.load(tmp_path / "model")[0].config, "transformers_weights")


def test_from_pretrained_refuses_a_folder_that_a_trainer_wrote(tmp_path):
    """Someone else's save_pretrained drops our mark: a process without sparselens stops at the name of the attention,
    one with it at the first forward."""
    gated("gpt2").save_pretrained(tmp_path / "model")
    code = f"""
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
except ValueError as error:
    print("refused:", "sparselens" in str(error))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["refused:", "True"], result.stdout + result.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="has no gates"):
        model(tokens())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_sparse_model_switched_to_dense_attention_stops(family, implementation):
    """set_attn_implementation, or the config behind it: nothing runs and nothing is saved until it is switched back."""
    model = gated(family)
    expected = model(tokens()).logits
    model.set_attn_implementation(implementation)
    for use in (lambda: model(tokens()), lambda: copy.deepcopy(model)(tokens()), lambda: is_gated(model)):
        with pytest.raises(ValueError, match=f"attn_implementation='{implementation}'.*set_attn_implementation"):
            use()
    model.set_attn_implementation("sparselens")
    assert torch.equal(model(tokens()).logits, expected)
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match="would open every gate"):
        model.generate(tokens(), max_new_tokens=2)


def test_a_model_that_lost_its_gates_is_refused(tmp_path):
    """The one way left: a folder that save_pretrained wrote, loaded with an attn_implementation (docs/limits.md)."""
    gated("llama").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    model(tokens())  # dense
    for use in (
        lambda: is_gated(model), lambda: sl.save(model, None, tmp_path / "again"),
        lambda: sl.discover(model, tiny_tokenizer(), say=lambda text: None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"has lost its gates.*sparselens\.load"):
            use()
    model.save_pretrained(tmp_path / "again")
    tiny_tokenizer().save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match="lacks its gates"):
        sl.load(tmp_path / "again")


def test_save_pretrained_alone_also_marks_the_folder(tmp_path):
    """Someone else's trainer calls save_pretrained; the mark must be there all the same."""
    gated("qwen3").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "sparselens"


def test_missing_gates_fail_loudly(tmp_path):
    from safetensors.torch import load_file, save_file

    sl.save(gated("llama"), tiny_tokenizer(), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if not name.endswith("0.self_attn.gate_bias")}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks its gates"):
        sl.load(tmp_path / "model")


def test_truncated_weights_fail_loudly(tmp_path):
    sl.save(gated("llama"), tiny_tokenizer(), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cannot be read"):
        sl.load(tmp_path / "model")


def test_save_replaces_a_folder_whole(tmp_path):
    sl.save(gated("llama"), tiny_tokenizer(), tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("old")
    sl.save(gated("llama", seed=1), tiny_tokenizer(), tmp_path / "model")
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_adapters_and_gates_travel_together(tmp_path):
    from peft import LoraConfig, get_peft_model

    sl.save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    base, tokenizer = sl.load(tmp_path / "base", gate=sl.Gate())
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        for bias in gate_biases(model):
            bias.normal_()
    model.eval()
    sl.save(model, tokenizer, tmp_path / "adapter")
    loaded, _ = sl.load(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits)
    from peft import AutoPeftModelForCausalLM

    with pytest.raises(Exception, match="sparselens:"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "gates.safetensors").unlink()
    with pytest.raises(ValueError, match="without its gates"):
        sl.load(tmp_path / "adapter")


def test_unsupported_architecture_is_refused_by_name():
    from transformers import AutoModelForCausalLM, BloomConfig

    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"'bloom'.*gpt2.*llama"):
        add_gates(AutoModelForCausalLM.from_config(config), sl.Gate())


def test_gates_are_not_put_in_twice():
    with pytest.raises(ValueError, match="already has gates"):
        add_gates(gated("llama"), sl.Gate())


def test_unknown_model_is_one_sentence():
    with pytest.raises(ValueError, match="no model found at 'no-such/model'"):
        sl.load("no-such/model")


def test_missing_gguf_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        sl.load(tmp_path / "model.gguf")


def write_gguf(path, add_bos=None):
    """A tiny random Llama with a byte-level tokenizer, as llama.cpp would write it."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    words = ["<|endoftext|>"] + [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["ab", "cd"]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)

    def add(name, *shape):
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32) * 0.2)

    add("token_embd.weight", len(words), 32)
    add("output.weight", len(words), 32)
    add("output_norm.weight", 32)
    for i in range(2):
        add(f"blk.{i}.attn_norm.weight", 32)
        add(f"blk.{i}.ffn_norm.weight", 32)
        for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)):
            add(f"blk.{i}.{name}.weight", rows, 32)
        add(f"blk.{i}.ffn_gate.weight", 48, 32)
        add(f"blk.{i}.ffn_up.weight", 48, 32)
        add(f"blk.{i}.ffn_down.weight", 32, 48)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_files_load_gate_and_save(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = sl.load(tmp_path / "tiny.gguf", gate=sl.Gate())
    ids = tokenizer("abcd", return_tensors="pt").input_ids
    sl.save(model, tokenizer, tmp_path / "saved")
    again, tokenizer_again = sl.load(tmp_path / "saved")
    assert is_gated(again) and tokenizer_again("abcd").input_ids == ids[0].tolist()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_gguf_files_say_whether_texts_start_with_bos(add_bos, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", add_bos)
    model, tokenizer = sl.load(tmp_path / "tiny.gguf")
    ids = tokenizer("abcd").input_ids
    assert ids == ([0] if add_bos else []) + tokenizer("abcd", add_special_tokens=False).input_ids and len(ids) > 1
    sl.save(model, tokenizer, tmp_path / "saved")
    assert sl.load(tmp_path / "saved")[1]("abcd").input_ids == ids


def test_hub_names_load_sparse_from_the_local_cache(tmp_path):
    """A repository in the hub's cache layout, read by name and offline: gates included."""
    repository = tmp_path / "hub" / "models--me--sparse"
    sl.save(gated("llama"), tiny_tokenizer(), repository / "snapshots" / "abc")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    code = "import sparselens as sl\nfrom sparselens.models.loading import is_gated\n"
    code += "print(is_gated(sl.load('me/sparse')[0]))"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "True", result.stderr


def test_a_model_without_a_tokenizer_is_told_from_no_model(tmp_path):
    sl.save(tiny_model("llama"), None, tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds a model but no tokenizer.*tokenizer.json") as refused:
        sl.load(tmp_path / "model")
    assert "no model found" not in str(refused.value)
    with pytest.raises(ValueError, match="no model found"):
        sl.load(tmp_path)


@pytest.mark.parametrize("hub", ["refuses", "hangs"])
def test_a_hub_that_does_not_answer_costs_seconds_and_one_sentence(hub, monkeypatch, capfd):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if hub == "hangs":
            server.listen()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for ask in (sl.load, sl.plan):
            began = time.perf_counter()
            with pytest.raises(ValueError, match=r"no model found at 'nobody/nothing'.*127\.0\.0\.1.* does not answer"):
                ask("nobody/nothing")
            assert time.perf_counter() - began < 10, "three seconds of waiting at most"
    assert "retry" not in "".join(capfd.readouterr()).lower()


def test_training_mode_with_dropout_in_the_config():
    """GPT-2's config has attention dropout; gates switch it off instead of failing in train()."""
    model = gated("gpt2").train()
    model(tokens(), use_cache=False)
    assert model.config.attn_pdrop == 0


def test_sampled_gates_depend_on_seed_and_layer():
    model = gated("llama")
    with torch.no_grad():
        a, b, c = (model(tokens(), use_cache=False, gate_sample=True, gate_seed=s).logits for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("queries", [1, 9])
def test_pairs_are_counted_as_the_mask_allows(queries, window):
    document = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 0, 2, 3, 3, 0, 0], [1, 1, 0, 1, 1, 1, 0, 1, 1]])
    expected = allowed_pairs(queries, 9, window=window, mask=document).sum((1, 2, 3)).double()
    # A query that is padding counts nothing, which allowed_pairs gives by itself: its document number is 0.
    assert torch.equal(count_pairs(document, queries, 9, window, "cpu"), expected)
    full = allowed_pairs(queries, 9, window=window).sum().double()
    assert count_pairs(None, queries, 9, window, "cpu").tolist() == [full]


def test_static_cache_falls_back_to_the_full_mask():
    """A static cache is longer than what was seen; generation with one still equals the dynamic cache."""
    model = gated("llama")
    dynamic = model.generate(tokens(2, 5), max_new_tokens=6, do_sample=False)
    static = model.generate(tokens(2, 5), max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(dynamic, static)


def test_document_mask_is_linear_in_memory():
    mask = document_mask(1, 4096, 4096, attention_mask=torch.ones(1, 4096, dtype=torch.bool))
    assert mask is not None and mask.shape == (1, 4096)


@pytest.mark.parametrize("family", FAMILIES)
def test_attentions_are_patterns_as_everywhere_in_transformers(family):
    """Wide open they are the dense model's own, padding included; in generate() and under PEFT, too."""
    dense, sparse, inputs = tiny_model(family), gated(family, WIDE_OPEN), layouts()["right padding"]
    dense.set_attn_implementation("eager")
    with torch.no_grad():
        expected = dense(tokens(), output_attentions=True, **inputs).attentions
        found = sparse(tokens(), output_attentions=True, **inputs).attentions
        assert sparse(tokens()).attentions is None
    assert len(found) == len(expected)
    real = inputs["attention_mask"].bool()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape == (3, sparse.config.num_attention_heads, 17, 17)
        assert (ours - theirs).transpose(1, 2)[real].abs().max() < 1e-5
    options = {"do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    steps = [m.generate(tokens(2, 5), max_new_tokens=2, **options).attentions for m in (dense, sparse)]
    shapes = [[[layer.shape for layer in step] for step in each] for each in steps]
    assert shapes[0] == shapes[1]


def test_attentions_under_peft_are_patterns_and_counts_on_request():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gated("llama"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert model(tokens(), output_attentions=True).attentions[0].shape[2:] == (17, 17)
    assert model(tokens(), output_attentions=True, gate_output="edges").attentions[0].shape[2:] == (2,)


def test_pattern_and_margin_come_back_on_request():
    model = gated("gpt2")
    with torch.no_grad():
        edges = model(tokens(), use_cache=False, output_attentions=True, gate_output="edges").attentions
        pattern = model(tokens(), use_cache=False, output_attentions=True, gate_output="pattern").attentions
        margin = model(tokens(), use_cache=False, output_attentions=True, gate_output="margin").attentions
    for count, weights, distance in zip(edges, pattern, margin, strict=True):
        assert torch.equal((weights > 0).sum((-1, -2)).float(), count[..., 0])
        assert torch.equal(weights > 0, distance > 0)
    with pytest.raises(ValueError, match="gate_output='nothing'"):
        model(tokens(), output_attentions=True, gate_output="nothing")


def test_copies_do_not_share_gates():
    model = gated("llama")
    twin = copy.deepcopy(model)
    gate_biases(twin)[0].data.fill_(99)
    assert not torch.equal(gate_biases(model)[0], gate_biases(twin)[0])


@pytest.mark.shared
def test_real_model_wide_open(shared):
    """The TinyStories model, real weights: wide open gates change no logit and no story."""
    dense, tokenizer = sl.load(shared / "models" / "stories15m")
    sparse, _ = sl.load(shared / "models" / "stories15m", gate=WIDE_OPEN)
    prompt = tokenizer("Lily and Tom went to the park. Tom gave a ball to", return_tensors="pt").input_ids
    if prompt[0, 0] != 1:
        prompt = torch.cat([torch.tensor([[1]]), prompt], 1)
    with torch.no_grad():
        a, b = dense(prompt).logits, sparse(prompt).logits
    assert (a - b).abs().max() < 1e-4
    told = sparse.generate(prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(told[0, prompt.shape[1] :]).strip().startswith("Lily")


def letters() -> PreTrainedTokenizerFast:
    """Long words in the vocabulary, and no way to get to them: what is left of a tokenizer without its merges."""
    from tokenizers import Tokenizer, models

    alphabet = "abcdefghijklmnopqrstuvwxyz"
    words = [f"wordsof{a}{b}" for a in alphabet for b in alphabet]
    vocabulary = {word: i for i, word in enumerate([*alphabet, *words])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))


def test_a_tokenizer_that_lost_its_merges_is_noticed(tmp_path, monkeypatch):
    """As transformers 5.17 makes of Gemma's .gguf: every word in letters, and a model that seems to know nothing."""
    whole, tried = whole_words(letters())
    assert whole == 0 and tried >= 200
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(huggingface.AutoTokenizer, "from_pretrained", lambda *a, **k: letters())
    with pytest.raises(ValueError, match=r"of \d+ words in its vocabulary 0 come back as one token. Update it"):
        sl.load(tmp_path / "tiny.gguf")


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2-tokenizer", "stories15m"])
def test_real_tokenizers_know_their_words(name, shared):
    whole, tried = whole_words(AutoTokenizer.from_pretrained(shared / "models" / name))
    assert tried >= 200 and whole > 0.7 * tried


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2"])
def test_gradients_stay_small_behind_closed_gates_before_a_norm(family):
    """The norm behind attention blows up the gradient of what little is left. Outputs stay as they are."""
    model = add_gates(tiny_model(family), sl.Gate(bias=-3.0))
    ids = torch.randint(2, 60, (4, 32), generator=torch.Generator().manual_seed(0))
    norms, losses = [], []
    for training in (False, True):
        model.train(training).zero_grad()
        loss = model(ids, labels=ids, gate_sample=True, gate_seed=1).loss
        loss.backward()
        norms.append(torch.stack([bias.grad.norm() for bias in gate_biases(model)]).norm().item())
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert norms[1] < norms[0] / 3, norms


def test_bounded_changes_no_output():
    """Not even where there is nothing: values of zero, or every gate of a token closed."""
    value = torch.randn(2, 1, 5, 4)
    out = torch.randn(2, 2, 3, 4, requires_grad=True)
    with torch.no_grad():
        out[0, :, 1] = 0
    assert torch.equal(bounded(out, value), out) and torch.equal(bounded(out * 0, value * 0), out * 0)
    bounded(out, value).sum().backward()
    assert out.grad.isfinite().all() and (out.grad[0, :, 1] == 1e-3).all() and out.grad.max() <= 1
