"""Pipeline schedules: which passes every rank of a pipeline runs, in which order.

GPipe (Huang et al., NeurIPS'19), 1F1B (PipeDream-flush: Narayanan et al., ICML'21), interleaved
1F1B (Narayanan et al., SC'21) and the zero-bubble schedules ZB-H1 and ZB-H2 (Qi et al., ICLR'24,
section 2); those made for the times of a pipeline are in `ir/zero_bubble.py`.
`F` is a forward pass; `B` a whole backward pass, or where the schedule splits it the gradient of
the inputs, with `W` the gradient of the weights. Stage s of a pipeline over r ranks is on rank
s % r, so that with more stages than ranks each rank holds `chunks` of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from parloom.errors import InputError, nearest
from parloom.ir.plan import Action

Lists = tuple[tuple[Action, ...], ...]
Order = Callable[[int, int, int, int], Iterator[Action]]
"""The passes of one rank, from (rank, ranks, microbatches, chunks)."""
STEP = (Action("REDUCE"), Action("STEP"), Action("GATHER"))
"""The step program, which ends every list."""


def schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    chunks: int = 1,
    edges: Collection[tuple[int, int]] | None = None,
) -> Lists:
    """The action list of every rank, first stage's rank first; each ends with the step program.

    Stages are a chain, or have the `edges` (source, later target); then each warms up by its depth,
    as a stage of a chain that is so far from the end. Raises `InputError` for an unknown schedule
    and for numbers that it cannot take.
    """
    if name in AUTOMATIC:
        raise InputError(f"{name} is made for the times of stages, which are not known here")
    if name not in ORDERS:
        raise InputError(f"no schedule {name!r}{nearest(name, (*ORDERS, *AUTOMATIC))}")
    if min(num_stages, num_microbatches, chunks) < 1 or num_stages % chunks:
        raise InputError(
            f"{num_stages} stages in {chunks} chunks a rank and {num_microbatches} microbatches:"
            " all must be at least 1, and the stages a multiple of the chunks"
        )
    ranks = num_stages // chunks
    if name == "interleaved_1f1b":
        if chunks == 1:
            raise InputError("interleaved_1f1b needs at least 2 chunks a rank; with 1, use 1f1b")
    elif chunks > 1:
        raise InputError(f"{name} takes one chunk a rank, not {chunks}; use interleaved_1f1b")
    if name == "one_stage" and num_stages > 1:
        raise InputError(f"one_stage is for one stage, not {num_stages}")
    order = ORDERS[name]
    if edges is None:
        ranked = range(ranks)
        return tuple((*order(rank, ranks, num_microbatches, chunks), *STEP) for rank in ranked)
    if chunks > 1:
        raise InputError(f"{name} is for chains; stages that are none have one chunk a rank")
    depths = stage_depths(num_stages, edges)
    longest = max(depths)
    alike = (order(longest - depth, longest, num_microbatches, 1) for depth in depths)
    return tuple(
        (*(replace(action, stage=stage) for action in own), *STEP)
        for stage, own in enumerate(alike)
    )


def stage_depths(num_stages: int, edges: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """The number of stages on the longest path from each stage to an end, itself included."""
    found = [1] * num_stages
    for source, target in sorted(edges, reverse=True):
        found[source] = max(found[source], 1 + found[target])
    return tuple(found)


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    for kind in ("F", "B"):
        for microbatch in range(microbatches):
            yield Action(kind, microbatch, rank)


def _one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    warm = min(ranks - rank - 1, microbatches)
    for microbatch in range(warm):
        yield Action("F", microbatch, rank)
    for microbatch in range(microbatches):
        if microbatch + warm < microbatches:
            yield Action("F", microbatch + warm, rank)
        yield Action("B", microbatch, rank)


def round_of(ranks: int, microbatches: int) -> int:
    """How many microbatches go through one chunk before the next one, in interleaved 1F1B.

    One per rank where they divide so. Otherwise the fewest for which the last round has at least
    one per rank, too: Megatron-Core refuses others (`microbatch_group_size_per_vp_stage`). Fewer
    microbatches than ranks are one round.
    """
    rounds = range(ranks, microbatches)
    whole = (n for n in rounds if not microbatches % n or microbatches % n >= ranks)
    return next(whole, microbatches)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Rounds of microbatches go through all chunks, forward and then backward."""
    each = round_of(ranks, microbatches)
    order = [
        (chunk, microbatch)
        for first in range(0, microbatches, each)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + each, microbatches))
    ]

    def nth(kind: str, index: int) -> Action:
        chunk, microbatch = order[index]
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(kind, microbatch, chunk * ranks + rank)

    total = microbatches * chunks
    warm = min(2 * (ranks - rank - 1) + (chunks - 1) * each, total)
    for index in range(warm):
        yield nth("F", index)
    for index in range(total):
        if index + warm < total:
            yield nth("F", index + warm)
        yield nth("B", index)


def _zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return _zero_bubble(rank, microbatches, ranks - rank, rank)


def _zb_h2(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return _zero_bubble(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank)


def _zero_bubble(rank: int, microbatches: int, warm: int, lag: int) -> Iterator[Action]:
    """`warm` forward passes, then B and F in turns, with W `lag` microbatches behind B.

    The lag makes all ranks hold equally many microbatches, and leaves W to fill the end.
    """
    forward, weight = min(warm, microbatches), 0
    for microbatch in range(forward):
        yield Action("F", microbatch, rank)
    for microbatch in range(microbatches):
        yield Action("B", microbatch, rank)
        if microbatch >= weight + lag:
            yield Action("W", weight, rank)
            weight += 1
        if forward < microbatches:
            yield Action("F", forward, rank)
            forward += 1
    for microbatch in range(weight, microbatches):
        yield Action("W", microbatch, rank)


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "one_stage": _one_f_one_b,
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "interleaved_1f1b": _interleaved,
        "zb_h1": _zb_h1,
        "zb_h2": _zb_h2,
    }
)
AUTOMATIC: Mapping[str, int] = MappingProxyType({"zb_1p": 1, "zb_2p": 2})
"""Schedules that `zero_bubble` makes for times, by their limit: how many times the activations that
1F1B holds on its first stage (Qi et al., ICLR'24, section 5.1)."""
SPLIT = frozenset({"zb_h1", "zb_h2", *AUTOMATIC})
"""Schedules that run the gradients of inputs and of weights apart."""
