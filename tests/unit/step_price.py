"""What a step costs by a formula: time, traffic, and memory by component.

    step = microbatches x (forward + backward) + exposed weight gathers and gradient reductions
           + optimizer + weight gathers after it

Weight gathers (ZeRO-3) hide behind the compute of their pass, gradient reductions behind the
compute of the backward pass; what does not fit there is exposed. Collectives on activations hide
behind nothing. Peak memory is the sum of the components, each at its own peak.
`cost.simulate` plays the same works and transfers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from parloom.cost.kernels import Kernels
from parloom.cost.parameters import Transfer
from parloom.cost.price import Price
from parloom.cost.step import Priced, priced
from parloom.cost.works import Pass, summed
from parloom.ir.expected import Prediction
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.step_program import EACH_MICROBATCH, EACH_STEP

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, slots=True)
class StepPrice:
    """A step: seconds, `Price` of all of it, and (component, bytes) in the order of COMPONENTS.

    The passes are those of one microbatch without the traffic of parameters.
    """

    step_s: float
    price: Price
    memory: tuple[tuple[str, int], ...]
    forward: Pass
    backward: Pass
    exposed_s: float

    @property
    def peak_bytes(self) -> int:
        return sum(size for _, size in self.memory)

    def prediction(self) -> Prediction:
        """As a plan stores it."""
        return Prediction(self.step_s, self.peak_bytes, self.memory, "spec")


def price_plan(
    pcg: PCG,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
) -> StepPrice:
    """Price one step of `pcg`, which was lowered from `decisions`, on `cluster`; see `priced`."""
    found = priced(pcg, cluster, decisions, optimizer, kernels)
    parameters, steps = found.parameters, pcg.num_microbatches
    reductions = found.reductions
    gathers = _total(parameters.gathers)
    # Main's own weights, and those of the last unit, stay whole from forward to backward pass.
    units = list(dict.fromkeys(gather.unit for gather in parameters.gathers))
    again = _total(g for g in parameters.gathers if g.unit and g.unit != units[-1])
    chunked = _total(t for t in reductions if t.when == EACH_MICROBATCH)
    whole = _total(t for t in reductions if t.when == EACH_STEP)
    update, publish = parameters.update(), _total(parameters.publications)

    forward, backward = found.main.forward.total, found.main.backward.total
    hidden = forward.price.compute_s, backward.price.compute_s
    # Chunked gradients are reduced in every microbatch, whole ones in the last.
    exposed = steps * max(0.0, gathers.comm_s - hidden[0])
    exposed += (steps - 1) * max(0.0, again.comm_s + chunked.comm_s - hidden[1])
    late = 0.0 if found.walker.kernels.software.overlaps else whole.comm_s
    beside = again.comm_s + chunked.comm_s + whole.comm_s - late
    exposed += max(0.0, beside - hidden[1]) + late
    hoisted = found.prologue.forward.total if pcg.hoisted else Pass()
    each = forward.seconds + backward.seconds + hoisted.seconds
    collect = parameters.collect()
    collecting_s = (steps - 1) * collect.seconds
    step_s = steps * each + collecting_s + exposed + update.seconds + publish.seconds

    price = (forward + backward + hoisted + gathers + again + chunked).price.times(steps)
    memory = _memory(found)
    price = price + collect.price.times(steps - 1)
    price = price + (whole + update + publish).price
    return StepPrice(step_s, price, memory, forward, backward, exposed)


def _total(transfers: Iterable[Transfer]) -> Pass:
    return summed(transfer.total() for transfer in transfers)


def _memory(found: Priced) -> tuple[tuple[str, int], ...]:
    """Bytes per device of every component.

    Buffers that weights are gathered into and gradients leave from stay for the next use: two of
    each size at most, and what the back end needs for the largest.
    """
    forward, backward = found.main.forward, found.main.backward
    activations = max(forward.peak_bytes, forward.net_bytes + backward.peak_bytes)
    parameters = found.parameters
    chunked = [t for t in found.reductions if t.chunked]
    sizes = [(t.staging_bytes, t.dtype) for t in parameters.gathers]
    memory = [(t.num_bytes, t.dtype) for t in parameters.gathers]
    leaving = [(t.staging_bytes, t.dtype) for t in chunked]
    scratch = max((t.scratch_bytes for t in (*parameters.gathers, *chunked)), default=0)
    in_use = Counter(sizes) | Counter(leaving)
    pool = _two_each(in_use) + _two_each(Counter(memory))
    buffers = parameters.held_bytes() + pool + scratch
    stored = parameters.stored_bytes()
    found_bytes = stored | {"activations": activations, "buffers": buffers}
    return tuple((name, found_bytes[name]) for name in COMPONENTS)


def _two_each(buffers: Counter[tuple[int, str]]) -> int:
    return sum(size * min(count, 2) for (size, _), count in buffers.items())
