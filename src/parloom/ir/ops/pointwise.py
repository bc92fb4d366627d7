"""Further elementwise operators: thresholds and a difference from the right."""

from parloom.ir.ops.opdef import Emission, OpDef, SavedTensors
from parloom.ir.ops.rule import broadcast

_X: SavedTensors = (("operand", 0),)


def _rsub(e: Emission) -> str:
    if e.site.node.kwargs or len(e.site.node.args) != 2:  # alpha
        return e.call("torch.rsub")
    return f"{e.arg(1)} - {e.arg(0)}"


OPS: tuple[OpDef, ...] = (
    OpDef("clamp_min", broadcast, "torch.clamp_min", saved=_X),
    OpDef("clamp_max", broadcast, "torch.clamp_max", saved=_X),
    OpDef("hardsigmoid", broadcast, "F.hardsigmoid", saved=_X),
    OpDef("rsub", broadcast, _rsub),
)
