"""What is expected of plans, what they are chosen by, and what was found beside them."""

from dataclasses import dataclass
from enum import StrEnum

from parloom.ir.shown import Shown


@dataclass(frozen=True, slots=True)
class Prediction(Shown):
    """What the cost layer expects of one step; `source` is spec, calibrated or measured.

    `memory` is what each component has at the instant at which most is held: `peak_bytes` in all.
    `error`: nine steps in ten take between 1/e^error and e^error times as long. `cores`: those that
    the processes of a CPU cluster were taken to have, as far as they need them; None elsewhere.
    `peaks` are the largest peaks by type of device, on a cluster of several types. `waits_s`: how
    long each group of devices that has the same stages waits for other stages in a step: for their
    messages, and for gradients of weights that they share.
    """

    step_s: float
    peak_bytes: int
    memory: tuple[tuple[str, int], ...] = ()
    source: str = "spec"
    error: float = 0.0
    cores: int | None = None
    peaks: tuple[tuple[str, int], ...] = ()
    waits_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another candidate that was priced."""

    name: str
    step_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """A flag that the plan keeps to, and the best that was found without it: None where nobody
    looked, as after Ctrl-C. `instead` says by which other rules a value is computed for which that
    plan has a rewrite that is forbidden here.
    """

    text: str
    step_s: float | None = None
    peak_bytes: int | None = None
    instead: str = ""


class Objective(StrEnum):
    """What a plan is chosen by: the time of a step, its dollars, or the peak of a device; what an
    inference plan is: the time of an answer, or how much is answered in a second.
    """

    TIME = "time"
    COST = "cost"
    MEMORY = "memory"
    LATENCY = "latency"
    THROUGHPUT = "throughput"


OF_INFERENCE = (Objective.LATENCY, Objective.THROUGHPUT)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a plan was chosen by, where that is not its time: dollars of a step, or the peak bytes
    of a device; of inference the seconds of an answer, or those that each token, or each sample
    where there are no tokens, takes of them. No plan that was searched has less than `bound`, where
    that is known.
    """

    objective: Objective
    value: float
    bound: float | None = None


class Status(StrEnum):
    """How the search for a plan ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    OUT_OF_BUDGET = "out of budget"
