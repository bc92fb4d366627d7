"""Collectives over groups of mesh axes: one protocol, and torch.distributed behind it.

Every collective is launched at once and returns a `Work`; its tensors belong to it until `wait`.
Tensors are contiguous. A stacked tensor `[p, ...]` has one row per member, in the order of the
group (first axis most significant), which need not be the order of global ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parloom.errors import LaunchError, VerifyError
from parloom.runtime.mesh import Mesh
from parloom.runtime.process_groups import ProcessGroups, default_timeout, device_types
from parloom.runtime.work import DONE, Awaited, Then, Waiting, Work

# All-reduces of at most so many bytes go by one exchange where gloo's ring would take 2 (p - 1)
# rounds: 3 to 6 against 11 to 14 ms among four ranks of 0.25 core over 100 Mbit/s, 2 against 4 to 7
# ms between two, most of it their processors' (64 B to 16 KiB, torch 2.13).
EXCHANGED_BYTES = 1 << 14
# Neither gloo nor NCCL has collectives of these (torch 2.13): they go as int32.
UNKNOWN = frozenset({torch.int16})


class Group(Protocol):
    """The ranks that differ along a tuple of mesh axes only; this rank is member `index`."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Reduce `tensor` in place with `sum`, `max` or `min`."""
        ...

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output` [p, ...] with every member's `tensor` [...]."""
        ...

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output` [...] with the sum over members of row `index` of `tensor` [p, ...]."""
        ...

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: list[int] | None = None,
        rows: list[int] | None = None,
    ) -> Work:
        """Send `rows[i]` leading rows of `tensor` to member i; equal parts where not given."""
        ...

    def broadcast(self, tensor: Tensor) -> Work:
        """Overwrite `tensor` with that of member 0."""
        ...


class Comm(Protocol):
    """One rank's way to the others."""

    @property
    def rank(self) -> int: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def weights(self) -> "Comm":
        """The same ranks with groups of their own: no collective waits for those of the others."""
        ...

    def group(self, axes: tuple[str, ...]) -> Group:
        """The group of `axes`; every rank asks for new groups in the same order."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Send `tensor` to a rank, which receives from each sender in the order of sending; `tag`
        names it.
        """
        ...

    def receive(self, tensor: Tensor, sender: int, tag: int) -> Work:
        """Overwrite `tensor` with the next one that a rank sends, which has this tag."""
        ...

    def connect(self, ways: Iterable[tuple[int, int]], device: torch.device) -> None:
        """Prepare for what goes from one rank to another, for all (sender, receiver) of a run, in
        tensors on `device`; every rank names the same.
        """
        ...

    def stage(
        self,
        mesh: Mesh,
        ranks: tuple[int, ...],
        groups: tuple[tuple[str, ...], ...],
        weights: tuple[tuple[str, ...], ...],
    ) -> "Comm | None":
        """The way of `ranks`, in the order of `mesh`, to each other; None for a rank that is not
        one of them. Every rank asks for all stages, in one order.
        """
        ...


class SingleGroup:
    """A group of one rank: reductions are identities, exchanges are copies."""

    __slots__ = ()
    size = 1
    index = 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor.unsqueeze(0))
        return DONE

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor[0])
        return DONE

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: list[int] | None = None,
        rows: list[int] | None = None,
    ) -> Work:
        output.copy_(tensor)
        return DONE

    def broadcast(self, tensor: Tensor) -> Work:
        return DONE


class TimeGroup(SingleGroup):
    """Microbatches seen as a group: what is at hand is member `index`. Nothing is exchanged."""

    __slots__ = ("index", "size")

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index


@dataclass(frozen=True, slots=True)
class SingleComm:
    """The only rank of a program."""

    mesh: Mesh
    rank: int = 0

    @property
    def weights(self) -> "SingleComm":
        return self

    def group(self, axes: tuple[str, ...]) -> Group:
        return SingleGroup()

    def barrier(self) -> None:
        return None

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        raise VerifyError(f"the only rank sends to rank {to}")

    def receive(self, tensor: Tensor, sender: int, tag: int) -> Work:
        raise VerifyError(f"the only rank waits for rank {sender}")

    def connect(self, ways: Iterable[tuple[int, int]], device: torch.device) -> None:
        return None

    def stage(
        self,
        mesh: Mesh,
        ranks: tuple[int, ...],
        groups: tuple[tuple[str, ...], ...],
        weights: tuple[tuple[str, ...], ...],
    ) -> "SingleComm":
        return SingleComm(mesh)


