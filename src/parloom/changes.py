"""What would have to change for a plan to fit: other questions, asked one by one and priced.

A price is that of a plan that was found without finer meshes and proofs: asked by itself, the
question may have a faster one.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from parloom.candidates import ALGEBRA, RANDOM
from parloom.choose import Choice, choose
from parloom.comparators.baselines import RULES
from parloom.cost.hardware import Hardware
from parloom.cost.money import work_of
from parloom.errors import ParloomError, StoppedError
from parloom.execute.machine import machine_for
from parloom.execute.optimizers import named_optimizer
from parloom.ir.expected import Status
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import part_sizes
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.microbatches import divisors
from parloom.ir.plan import DTYPES, MICROBATCH, ModelSource
from parloom.ir.samples import num_samples, num_tokens
from parloom.report.shortage import Change
from parloom.search.least import least_share
from parloom.search.pinned import resolve
from parloom.search.request import AUTO, Request, Say, ScoredPlan, Wanted, base_of

SPEC = re.compile(r"(?:([0-9]+)x)?([0-9]+)x([^0-9].*)")
# How often batch, microbatches or nodes are halved or doubled.
DOUBLINGS = 4
Build = Callable[[ModelSource, int | None], Graph]
Trial = tuple[str, str, Request]
"""Flags, the same in words, and the request."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from, so that it can be asked otherwise.

    `build` captures the model again, from a source of another batch size, length of samples or
    dtype, and with a number of microbatches; `spec` is that of the cluster, empty where its rates
    were measured; `whole` the machine of which the request is for the part that was asked for.
    `alone`: of several questions, so that nobody wants to know what would fit in place of one.
    `assumed`: what nobody asked for, in words.
    """

    source: ModelSource
    spec: str
    build: Build
    whole: Hardware | None = None
    alone: bool = True
    assumed: tuple[str, ...] = ()


def priced_changes(request: Request, origin: Origin, say: Say) -> Iterator[Change | str]:
    """The least of every kind of change to which a plan fits; the flags of the largest of a kind
    to none of which one does.
    """
    request = replace(request, wanted=Wanted.PRICE)
    kinds = (_optimizer, _dtype, _method, _microbatches, _batch, _length, _devices, _nodes)
    each = _units(request) / request.samples
    for series in kinds:
        largest = ""
        for flags, words, other in series(request, origin):
            largest = flags
            if not _may_fit(other):
                continue
            say(f"trying {flags}")
            try:
                found = chosen(other)
            except StoppedError:
                raise
            except ParloomError:
                continue
            yield change(flags, words, other, found.best, _units(other) / each)
            break
        else:
            if largest:
                yield largest


def chosen(request: Request) -> Choice:
    """The plan of a request that is made beside the user's own; one that Ctrl-C stopped ends them
    all (`StoppedError`).
    """
    found = choose(request, lambda text: None)
    if found.status is Status.INTERRUPTED:
        raise StoppedError
    return found


def _may_fit(request: Request) -> bool:
    """Whether all devices together have room for weights and their states."""
    base, devices = base_of(request), request.cluster.num_devices
    return least_share(request.graph, base, request.optimizer, devices) <= request.limit_bytes


def change(
    flags: str, words: str, request: Request, found: ScoredPlan, samples: float | None = None
) -> Change:
    """A change with what its plan costs; a step has as much work as `samples` of those that were
    asked for, by default all its own.
    """
    step_s, peak = found.prediction.step_s, found.prediction.peak_bytes
    devices = request.cluster.num_devices
    return Change(flags, words, step_s, peak, step_s * devices / (samples or request.samples))


def _units(request: Request) -> int:
    """Tokens of a step, or samples where there are none."""
    apart = request.num_microbatches or 1 if request.batch_semantics == MICROBATCH else 1
    return work_of(request.graph, apart).in_step


def _optimizer(request: Request, origin: Origin) -> Iterator[Trial]:
    if request.optimizer.num_states:
        other = replace(request, optimizer=named_optimizer("sgd"))
        yield "--optimizer sgd", "no optimizer states", other


def _dtype(request: Request, origin: Origin) -> Iterator[Trial]:
    rates = dict(request.cluster.device.flops_per_s)
    # Volta and Turing multiply in float16 and not in bfloat16.
    half = "fp16" if DTYPES["fp16"] in rates and DTYPES["bf16"] not in rates else "bf16"
    if origin.source.dtype not in (DTYPES["bf16"], DTYPES["fp16"]):
        flags, words = f"--dtype {half}", "activations of half the size"
        yield from _captured(request, origin, flags, words, replace(origin.source, dtype=half))


def _method(request: Request, origin: Origin) -> Iterator[Trial]:
    if request.method != AUTO:
        words = "searches layouts, storage and recomputation"
        yield "--method auto", words, replace(request, method=AUTO)


def _microbatches(request: Request, origin: Origin) -> Iterator[Trial]:
    """More microbatches; a method that chooses their number itself has tried every one."""
    if request.method in (AUTO, RANDOM, *RULES, *ALGEBRA) and request.num_microbatches is None:
        return
    least = request.num_microbatches or 1
    legal = legal_microbatches(factorize(request.graph), request.batch_semantics).counts
    if request.batch_semantics == MICROBATCH:  # the graph is of one microbatch
        legal = divisors(request.samples)
    for count in _doubled(2 * least, request.samples):
        if count not in legal:
            continue
        flags, words = f"--microbatches {count}", "so many passes, one after the other"
        other = replace(request, num_microbatches=count)
        if request.batch_semantics == MICROBATCH:
            yield from _captured(other, origin, flags, words, origin.source)
        else:
            yield flags, words, other


def _batch(request: Request, origin: Origin) -> Iterator[Trial]:
    before = request.samples
    for share in _doubled(2, before):
        if before % share == 0 and _may_fit(request):  # weights are the same for every batch
            size, words = before // share, f"instead of {before}"
            source = replace(origin.source, batch=size)
            yield from _captured(request, origin, f"--batch {size}", words, source)


def _length(request: Request, origin: Origin) -> Iterator[Trial]:
    """Shorter sequences of tokens."""
    tokens = num_tokens(factorize(request.graph))
    if tokens is None or not _may_fit(request):
        return
    before = tokens // num_samples(factorize(request.graph))
    for share in _doubled(2, before):
        if before % share == 0:
            size, words = before // share, f"instead of {before}, for as many tokens"
            source = replace(origin.source, seq=size)
            yield from _captured(request, origin, f"--seq {size}", words, source)


def _captured(
    request: Request, origin: Origin, flags: str, words: str, source: ModelSource
) -> Iterator[Trial]:
    """The model captured anew, where it can be."""
    try:
        graph = origin.build(source, request.num_microbatches)
    except ParloomError:
        return
    pinned = resolve(request.pinned.pins, graph, factorize(graph))
    yield flags, words, replace(request, graph=graph, pinned=pinned)


def _devices(request: Request, origin: Origin) -> Iterator[Trial]:
    """More devices of the cluster, where a part of it was asked for."""
    if origin.whole is None:
        return
    cluster, before = origin.whole.cluster, request.cluster.num_devices
    for size in (*reversed(part_sizes(cluster)), cluster.num_devices):
        if size > before:
            machine = origin.whole.part(size)
            yield f"--devices {size}", f"instead of {before}", replace(request, machine=machine)


def _nodes(request: Request, origin: Origin) -> Iterator[Trial]:
    """More nodes of the same kind, for clusters that are given by a spec and used whole."""
    found = SPEC.fullmatch(origin.spec)
    if found is None or origin.whole is not None:
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
        yield f"--cluster {spec}", words, replace(request, machine=machine)


def _doubled(first: int, most: int) -> Iterable[int]:
    """`first`, twice that, ..., not above `most`."""
    numbers = (first * 2**count for count in range(DOUBLINGS))
    return (number for number in numbers if number <= most)
