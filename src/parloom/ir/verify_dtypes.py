"""Invariants of the data types that plans decide."""

from collections.abc import Iterator

from parloom.ir.factors import Factored
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.plan import WIDE_DTYPES, Decisions
from parloom.quantization import COMMUNICATION_DTYPES, REAL

Problems = Iterator[str]
Planned = tuple[Factored, Decisions]


def precision(planned: Planned) -> Problems:
    """The proof computes in float64 whatever these fields say, so they are checked here."""
    factored, decisions = planned
    for name in ("master_dtype", "reduce_dtype"):
        dtype = getattr(decisions, name)
        if dtype not in (None, *WIDE_DTYPES):
            yield f"{name} {dtype!r} is not one of {', '.join(WIDE_DTYPES)}"
        elif dtype and name == "reduce_dtype":
            for entry in factored.graph.of_kind("parameter"):
                own = entry.value.spec.dtype
                if entry.trainable and (
                    own.startswith("complex") or DTYPE_BYTES[own] > DTYPE_BYTES[dtype]
                ):
                    yield f"{name} {dtype!r} does not hold gradients of {entry.target} ({own})"
                    break


def communication(planned: Planned) -> Problems:
    """In which data types gradients and weights may travel."""
    factored, decisions = planned
    for dtype in decisions.sent_dtypes:
        if dtype not in COMMUNICATION_DTYPES:
            yield f"{dtype!r}, to send in, is not one of {', '.join(COMMUNICATION_DTYPES)}"
        elif len(decisions.stages) > 1:
            yield f"communication in {dtype} is not yet executable in pipelines"
    own = {entry.target: entry.value.spec.dtype for entry in factored.graph.of_kind("parameter")}
    for found in decisions.parameters:
        sent = found.weight_sent or found.gradient_sent
        if sent and own.get(found.name, REAL[0]) not in REAL:
            yield f"{found.name} is in {own[found.name]}, of which nothing is sent in {sent}"
