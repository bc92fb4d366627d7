"""The process groups of torch.distributed that a run uses, and their back ends."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class ProcessGroups:
    """The process groups of torch.distributed for sets of ranks, each made once.

    Making one is collective over all ranks, members or not. `timeout` is that of all; `known` are
    groups that are there already.
    """

    def __init__(self, timeout: timedelta, known: Mapping[tuple[int, ...], Any]) -> None:
        self.timeout = timeout
        self._made = dict(known)

    def has(self, ranks: tuple[int, ...]) -> bool:
        """Whether the group of `ranks` is there."""
        return tuple(sorted(ranks)) in self._made

    def make(self, ranks: tuple[int, ...]) -> Any:
        """The group of `ranks`, whatever their order."""
        members = tuple(sorted(ranks))
        if members not in self._made:
            self._made[members] = dist.new_group(list(members), timeout=self.timeout)
        return self._made[members]


def device_types(backend: str, group: dist.ProcessGroup | None = None) -> frozenset[str]:
    """The types of the devices whose tensors a group, the default one if None, leaves to `backend`.

    `dist.get_backend` does not tell: of a group that a script made it may say "undefined", or
    "cpu:gloo,cuda:nccl".
    """
    entries = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return frozenset(device for device, name in entries if name == backend)


def default_timeout() -> timedelta:
    """The timeout of the default process group: the shortest of its backends'.

    `new_group` does not inherit it, and torch has no public way to ask for it.
    """
    group = dist.group.WORLD
    assert group is not None
    return min(group._get_backend(device).options._timeout for device in group._device_types)
