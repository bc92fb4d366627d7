"""Times of operators on this device, as one rank runs them.

A processor under a quota pauses for longer than an operator takes, so what counts is the mean over
a window of many calls, and of some windows the median: machines stall now and then. On a GPU the
device's own clock is read (events). Operands are used in turns, so that small ones are not always
in the cache; weights, as many as the program has. Backward passes run over many calls at once, as
in a program: the engine's start-up is not theirs. Programs without gradients are measured as passes
(`measure_pass`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from math import ceil

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from parloom.cost.calibration import Product, Stream, Timed, key_of
from parloom.cost.local_operators import local_operator
from parloom.errors import ParloomError
from parloom.execute.clock import WINDOWS, Clock
from parloom.execute.measure_pass import forward_pass_times, is_forward
from parloom.execute.operands import local_bytes_of, not_measured, operator_call, random_operands
from parloom.execute.program import compile_pcg
from parloom.execute.stored import stored_bytes, stored_values
from parloom.ir.ops import op_of
from parloom.ir.pcg import PCG, Compute
from parloom.runtime import Context, SingleComm
from parloom.runtime.split_backward import SplitBackward

MOST_CALLS = 32
MOST_BYTES = 128 << 20  # of the results of one round of calls
# Operands in turns take at least as much, where few enough will do: more than caches hold (those of
# a B200: 126 MB).
CACHE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
MOST_COPIES = 16
# Of weights and caches, as much as a pass reads of them between two uses of one, up to this.
STORED_BYTES, MOST_STORED = 256 << 20, 128
SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STREAM_BYTES = {
    "cpu": (1 << 16, 1 << 20, 1 << 24, 1 << 26),
    "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28, 1 << 30),
}


def launch_s(clock: Clock) -> float:
    """An operator on one element, recorded by autograd as in a training step."""
    x = torch.zeros(1, device=clock.device, requires_grad=True)
    return clock.typical(lambda: [x + 1.0 for _ in range(100)], 100)


def split_s(clock: Clock) -> float:
    """What gradients of weights take where they are made apart, for each operator that reads one:
    on a processor more than with the others, on a GPU until its kernels are issued.
    """
    count = 16
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count))).to(clock.device)
    given = torch.ones(1, 8, device=clock.device)

    def backward(*, split: bool) -> float:
        x = torch.zeros(1, 8, device=clock.device, requires_grad=True)
        y = layers(x)
        if not split:
            return clock.elapsed(lambda: torch.autograd.backward([y], [given]))

        def inputs() -> SplitBackward:
            apart = SplitBackward([get_gradient_edge(y)], [x])
            apart.inputs([given])
            return apart

        if clock.device.type == "cpu":
            return clock.elapsed(lambda: inputs().weights())
        return clock.elapsed(inputs().weights)

    for split in (True, False):
        backward(split=split)
    if clock.device.type != "cpu":
        return clock.typical_of(lambda: (backward(split=True),))[0] / count
    apart_s, whole_s = clock.typical_of(lambda: (backward(split=True), backward(split=False)))
    return max(0.0, apart_s - whole_s) / count


def products(clock: Clock, dtypes: Sequence[str]) -> Iterator[Product]:
    """Square matrix products, until one takes longer than all of `least_s`."""
    for name in dtypes:
        dtype = getattr(torch, name)
        for side in SIDES:
            a, b, out = (torch.rand(side, side, device=clock.device).to(dtype) for _ in range(3))
            calls = max(1, 512 // side)
            seconds = clock.typical(partial(_multiply, a, b, out, calls), calls)
            yield Product(name, side, side, side, seconds)
            if seconds > clock.least_s:
                break


def _multiply(a: Tensor, b: Tensor, out: Tensor, calls: int) -> None:
    for _ in range(calls):
        torch.mm(a, b, out=out)


def streams(clock: Clock) -> Iterator[Stream]:
    """A product with a number: reads and writes."""
    kind = clock.device.type
    for size in STREAM_BYTES[kind]:
        count = max(1, min(MOST_COPIES, CACHE_BYTES[kind] // size))
        tensors = [torch.rand(size // 8, device=clock.device) for _ in range(count)]
        out = torch.empty_like(tensors[0])
        yield Stream(size, clock.typical(partial(_scale, tensors, out), len(tensors)))


def _scale(tensors: Sequence[Tensor], out: Tensor) -> None:
    for tensor in tensors:
        torch.mul(tensor, 1.5, out=out)


def operators(
    pcgs: Sequence[PCG],
    clock: Clock,
    say: Callable[[str], None] = lambda text: None,
    measured: Iterable[str] = (),
) -> Iterator[Timed]:
    """Every operator of lowered programs once per local shape, but for those that are `measured`
    already (by `key_of`); those that cannot be run alone are left out.
    """
    known = set(measured)
    for pcg in pcgs:
        mesh = compile_pcg(pcg, "calibration").program.mesh
        ctx = Context(SingleComm(mesh), clock.device)  # operators do not communicate
        if is_forward(pcg):
            found = [
                one for one in forward_pass_times(pcg, ctx, clock, say) if one.key not in known
            ]
            known |= {one.key for one in found}
            yield from found
            continue
        num_bytes = min(STORED_BYTES, stored_bytes(pcg))
        for item, stored in _computes(pcg):
            local = local_operator(item, pcg.mesh)
            key = key_of(local)
            # Of attention in blocks, one rank alone has none that come and sees the fewest.
            if key in known or op_of(item.node).view or local.blocks.count > 1:
                continue
            known.add(key)
            try:
                yield _Trial(pcg, item, ctx, clock, stored, num_bytes).timed(key)
            except (RuntimeError, IndexError, ParloomError) as error:
                say(not_measured(item, error))


def _computes(pcg: PCG) -> Iterator[tuple[Compute, frozenset[str]]]:
    """Operators, each with the names of its operands that are stored from pass to pass."""
    stored = stored_values(pcg)
    for function in (pcg.main, *pcg.functions):
        for item in function.body:
            if isinstance(item, Compute):
                names = frozenset(value.name for value in item.operands)
                yield item, names & stored.get(function.name, frozenset())


class _Trial:
    """One operator's code with operands to call it on; those `stored`, of a pass that reads
    `num_bytes` of them, in more copies.
    """

    def __init__(
        self,
        pcg: PCG,
        item: Compute,
        ctx: Context,
        clock: Clock,
        stored: frozenset[str],
        num_bytes: int,
    ) -> None:
        self._clock, self._ctx = clock, ctx
        self._call = operator_call(pcg, item)
        mesh = pcg.mesh
        size, made = (max(1, sum(local_bytes_of(v, mesh) for v in part))
                      for part in (item.operands, item.results))  # fmt: skip
        copies = max(1, min(MOST_COPIES, CACHE_BYTES[clock.device.type] // size))
        own = sum(local_bytes_of(v, mesh) for v in item.operands if v.name in stored)
        many = max(copies, min(MOST_STORED, num_bytes // own)) if own else copies
        every = {v.name for v in item.operands}
        made_of = partial(random_operands, item, mesh, clock.device)
        bases = [made_of(every) for _ in range(copies)]
        more = [_leaves(bases[i % copies]) | made_of(stored) for i in range(copies, many)]
        self._copies = [list(operands.values()) for operands in (*bases, *more)]
        calls = max(1, min(max(MOST_CALLS, many), MOST_BYTES // made, 4 * many))
        self._turns = list(islice(cycle(self._copies), calls))
        self._made: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._given: list[Tensor] = []

    def timed(self, key: str) -> Timed:
        """Forward and backward pass; the first round warms up, and says how many calls fill a
        window.
        """
        calls = len(self._turns)
        whole_s = sum(self._round())
        calls = min(calls, ceil(calls * self._clock.least_s / WINDOWS / max(whole_s, 1e-9)))
        self._turns = self._turns[:calls]
        forward, backward = self._clock.typical_of(self._round)
        return Timed(key, max(1e-9, forward / calls), backward / calls)

    def _round(self) -> tuple[float, float]:
        forward_s = self._clock.elapsed(self._forward)
        self._roots = [t for t in self._made if t.requires_grad]
        if len(self._given) != len(self._roots):
            self._given = [torch.ones_like(t) for t in self._roots]
        backward_s = self._clock.elapsed(self._backward) if self._roots else 0.0
        for tensors in self._copies:
            for tensor in tensors:
                tensor.grad = None
        self._made, self._roots = [], []
        return forward_s, backward_s

    def _forward(self) -> None:
        for tensors in self._turns:
            made = self._call(self._ctx, "", *tensors)
            self._made += [made] if isinstance(made, Tensor) else made

    def _backward(self) -> None:
        torch.autograd.backward(self._roots, self._given)


def _leaves(operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same memory, with gradients of its own."""
    return {n: t.detach().requires_grad_(t.requires_grad) for n, t in operands.items()}
