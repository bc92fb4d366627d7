"""How sure a prediction from data sheets is: nine steps in ten take between 1/e^error and e^error
times as long.

The error grows with what is not known of a run. Each part is set from published runs with constants
that were fitted without their source (benchmarks/fidelity.py prints how many lie within the band).
"""

import math
from dataclasses import dataclass

# Devices with runs whose plan is known in full.
COMPARED = frozenset(
    {
        "V100-SXM2-16GB", "V100-SXM2-32GB", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB",
        "H100-96GB-HBM2e",
    }
)  # fmt: skip
# Generations of software (`cost.software`) that such runs had. No run of parloom's own on GPUs has
# been compared.
COMPARED_SOFTWARE = frozenset({"megatron", "eager 2023", "fused 2023", "eager", "compiled"})
# 90th percentiles of |log(predicted / measured)|: of runs known in full, and what each unknown adds
# (in quadrature): a device that no such run had, kernels that no such run had, a part of the plan
# that was assumed, and memory from which allocators begin to give back and ask again.
KNOWN = 0.14
DEVICE, SOFTWARE, PLAN, FULL = 0.3, 0.25, 0.22, 0.1
FULL_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Unknown:
    """What is not known of a run; `memory_share` is what it takes of the device's memory."""

    device: bool = False
    software: bool = False
    plan: bool = False
    memory_share: float = 0.0

    @property
    def error(self) -> float:
        """The half width of the band, as a logarithm."""
        parts = (
            KNOWN,
            DEVICE * self.device,
            SOFTWARE * self.software,
            PLAN * self.plan,
            FULL * (self.memory_share > FULL_SHARE),
        )
        return math.hypot(*parts)
