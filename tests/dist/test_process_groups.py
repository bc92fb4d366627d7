"""Process groups that the script made: a back end for each type of device."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from parloom import runtime as rt
from parloom.errors import SilentRankError
from parloom.execute.ranks import fork_ranks

BACKENDS = [
    pytest.param(
        None, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL for GPUs alone")
    ),
    "cpu:gloo",
    "cpu:gloo,cuda:gloo",
]


def _silence(backend: str | None, folder: Path) -> str:
    """Of two ranks in a group that was made anew: what the first one says of the second one, which
    sends nothing.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    # A small all-reduce is an exchange; in this forked rank alone.
    pytest.MonkeyPatch().delattr(dist, "all_reduce")
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    comm = rt.DistributedComm(rt.grid({"x": size}), timeout=timedelta(seconds=0.5))
    comm.group(("x",)).all_reduce(total := torch.ones(4)).wait()
    assert total.tolist() == [size] * 4
    if rank == 1:
        store.wait(["over"])
        return ""
    with pytest.raises(SilentRankError) as silent:
        comm.receive(torch.ones(1), 1, 0).wait()
    store.set("over", "")
    return str(silent.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gloo_of_a_group_for_several_devices(backend: str | None, tmp_path: Path) -> None:
    """Small all-reduces are exchanges, and a rank that does not answer is named."""
    said, _ = fork_ranks(2, _silence, backend, tmp_path)
    assert said.startswith("rank 1 did not answer within 0.5 s")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.usefixtures("alone")
def test_each_direction_has_a_queue_of_its_own_on_nccl(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the group names its back end, and where it has another one for the CPU."""
    comm = rt.DistributedComm(rt.grid({"x": 3}), ranks=(0, 1, 2))
    made: list[list[int]] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)

    def new_group(ranks: list[int], timeout: timedelta, backend: str) -> None:
        assert backend == "nccl"
        made.append(ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    ways = [(2, 1), (1, 1), (1, 2)]
    comm.connect(ways, torch.device("cpu"))
    assert made == []
    comm.connect(ways, torch.device("cuda"))
    comm.connect(ways, torch.device("cuda"))
    assert made == [[1, 2], [1, 2]]


def _short() -> list[list[int]]:
    """Collectives of int16, which neither gloo nor NCCL has."""
    comm = rt.DistributedComm(rt.grid({"x": 2}))
    group, rank = comm.group(("x",)), dist.get_rank()
    mine = torch.tensor([1 + rank, -300], dtype=torch.int16)
    summed, told = mine.repeat(10_000), mine.clone()
    group.all_reduce(summed).wait()
    group.broadcast(told).wait()
    gathered, scattered = mine.new_empty(2, 2), mine.new_empty(1)
    group.all_gather(gathered, mine).wait()
    group.reduce_scatter(scattered, mine).wait()
    exchanged = torch.empty_like(mine)
    group.all_to_all(exchanged, mine).wait()
    found = (summed[-2:], told, gathered.view(-1), scattered, exchanged)
    assert all(one.dtype == torch.int16 for one in found)
    return [one.tolist() for one in found]


def test_collectives_of_short_integers() -> None:
    first, second = fork_ranks(2, _short)
    assert first == [[3, -600], [1, -300], [1, -300, 2, -300], [3], [1, 2]]
    assert second == [[3, -600], [1, -300], [1, -300, 2, -300], [-600], [-300, -300]]
