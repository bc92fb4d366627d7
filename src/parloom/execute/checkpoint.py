"""Checkpoints: saved under one plan, loaded under any other, through torch.distributed.checkpoint.

Every rank hands out the contiguous boxes of the tensors that it holds, in coordinates of the whole
tensor under the user's name; a checkpoint knows boxes only, never layouts, meshes or rank counts.
Loading intersects the boxes that a rank wants with those that are stored and reads the overlaps.

Ranks speak over a gloo group made for each save or load, so that an asynchronous save never shares
a group with training. An asynchronous save copies all values to host memory before it returns.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from parloom.errors import InputError, LaunchError, ParloomError, VerifyError
from parloom.execute.box_planner import Box, BoxLoadPlanner, BoxSavePlanner, Shard, by_name
from parloom.execute.manifest import (
    MANIFEST,
    REPLACED,
    TEMPORARY,
    Manifest,
    decode_manifest,
    decode_state,
    encode_state,
    read_manifest,
    resolve,
    stale_folders,
)
from parloom.execute.safetensors_storage import BoxReader, BoxWriter
from parloom.execute.watch import timeout
from parloom.runtime.process_groups import default_timeout

T = TypeVar("T")
Folder = str | os.PathLike[str]


class Checkpointed(Protocol):
    """What is saved and loaded: the runtime's trainer, on every rank."""

    def shards(self) -> Iterable[Shard]:
        """Weights, optimizer states and buffers; the tensors are live memory."""

    def extra_state(self) -> dict[str, Any]:
        """JSON values, equal on all ranks; `step` counts finished steps."""

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `extra_state` gave; makes room for the optimizer states among `shards`."""

    def refresh(self) -> None:
        """Bring up to date what follows from the shards; every rank calls it after a load."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where a run resumes: finished steps, and the hash of the plan that saved the checkpoint."""

    folder: Path
    step: int
    plan_hash: str


class Handle:
    """A save under way; every rank must `wait` before it destroys its process group."""

    def __init__(
        self, folder: Path, future: "Future[Metadata]", group: dist.ProcessGroup | None
    ) -> None:
        self.folder = folder
        self._future = future
        self._group = group

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Path:
        """The folder of the finished checkpoint.

        Raises:
            LaunchError: the folder cannot be written.
            TimeoutError: not finished within `timeout_s`; `wait` may be called again.
        """
        try:
            with _explained("save", self.folder):
                self._future.result(timeout_s)
        finally:
            if self._future.done():
                _destroy(self._group)
                self._group = None
        return self.folder


def save(
    trainer: Checkpointed, folder: Folder, *, asynchronous: bool = False, plan_hash: str = ""
) -> Handle:
    """Save a checkpoint as `folder`, in full or not at all; every rank calls it.

    An asynchronous save returns when all values are copied to host memory; training may go on and
    `Handle.wait` gives the folder. Without a process group it is synchronous.

    Raises:
        InputError: `folder` is something other than a checkpoint, or is not shared by all ranks.
        LaunchError: the folder cannot be written.
    """
    target = Path(folder).absolute()
    state = encode_state(trainer.extra_state())
    step = state.get("step")
    if not isinstance(step, int) or step < 0:
        raise VerifyError(f"the trainer's extra state has step {step!r}, not a count")
    writer = BoxWriter(target, step, state, plan_hash)
    return write(by_name(trainer.shards()), writer, target, asynchronous=asynchronous)


def write(
    shards: dict[str, Any], writer: BoxWriter, folder: Path, *, asynchronous: bool = False
) -> Handle:
    """Save the named shards through `writer`; see `save`."""
    group = _new_group()
    future: Future[Metadata]
    if asynchronous and group is not None:
        response = dcp_async_save(
            shards,
            storage_writer=writer,
            planner=BoxSavePlanner(),
            process_group=group,
            async_stager=_Snapshot(),
        )
        assert isinstance(response, Future)
        future = response
        future.add_done_callback(lambda done: writer.discard() if done.exception() else None)
        return Handle(folder, future, group)
    future = Future()
    try:
        with _explained("save", folder), _quiet_alone(group):
            metadata = dcp_save(
                shards, storage_writer=writer, planner=BoxSavePlanner(), process_group=group
            )
            future.set_result(metadata)
    finally:
        writer.discard()
        _destroy(group)
    return Handle(folder, future, None)


