"""Which rank keeps the others waiting, from what all ranks left."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parloom.execute.watch import Seen

# What torch says where it has waited long enough outside of the runtime: in checkpoints' groups and
# where ranks meet.
TIMED_OUT = re.compile(r"gloo.*Timed out|^RuntimeError: Operation timed out|^Dist(Store|Network)Er")


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waited for `ranks` as long as it may, until `time_s`; `ranks` are empty where it
    is not known for whom.
    """

    ranks: tuple[int, ...]
    timeout_s: float
    time_s: float


def silent_ranks(waits: Mapping[int, Wait], seen: Sequence[Seen]) -> tuple[tuple[int, ...], int]:
    """The rank that kept the others waiting, and one that waited for it.

    That is the rank whose process has not run for the longest, if there is one; otherwise a rank
    that waits for nobody, among those that the first wait led to. Where it is not known whom that
    wait was for, all that may be: those that did not give up.
    """
    first = min(waits, key=lambda rank: waits[rank].time_s)
    last_s = max(own.alive_s for own in seen)
    others = [rank for rank in range(len(seen)) if rank not in waits]
    stopped = [
        rank for rank in others if 0 < seen[rank].alive_s < last_s - waits[first].timeout_s / 2
    ]
    waited = [
        waits[rank].ranks if rank in waits else own.waits_for for rank, own in enumerate(seen)
    ]
    if stopped:
        blamed = min(stopped, key=lambda rank: seen[rank].alive_s)
    elif waited[first]:
        blamed = _end_of_waits(first, waited)
    else:
        return tuple(others) or (first,), first
    by = [rank for rank in (first, *waits, *others) if blamed in waited[rank] and rank != blamed]
    return (blamed,), (by or [first])[0]


def _end_of_waits(first: int, waited: Sequence[tuple[int, ...]]) -> int:
    """A rank that does not wait, reached from `first` by waits; the first one's own if none is."""
    reached, queue = {first}, [first]
    for rank in queue:
        for other in waited[rank]:
            if not waited[other]:
                return other
            if other not in reached:
                reached.add(other)
                queue.append(other)
    return waited[first][0]
