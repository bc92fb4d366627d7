"""Whether a model captures to the program that was planned, and the first thing that differs.

Two programs are equal where the same operators read the same values with the same arguments, in
the same order. Names of classes and modules, source lines, and which blocks repeat may differ:
nothing that is computed depends on them.
"""

from collections.abc import Iterator
from itertools import zip_longest

import torch

from parloom.ir.graph import (
    Arg,
    Dtype,
    FlatNode,
    Graph,
    Input,
    Ref,
    TensorSpec,
    Value,
    with_operands,
)

NEAR = 64  # operators ahead in which one that is missing is looked for
MISSING = object()
LOSS = "the loss function (parallelize(..., loss=...))"


def has_loss_function(graph: Graph) -> bool:
    """Whether the loss is computed by a function beside the model."""
    return any(map(_of_loss_function, graph.flat()))


def first_difference(planned: Graph, found: Graph) -> str:
    """Where and how `found` is not the `planned` program; empty where they are equal."""
    return next(_Comparison(planned, found).differences(), "")


class _Comparison:
    """Two programs, and which value of the one is which of the other."""

    def __init__(self, planned: Graph, found: Graph) -> None:
        self.planned = planned
        self.found = found
        self.planned_inputs = {i.value.name: i for i in planned.inputs}
        self.found_inputs = {i.value.name: i for i in found.inputs}
        self.makers: tuple[dict[str, FlatNode], dict[str, FlatNode]] = ({}, {})
        self.same: dict[str, str] = {}

    def differences(self) -> Iterator[str]:
        """Everything that differs, as the programs run."""
        yield from self.of_inputs()
        planned, found = tuple(self.planned.flat()), tuple(self.found.flat())
        for index, (one, other) in enumerate(zip_longest(planned, found)):
            if one is None or other is None or one.node.op != other.node.op:
                yield _replaced(planned[index:], found[index:])
                return
            yield from self.of_nodes(one, other)
            for makers, flat in zip(self.makers, (one, other), strict=True):
                makers.update((name, flat) for name in flat.results)
            self.same.update(zip(one.results, other.results, strict=True))
        yield from self.of_results()

    def of_inputs(self) -> Iterator[str]:
        """Parameters, buffers and batch tensors; constants are compared where they are read."""
        for kind, word in (("parameter", ""), ("buffer", ""), ("batch", "batch tensor ")):
            found = {i.target: i for i in self.found.of_kind(kind)}
            for one in self.planned.of_kind(kind):
                other = found.pop(one.target, None)
                if other is None:
                    yield f"{word}{one.target} is missing here"
                else:
                    yield from (f"{word}{one.target}: {text}" for text in _inputs(one, other))
            yield from (f"{word}{name} is not in the plan" for name in found)

    def of_nodes(self, one: FlatNode, other: FlatNode) -> Iterator[str]:
        """Two calls of one operator."""
        where = _where(one) + (f" ({other.node.source})" if other.node.source else "")
        left, right = _arguments(one), _arguments(other)
        for name in dict.fromkeys((*left, *right)):
            text = self.of_arguments(left.get(name, MISSING), right.get(name, MISSING))
            if text.startswith("constant ") and " differs at [" in text:
                yield f"{text} (read by {where})"
            elif text:
                yield f"{where}: {name} {text}"
        for first, second in zip_longest(one.node.results, other.node.results):
            if first is None or second is None or first.spec != second.spec:
                yield f"{where}: the result is {_told(first)} in the plan, {_told(second)} here"

    def of_arguments(self, one: object, other: object) -> str:
        """How an argument differs; empty where it does not."""
        one = _number(one, self.planned_inputs)
        other = _number(other, self.found_inputs)
        if isinstance(one, Ref) and isinstance(other, Ref):
            return self.of_values(one.name, other.name)
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            pairs = zip(one, other, strict=True)
            if any(isinstance(item, Ref | tuple) for item in (*one, *other)):
                return next(filter(None, (self.of_arguments(*pair) for pair in pairs)), "")
        if _equal(one, other):
            return ""
        return f"{self.shown(one, 0)} in the plan, {self.shown(other, 1)} here"

    def of_values(self, one: str, other: str) -> str:
        """How one tensor that is read is not the other."""
        left, right = self.planned_inputs.get(one), self.found_inputs.get(other)
        if left is None or right is None:
            agree = left is right is None and self.same.get(one) == other
        elif left.kind == right.kind == "constant":
            if left.value.spec == right.value.spec:
                return _constants(left, right)
            agree = False
        else:
            agree = (left.kind, left.target) == (right.kind, right.target)
        if agree:
            return ""
        return f"is {self.shown(Ref(one), 0)} in the plan, {self.shown(Ref(other), 1)} here"

    def shown(self, arg: object, side: int) -> str:
        """An argument as a user knows it."""
        if arg is MISSING:
            return "not given"
        if isinstance(arg, Ref):
            inputs = (self.planned_inputs, self.found_inputs)[side]
            if arg.name in inputs:
                found = inputs[arg.name]
                text = f"{found.kind} {found.target}"
                return text + (f" {_told(found.value)}" if found.kind == "constant" else "")
            maker = self.makers[side].get(arg.name)
            if maker is None:
                return "another value"
            which = f" {maker.results.index(arg.name)}" if len(maker.results) > 1 else ""
            return f"result{which} of {maker.key}"
        if isinstance(arg, tuple):
            return f"[{', '.join(self.shown(item, side) for item in arg)}]"
        return arg.name if isinstance(arg, Dtype) else str(arg)

    def of_results(self) -> Iterator[str]:
        """The loss, the outputs and what is written back."""
        left = {"the loss": self.planned.loss} if self.planned.loss else {}
        right = {"the loss": self.found.loss} if self.found.loss else {}
        for word, one, other in (
            ("output", self.planned.outputs, self.found.outputs),
            ("what is written to", self.planned.updates, self.found.updates),
        ):
            left |= {f"{word} {name}": value for name, value in one}
            right |= {f"{word} {name}": value for name, value in other}
        for name in dict.fromkeys((*left, *right)):
            if name not in left or name not in right:
                yield f"{name} is {'not in the plan' if name in right else 'missing here'}"
                continue
            text = self.of_values(
                self.planned.flat_ids[left[name]], self.found.flat_ids[right[name]]
            )
            if text:
                yield f"{name} {text}"