def load(trainer: Checkpointed, folder: Folder) -> Loaded:
    """Load a checkpoint into the trainer, whatever plan saved it; every rank calls it.

    All headers and checksums are checked before the first tensor is overwritten, but a trainer
    whose load failed is not to be trained. Warns of checkpoints without checksums, and of folders
    that killed saves left beside this one.

    Raises:
        InputError: no checkpoint, a damaged one, or one of another model or optimizer.
    """
    target = resolve(Path(folder).absolute())
    with temporary_group() as group:
        rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        manifest = everywhere(group, lambda: read_manifest(target))
        if rank == 0:
            _warn(target, manifest)
        everywhere(group, lambda: _load_extra_state(trainer, manifest, target))
        with _explained("load", target), _quiet_alone(group):
            dcp_load(
                by_name(trainer.shards()),
                storage_reader=BoxReader(target, manifest, rank, world),
                planner=BoxLoadPlanner(),
                process_group=group,
            )
    trainer.refresh()
    return Loaded(target, manifest.step, manifest.plan_hash)


def _warn(folder: Path, manifest: Manifest) -> None:
    if not manifest.has_checksums:
        warnings.warn(
            f"checkpoint {folder} has no checksums (an older parloom saved it): damage to its"
            " tensors is not noticed; save it again",
            stacklevel=3,
        )
    if stale := stale_folders(folder):
        names = ", ".join(path.name for path in stale)
        warnings.warn(
            f"beside checkpoint {folder} are folders of saves that were killed before they were"
            f" complete: {names}; nothing reads them: delete them unless another job is saving",
            stacklevel=3,
        )


def _load_extra_state(trainer: Checkpointed, manifest: Manifest, folder: Path) -> None:
    try:
        trainer.load_extra_state(decode_state(manifest.state))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the extra state in {folder / MANIFEST} is none of this version's trainer"
            f" ({type(error).__name__}: {error}); load it with the version of parloom that saved it"
        ) from error


def latest(folder: Folder) -> Path | None:
    """The checkpoint of the most steps among those in `folder`, or None where there is none.

    Raises:
        InputError: the manifest of one of them is damaged.
    """
    newest: tuple[tuple[int, bool, int], Path] | None = None
    for candidate in sorted(Path(folder).absolute().glob("*")):
        document = candidate / MANIFEST
        if TEMPORARY in candidate.name or not document.is_file():
            continue
        step = decode_manifest(document.read_bytes(), document).step
        age = (step, REPLACED not in candidate.name, document.stat().st_mtime_ns)
        if newest is None or age > newest[0]:
            newest = (age, candidate)
    return newest[1] if newest else None


@dataclass(frozen=True, slots=True)
class _Copy:
    """A shard whose values no longer change."""

    name: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tensor: Tensor
    primary: bool


class _Snapshot(AsyncStager):
    """Copies what this rank writes to host memory before `async_save` returns."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: _copied(shard) for name, shard in state_dict.items()}

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


def _copied(shard: Shard) -> _Copy:
    values = shard.tensor.detach()
    if shard.primary:
        boxes, values = tuple(shard.boxes), values.to("cpu", copy=True)
    else:
        boxes, values = (), values.new_empty(0, device="cpu")
    return _Copy(shard.name, tuple(shard.global_shape), boxes, values, shard.primary)


def _new_group() -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.new_group(backend="gloo", timeout=timeout() or default_timeout())
    assert isinstance(group, dist.ProcessGroup)
    return group


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.destroy_process_group(group)


@contextmanager
def temporary_group() -> Iterator[dist.ProcessGroup | None]:
    """A gloo group of all ranks for one save or load; None in a process without a group."""
    group = _new_group()
    try:
        yield group
    finally:
        _destroy(group)


def everywhere(group: dist.ProcessGroup | None, read: Callable[[], T]) -> T:
    """The value of `read`; where it fails on one rank it fails on all, so that none waits."""
    value: list[T] = []
    problem: str | None = None
    try:
        value.append(read())
    except (ParloomError, OSError) as error:
        problem = str(error)
    problems = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for rank, found in enumerate(problems):
        if found is not None:
            raise InputError(found if found == problem else f"rank {rank}: {found}")
    return value[0]


@contextmanager
def _explained(verb: str, folder: Path) -> Iterator[None]:
    """Turn torch's collected failures of ranks into the first rank's own error."""
    try:
        yield
    except CheckpointException as failure:
        rank, (cause, _) = min(failure.failures.items(), key=lambda entry: entry[0])
        where = f"rank {rank}: " if len(failure.failures) > 1 or rank else ""
        if isinstance(cause, ParloomError):
            raise type(cause)(f"{where}{cause}") from cause
        if isinstance(cause, OSError):
            raise LaunchError(
                f"{where}cannot {verb} checkpoint {folder}: {cause}; an earlier checkpoint is as"
                " it was; free space or change the permissions, or choose another folder"
            ) from cause
        raise cause from None


@contextmanager
def _quiet_alone(group: dist.ProcessGroup | None) -> Iterator[None]:
    """One process without a group is a supported case, not torch's reason to warn."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
