"""Collectives and messages under way, and ranks that do not answer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from parloom.errors import SilentRankError

# What gloo says where it has waited long enough: of messages, and of collectives.
TIMED_OUT = re.compile(r"[Tt]imed out")


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the results may be read on the current stream."""
        ...


class Done:
    """What was over when it was launched."""

    __slots__ = ()

    def wait(self) -> None:
        return None


DONE = Done()


@dataclass(frozen=True, slots=True)
class Then:
    """A collective followed by a local copy."""

    work: Work
    copy: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.copy()


class Waiting:
    """How long a rank waits for others, and who is told whom it waits for.

    `tell` is given the ranks that a wait needs, and none once they have answered.
    """

    __slots__ = ("_tell", "rank", "timeout")

    def __init__(
        self, rank: int, timeout: timedelta, tell: Callable[[tuple[int, ...]], None]
    ) -> None:
        self.rank, self.timeout, self._tell = rank, timeout, tell

    def wait(self, work: dist.Work, ranks: tuple[int, ...]) -> None:
        """Raise `SilentRankError` where one of `ranks` has not done its part in time."""
        self._tell(ranks)
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            if TIMED_OUT.search(str(error)) is None:
                raise
            raise SilentRankError(ranks, self.rank, self.timeout.total_seconds()) from error
        self._tell(())


@dataclass(frozen=True, slots=True)
class Awaited:
    """What other ranks have a part in, on a back end that waits on the host."""

    work: dist.Work
    ranks: tuple[int, ...]
    waiting: Waiting

    def wait(self) -> None:
        self.waiting.wait(self.work, self.ranks)
