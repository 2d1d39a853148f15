"""A cross-layer transcoder trained by CLT-Forge, in its own environment.

spec: model, documents (token ids, one list per document), heldout ([sequences, tokens]), features, steps, batch
(sequences), length, lr, sparsity, folder.

Its store, transcoder and trainer are its own. Its runner is left out: it would look for the model on a hub.
"""

import json
from pathlib import Path
from typing import Any

import torch
from clt_forge.clt import CLT
from clt_forge.config import CLTConfig, CLTTrainingRunnerConfig
from clt_forge.training.activations_store import ActivationsStore
from clt_forge.training.clt_trainer import CLTTrainer
from datasets import Dataset
from fit import fit
from hooked import load
from measuring import serve, spec, versions
from safetensors.torch import load_file

asked = spec()
folder = Path(asked["folder"])
tokens, steps = asked["batch"] * asked["length"], asked["steps"]


def load_all() -> Any:
    Dataset.from_dict({"tokens": json.loads(Path(asked["documents"]).read_text())}).save_to_disk(folder / "documents")
    return load(asked["model"])


def train(model: Any) -> Any:
    config = CLTTrainingRunnerConfig(
        device="cpu", n_checkpoints=0, checkpoint_path=str(folder), logger_verbose=False,
        dataset_path=str(folder / "documents"), disk=True,
        d_in=model.cfg.d_model, d_latent=asked["features"], context_size=asked["length"],
        n_batches_in_buffer=10, store_batch_size_prompts=asked["batch"], distributed_setup="None", log_to_wandb=False,
        total_training_tokens=steps * tokens, train_batch_size_tokens=tokens, adam_beta1=0.9, adam_beta2=0.99,
        lr=asked["lr"], lr_warm_up_steps=round(0.02 * steps), lr_decay_steps=steps // 2, final_lr_scale=0.05,
        lr_warm_up_type="linear", l0_coefficient=asked["sparsity"], l0_warm_up_steps=round(0.3 * steps),
        n_batches_for_norm_estimate=4,
    )  # fmt: skip
    torch.manual_seed(config.seed)
    store = ActivationsStore(model, config)
    clt = CLT(config.create_sub_config(CLTConfig, n_layers=model.cfg.n_layers))
    clt.estimated_norm_scaling_factor_in = store.estimated_norm_scaling_factor_in
    clt.estimated_norm_scaling_factor_out = store.estimated_norm_scaling_factor_out
    trainer = CLTTrainer(clt, store, config, save_checkpoint_fn=lambda trainer, checkpoint_name: None)
    trainer.fit()
    return store, clt


def tell(model: Any, trained: Any) -> dict[str, Any]:
    store, clt = trained

    def batches() -> Any:
        for some in load_file(asked["heldout"])["tokens"].split(asked["batch"]):
            cache = model.run_with_cache(some, names_filter=store.hook_names_in + store.hook_names_out)[1]
            inputs, outputs = (
                torch.stack([cache[name][:, 1:].flatten(0, 1) for name in names], 1)
                for names in (store.hook_names_in, store.hook_names_out)
            )
            features, _ = clt.encode(store.apply_norm_scaling_factor_in(inputs))
            guess = clt.decode(features)
            yield store.apply_norm_scaling_factor_out(outputs.clone()), guess, (features > 0).sum((0, 2))

    return {**fit(batches()), "versions": versions("torch", "transformers", "transformer-lens", "sae-lens")}


serve(asked, load_all, train, tell)
