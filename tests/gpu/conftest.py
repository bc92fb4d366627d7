"""A process group of NCCL with one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    rendezvous = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
