"""Gradients of weights that are autograd leaves: buckets that overlap with the backward pass.

Gradients collect over the microbatches in the reduce dtype. One that needs no reduction stays where
autograd left it. A *whole* bucket all-reduces the gradients of home shards once a step, in the last
microbatch; its flat memory is where they accumulate. A *chunked* bucket leaves only the owned
chunks (`runtime.chunked`): where gradients are stored in chunks it is scattered in every
microbatch, otherwise whole gradients collect and are scattered in the last.

Buckets are built after the first backward pass, in the order in which gradients became ready (rank
0's order, told to all), and are launched in that order. So parameters that no loss reaches are in
no bucket, and all ranks launch the same collectives in the same order.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from parloom.errors import VerifyError
from parloom.runtime.chunked import ChunkedReduction, Path, Traffic
from parloom.runtime.chunks import Pool, Section, layout
from parloom.runtime.comm import Comm
from parloom.runtime.memory import apart, memory_of
from parloom.runtime.quantized import over
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.runtime.work import Work

FIRST_BUCKET_BYTES = 1 << 20  # as torch's DDP: a small one first, to start early


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Leaf:
    """A leaf weight, and the memory where its gradient collects over the microbatches.

    `place` is in the reduce dtype; where that is the weight's own, it is also `weight.grad`. With
    `each` the gradient leaves in every microbatch.
    """

    held: ShardedParameter
    weight: Tensor
    dtype: torch.dtype
    path: Path
    each: bool
    bucket: "_Bucket | None" = None
    place: Tensor | None = None
    filled: bool = False

    @property
    def chunked(self) -> bool:
        return self.held.parts > 1

    @property
    def num_bytes(self) -> int:
        return prod(self.held.home) * self.dtype.itemsize

    def collect(self, taken: "dict[int, list[_Leaf]]") -> None:
        """Bring the gradient that autograd left in `weight.grad` to its place; `taken` says which
        leaves collect in a memory.
        """
        gradient = self.weight.grad
        if gradient is None or gradient is self.place:
            return
        if self.place is None:
            # Of one sum autograd gives both addends the same gradient, in one memory.
            others = taken.get(memory_of(gradient), ())
            (own,) = apart([gradient], (other.place for other in others))
            assert own is not None, "there is a gradient"
            gradient = own
            self.place = gradient.to(self.dtype)
            taken.setdefault(memory_of(self.place), []).append(self)
        elif self.filled:
            self.place.add_(gradient)
        else:
            self.place.copy_(gradient)
        self.filled = True
        self.weight.grad = self.place if self.dtype == gradient.dtype else None

    def leave(self) -> Tensor | None:
        """The gradient of all microbatches since it left last."""
        gradient = self.place if self.filled else self.weight.grad
        self.weight.grad = self.place = None
        self.filled = False
        return gradient

    def move(self, place: Tensor) -> None:
        """Collect in `place` from now on."""
        if self.place is not None:
            place.copy_(self.place)
        if self.weight.grad is not None:
            self.weight.grad = place
        self.place = place


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that travel together."""

    leaves: list[_Leaf]
    flat: Tensor | None
    chunked: ChunkedReduction | None
    missing: int = 0
    work: Work | None = None


