"""Random prompt pairs as tensors, for tests of everything behind the tasks."""

import torch

from sparselens.tasks import Pair
from sparselens.tasks.prompts import Prompts


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
