"""torch's operators by the names that graphs use; a graph may come from a file.

Known are the entries of the registry, the list `ir.ops.plain`, and what the user's own code
registered with `torch.library.custom_op`: functions from tensors to tensors, none of which writes
to its arguments. Everything else that torch can call is refused, whoever asks.
"""

from collections.abc import Iterable

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from parloom.errors import VerifyError
from parloom.ir.graph import Node
from parloom.ir.ops import NEVER_NAMED, OPS, PLAIN

ADVICE = "torch.library.custom_op makes a function of yours an operator"


def packet(op: str) -> OpOverloadPacket:
    """The operator packet: `aten` unless another namespace is named.

    Raises `VerifyError` for what is on no list, and for what this torch does not have.
    """
    namespace, _, name = op.rpartition(".")
    known = (op in OPS or op in PLAIN) if op in OPS or not namespace else is_custom(op)
    if not known or namespace in ("aten", "parloom"):
        raise VerifyError(f"operator {op!r} may not stand in a graph; {ADVICE}")
    owner = getattr(torch.ops, namespace or "aten", None)
    found = getattr(owner, name, None) if isinstance(owner, _OpNamespace) else None
    if not isinstance(found, OpOverloadPacket):
        raise VerifyError(f"torch {torch.__version__} has no operator {op!r}")
    return found


def is_custom(op: str) -> bool:
    """Whether `op` is a function of the user's: registered by other code than torch's and ours,
    from tensors (and numbers) to tensors, and writing to none.
    """
    namespace, _, name = op.rpartition(".")
    found = OPDEFS.get(f"{namespace}::{name}")
    module = str(getattr(getattr(found, "_init_fn", None), "__module__", "torch"))
    if found is None or module.partition(".")[0] in ("torch", "parloom"):
        return False
    schema = found._opoverload._schema
    text = any("str" in str(a.type) or "Device" in str(a.type) for a in schema.arguments)
    return _returns_tensors(found._opoverload) and not text and not schema.is_mutable


def is_unregistered(op: str) -> bool:
    """Whether `op` is none of ours or torch's: of the user's code, which may not be loaded here."""
    namespace, _, name = op.rpartition(".")
    if not namespace or op in OPS:
        return False
    full = f"{namespace}::{name}"
    return not any(n.partition(".")[0] == full for n in torch._C._dispatch_get_all_op_names())


def functional(found: OpOverloadPacket) -> list[OpOverload]:
    """The overloads of a packet that return tensors and write to no argument.

    Others are of numbers, strings and lists, or write to `out`.
    """
    names: list[str] = found.overloads()  # type: ignore[no-untyped-call]
    overloads = [getattr(found, name) for name in names]
    return [o for o in overloads if not o._schema.is_mutable and _returns_tensors(o)]


def _returns_tensors(overload: OpOverload) -> bool:
    returned = overload._schema.returns
    return bool(returned) and all("Tensor" in str(r.type) for r in returned)


def check_operators(nodes: Iterable[Node]) -> None:
    """Raise `VerifyError` for an operator that is on no list, or an argument that none of its
    functional overloads has (`out` is one).
    """
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for node in nodes:
        call = (node.op, tuple(name for name, _ in node.kwargs))
        if call not in seen:
            seen.add(call)
            _check_call(node, *call)


def _check_call(node: Node, op: str, names: tuple[str, ...]) -> None:
    refused = NEVER_NAMED.intersection(names)
    if op not in OPS or hasattr(torch.ops.aten, op):  # others have code of their own
        known = {a.name for overload in functional(packet(op)) for a in overload._schema.arguments}
        refused |= set(names) - known
    if refused:
        where = node.path or "(top)"
        raise VerifyError(f"{where}: operator {op!r} takes no argument {min(refused)!r}")
