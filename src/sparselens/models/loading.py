"""Gates inside unmodified Hugging Face decoders; `load` and `save` never give a dense model for a sparse one.

The gated attention (attention.py) is registered with transformers under the name "sparselens". A model is
gated when (1) its config says `attn_implementation: sparselens` and (2) every attention module has a parameter
`gate_bias` of shape [n_heads]. Both are saved, and `save` names no weights in config.json but says who can read them: a
sentence at which every `from_pretrained` stops, whatever attention it was asked for. Where a model's own
`save_pretrained` wrote the folder, (1) stops it, unless a caller overrides that: such a model has lost its gates, and
everything here refuses it. Switched to other attention later, a model with gates stops at its next forward pass.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from ..config import Gate
from ..runs import distributed
from ..runs.run import Run, read_json, reading, whole_folder
from .access import access, check_versions, may_be_loaded, quiet, refusing, stop_from_pretrained
from .architectures import architecture, attention_modules, base_model, dimensions
from .attention import NAME, gate_biases as gate_biases, give_patterns, is_gated as is_gated, refuse_other_attention
from .delta import ABOUT as DELTA, apply_delta, read_about
from .gguf_file import load_gguf

INDEX = "model.safetensors.index.json"  # which file has which weight, where there are several
# What a verb may be given as its model.
WAYS = "a name, a path, a Run, a model from transformers, or (model, tokenizer)"
Source = str | Path | Run | nn.Module | tuple[nn.Module, PreTrainedTokenizerBase]
DTYPES = ("float32", "bfloat16", "float16", "float64")
ADAPTER_PREFIX = "sparselens:"  # marks an adapter's base so that plain peft cannot load it without its gates


def add_gates(model: PreTrainedModel, gate: Gate | None = None) -> PreTrainedModel:
    """Put gates into a dense model, in place: a learnable bias per head and the gated attention. Returns the model.

    gate: how they begin; without it, as in `Gate()`.
    """
    gate = Gate() if gate is None else gate
    if not isinstance(gate, Gate):
        raise ValueError(f"gate={one_thing(gate)}: expected a Gate, such as sl.Gate(bias=0.0)")
    if isinstance(model, tuple) or not isinstance(model, nn.Module):
        raise ValueError(f"expected a model in memory, got {one_thing(model)}; sl.load(name, gate=...) takes a name")
    check_source(model)
    check_versions()
    if is_gated(model):
        raise ValueError("this model already has gates; change its `gate_bias` parameters instead of adding new ones")
    architecture(model.config)
    n_heads = dimensions(model.config).n_heads
    for name in ("attn_pdrop", "attention_dropout"):
        if getattr(model.config, name, None):
            setattr(model.config, name, 0.0)
    module: Any
    for module in attention_modules(model):
        weight = next(module.parameters())
        # fp32 whatever the model's dtype: steps of a slowly learnt bias vanish in bf16.
        module.gate_bias = nn.Parameter(torch.full((n_heads,), float(gate.bias), device=weight.device))
        if isinstance(getattr(module, "attention_dropout", None), float | int):
            module.attention_dropout = 0.0
        if isinstance(getattr(module, "attn_dropout", None), nn.Dropout):
            module.attn_dropout.p = 0.0
        module.register_forward_pre_hook(refuse_other_attention)
    # The decoder inside: PEFT calls the model's own forward without its hooks.
    model.base_model.register_forward_pre_hook(give_patterns, with_kwargs=True)
    model.config.sparselens = {"version": 1, "normalise": gate.normalise}
    model.set_attn_implementation(NAME)
    # An ordinary attribute, so that every save_pretrained writes it and from_pretrained trips over it.
    model.config.attn_implementation = NAME
    return model


def load(
    source: str | Path | Run, gate: Gate | None = None, dtype: str = "float32", device: str | None = None,
    base: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:  # fmt: skip
    """(model, tokenizer) from a hub name, a folder, a Run or a .gguf file: dense or sparse, as it was saved.

    gate: put gates into a dense model. Refused for a model that has gates already. base: where the base is of a folder
    that holds the difference to one (`export --delta`); by default where it was.
    """
    if not isinstance(source, str | Path | Run):
        raise ValueError(f"expected a name, a path or a Run to load, got {one_thing(source)}")
    check_versions()
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    source = source.path if isinstance(source, Run) else source
    path = Path(source)
    if (path / "run.json").is_file():
        path = path / "model"
        if not path.is_dir():
            raise ValueError(Run(source).without_model())
        source = path
    model: Any
    if base is not None and not (path / DELTA).is_file():
        raise ValueError(f"{source} is a whole model; base= is for the difference to one, as export --delta writes it")
    if (path / DELTA).is_file():
        model, tokenizer = _load_delta(path, dtype, base)
    elif (path / "adapter_config.json").is_file():
        model, tokenizer = _load_adapter(path, dtype)
    elif path.suffix == ".gguf":
        model, tokenizer = load_gguf(path, dtype)
    else:
        model, tokenizer = _load_folder(str(source), dtype)
    if gate is not None:
        add_gates(model, gate)
    model.eval()
    return (model.to(device) if device else model), tokenizer


def resolve(
    source: Source, tokenizer: PreTrainedTokenizerBase | None = None, say: Callable[[str], None] = print
) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    """(model, tokenizer) of whatever a verb was given: a name, a path, a Run, a model, or (model, tokenizer).

    What is loaded here goes to the device, in float32; a model in memory stays where and as it is. Where that is half
    precision, a copy in float32 is used, with a line. A model without a tokenizer gets the one of the name it has.
    """
    check_source(source)
    if isinstance(source, str | Path | Run):
        # With FSDP2 a model stays whole, on the CPU, until it is split.
        loaded, its = load(source, device=None if distributed.sharded() else distributed.device())
        return loaded, tokenizer or its
    model, own = source if isinstance(source, tuple) else (source, None)
    is_gated(base_model(model))  # or refused
    half = next((p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)), None)
    if half is not None:
        name = f"{half}".removeprefix("torch.")
        say(f"{name_of(source)} is in {name}; a copy of it in float32 is used")
        model = copy.deepcopy(model).float()
    return model, tokenizer or own or _tokenizer_of(model)


def check_source(source: object) -> None:
    """ValueError for what is no model, and no way to one."""
    if isinstance(source, str | Path | Run):
        return
    model: object = source[0] if isinstance(source, tuple) and len(source) == 2 else source
    other = source[1] if isinstance(source, tuple) and len(source) == 2 else None
    if not isinstance(model, nn.Module) or not (other is None or isinstance(other, PreTrainedTokenizerBase)):
        got = (
            f"({', '.join(type(part).__name__ for part in source)})" if isinstance(source, tuple) else one_thing(source)
        )
        raise ValueError(f"expected a model, got {got}: {WAYS}")
    if not hasattr(base_model(model), "config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers (it has no config): {WAYS}")


def one_thing(value: object) -> str:
    """A value of a wrong kind, for a sentence about it."""
    text = repr(value)
    return type(value).__name__ + (f" {text}" if len(text) <= 40 and "\n" not in text else "")


def _tokenizer_of(model: nn.Module) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies where a model in memory came from, if it can still be found."""
    name = str(base_model(model).config._name_or_path or "")
    if not name or Path(name).suffix == ".gguf":
        return None
    try:
        with quiet():
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **access(name).options)
    except Exception:  # whatever the reason: the verb asks for one, where it needs one
        return None
    return found