class DistributedGroup:
    """A group on top of a torch.distributed process group.

    Process groups number their members by ascending global rank. Where the order of the axes is
    another one, `order[i]` is the process-group rank of member i and stacked tensors are permuted.
    """

    __slots__ = (
        *("_on_gloo", "_ops", "_waiting", "index", "members", "order", "process_group"),
        *("rank", "size"),
    )

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        rank: int,
        waiting: Waiting | None = None,
    ) -> None:
        self.process_group, self._waiting = process_group, waiting
        self.size = len(ranks)
        self.rank = rank
        self.index = ranks.index(rank)
        self.members = ranks
        ascending = sorted(ranks)
        order = [ascending.index(member) for member in ranks]
        self.order = None if order == list(range(self.size)) else order
        self._on_gloo = device_types("gloo", process_group)
        self._ops: dict[str, Any] = {
            "sum": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }

    @property
    def name(self) -> str:
        """The process group's name in torch's own registry."""
        name: str = self.process_group.group_name
        return name

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        if tensor.dtype in UNKNOWN:
            wide = tensor.int()
            return Then(self.all_reduce(wide, op), lambda: tensor.copy_(wide))
        # A ring of less than an element for each member leaves out rounds.
        small = tensor.numel() >= self.size and tensor.nbytes <= EXCHANGED_BYTES
        if small and tensor.is_cpu and "cpu" in self._on_gloo:
            return self._exchange(tensor, op)
        return self._started(
            dist.all_reduce(tensor, self._ops[op], group=self.process_group, async_op=True), tensor
        )

    def _exchange(self, tensor: Tensor, op: str) -> Work:
        """Every member sends its whole tensor to all others, and reduces in the same order."""
        rows = tensor.expand(self.size, *tensor.shape).contiguous()
        received = torch.empty_like(rows)

        def reduce() -> None:
            whole = received.sum(0, dtype=tensor.dtype) if op == "sum" else _extreme(received, op)
            tensor.copy_(whole)

        return Then(self._all_to_all(received, rows, None, None), reduce)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.dtype in UNKNOWN:
            return _widened(self.all_gather, output, tensor)
        if self.order is None:
            return self._all_gather(output, tensor)
        order, received = self.order, torch.empty_like(output)
        work = self._all_gather(received, tensor)
        return Then(work, lambda: output.copy_(received[order]))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        # Flat tensors: gloo concatenates along dim 0 and refuses a stacked output.
        return self._started(
            dist.all_gather_single(
                output.view(-1), tensor.view(-1), group=self.process_group, async_op=True
            ),
            tensor,
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.dtype in UNKNOWN:
            return _widened(self.reduce_scatter, output, tensor)
        rows = tensor if self.order is None else tensor[_inverse(self.order)]
        return self._started(
            dist.reduce_scatter_single(
                output.view(-1), rows.view(-1), group=self.process_group, async_op=True
            ),
            tensor,
        )

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: list[int] | None = None,
        rows: list[int] | None = None,
    ) -> Work:
        if tensor.dtype in UNKNOWN:
            return _widened(
                lambda to, of: self.all_to_all(to, of, output_rows, rows), output, tensor
            )
        if self.order is None:
            return self._all_to_all(output, tensor, output_rows, rows)
        incoming = output_rows or [output.shape[0] // self.size] * self.size
        outgoing = rows or [tensor.shape[0] // self.size] * self.size
        inverse = _inverse(self.order)
        pieces = torch.split(tensor, outgoing)
        received = torch.empty_like(output)
        work = self._all_to_all(
            received,
            torch.cat([pieces[member] for member in inverse]),
            [incoming[member] for member in inverse],
            [outgoing[member] for member in inverse],
        )
        arrived = torch.split(received, [incoming[member] for member in inverse])
        order = self.order
        return Then(work, lambda: torch.cat([arrived[rank] for rank in order], out=output))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int] | None, rows: list[int] | None
    ) -> Work:
        return self._started(
            dist.all_to_all_single(
                output, tensor, output_rows, rows, group=self.process_group, async_op=True
            ),
            tensor,
        )

    def broadcast(self, tensor: Tensor) -> Work:
        if tensor.dtype in UNKNOWN:
            wide = tensor.int()
            return Then(self.broadcast(wide), lambda: tensor.copy_(wide))
        return self._started(
            dist.broadcast(tensor, src=self.members[0], group=self.process_group, async_op=True),
            tensor,
        )

    def _started(self, work: dist.Work | None, tensor: Tensor) -> Work:
        if work is None:
            return DONE
        if self._waiting is None or tensor.device.type not in self._on_gloo:
            return work
        others = tuple(member for member in self.members if member != self.rank)
        return Awaited(work, others, self._waiting)


def _widened(run: Callable[[Tensor, Tensor], Work], output: Tensor, tensor: Tensor) -> Work:
    """A collective on wider numbers, of which `output` gets its own."""
    wide = torch.empty_like(output, dtype=torch.int32)
    return Then(run(wide, tensor.int()), lambda: output.copy_(wide))


