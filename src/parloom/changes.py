"""What would have to change for a plan to fit: other questions, asked one by one and priced.

A price is that of a plan that was found without finer meshes and proofs: asked by itself, the
question may have a faster one.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from parloom.candidates import AUTO
from parloom.choose import Ask, Say, choose, samples
from parloom.errors import ParloomError
from parloom.execute.machine import machine_for
from parloom.execute.optimizers import named_optimizer
from parloom.ir.factors import factorize
from parloom.ir.plan import DTYPES, MICROBATCH, Plan
from parloom.report.shortage import Change
from parloom.search.least import least_share
from parloom.search.pinned import resolve
from parloom.search.question import Wanted, base_of

SPEC = re.compile(r"(?:([0-9]+)x)?([0-9]+)x([^0-9].*)")
# How often batch, microbatches or nodes are halved or doubled.
DOUBLINGS = 4
Trial = tuple[str, str, Ask]
"""Flags, the same in words, and the question."""


def priced_changes(ask: Ask, say: Say) -> Iterator[Change]:
    """The least of every kind of change to which a plan fits."""
    for series in (_optimizer, _dtype, _method, _microbatches, _batch, _nodes):
        for flags, words, other in series(replace(ask, wanted=Wanted.PRICE)):
            if not _may_fit(other):
                continue
            say(f"trying {flags}")
            try:
                found = chosen(other)
            except ParloomError:
                continue
            yield change(flags, words, other, found)
            break


def chosen(ask: Ask) -> Plan:
    """The plan of a question that is asked beside the user's own; Ctrl-C ends them all."""
    found = choose(ask, lambda text: None)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _may_fit(ask: Ask) -> bool:
    """Whether all devices together have room for weights and their states."""
    question = ask.question
    base, devices = base_of(question), question.cluster.num_devices
    return least_share(question.graph, base, question.optimizer, devices) <= ask.limit


def change(flags: str, words: str, ask: Ask, found: Plan) -> Change:
    """A change with what its plan costs."""
    assert found.prediction is not None
    step_s, peak = found.prediction.step_s, found.prediction.peak_bytes
    devices = ask.machine.cluster.num_devices
    return Change(flags, words, step_s, peak, step_s * devices / samples(ask))


def _optimizer(ask: Ask) -> Iterator[Trial]:
    if ask.plan.optimizer.num_states:
        plan = replace(ask.plan, optimizer=named_optimizer("sgd"))
        yield "--optimizer sgd", "no optimizer states", replace(ask, plan=plan)


def _dtype(ask: Ask) -> Iterator[Trial]:
    rates = dict(ask.machine.cluster.device.flops_per_s)
    # Volta and Turing multiply in float16 and not in bfloat16.
    half = "fp16" if DTYPES["fp16"] in rates and DTYPES["bf16"] not in rates else "bf16"
    if ask.plan.source.dtype not in (DTYPES["bf16"], DTYPES["fp16"]):
        batch = ask.plan.source.batch
        yield from _captured(ask, f"--dtype {half}", "activations of half the size", batch, half)


def _method(ask: Ask) -> Iterator[Trial]:
    if ask.plan.method != AUTO:
        words = "searches layouts, storage and recomputation"
        yield "--method auto", words, replace(ask, plan=replace(ask.plan, method=AUTO))


def _microbatches(ask: Ask) -> Iterator[Trial]:
    """Rules of thumb have those that are asked for; a search has tried all."""
    if ask.plan.method == AUTO and ask.microbatches is None:
        return
    least = ask.microbatches or 1
    for count in _doubled(2 * least, samples(ask)):
        flags, words = f"--microbatches {count}", "so many passes, one after the other"
        if ask.batch_semantics == MICROBATCH:
            batch, dtype = ask.plan.source.batch, ask.plan.source.dtype
            other = replace(ask, microbatches=count)
            yield from _captured(other, flags, words, batch, dtype)
        else:
            yield flags, words, replace(ask, microbatches=count)


def _batch(ask: Ask) -> Iterator[Trial]:
    before = samples(ask)
    for share in _doubled(2, before):
        if before % share == 0 and _may_fit(ask):  # weights are the same for every batch
            size, dtype = before // share, ask.plan.source.dtype
            yield from _captured(ask, f"--batch {size}", f"instead of {before}", size, dtype)


def _captured(
    ask: Ask, flags: str, words: str, batch: int | None, dtype: str | None
) -> Iterator[Trial]:
    """The model captured anew, where it can be."""
    if ask.build is None:
        return
    try:
        graph = ask.build(batch, dtype, ask.microbatches)
    except ParloomError:
        return
    pinned = resolve(ask.pinned.pins, graph, factorize(graph))
    yield flags, words, replace(ask, graph=graph, pinned=pinned)


def _nodes(ask: Ask) -> Iterator[Trial]:
    """More nodes of the same kind, for clusters that are given by a spec."""
    found = SPEC.fullmatch(ask.plan.cluster)
    if found is None or ask.machine.calibration is not None:
        return
    nodes = int(found[1] or 1)
    for factor in _doubled(2, 2**DOUBLINGS):
        spec = f"{nodes * factor}x{found[2]}x{found[3]}"
        more = nodes * (factor - 1)
        words = f"{more} more node{'s' if more > 1 else ''}"
        try:
            machine = machine_for(spec)
        except ParloomError:
            return
        yield f"--cluster {spec}", words, replace(ask, machine=machine)


def _doubled(first: int, most: int) -> Iterable[int]:
    """`first`, twice that, ..., not above `most`."""
    numbers = (first * 2**count for count in range(DOUBLINGS))
    return (number for number in numbers if number <= most)
