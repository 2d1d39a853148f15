"""Random prompt pairs as tensors, for tests of everything behind the tasks."""

import numpy as np
import torch
from tiny_models import tiny_tokenizer

from sparselens.tasks import Pair, Task
from sparselens.tasks.prompts import Prompts

QUIET = {"say": lambda text: None}


def random_prompts(n: int = 4, tokens: int = 8, vocabulary: int = 64, reads: int = 2, metric="logit") -> Prompts:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(2, vocabulary, shape, generator=generator)

    position = torch.arange(tokens - reads, tokens).expand(n, -1).contiguous()
    right = draw(n, reads, 1)
    return Prompts(
        metric=metric, clean=draw(n, tokens), corrupted=draw(n, tokens), lengths=torch.full((n,), tokens),
        position=position, right=right, wrong=(right + 1) % vocabulary, through=torch.full((n, reads), -1),
        used=torch.ones(n, reads, dtype=torch.bool), pairs=tuple(Pair("", "", "", "") for _ in range(n)),
    )  # fmt: skip


def words_task(n: int = 60) -> Task:
    """The answer is the token after the last one: any random model does some of it right by chance."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(n):
        a, b, c, d = (f"w{i}" for i in rng.choice(60, 4, replace=False))
        pairs.append(Pair(f"w1 {a} w2 w3", f"w1 {b} w2 w3", f" {c}", f" {d}"))
    return Task("words", None, "logit", tuple(pairs))


def chosen(models: list) -> Task:
    """Of `words_task`, the pairs on which the models' metric really falls when the prompt is corrupted."""
    from sparselens.tasks.prompts import build

    task = words_task(400)
    prompts = build(task, tiny_tokenizer(), 400, **QUIET)
    keep = torch.ones(len(prompts), dtype=torch.bool)
    for model in models:
        with torch.no_grad():
            good, bad = (
                prompts.score(prompts.at_reads(model(ids).logits)) for ids in (prompts.clean, prompts.corrupted)
            )
        keep &= (good > 0) & (good - bad > 0)
    return Task("words", None, "logit", prompts.take(keep).pairs[:32])