class LeafGradients:
    """Reduces the gradients of all trainable leaf weights of a store."""

    def __init__(
        self,
        helds: Sequence[ShardedParameter],
        paths: Mapping[str, Path],
        comm: Comm,
        pool: Pool,
        traffic: Traffic,
        dtype: str | None,
    ) -> None:
        self._comm = comm
        self._pool = pool
        self._traffic = traffic
        self._leaves: list[_Leaf] = []
        self._local: list[_Leaf] = []
        self._arrived: list[int] = []
        self._taken: dict[int, list[_Leaf]] = {}
        self._buckets: list[_Bucket] | None = None
        self._next = self._passes = 0
        self._last = True
        for held in helds:
            if held.weight is None or not held.spec.trainable:
                continue
            wanted: torch.dtype = getattr(torch, dtype or held.spec.dtype)
            each = comm.mesh.size(held.spec.storage.gradient) > 1
            leaf = _Leaf(held, held.weight, wanted, paths[held.name], each)
            local = not leaf.path and not leaf.chunked
            leaves = self._local if local else self._leaves
            # Python's collector sees no cycles through these hooks.
            index = None if local else len(leaves)
            hook = partial(_accumulated, weakref.ref(self), weakref.ref(leaf), index)
            held.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            leaves.append(leaf)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._passes = 0
        self._taken.clear()
        for leaf in self._leaves:
            leaf.weight.grad = None
            leaf.filled = False
        for leaf in self._local:
            leaf.weight.grad = leaf.place = None
            leaf.filled = False

    def begin_backward(self, last: bool) -> None:
        """`last`: no microbatch of this step comes after."""
        self._last = last
        self._next = 0
        self._passes += 1
        for bucket in self._buckets or ():
            bucket.missing = len(bucket.leaves)

    def end_backward(self) -> None:
        """Check that every bucket was launched; after the first backward pass, build them.

        Raises `VerifyError` when a gradient is missing that was there in the first step.
        """
        if self._buckets is None:
            self._buckets = self._build()
            self._launch()
        if self._next < len(self._buckets):
            names = [leaf.held.name for leaf in self._buckets[self._next].leaves]
            raise VerifyError(f"a gradient did not arrive that did before, one of {names}")

    def finish(self) -> None:
        """Wait, and give every owner its whole gradient."""
        for bucket in self._buckets or ():
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        for leaf in self._leaves:
            if leaf.filled and leaf.place is not None:
                leaf.held.owned.grad = leaf.place.to(leaf.held.owned.dtype)
        for leaf in self._local:
            if leaf.place is not None:
                leaf.held.owned.grad = leaf.place.to(leaf.held.owned.dtype)
                leaf.place = None
            if leaf.weight is not leaf.held.owned:
                leaf.weight.grad = None

    def collect(self, leaf: _Leaf) -> None:
        """Autograd has left a gradient that is not reduced."""
        leaf.collect(self._taken)

    @property
    def collected(self) -> Iterator[Tensor]:
        """The memories that later passes add gradients to."""
        for leaf in (*self._leaves, *self._local):
            if leaf.place is not None:
                yield leaf.place

    def ready(self, index: int, leaf: _Leaf) -> None:
        """Autograd has left a gradient that is to be reduced."""
        if not leaf.chunked or not (leaf.each or (self._last and not leaf.filled)):
            leaf.collect(self._taken)
        if self._buckets is None:
            if index not in self._arrived:
                self._arrived.append(index)
            return
        if leaf.bucket is None:
            raise VerifyError(f"{leaf.held.name} got a gradient that the first step did not give")
        leaf.bucket.missing -= 1
        self._launch()

    def _launch(self) -> None:
        """Launch the buckets that are complete, in order."""
        buckets = self._buckets or []
        while self._next < len(buckets) and buckets[self._next].missing == 0:
            bucket = buckets[self._next]
            self._next += 1
            if bucket.chunked is not None:
                if self._last or bucket.chunked.each is not None:
                    gradients = [leaf.leave() for leaf in bucket.leaves]
                    collected = self._passes > 1 and bucket.chunked.each is None
                    self._traffic.launch(bucket.chunked, gradients, collected=collected)
            elif bucket.flat is not None and self._last:
                (node,) = bucket.leaves[0].path
                for leaf in bucket.leaves:
                    leaf.held.tell(leaf.place)
                group = over(self._comm.weights.group(node.axes), node.dtype)
                bucket.work = group.all_reduce(bucket.flat)

    def _build(self) -> list[_Bucket]:
        order = [self._leaves[index] for index in self._agreed_order()]
        buckets: list[_Bucket] = []
        for leaves in _grouped(order):
            helds, dtype = [leaf.held for leaf in leaves], leaves[0].dtype
            if leaves[0].chunked:
                path = leaves[0].path
                chunked = ChunkedReduction(helds, path, self._comm, self._pool, dtype)
                bucket = _Bucket(leaves, None, chunked)
            else:
                bucket = _Bucket(leaves, _flatten(leaves), None)
            for leaf in leaves:
                leaf.bucket = bucket
            buckets.append(bucket)
        return buckets

    def _agreed_order(self) -> list[int]:
        """Rank 0's order of arrival; -1 fills up for leaves that got no gradient."""
        if not self._leaves:
            return []
        unreached = len(self._leaves) - len(self._arrived)
        order = torch.tensor(
            [*self._arrived, *[-1] * unreached], dtype=torch.int64, device=self._pool.device
        )
        self._comm.group(self._comm.mesh.space).broadcast(order).wait()
        return [index for index in order.tolist() if index >= 0]


def _accumulated(
    gradients: "weakref.ref[LeafGradients]",
    leaf: "weakref.ref[_Leaf]",
    index: int | None,
    weight: Tensor,
) -> None:
    """Autograd has left a gradient in `weight.grad`; `index`: that of one that is to be reduced."""
    owner, own = gradients(), leaf()
    assert owner is not None, "a backward pass is the trainer's"
    assert own is not None, "its gradients have their leaves"
    if index is None:
        owner.collect(own)
    else:
        owner.ready(index, own)


def _flatten(leaves: list[_Leaf]) -> Tensor:
    """Flat memory in which the leaves collect their gradients from now on."""
    align = leaves[0].path[0].align
    homes = (Section(leaf.held.home or (1,), 0, 1, (*leaf.held.home, 1)[0]) for leaf in leaves)
    sections, total = layout(homes, align)
    flat = leaves[0].weight.new_zeros(total, dtype=leaves[0].dtype)
    for leaf, own in zip(leaves, sections, strict=True):
        leaf.move(own.part(flat, 0).view(leaf.held.home))
    return flat


def _grouped(order: Sequence[_Leaf]) -> list[list[_Leaf]]:
    """Leaves that can share a collective, cut where a bucket is full."""
    full: list[list[_Leaf]] = []
    filling: dict[object, list[_Leaf]] = {}
    begun: set[object] = set()
    for leaf in order:
        kind = _kind(leaf)
        bucket = filling.setdefault(kind, [])
        bucket.append(leaf)
        limit = leaf.path[0].bucket_bytes if leaf.path else 0
        if kind not in begun:
            limit = min(limit, FIRST_BUCKET_BYTES)
        if sum(member.num_bytes for member in bucket) >= limit:
            begun.add(kind)
            full.append(filling.pop(kind))
    return [*full, *filling.values()]


def _kind(leaf: _Leaf) -> object:
    """What gradients of one collective have in common."""
    storage = leaf.held.spec.storage
    return leaf.path, storage.gradient, storage.optimizer, leaf.dtype
