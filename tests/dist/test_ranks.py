"""Forked ranks: results, failures with their rank and cause, deaths, timeouts."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parloom import runtime as rt
from parloom.errors import LaunchError
from parloom.execute import ranks
from parloom.execute.ranks import RankError, fork_ranks
from parloom.runtime.comm import EXCHANGED_BYTES, DistributedGroup
from tests.dist import mlp


def _sum_of_ranks(offset: int) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def test_results_come_in_rank_order() -> None:
    assert [int(t) for t in fork_ranks(3, _sum_of_ranks, 10)] == [33, 33, 33]


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing as rank one")
    dist.barrier()


def test_a_failing_rank_is_named_and_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 3 failed: ValueError: no such thing") as caught:
        fork_ranks(3, _one_raises)
    assert caught.value.rank == 1
    assert "_one_raises" in caught.value.traceback_text
    assert time.monotonic() - started < 20


def _one_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(
        RankError, match=r"rank 0 of 2 failed: it ended .* \(exit code 3\)"
    ) as caught:
        fork_ranks(2, _one_dies)
    assert not caught.value.killed


def _one_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_told_apart() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: .* \(signal SIGKILL\)") as caught:
        fork_ranks(2, _one_is_killed)
    assert caught.value.killed


def test_long_runs_tell_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "EVERY_S", 0.0)
    said: list[str] = []
    fork_ranks(2, _sum_of_ranks, 10, say=said.append)
    assert any(line.endswith(" 0 of 2 ranks are done") for line in said)


def _one_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_slow_rank_times_out() -> None:
    with pytest.raises(LaunchError, match=r"ranks \[1\] of 2 gave no result within 2 s"):
        fork_ranks(2, _one_sleeps, timeout_s=2.0)


LAYOUTS = [
    mlp.Layout(("x", "y")),
    mlp.Layout(("y", "x"), storage="zero3"),
    mlp.Layout(("x",), ("y",), "zero2"),
    mlp.Layout(("y", "x"), storage="zero1"),
]


def _train() -> list[mlp.Run]:
    runs = []
    for layout in LAYOUTS:
        made = mlp.program(mlp.with_time(rt.grid({"x": 2, "y": 2}), 2), layout)
        comm = rt.DistributedComm(made.mesh, rt.required_groups(made))
        runs.append(mlp.parallel(comm, made, mlp.adamw, clip_norm=0.5))
    return runs


def test_training_over_gloo_equals_one_device() -> None:
    expected = mlp.single_device(mlp.adamw, clip_norm=0.5)
    for runs in fork_ranks(4, _train):
        assert max(mlp.difference(run, expected) for run in runs) < 1e-9


def _exchange() -> bool:
    """Every collective of a group gives over gloo what it gives between threads."""
    mesh = rt.grid({"x": 2, "y": 2})
    comm = rt.DistributedComm(mesh)
    for axes in (("x", "y"), ("y", "x"), ("y",), ("x",)):
        group = comm.group(axes)
        ranks = mesh.group(axes, comm.rank)
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
            mine = torch.full((2, 3), comm.rank).to(dtype)
            stacked = torch.empty(group.size, 2, 3, dtype=dtype)
            group.all_gather(stacked, mine).wait()
            assert torch.equal(
                stacked, torch.stack([torch.full((2, 3), r) for r in ranks]).to(dtype)
            )
            sent = torch.stack([torch.full((2,), 10 * comm.rank + r) for r in ranks]).to(dtype)
            received = torch.empty_like(sent)
            group.all_to_all(received, sent).wait()
            expected = torch.stack([torch.full((2,), 10 * r + comm.rank) for r in ranks])
            assert torch.equal(received, expected.to(dtype))
        scattered = torch.empty(2)
        rows = torch.tensor(ranks, dtype=torch.float32).unsqueeze(1).repeat(1, 2)
        group.reduce_scatter(scattered, rows + comm.rank).wait()
        assert torch.equal(scattered, torch.full((2,), float(group.size * comm.rank + sum(ranks))))
        counts = [1 + r % 2 for r in ranks]
        out = torch.empty(group.size * (1 + comm.rank % 2), dtype=torch.int64)
        sent = torch.cat([torch.full((n,), comm.rank) for n in counts])
        group.all_to_all(out, sent, [1 + comm.rank % 2] * group.size, counts).wait()
        assert out.tolist() == [r for r in ranks for _ in range(1 + comm.rank % 2)]
        # Most members exchange nothing.
        window = rt.halo_exchange(
            torch.full((2,), group.index + 1), rt.Context(comm), axes, 0, 1, 2
        )
        padded = [0, *[i + 1 for i in range(group.size) for _ in range(2)], 0, 0]
        assert window.tolist() == padded[2 * group.index : 2 * group.index + 5]
        told = torch.tensor([comm.rank])
        group.broadcast(told).wait()
        assert told.item() == ranks[0]
    return True


def test_collectives_over_gloo() -> None:
    assert all(fork_ranks(4, _exchange))


def _all_reduced() -> list[tuple[str, tuple[str, ...], list[float], int]]:
    """All-reduces of one number and of more than is exchanged; how many rings there were."""
    comm = rt.DistributedComm(rt.grid({"x": 2, "y": 2}))
    rings: list[int] = []
    ring = dist.all_reduce

    def counted(*args: Any, **named: Any) -> Any:
        rings.append(1)
        return ring(*args, **named)

    dist.all_reduce = counted  # in this forked rank alone
    found: list[tuple[str, tuple[str, ...], list[float], int]] = []
    for axes in (("x", "y"), ("y", "x"), ("x",)):
        group = comm.group(axes)
        ranks = comm.mesh.group(axes, comm.rank)
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            for op, reduce in (("sum", sum), ("max", max), ("min", min)):
                for shape in ((), (3, 2), (2,), (EXCHANGED_BYTES,)):
                    tensor = torch.full(shape, 1 + comm.rank, dtype=dtype)
                    group.all_reduce(tensor, op).wait()
                    expected = reduce(1 + r for r in ranks)
                    assert torch.equal(tensor, torch.full(shape, expected, dtype=dtype))
        rings.clear()
        thirds = torch.full((4,), 1 / (3 + comm.rank))
        group.all_reduce(thirds).wait()
        found.append(("exchange", axes, thirds.tolist(), len(rings)))
        group.all_reduce(torch.zeros(EXCHANGED_BYTES)).wait()
        found.append(("ring", axes, [], len(rings)))
    return found


def test_small_all_reduces_are_one_exchange_and_give_all_ranks_the_same_bits() -> None:
    on_ranks = fork_ranks(4, _all_reduced)
    for how, axes, bits, rings in (row for found in on_ranks for row in found):
        assert rings == (how == "ring"), axes
        if len(axes) == 2 and bits:
            same = {b[0] for found in on_ranks for h, a, b, _ in found if (h, a) == (how, axes)}
            assert len(same) == 1


def _crossed() -> list[list[float]]:
    """Collectives on weights and on activations over the same axis: one rank waits for activations
    before it launches what it sends of weights, the other has launched that before.
    """
    comm = rt.DistributedComm(rt.grid({"x": 2}))
    activations, weights = comm.group(("x",)), comm.weights.group(("x",))
    whole = torch.empty(2, 3)
    mine, sent = torch.full((3,), 1.0 + comm.rank), torch.full((4,), 10.0 * (1 + comm.rank))
    if comm.rank == 0:
        gather = weights.all_gather(whole, mine)
        activations.all_gather(both := torch.empty(2, 4), sent).wait()
    else:
        activations.all_gather(both := torch.empty(2, 4), sent).wait()
        gather = weights.all_gather(whole, mine)
    gather.wait()
    return [whole[:, 0].tolist(), both[:, 0].tolist()]


def test_collectives_on_activations_wait_for_none_on_weights() -> None:
    assert fork_ranks(2, _crossed) == [[[1.0, 2.0], [10.0, 20.0]]] * 2


def _timeouts() -> list[timedelta]:
    """Of the default group, of a group of it, and of one with a timeout of its own."""
    mesh = rt.grid({"x": 2, "y": 2})
    found = []
    for comm in (rt.DistributedComm(mesh), rt.DistributedComm(mesh, timeout=timedelta(seconds=7))):
        for axes in (("x", "y"), ("y",)):
            group = comm.group(axes)
            assert isinstance(group, DistributedGroup)
            backend = group.process_group._get_backend(torch.device("cpu"))
            found.append(backend.options._timeout)
    return found


def test_groups_have_the_timeout_of_the_default_group() -> None:
    for default, group, _, own in fork_ranks(4, _timeouts):
        assert default == group
        assert default < timedelta(minutes=30)  # the backend's default
        assert own == timedelta(seconds=7)
