"""A machine on which every collective is as fast as where it is fastest.

Layouts do not depend on where a mesh lies, so logical plans are searched on this machine: no
placement of one is expected to take less, and a bound is one of every placement.
"""

from dataclasses import replace

from parloom.cost.hardware import DataSheets, Hardware
from parloom.cost.kernels import Kernels
from parloom.search.placements import fastest_places


def anywhere(machine: Hardware) -> DataSheets:
    """`machine` as if a mesh could lie otherwise for each of its collectives."""
    kernels = machine.kernels or Kernels(machine.cluster.device)
    return DataSheets(machine.cluster, replace(kernels, places=fastest_places))
