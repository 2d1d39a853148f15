import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # tiny models gain nothing from more, and the tests themselves run in parallel

SHARED = Path(os.environ.get("SPARSELENS_SHARED", Path(__file__).parents[2] / "shared"))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("shared") and not (SHARED / "models").is_dir():
            item.add_marker(pytest.mark.skip(reason=f"no real models at {SHARED}"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    return SHARED
