"""A finished Run as the difference to its base: small enough to travel, with what the rounding costs beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..evaluation.side_by_side import heldout_of
from ..models.delta import ABOUT, WEIGHTS, save_delta
from ..models.loading import load
from ..runs import distributed
from ..runs.run import Run, read_json, whole_folder, write_json
from ..training.measure import measure


def export_delta(run: Run, out: Path, bits: int, say: Callable[[str], None] = print) -> Path:
    """Write the folder, load it again, and say how far what comes back is from the model; returns the folder."""
    base_name = run.started_from
    model: Any = load(run.path)[0]
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    base, tokenizer = load(base_name)
    with whole_folder(out) as fresh:
        fresh.mkdir(exist_ok=True)
        save_delta(model, base, str(base_name), fresh, bits)
        found = cost(run, model, load(fresh, base=base_name)[0], tokenizer)
        write_json(fresh / ABOUT, read_json(fresh / ABOUT) | {"cost": found})
        size = (fresh / WEIGHTS).stat().st_size / 1e6
    told = "not measured: the Run's held-out text is not at hand"
    if found is not None:
        told = (
            f"KL {found['kl']:.2g} nats, loss {found['loss_added']:+.4f}, n = {found['sequences']} held-out sequences"
        )
    say(f"difference to {base_name} in {bits} bits: {size:.1f} MB; what the rounding adds: {told}")
    return out


def cost(run: Run, model: Any, restored: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, float] | None:
    """KL(model || what comes back) and the loss it adds, on text the Run has held out."""
    found = heldout_of(run, tokenizer)
    if found is None:
        return None
    batches, first, count = found
    for one in (model, restored):
        distributed.place(one, distributed.device())
    own, back = (measure(one, batches, first, count, base=model) for one in (model, restored))
    assert back.kl is not None
    return {"kl": back.kl.mean().item(), "loss_added": back.loss - own.loss, "sequences": count}
