"""Into how many microbatches a batch may be divided.

Where each is computed by itself, all divisors of the number of samples are legal. Under global
semantics the layout over time is the same for all counts that divide the factors on which it lies,
so one lowering on one device for each prime factor of the number of samples answers for all counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from parloom.errors import InputError, LayoutError
from parloom.ir.factors import Factored
from parloom.ir.lower import lower
from parloom.ir.mesh import prime_factors
from parloom.ir.microbatches import divisors, nearest_counts
from parloom.ir.pcg import PCG, TIME, Compute
from parloom.ir.plan import GLOBAL, MICROBATCH, Decisions
from parloom.ir.samples import num_samples


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The legal counts, ascending, for so many samples; `reason` why other divisors are not."""

    counts: tuple[int, ...]
    samples: int
    reason: str = ""

    def check(self, count: int) -> None:
        """Raise `InputError` for a count that is not legal, with the nearest that are."""
        if count in self.counts:
            return
        near = nearest_counts(count, self.counts)
        if self.samples % count == 0:
            why = f"{count} microbatches are not possible: {self.reason}"
        else:
            why = f"{self.samples} samples do not divide into {count} microbatches"
            if self.reason:
                apart = nearest_counts(count, divisors(self.samples))
                near += f"; with --batch-semantics microbatch {apart}"
        raise InputError(f"--microbatches {count}: {why}; {near}")


def legal_microbatches(factored: Factored, batch_semantics: str = GLOBAL) -> Microbatches:
    """The counts that the program of the whole batch allows: under global semantics those with
    which `lower` succeeds on one device.
    """
    samples = num_samples(factored)
    if batch_semantics == MICROBATCH:
        return Microbatches(divisors(samples), samples)
    limits: dict[int, int] = {}
    reasons: list[str] = []
    for prime in sorted(set(prime_factors(samples))):
        decisions = Decisions(num_microbatches=prime)
        try:
            pcg = lower(factored.graph, decisions, factored=factored)
        except LayoutError as error:
            reasons.append(str(error))
        else:
            limits[prime] = gcd(samples, *_sizes(pcg))
    counts = tuple(
        count
        for count in divisors(samples)
        if all(limits.get(prime, 0) % count == 0 < limits.get(prime, 0)
               for prime in prime_factors(count))
    )  # fmt: skip
    if not reasons and len(counts) < len(divisors(samples)):
        reasons.append("a view joins or splits samples")
    return Microbatches(counts, samples, reasons[0] if reasons else "")


def _sizes(pcg: PCG) -> Iterator[int]:
    """The sizes of the factors on which operators find their operands cut in time."""
    for body in (pcg.prologue, pcg.main.body, *(f.body for f in pcg.functions)):
        for item in body:
            if isinstance(item, Compute) and any(v.layout.shard(TIME) for v in item.operands):
                yield from (item.rule.size(f) for f, axes in item.assignment if TIME in axes)
