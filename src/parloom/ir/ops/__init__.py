"""The operator registry: one entry per operator (`docs/add-an-op.md` shows how to add one)."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from parloom.errors import CaptureError
from parloom.ir.graph import Node
from parloom.ir.ops import (
    arrange,
    attention,
    blocks,
    cache,
    conv,
    elementwise,
    experts,
    extreme,
    factory,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pool,
    random,
    recurrent,
    reduce,
    replicated,
    resample,
    scan,
    scatter,
    shape,
    spectral,
)
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.plain import NEVER_NAMED, PLAIN
from parloom.ir.ops.rule import Assignment, Rule, Site, opaque

_MODULES = (
    arrange,
    attention,
    blocks,
    cache,
    conv,
    elementwise,
    experts,
    extreme,
    factory,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pool,
    random,
    recurrent,
    reduce,
    replicated,
    resample,
    scan,
    scatter,
    shape,
    spectral,
)

_PARTS = {op.name: op for module in _MODULES for op in module.OPS}

OPS: Mapping[str, OpDef] = MappingProxyType(_PARTS | {experts.NAME: experts.made_of(_PARTS)})

CUSTOM = re.compile(r"(?!aten\.|parloom\.|prims\.)[A-Za-z]\w*\.[A-Za-z_]\w*", re.ASCII)

# ATen operators without an entry that return a list of tensors, so that one result is unpacked.
RETURN_LISTS = frozenset({
    "broadcast_tensors", "dsplit", "gradient", "hsplit", "meshgrid", "split_copy",
    "split_with_sizes_copy", "tensor_split", "unbind_copy", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "vsplit",
})  # fmt: skip

__all__ = [
    "NEVER_NAMED",
    "OPS",
    "PLAIN",
    "Assignment",
    "Emission",
    "OpDef",
    "Rule",
    "Site",
    "is_operator",
    "op_of",
    "why_whole",
]


def is_operator(name: str) -> bool:
    """Whether `name` may stand in a graph: an entry, one of `PLAIN`, or a user's own operator.

    Names come from files and end up in code, so attributes of attributes and double underscores
    are none. Whether the user registered `namespace.name` is for `capture.operators` to say.
    """
    if name in OPS or name in PLAIN:
        return True
    return "__" not in name and CUSTOM.fullmatch(name) is not None


def op_of(node: Node) -> OpDef:
    """The entry of a node's operator; operators without one are opaque: replicated, never split.

    Raises `CaptureError` for random and mutating operators, which cannot be replicated blindly.
    """
    known = OPS.get(node.op)
    if known is not None:
        return known
    if node.op in random.UNKEYED or (node.op.endswith("_") and not node.op.endswith("__")):
        raise CaptureError(
            f"operator {node.op!r} in module {node.path or '(top)'!r} ({node.source}) is random or"
            " mutates its input and has no rule; use torch.nn.functional.dropout for random masks,"
            " draw random inputs in the batch, or add an entry (docs/add-an-op.md)"
        )
    return OpDef(
        node.op,
        opaque,
        replicated.call,
        returns_list=node.op in RETURN_LISTS,
        why_whole="no entry says how to split it (docs/add-an-op.md)",
    )


def why_whole(site: Site, rule: Rule) -> str:
    """Why no axis can be put on a call that has something to split; empty where one can."""
    if rule.shardable or all(s.num_elements <= 1 for s in (*site.operands, *site.results)):
        return ""
    return op_of(site.node).why_whole or "not with these arguments and sizes"
