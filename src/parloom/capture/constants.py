"""Which values of a trace are the same in every call, and whether two traces compute the same.

A value is fixed where neither the batch, nor a weight, nor a buffer that is written, nor a draw
reaches it: a mask, a rotary table. Two traces are the same program where one computes what the
other one reads from a cache that has that value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from parloom.capture.nodes import packet_of, written_by

# Operators that read the shape of their operand alone.
OF_SHAPE = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)  # fmt: skip
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, NotImplementedError, AttributeError)


def fixed_values(graph: fx.Graph, root: Any, given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """The fixed nodes of a graph with their values; `given` are those of placeholders.

    One into which a value that is not fixed is written is fixed no longer, nor is what it may share
    memory with.
    """
    known = {n: v for n, v in given.items() if n not in set(written(graph))}
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        # Values are written to in place, and the user's own tensors are among them.
        found: dict[fx.Node, Any] = {n: copied(v) for n, v in known.items()}
        for node in graph.nodes:
            if node.op == "get_attr":
                found[node] = copied(attribute(root, str(node.target)))
            elif node.op == "call_function" and is_fixed(node, found):
                try:
                    found[node] = value_of(node, found)
                except FAILURES:
                    continue
            else:
                for target in written_by(node):
                    for other in related(target):
                        found.pop(other, None)
    return found


def related(node: fx.Node) -> set[fx.Node]:
    """The nodes that may share memory with one: its first operands, and all computed from them."""
    root = node
    while packet_of(root) not in OF_SHAPE and root.args and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    reached, left = {root}, [root]
    while left:
        new = [user for user in left.pop().users if user not in reached]
        reached.update(new)
        left += new
    return reached


def is_fixed(node: fx.Node, found: Mapping[fx.Node, Any]) -> bool:
    """Whether nothing that is not fixed reaches a node, and no draw."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return packet_of(node) in OF_SHAPE or all(n in found for n in node.all_input_nodes)


def value_of(node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
    """What a node computes, on the CPU."""

    def operand(other: fx.Node) -> Any:
        if other in found:
            return found[other]
        like = other.meta["val"]
        return torch.empty(tuple(like.shape), dtype=like.dtype)

    args, kwargs = map_arg((node.args, node.kwargs), operand)
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if not callable(node.target):
        raise TypeError(f"{node.target} is not called")
    return node.target(*args, **kwargs)


def copied(value: Any) -> Any:
    """A tensor on the CPU that may be written to; zeros in place of one that has no values."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return torch.zeros(tuple(value.shape), dtype=value.dtype)
    return value.detach().cpu().clone()


def written(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that are written to, also through views."""
    viewed: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        if any(r.alias_info is not None for r in schema.returns):
            viewed[node] = viewed.get(node.args[0], node.args[0])
        yield from (viewed.get(target, target) for target in written_by(node))


def attribute(root: Any, path: str) -> Any:
    """An attribute by its dotted path."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


def same(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether two traces of one model compute the same."""
    if one.graph_module.code == other.graph_module.code and equal(
        list(one.constants.values()), list(other.constants.values())
    ):
        return True
    (first, values), (second, others) = described(one), described(other)
    return first == second and equal(values, others)


def equal(values: list[Any], others: list[Any]) -> bool:
    """Whether lists of tensors have the same bits, dtypes and shapes."""
    return len(values) == len(others) and all(
        one is other or same_tensor(one, other) for one, other in zip(values, others, strict=True)
    )


def same_tensor(one: Any, other: Any) -> bool:
    """Whether two tensors are equal to the bit; what has no values is compared by shape."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with _disable_current_modes(), torch.no_grad():
        if one.is_meta or other.is_meta:
            return True
        return torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements; 0.0 and -0.0 have others."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    plain = dense.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def described(program: ExportedProgram) -> tuple[list[object], list[Any]]:
    """The live nodes that are not fixed, and the fixed values that they read."""
    module = program.graph_module
    given: dict[fx.Node, Tensor] = {}
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    targets: dict[fx.Node, object] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        targets[node] = (spec.kind.name, spec.target or node.name)
        # Buffers that are not saved are among the constants.
        tensor = program.constants.get(spec.target or "", program.state_dict.get(spec.target or ""))
        if spec.kind not in (InputKind.CONSTANT_TENSOR, InputKind.BUFFER):
            continue
        if isinstance(tensor, Tensor):
            given[node] = tensor
    fixed = fixed_values(module.graph, module, given)
    lines: list[object] = []
    values: list[Any] = []
    numbers: dict[fx.Node, object] = dict(targets)

    def reference(node: fx.Node) -> Any:
        if node not in fixed:
            return f"%{numbers[node]}"
        value = fixed[node]
        if isinstance(value, fx.GraphModule):
            return value.code
        values.append(value)
        return f"fixed {len(values)}"

    for node in live(module.graph):
        if node.op in ("placeholder", "get_attr") or (node in fixed and node.op != "output"):
            continue
        numbers[node] = len(lines)
        lines.append((str(node.target), str(map_arg((node.args, node.kwargs), reference))))
    return lines, values


def live(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that the output needs, and those that write."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in needed or node.op == "output" or written_by(node):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed]
