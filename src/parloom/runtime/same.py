"""Whether ranks hold the same: weights by two sums per tensor, batches and texts by their bytes."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parloom.errors import InputError, LaunchError, ParloomError
from parloom.runtime.comm import Comm

PIECE = 1 << 22  # elements that are float64 at a time
# Ranks may sum in another order (threads, vector widths): four thousand roundings of float64. One
# float32 that differs in its last bit is still seen among tens of thousands like it.
TOLERANCE = 1e-12
WHOLE = -1  # the place of the samples of a rank that has all of them


def check_same_values(
    comm: Comm, tensors: Iterable[tuple[str, Tensor]], device: torch.device | None = None
) -> None:
    """Raise `LaunchError` that names the first of `tensors` that is not equal on all ranks.

    Every rank passes the same names in the same order. Compared are the sum and the sum of squares
    of the finite elements in float64, and how many are NaN and infinite; an exchange of elements
    goes unnoticed, and so does a tensor on the meta device. `device` is where collectives take
    their tensors, the CPU if not given.
    """
    group = comm.group(comm.mesh.space)
    if group.size == 1:
        return
    names, rows = [], []
    for name, tensor in tensors:
        names.append(name)
        rows.append(_sums(tensor.detach()))
    if not names:
        return
    low = torch.stack(rows).to(device or "cpu")
    high = low.clone()
    works = [group.all_reduce(low, "min"), group.all_reduce(high, "max")]
    for work in works:
        work.wait()
    least, most = low.cpu(), high.cpu()
    squares, count = most[:, 1], most[:, 4]
    # The sum of magnitudes is at most sqrt(count * squares).
    allowed = torch.zeros_like(most)
    allowed[:, 0] = TOLERANCE * count.sqrt() * squares.sqrt()
    allowed[:, 1] = TOLERANCE * squares
    differ = (most - least > allowed).any(1).nonzero().flatten().tolist()
    if differ:
        others = len(differ) - 1
        more = f" and {others} more tensor{'s' if others > 1 else ''}" if others else ""
        verb = "differ" if others else "differs"
        raise LaunchError(
            f"{names[differ[0]]}{more} {verb} between ranks; give every rank the same weights:"
            " load the same file, or call torch.manual_seed before the model is made"
        )


def check_same_batch(
    comm: Comm,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    places: Mapping[str, int],
    device: torch.device,
) -> None:
    """Raise `InputError`, on all ranks, that names an input which two of them should have been
    given alike and were not.

    `names` are all inputs; a rank has some of `tensors`. `places` are those of which it has its own
    samples, and where these are among all: ranks with the same place must have the same bytes.
    """
    group = comm.group(comm.mesh.space)
    if group.size == 1 or not names:
        return
    given = [
        (1, places.get(n, WHOLE), _hash(tensors[n])) if n in tensors else (0, 0, 0) for n in names
    ]
    mine = torch.tensor(given, device=device)
    everyone = mine.new_empty(group.size, *mine.shape)
    group.all_gather(everyone, mine).wait()
    ranks = comm.mesh.group(comm.mesh.space, comm.rank)
    rows = sorted(zip(ranks, everyone.tolist(), strict=True))
    for index, name in enumerate(names):
        first: dict[int, tuple[int, int]] = {}
        for rank, row in rows:
            there, place, value = row[index]
            other, expected = first.setdefault(place, (rank, value)) if there else (rank, value)
            if value != expected:
                raise InputError(f"input {name!r} {_differs(other, rank, place != WHOLE)}")


def told_by_some(
    mine: Tensor | None, shape: tuple[int, ...], dtype: str, comm: Comm, device: torch.device
) -> Tensor:
    """The sum of what some ranks have, most often one, on every rank; the others pass None."""
    told = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    if mine is not None:
        told.copy_(mine)
    plain = torch.view_as_real(told) if told.is_complex() else told
    plain = plain.view(torch.uint8) if told.dtype == torch.bool else plain
    comm.group(comm.mesh.space).all_reduce(plain).wait()
    return told


def told_by_the_first(comm: Comm, text: str, device: torch.device) -> str:
    """The `text` of rank 0, on every rank; the others' is not looked at."""
    group = comm.group(comm.mesh.space)
    size = torch.tensor([len(text.encode())], device=device)
    group.broadcast(size).wait()
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if group.index == 0:
        data.copy_(torch.tensor(list(text.encode()), dtype=torch.uint8))
    if len(data):
        group.broadcast(data).wait()
    return bytes(data.tolist()).decode()


def told_by_all(comm: Comm, text: str, device: torch.device) -> list[str]:
    """The `text` of every rank, by rank."""
    group = comm.group(comm.mesh.space)
    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    sizes = size.new_empty(group.size, 1)
    group.all_gather(sizes, size).wait()
    counts = sizes.flatten().tolist()
    mine = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = mine.new_empty(group.size, max(counts))
    if max(counts):
        group.all_gather(rows, mine).wait()
    ranks = comm.mesh.group(comm.mesh.space, comm.rank)
    found = zip(ranks, rows.cpu(), counts, strict=True)
    return [bytes(row[:count].tolist()).decode() for _, row, count in sorted(found, key=_rank)]


@contextmanager
def agreed(comm: Comm, device: torch.device) -> Iterator[None]:
    """Every rank raises at the end where one raised inside: its own error, or the first rank's.

    Otherwise the others would wait for a rank that is gone.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    text = "" if error is None else f"{type(error).__name__}\n{error}"
    texts = told_by_all(comm, text, device)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            kind, _, message = text.partition("\n")
            where = f"on rank {rank}: " if rank else ""
            kinds = {known.__name__: known for known in ParloomError.__subclasses__()}
            if kind in kinds:
                raise kinds[kind](f"{where}{message}")
            raise RuntimeError(f"{where}{kind}: {message}")


def _rank(row: tuple[int, Tensor, int]) -> int:
    return row[0]


def _differs(first: int, second: int, local: bool) -> str:
    if local:
        return (
            f"differs between ranks {first} and {second}, which work on the same samples; give the"
            " sampler (num_replicas, rank) = trainer.sampler_position, and the same seed to"
            " whatever augments samples at random"
        )
    return (
        f"differs between ranks {first} and {second}; the batch must be the global one, the same on"
        " every rank. Usual cause: a DataLoader with shuffle=True without the same seed"
        " (torch.manual_seed, or generator=torch.Generator().manual_seed(0)). A rank's own shard"
        " goes in as step(batch, local=True)"
    )


def _hash(tensor: Tensor) -> int:
    values = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(
        hashlib.sha256(values.numpy().tobytes()).digest()[:8], "little", signed=True
    )


def _sums(tensor: Tensor) -> Tensor:
    """Sum and sum of squares of the finite elements, numbers of NaNs, infinities and elements."""
    totals = torch.zeros(5, dtype=torch.float64)
    if tensor.is_meta:
        return totals
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    for piece in torch.split(flat, PIECE):
        values = piece.to(torch.float64)
        finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        counts = (values.isnan().sum(), values.isinf().sum(), torch.tensor(values.numel()))
        sums = (finite.sum(), finite.square().sum())
        totals += torch.stack([n.to("cpu", torch.float64) for n in (*sums, *counts)])
    # Sums that overflow are as good as any number, but must compare.
    return totals.nan_to_num()