def _inputs(one: Input, other: Input) -> Iterator[str]:
    """How two tensors of one name differ."""
    if one.value.spec != other.value.spec:
        yield f"{_told(one.value)} in the plan, {_told(other.value)} here"
    if one.trainable != other.trainable:
        planned, found = ("trained" if i.trainable else "without a gradient" for i in (one, other))
        yield f"{planned} in the plan, {found} here"
    if set(one.aliases) != set(other.aliases):
        planned, found = (", ".join(i.aliases) or "nothing" for i in (one, other))
        yield f"tied to {planned} in the plan, to {found} here"


def _replaced(planned: tuple[FlatNode, ...], found: tuple[FlatNode, ...]) -> str:
    """What of the first operators of two programs, which are not equal, stands for what."""
    if not found:
        return f"{_where(planned[0])} is missing here"
    if not planned:
        return f"{_where(found[0])}{_line(found[0])} is not in the plan"
    one, other = planned[0], found[0]
    instead = _path(one) == _path(other) and _ops(planned[1:]) == _ops(found[1:])
    added = _occurs(one, found[1:]) and not _occurs(other, planned[1:])
    missing = _occurs(other, planned[1:]) and not _occurs(one, found[1:])
    if added and not instead:
        return f"{_where(other)}{_line(other)} is not in the plan"
    if missing and not instead:
        return f"{_where(one)} is missing here"
    if _path(one) == _path(other):
        place = LOSS if _of_loss_function(other) else _path(one) or "the model itself"
        return f"{place}{_line(other)}: {one.node.op} in the plan, {other.node.op} here"
    return f"{_where(one)} in the plan, {_where(other)}{_line(other)} here"


def _occurs(flat: FlatNode, among: tuple[FlatNode, ...]) -> bool:
    """Whether an operator of a module is soon called."""
    wanted = (_path(flat), flat.node.op)
    return any((_path(other), other.node.op) == wanted for other in among[:NEAR])


def _ops(rest: tuple[FlatNode, ...]) -> list[str]:
    """The next operators."""
    return [flat.node.op for flat in rest[:2]]


def _path(flat: FlatNode) -> str:
    return ".".join(part for part in (flat.prefix, flat.node.path) if part)


def _where(flat: FlatNode) -> str:
    """Module path and operator."""
    path = LOSS if _of_loss_function(flat) else _path(flat)
    return f"{path}: {flat.node.op}" if path else flat.node.op


def _of_loss_function(flat: FlatNode) -> bool:
    """Whether no module calls the operator: the model's own stand with a line of its forward."""
    return not _path(flat) and not flat.node.source


def _line(flat: FlatNode) -> str:
    return f" ({flat.node.source})" if flat.node.source else ""


def _arguments(flat: FlatNode) -> dict[str, object]:
    """The arguments by torch's names of them, those that are left out included."""
    node = with_operands(flat.node, flat.operands)
    packet = getattr(torch.ops.aten, node.op, None)
    schema = getattr(packet, packet.overloads()[0])._schema.arguments if packet else ()
    names = [argument.name for argument in schema]
    given: dict[str, object] = {
        names[i] if i < len(names) else f"argument {i}": arg for i, arg in enumerate(node.args)
    }
    given.update(node.kwargs)
    for argument in schema:
        if argument.has_default_value() and argument.name not in given:
            default = argument.default_value
            given[argument.name] = tuple(default) if isinstance(default, list) else default
    return given


def _number(arg: object, inputs: dict[str, Input]) -> object:
    """The value of a constant that is one number: repeated blocks are passed theirs so."""
    if isinstance(arg, Ref) and arg.name in inputs:
        found = inputs[arg.name]
        if found.kind == "constant" and not found.value.spec.shape:
            return found.data
    return arg


def _constants(one: Input, other: Input) -> str:
    """The first element in which two constants of one shape differ."""
    for index, left, right in _elements(one.data, other.data):
        if not _equal(left, right):
            where = f"constant {other.target} differs at {list(index)}"
            return f"{where}: {left} in the plan, {right} here"
    return ""


def _elements(
    one: Arg, other: Arg, index: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Arg, Arg]]:
    if isinstance(one, tuple) and isinstance(other, tuple):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from _elements(*pair, (*index, i))
    else:
        yield index, one, other


def _equal(one: object, other: object) -> bool:
    """Equality of plain arguments; NaN equals NaN, and 0.0 is not -0.0."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and repr(float(one)) == repr(float(other))  # type: ignore[arg-type]
    return one is other or one == other


def _told(value: Value | None) -> str:
    """Dtype and shape."""
    if value is None:
        return "nothing"
    spec: TensorSpec = value.spec
    return f"{spec.dtype}{list(spec.shape)}"