class DistributedComm:
    """Process groups of torch.distributed, made for `groups` at once, for others when first asked.

    `timeout` is that of every group it makes; the default process group's if none is given. Those
    of `weights` are new ones: a process group runs its collectives one after the other, and a block
    that sends a few activations would wait for all weights that are gathered ahead of time.
    `ranks` are the ranks of the default process group that the mesh numbers: all of them, but for
    pipeline stages. Raises `LaunchError` when these are another number than `mesh` has. `tell` is
    given the ranks that this one waits for, and none when they have answered; gloo alone waits on
    the host.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: tuple[tuple[str, ...], ...] = (),
        timeout: timedelta | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        made: tuple[ProcessGroups, ProcessGroups] | None = None,
        tell: Callable[[tuple[int, ...]], None] = lambda ranks: None,
    ) -> None:
        self.mesh = mesh
        self._ranks = tuple(range(dist.get_world_size())) if ranks is None else ranks
        if len(self._ranks) != mesh.num_ranks:
            raise LaunchError(
                f"the program was made for {mesh.num_ranks} ranks, {dist.get_world_size()} were"
                " started; start as many ranks as the plan has devices"
            )
        self.rank = self._ranks.index(dist.get_rank())
        if made is None:
            timeout = timeout or default_timeout()
            world = {tuple(range(dist.get_world_size())): dist.group.WORLD}
            made = ProcessGroups(timeout, world), ProcessGroups(timeout, {})
        self._made, self._tell = made, tell
        self._waiting = Waiting(dist.get_rank(), self.timeout, tell)
        self._on_gloo = device_types("gloo")
        self._groups: dict[tuple[str, ...], Group] = {}
        self._weights: DistributedComm | None = None
        self._ways: dict[tuple[int, int], Any] = {}
        for axes in groups:
            self.group(axes)

    @property
    def timeout(self) -> timedelta:
        return self._made[0].timeout

    @property
    def weights(self) -> "DistributedComm":
        if self._weights is None:
            own = self._made[1]
            self._weights = DistributedComm(
                self.mesh, ranks=self._ranks, made=(own, own), tell=self._tell
            )
            self._weights._weights = self._weights
        return self._weights

    def group(self, axes: tuple[str, ...]) -> Group:
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = self._make(axes)
        return group

    def _make(self, axes: tuple[str, ...]) -> Group:
        if len(self._ranks) == dist.get_world_size():
            _make_all(self._made[0], self.mesh, self._ranks, axes)
        ranks = _members(self.mesh, self._ranks, axes, self.rank)
        if len(ranks) == 1:
            return SingleGroup()
        if not self._made[0].has(ranks):
            raise VerifyError(f"no group over {axes} was made for this stage when it began")
        made = self._made[0].make(ranks)
        return DistributedGroup(made, ranks, self._ranks[self.rank], self._waiting)

    def barrier(self) -> None:
        dist.barrier()

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        way = self._ways.get((self._ranks[self.rank], to))
        return self._started(dist.isend(tensor, to, group=way, tag=tag), tensor, to)

    def receive(self, tensor: Tensor, sender: int, tag: int) -> Work:
        way = self._ways.get((sender, self._ranks[self.rank]))
        return self._started(dist.irecv(tensor, sender, group=way, tag=tag), tensor, sender)

    def _started(self, work: dist.Work | None, tensor: Tensor, other: int) -> Work:
        assert work is not None
        waits = tensor.device.type in self._on_gloo
        return Awaited(work, (other,), self._waiting) if waits else work

    def connect(self, ways: Iterable[tuple[int, int]], device: torch.device) -> None:
        if device.type not in device_types("nccl"):
            return
        # What two ranks send each other is one queue in NCCL: a receive that waits for the other
        # one would hold up what the other one waits for.
        mine = self._ranks[self.rank]
        for way in sorted(set(ways) - self._ways.keys()):
            if way[0] == way[1]:
                continue
            self._ways[way] = dist.new_group(sorted(way), timeout=self.timeout, backend="nccl")
            # The first message of a group waits on the host for the other rank: here, in one order
            # for all, and not where each waits for what the other sends.
            if mine == way[0]:
                self.send(torch.zeros(1, device=device), way[1], 0).wait()
            elif mine == way[1]:
                self.receive(torch.zeros(1, device=device), way[0], 0).wait()

    def stage(
        self,
        mesh: Mesh,
        ranks: tuple[int, ...],
        groups: tuple[tuple[str, ...], ...],
        weights: tuple[tuple[str, ...], ...],
    ) -> "DistributedComm | None":
        for made, wanted in zip(self._made, (groups, weights), strict=True):
            for axes in wanted:
                _make_all(made, mesh, ranks, axes)
        if self._ranks[self.rank] not in ranks:
            return None
        return DistributedComm(mesh, ranks=ranks, made=self._made, tell=self._tell)


def _members(
    mesh: Mesh, ranks: tuple[int, ...], axes: tuple[str, ...], rank: int
) -> tuple[int, ...]:
    """The ranks, of the default process group, that differ from a rank of the mesh along `axes`."""
    return tuple(ranks[member] for member in mesh.group(axes, rank))


def _make_all(
    made: ProcessGroups, mesh: Mesh, ranks: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    """Make the groups of all ranks of a mesh along `axes`."""
    if mesh.size(axes) > 1:
        for rank in range(mesh.num_ranks):
            made.make(_members(mesh, ranks, axes, rank))


def _extreme(stacked: Tensor, op: str) -> Tensor:
    """The largest or smallest of the rows."""
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _inverse(order: list[int]) -> list[int]:
    inverse = [0] * len(order)
    for member, rank in enumerate(order):
        inverse[rank] = member
    return inverse
