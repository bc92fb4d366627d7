"""Pipeline schedules: which passes every rank of a pipeline runs, in which order.

GPipe (Huang et al., NeurIPS'19), 1F1B (PipeDream-flush: Narayanan et al., ICML'21), eager 1F1B
(Zhuang et al., MLSys'23, section 4), kFkB (Ada-Grouper: Wang et al., arXiv 2303.01675), interleaved
1F1B (Narayanan et al., SC'21) and the zero-bubble schedules ZB-H1, ZB-H2 (Qi et al., ICLR'24,
section 2) and ZB-V (Qi et al., NeurIPS'24); those made for the times of a pipeline are in
`ir/zero_bubble.py`.
`F` is a forward pass; `B` a whole backward pass, or where the schedule splits it the gradient of
the inputs, with `W` the gradient of the weights. Stage s of a pipeline over r ranks is on rank
s % r, so that with more stages than ranks each rank holds `chunks` of them; in ZB-V the second one
of rank s is stage 2r - 1 - s.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
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
    order = _order_of(name)
    if min(num_stages, num_microbatches, chunks) < 1 or num_stages % chunks:
        raise InputError(
            f"{num_stages} stages in {chunks} chunks a rank and {num_microbatches} microbatches:"
            " all must be at least 1, and the stages a multiple of the chunks"
        )
    ranks = num_stages // chunks
    if name == "interleaved_1f1b":
        if chunks == 1:
            raise InputError("interleaved_1f1b needs at least 2 chunks a rank; with 1, use 1f1b")
    elif chunks != CHUNKS.get(name, 1):
        taken = "two chunks" if name in CHUNKS else "one chunk"
        raise InputError(f"{name} takes {taken} a rank, not {chunks}; use interleaved_1f1b")
    if name == "one_stage" and num_stages > 1:
        raise InputError(f"one_stage is for one stage, not {num_stages}")
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


def _order_of(name: str) -> Order:
    """The passes of a rank by the name of a schedule; k in `kFkB` is any number."""
    if name in AUTOMATIC:
        raise InputError(f"{name} is made for the times of stages, which are not known here")
    grouped = re.fullmatch(r"([1-9]\d{0,5})f\1b", name)
    if grouped is not None:
        return partial(_grouped, int(grouped[1]))
    if name not in ORDERS:
        raise InputError(f"no schedule {name!r}{nearest(name, (*ORDERS, *AUTOMATIC))}")
    return ORDERS[name]


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
    return _in_turns(rank, microbatches, ranks - rank - 1)


def _eager(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """One microbatch more in flight for each boundary behind a rank, so that sends hide."""
    return _in_turns(rank, microbatches, 2 * (ranks - rank - 1))


def _in_turns(rank: int, microbatches: int, warm: int) -> Iterator[Action]:
    """`warm` forward passes, then F and B in turns."""
    warm = min(warm, microbatches)
    for microbatch in range(warm):
        yield Action("F", microbatch, rank)
    for microbatch in range(microbatches):
        if microbatch + warm < microbatches:
            yield Action("F", microbatch + warm, rank)
        yield Action("B", microbatch, rank)


def _grouped(each: int, rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """1F1B of groups of `each` microbatches, the last one of those that are left."""
    groups = [range(n, min(n + each, microbatches)) for n in range(0, microbatches, each)]
    for action in _one_f_one_b(rank, ranks, len(groups), chunks):
        for microbatch in groups[action.microbatch or 0]:
            yield replace(action, microbatch=microbatch)


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


def _zb_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Forward passes of both stages until the last stage's first gradient comes back, then all
    passes of both in turns; gradients of weights fill the end. Of fewer microbatches than fill the
    pipeline, as if the others were there.
    """
    first, last = rank, 2 * ranks - 1 - rank
    total = max(2 * ranks - 1, microbatches)
    order = [("F", first)] * (2 * (ranks - rank) - 1) + [("F", last), ("F", first)] * rank
    order += [("F", last), ("B", last), ("W", last)] * (ranks - rank)
    forward = 2 * ranks - rank - 1  # of the first stage
    for index in range(total - ranks):
        order += [("F", first)] * (forward + index < total)
        order += [("B", first), ("W", first), ("F", last), ("B", last), ("W", last)]
    order += [("B", first), ("B", last)] * rank + [("B", first), ("W", first)] * (ranks - rank)
    order += [("W", last)] * rank + [("W", first)] * rank
    done: Counter[tuple[str, int]] = Counter()
    for kind, stage in order:
        if done[kind, stage] < microbatches:
            yield Action(kind, done[kind, stage], stage)
        done[kind, stage] += 1


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "one_stage": _one_f_one_b,
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "eager_1f1b": _eager,
        "interleaved_1f1b": _interleaved,
        "zb_h1": _zb_h1,
        "zb_h2": _zb_h2,
        "zb_v": _zb_v,
    }
)
CHUNKS: Mapping[str, int] = MappingProxyType({"zb_v": 2})
"""Stages of each rank, of schedules that take neither one nor any number."""
AUTOMATIC: Mapping[str, int] = MappingProxyType({"zb_1p": 1, "zb_2p": 2})
"""Schedules that `zero_bubble` makes for times, by their limit: how many times the activations that
1F1B holds on its first stage (Qi et al., ICLR'24, section 5.1)."""
SPLIT = frozenset({"zb_h1", "zb_h2", "zb_v", *AUTOMATIC})
"""Schedules that run the gradients of inputs and of weights apart."""
