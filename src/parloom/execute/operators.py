"""torch's operators by the names that graphs use; a graph may come from a file."""

from collections.abc import Iterable

import torch
from torch._ops import OpOverloadPacket, _OpNamespace

from parloom.errors import VerifyError
from parloom.ir.ops import OPS, is_operator

FILES = frozenset({"filename", "file", "path"})


def packet(op: str) -> OpOverloadPacket:
    """The operator packet: `aten` unless another namespace is named.

    Raises `VerifyError` for anything that is no function from tensors to tensors: attributes of
    torch's that are no operator, operators that read or write files, or that return no tensor.
    """
    namespace, _, name = op.rpartition(".")
    owner = getattr(torch.ops, namespace or "aten", None) if is_operator(op) else None
    found = getattr(owner, name, None) if isinstance(owner, _OpNamespace) else None
    if not isinstance(found, OpOverloadPacket):
        raise VerifyError(f"torch {torch.__version__} has no operator {op!r}")
    names: list[str] = found.overloads()  # type: ignore[no-untyped-call]
    schemas = [getattr(found, overload)._schema for overload in names]
    files = (
        a.name in FILES and "str" in str(a.type) for schema in schemas for a in schema.arguments
    )
    if any(files) or not any(
        schema.returns and all("Tensor" in str(r.type) for r in schema.returns)
        for schema in schemas
    ):
        raise VerifyError(f"operator {op!r} is no function from tensors to tensors")
    return found


def check_operators(names: Iterable[str]) -> None:
    """Raise `VerifyError` unless every operator without an entry is one of torch's."""
    for name in sorted(set(names) - OPS.keys()):
        packet(name)
