"""The captured program on the numbers of a module's calls, beside what the module made of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parloom.capture.quantized import LARGEST
from parloom.execute.eager_calls import Call
from parloom.execute.reference import run_step
from parloom.execute.relative import Compared, Difference, judged, relative_difference
from parloom.execute.replay import Replay, ReplayError
from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph

EQUAL, DIFFERS, NOT_COMPARED = "equal", "differs", "not compared"
# Of a tensor's own scale. Half precision is compared with itself, operator by operator.
TOLERANCES = {
    "float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "float16": 4e-3,
    "bfloat16": 3e-2,
}  # fmt: skip
OTHER_TOLERANCE = 0.1  # eight-bit floats
# Of the call's largest gradient: one that cancels, as in front of a batch norm, is all rounding.
GRADIENT_FLOOR = 0.1
STATE_FLOOR = 1e-6

Pair = tuple[str, Tensor | None, Tensor | None, float]  # name, expected, found, floor of the scale


@dataclass(frozen=True, slots=True)
class EagerReport:
    """How the captured program compares with the module: `outcome`, and why.

    `worst` is the largest relative difference, in `worst_tensor`; `difference` the first tensor
    above the tolerance; `draws` the number of random draws that both were given; `shrunk` says how
    the model was made smaller for it.
    """

    outcome: str
    reason: str = ""
    difference: str = ""
    worst: float = 0.0
    worst_tensor: str = ""
    dtype: str = ""
    tolerance: float = 0.0
    calls: int = 0
    num_tensors: int = 0
    draws: int = 0
    shrunk: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line, the same on every machine: without measured numbers where it is equal."""
        shrunk = f" (shrunk: {self.shrunk})" if self.shrunk else ""
        if self.outcome == NOT_COMPARED:
            return f"not compared with the module itself{shrunk}: {self.reason}"
        draws = f", {self.draws} random draws replayed" if self.draws else ""
        what = f"{self.calls} calls, {self.dtype}, limit {self.tolerance:.0e}{draws}{shrunk}"
        if self.outcome == EQUAL:
            return f"the captured program equals the module itself ({what})"
        return f"the captured program is not what the module does: {self.difference} ({what})"


def compare(
    calls: Sequence[Call], training: str, evaluation: str, started_s: float = 0.0
) -> EagerReport:
    """Run both captured programs (as text) beside calls of the module; `evaluation` may be empty.

    Every call is compared by itself: the program begins with what the module began with.
    `started_s` is when the calls were begun, on the monotonic clock.
    """
    graph = parse_graph(training)
    dtype, tolerance = tolerance_of(graph)
    report = EagerReport(EQUAL, dtype=dtype, tolerance=tolerance)
    programs = {True: graph} | ({False: parse_graph(evaluation)} if evaluation else {})
    compared: list[Compared] = []
    try:
        for number, call in enumerate(calls, 1):
            if not bool(call.loss.isfinite().all()):
                reason = f"the module's own loss in call {number} is not finite"
                return replace(report, outcome=NOT_COMPARED, reason=reason)
            if call.training in programs:
                where = f"in call {number}" if call.training else "in evaluation"
                compared.append(compare_call(programs[call.training], call, where, tolerance))
            if compared[-1].first is not None:
                break
    except ReplayError as error:
        reason = f"random draws could not be replayed: {error}"
        return replace(report, outcome=NOT_COMPARED, reason=reason)
    worst = max(compared, key=lambda c: (c.worst != c.worst, c.worst))
    first = compared[-1].first
    return replace(
        report,
        outcome=EQUAL if first is None else DIFFERS,
        difference=str(first or ""),
        worst=worst.worst,
        worst_tensor=worst.worst_tensor,
        calls=len(compared),
        num_tensors=sum(c.num_tensors for c in compared),
        seconds=time.monotonic() - started_s,
        draws=sum(len(call.draws) for call in calls[: len(compared)]),
    )


def compare_call(graph: Graph, call: Call, where: str, tolerance: float) -> Compared:
    """The captured program on the numbers of `call`, beside what the module made of them.

    Raises `ReplayError` where its draws are not the module's.
    """
    trainable = {i.target for i in graph.of_kind("parameter") if i.trainable}
    replay = Replay(list(call.draws))
    state = {n: t.clone().requires_grad_(n in trainable) for n, t in call.before.items()}
    with torch.enable_grad() if graph.training else torch.no_grad():
        results = run_step(graph, state, call.batch, lambda index, count: replay)
    pairs: list[Pair] = []
    if results["loss"] is not None:
        pairs.append(("loss", call.loss, results["loss"], 1e-2))
    if graph.training:
        found = [g for g in call.gradients.values() if g is not None and g.numel()]
        floor = GRADIENT_FLOOR * max((float(g.abs().max()) for g in found), default=0.0)
        pairs += [
            (f"gradient of {n}", g, state[n].grad if n in trainable else None, floor)
            for n, g in call.gradients.items()
        ]
    else:
        outputs = results["outputs"]
        pairs += [(f"output {n}", t, outputs.get(n), 1e-2) for n, t in call.outputs.items()]
    # A buffer that forward registers is made once, and no part of the program.
    kinds = {i.target: i.kind for i in graph.inputs if i.kind in ("parameter", "buffer")}
    updates = results["updates"]
    pairs += [
        (f"{kinds[n]} {n}", t, updates.get(n, call.before[n]).detach(), STATE_FLOOR)
        for n, t in call.after.items()
        if n in kinds
    ]
    differences = (
        _difference(f"{name} {where}", expected, got, floor) for name, expected, got, floor in pairs
    )
    compared = judged(differences, tolerance)
    if compared.first is not None and replay.num_left:
        raise ReplayError(f"{replay.num_left} draws of the module are not in the program")
    return compared


def _difference(name: str, expected: Tensor | None, got: Tensor | None, floor: float) -> Difference:
    if (expected is None) != (got is None):
        had = "the module has none" if expected is None else "the captured program has none"
        return Difference(name, float("inf"), had)
    return Difference(name, _error(expected, got, floor))


def _error(expected: Tensor | None, got: Tensor | None, floor: float) -> float:
    """The relative difference; none between NaN in the same places, or two missing tensors."""
    if expected is None and got is None:
        return 0.0
    if expected is None or got is None or expected.shape != got.shape:
        return relative_difference(expected, got, floor)
    unknown = expected.isnan()
    if unknown.any() and torch.equal(unknown, got.isnan()):
        expected, got = expected.masked_fill(unknown, 0), got.masked_fill(unknown, 0)
    return relative_difference(expected, got, floor)


def tolerance_of(graph: Graph) -> tuple[str, float]:
    """The least precise floating dtype in a program, and the error that its rounding explains."""
    found = {i.value.spec.dtype for i in graph.inputs if i.value.spec.is_float}
    found |= {v.spec.dtype for f in graph.flat() for v in f.node.results if v.spec.is_float}
    found -= {*LARGEST}  # of storage alone
    limits = {dtype: TOLERANCES.get(dtype, OTHER_TOLERANCE) for dtype in found}
    dtype = max(sorted(limits), key=limits.__getitem__)
    return dtype, limits[dtype]
