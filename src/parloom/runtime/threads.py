"""Many ranks as threads of one process: the same collectives in microseconds, for tests.

A collective is a rendezvous: every member lays down its tensor, all wait, each reads what it
needs, all wait again. Autograd runs a CPU backward pass in the thread that called it, so backward
collectives meet in the same way.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from parloom.runtime.comm import Comm, Group, SingleGroup
from parloom.runtime.mesh import Mesh
from parloom.runtime.work import DONE, Work

T = TypeVar("T")

_REDUCE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@dataclass(slots=True)
class _Table:
    """Where the members of one group meet."""

    barrier: threading.Barrier
    slots: list[list[Tensor]]


@dataclass(slots=True)
class ThreadWorld:
    """What the threads of one run share."""

    mesh: Mesh
    timeout_s: float = 60.0
    tables: dict[tuple[int, ...], _Table] = field(default_factory=dict)
    letters: dict[tuple[int, int], "queue.Queue[tuple[int, Tensor]]"] = field(
        default_factory=lambda: defaultdict(queue.Queue)
    )
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: bool = False

    def table(self, ranks: tuple[int, ...]) -> _Table:
        with self.lock:
            if ranks not in self.tables:
                size = len(ranks)
                barrier = threading.Barrier(size, timeout=self.timeout_s)
                self.tables[ranks] = _Table(barrier, [[]] * size)
                if self.failed:
                    barrier.abort()
            return self.tables[ranks]

    def abort(self) -> None:
        """Wake every rank that waits for others; all later rendezvous fail at once."""
        with self.lock:
            self.failed = True
            for table in self.tables.values():
                table.barrier.abort()


class ThreadGroup:
    """A group of threads."""

    def __init__(self, table: _Table, size: int, index: int) -> None:
        self._table = table
        self.size = size
        self.index = index

    def _exchange(self, pieces: list[Tensor], read: Callable[[list[list[Tensor]]], T]) -> T:
        """Lay down `pieces`; `read` what every member laid down, in the order of the group."""
        self._table.slots[self.index] = [piece.detach() for piece in pieces]
        self._table.barrier.wait()
        result = read(self._table.slots)
        self._table.barrier.wait()
        return result

    def _column(self, tensor: Tensor, part: int | None, op: str = "sum") -> Tensor:
        """Every member's tensor (or its row `part`), reduced; all must agree on the shape."""

        def read(slots: list[list[Tensor]]) -> Tensor:
            tensors = [slot[0] for slot in slots]
            if len({(t.dtype, t.shape) for t in tensors}) > 1:
                raise ValueError(f"ranks disagree: {[(t.dtype, tuple(t.shape)) for t in tensors]}")
            stacked = torch.stack([t if part is None else t[part] for t in tensors])
            return stacked if op == "none" else _REDUCE[op](stacked, 0)

        return self._exchange([tensor], read)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        tensor.detach().copy_(self._column(tensor, None, op))
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(self._column(tensor, None, "none"))
        return DONE

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(self._column(tensor, self.index))
        return DONE

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: list[int] | None = None,
        rows: list[int] | None = None,
    ) -> Work:
        sent = rows or [tensor.shape[0] // self.size] * self.size
        output.copy_(
            self._exchange(
                list(torch.split(tensor, sent)),
                lambda slots: torch.cat([s[self.index] for s in slots]),
            )
        )
        return DONE

    def broadcast(self, tensor: Tensor) -> Work:
        tensor.detach().copy_(self._exchange([tensor], lambda slots: slots[0][0].clone()))
        return DONE


@dataclass(slots=True, eq=False)
class _Arriving:
    """A tensor that another thread sends. Letters go to those who wait in the order in which they
    began to, whoever looks first; a letter with another tag than was asked for is an error.
    """

    tensor: Tensor
    tag: int
    way: tuple[int, int]
    world: ThreadWorld
    waiting: "deque[_Arriving]"
    there: bool = False

    def wait(self) -> None:
        end = time.monotonic() + self.world.timeout_s
        while not self.there:
            try:
                letter = self.world.letters[self.way].get(timeout=0.05)
            except queue.Empty:
                if self.world.failed or time.monotonic() > end:
                    raise threading.BrokenBarrierError from None
                continue
            self.waiting.popleft().take(*letter)

    def take(self, tag: int, letter: Tensor) -> None:
        wanted = self.tag, self.tensor.shape, self.tensor.dtype
        if (tag, letter.shape, letter.dtype) != wanted:
            found = f"{tag}: {letter.dtype}{tuple(letter.shape)}"
            raise ValueError(f"rank {self.way[0]} sent {found}, not {wanted}")
        self.tensor.copy_(letter)
        self.there = True


class ThreadComm:
    """One thread's way to the others; `ranks` are the world's that the mesh numbers."""

    def __init__(
        self,
        world: ThreadWorld,
        rank: int,
        mesh: Mesh | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.mesh = mesh or world.mesh
        self._ranks = tuple(range(self.mesh.num_ranks)) if ranks is None else ranks
        self.rank = self._ranks.index(rank)
        self._world = world
        self._waiting: dict[tuple[int, int], deque[_Arriving]] = {}
        self._groups: dict[tuple[str, ...], Group] = {}

    @property
    def weights(self) -> "ThreadComm":
        """The same: a collective of threads is over when it was launched."""
        return self

    def group(self, axes: tuple[str, ...]) -> Group:
        group = self._groups.get(axes)
        if group is None:
            ranks = tuple(self._ranks[member] for member in self.mesh.group(axes, self.rank))
            if len(ranks) == 1:
                group = SingleGroup()
            else:
                table = self._world.table(ranks)
                group = ThreadGroup(table, len(ranks), ranks.index(self._ranks[self.rank]))
            self._groups[axes] = group
        return group

    def barrier(self) -> None:
        if len(self._ranks) > 1:
            self._world.table(self._ranks).barrier.wait()

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        self._world.letters[self._ranks[self.rank], to].put((tag, tensor.detach().clone()))
        return DONE

    def receive(self, tensor: Tensor, sender: int, tag: int) -> Work:
        way = sender, self._ranks[self.rank]
        waiting = self._waiting.setdefault(way, deque())
        waiting.append(_Arriving(tensor, tag, way, self._world, waiting))
        return waiting[-1]

    def connect(self, ways: Iterable[tuple[int, int]], device: torch.device) -> None:
        with self._world.lock:
            for way in ways:
                self._world.letters[way]

    def stage(
        self,
        mesh: Mesh,
        ranks: tuple[int, ...],
        groups: tuple[tuple[str, ...], ...],
        weights: tuple[tuple[str, ...], ...],
    ) -> "ThreadComm | None":
        rank = self._ranks[self.rank]
        return ThreadComm(self._world, rank, mesh, ranks) if rank in ranks else None


def run_threads(mesh: Mesh, function: Callable[[Comm], T], timeout_s: float = 60.0) -> list[T]:
    """Run `function` on every rank of `mesh`, one thread each; results in rank order.

    The first exception of a rank ends all of them and is raised here, with its rank as a note.
    """
    world = ThreadWorld(mesh, timeout_s)
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadComm(world, rank))
        except BaseException as error:  # carried to the caller below: nothing is swallowed
            with world.lock:
                failures.append((rank, error))
            world.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        # A broken barrier is what the others see of the first failure.
        causes = [f for f in failures if not isinstance(f[1], threading.BrokenBarrierError)]
        rank, error = (causes or failures)[0]
        error.add_note(f"on rank {rank} of {mesh.num_ranks}")
        raise error
    return [results[rank] for rank in range(mesh.num_ranks)]