def name_of(source: Source) -> str:
    """What to call it: a hub name as it is, a file or folder by its own name, a model in memory by where it came from.

    A Run's folder says more than the "model" inside it; SmolLM2-1.7B has a dot, but no suffix.
    """
    if isinstance(source, Run):
        source = source.path
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.exists():
            return str(source)
        path = path.resolve()
        return path.stem if path.suffix == ".gguf" else path.parent.name if path.name == "model" else path.name
    config = base_model(source[0] if isinstance(source, tuple) else source).config
    return str(config._name_or_path or config.model_type)


def _load_folder(source: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    index = Path(source) / INDEX
    if index.is_file():
        with reading(index):
            outside = [name for name in read_json(index)["weight_map"].values() if Path(name).name != name]
        if outside:
            raise ValueError(f"{index} names a file outside its folder: {outside[0]}")
    expected = "expected a Hugging Face name, a model folder, a Run or a .gguf file"
    found = access(source)
    with refusing(f"no model found at {source!r}: {expected} (", f"{found.trouble})"), quiet():
        config = AutoConfig.from_pretrained(source, **found.options)
    beside = "tokenizer.json and tokenizer_config.json belong beside it, as tokenizer.save_pretrained() writes them"
    with refusing(f"{source!r} holds a model but no tokenizer that can be read: {beside} (", ")"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(source, **found.options)
        tokenizer("a")  # damaged settings show when it is first used
    settings = getattr(config, "sparselens", None)
    if settings is not None and (not isinstance(settings, dict) or settings.get("normalise") not in ("all", "open")):
        raise ValueError(f"the settings of the gates in {source!r} are damaged: {settings!r}")
    # The dense weights are loaded first, knowingly; the gates follow, and a missing one is an error.
    may_be_loaded(config)
    options = {"attn_implementation": "eager", "config": config} if settings else {}  # the one every family has
    pickled = any(Path(source).glob("*.bin")) and not any(Path(source).glob("*.safetensors"))
    hint = "; pickled weights (.bin) are never read, convert them to safetensors" if pickled else ""
    with refusing(f"the weights at {source!r} cannot be read: ", hint), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            **found.options,
            **options,
        )
    model, report = loaded
    _refuse_incomplete(model, report, source)
    if settings:
        del model.config.sparselens
        add_gates(model, Gate(normalise=settings["normalise"]))
        _restore_gates(model, _read_gates(source, **found.options))
    return model, tokenizer


def _refuse_incomplete(model: PreTrainedModel, report: Mapping[str, Iterable[str]], source: str) -> None:
    """transformers fills missing weights with random ones, and a NaN spoils every number that comes after it."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"the weights at {source!r} are not complete: {len(missing)} missing, first {missing[0]}")
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not 0 <= module.p <= 1:
            raise ValueError(f"the config of {source!r} says dropout {module.p}: expected a share between 0 and 1")
    bad = next((name for name, p in model.named_parameters() if not p.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"the weights at {source!r} hold NaN or infinite numbers, first in {bad}; they are damaged")


def _read_gates(source: str, local_files_only: bool = False, **_: Any) -> dict[str, Tensor]:
    """Every `gate_bias` tensor in the safetensors files of a folder or hub repository."""
    options = {"local_files_only": local_files_only}
    index = cached_file(source, INDEX, _raise_exceptions_for_missing_entries=False, **options)
    names = ["model.safetensors"]
    if index:
        with reading(index):
            names = sorted(set(read_json(Path(index))["weight_map"].values()))
    found: dict[str, Tensor] = {}
    for name in names:
        with safe_open(cached_file(source, name, **options), framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if key.endswith(".gate_bias")}  # noqa: SIM118 (not a dict)
    return found


def _restore_gates(model: nn.Module, saved: dict[str, Tensor]) -> None:
    mine = {name: parameter for name, parameter in model.named_parameters() if name.endswith(".gate_bias")}
    if mine.keys() != saved.keys():
        missing = sorted(mine.keys() - saved.keys())
        raise ValueError(
            f"this sparse model lacks its gates ({len(missing)} of {len(mine)} missing, first: {missing[:1]}); "
            "refusing to load it without them. Save it again with sparselens.save()."
        )
    with torch.no_grad():
        for name, parameter in mine.items():
            if saved[name].shape != parameter.shape or not saved[name].isfinite().all():
                raise ValueError(f"the gates {name} are damaged: expected {len(parameter)} finite numbers")
            parameter.copy_(saved[name])


def _load_adapter(path: Path, dtype: str) -> tuple[Any, PreTrainedTokenizerBase]:
    from peft import PeftConfig, PeftModel

    with refusing(f"{path / 'adapter_config.json'} is damaged: "):
        config = PeftConfig.from_pretrained(str(path))
    name = config.base_model_name_or_path
    if not isinstance(name, str) or not name.startswith(ADAPTER_PREFIX):
        raise ValueError(
            f"{path} holds a plain PEFT adapter without gates; sparselens.save() writes adapters with them"
        )
    base, tokenizer = load(name.removeprefix(ADAPTER_PREFIX), dtype=dtype)
    for file in ("gates.safetensors", "gates.json", "adapter_model.safetensors"):
        if not (path / file).is_file():  # without the last, peft would take a pickle in its place
            raise ValueError(f"{path} lacks {file}; refusing to load a sparse adapter without its gates")
    with reading(path / "gates.json"):
        settings = read_json(path / "gates.json")
        if settings is not None:  # as it is for the adapter of a dense control, which was saved without gates
            add_gates(base, Gate(normalise=settings["normalise"]))
    config.base_model_name_or_path = name.removeprefix(ADAPTER_PREFIX)
    with refusing(f"the adapter in {path} cannot be read: "):
        gates = load_file(path / "gates.safetensors")
        model = PeftModel.from_pretrained(base, str(path), config=config)
    _restore_gates(base, gates)
    return model, tokenizer


def _load_delta(path: Path, dtype: str, base: str | Path | None) -> tuple[Any, PreTrainedTokenizerBase]:
    about = read_about(path)
    place = Path(about["base"] if base is None else base)
    if (place / DELTA).is_file():
        raise ValueError(f"{place}, the base of {path}, is itself the difference to a base; name a whole model")
    try:
        model, tokenizer = load(about["base"] if base is None else base)
    except ValueError as error:
        if base is not None:
            raise
        raise ValueError(
            f"{path} needs its base, {about['base']!r}: {error}. Say where: sl.load(folder, base=...)"
        ) from None
    gates = apply_delta(model, path)
    model = model.to(getattr(torch, dtype))  # type: ignore[assignment]  # before it has gates: they stay in fp32
    add_gates(model, Gate(normalise=about["normalise"]))  # type: ignore[arg-type]
    _restore_gates(model, gates)
    return model, tokenizer


def save(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path) -> Path:
    """Write a Hugging Face folder that `load` brings back exactly as it is, gates and adapters included.

    The folder appears whole or not at all: it is written beside its final place and then renamed.
    """
    if not isinstance(model, nn.Module) or not isinstance(folder, str | Path):
        raise ValueError("expected save(model, tokenizer, folder): a model in memory, its tokenizer and a path")
    check_source((model, tokenizer))
    folder = Path(folder)
    gated = is_gated(model)  # or refused
    with whole_folder(folder) as fresh:
        with quiet():
            if hasattr(model, "peft_config"):
                _save_adapter(model, fresh)
            else:
                model.save_pretrained(fresh)  # type: ignore[operator]
                if gated:
                    stop_from_pretrained(fresh / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
    return folder


def _save_adapter(model: Any, folder: Path) -> None:
    """Adapter weights, gates, and the name of the base: small, but it needs the base to be found again."""
    base = model.get_base_model()
    name = base.config._name_or_path
    if not name:
        raise ValueError(
            "the adapter's base model has no name to load it by; merge_and_unload() it and save the result"
        )
    config = model.peft_config["default"]
    before = config.base_model_name_or_path
    config.base_model_name_or_path = f"{ADAPTER_PREFIX}{name}"
    try:
        # Without this, PEFT looks for the base under its marked name, to see whether the vocabulary has grown.
        model.save_pretrained(folder, save_embedding_layers=False)
    finally:
        config.base_model_name_or_path = before
    # PEFT renames modules it wraps, but the gates sit on attention modules, which it does not touch.
    gates = {n: p.detach().cpu().contiguous() for n, p in base.named_parameters() if n.endswith(".gate_bias")}
    save_file(gates, folder / "gates.safetensors")
    (folder / "gates.json").write_text(json.dumps(getattr(base.config, "sparselens", None)))


def first_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that starts every document: BOS where the tokenizer puts it there itself; else <|endoftext|> where the
    vocabulary has it, else BOS, else EOS."""
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a")["input_ids"][:1] == [bos]:
        return int(bos)
    found = (tokenizer.get_vocab().get("<|endoftext|>"), bos, tokenizer.eos_token_id)
    return next((token for token in found if token is not None), None)
