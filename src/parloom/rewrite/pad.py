"""Vocabulary padding: a parameter transformation with an inverse.

GPT-2 has 50,257 tokens, a prime; no axis divides it. A rewrite pads the rows of the embedding (and
of what is tied to it) with zeros and masks the padded classes with -inf before the loss, so that
rows and classes can be sharded. The padded rows are never read by index, their logits have
probability zero, so their gradient is zero and they stay zero under every elementwise optimizer;
the runtime drops them from everything that the user sees (`ParameterSpec.valid`). Megatron-LM pads
the same way.

As text, in a plan: `pad transformer.wte.weight 50257 50260`.
"""

import re
from dataclasses import dataclass, replace
from math import ceil

from parloom.errors import InputError
from parloom.ir.graph import (
    DTYPE_BYTES,
    Call,
    Graph,
    Input,
    Node,
    Ref,
    TensorSpec,
    Value,
    numbered,
    rename_args,
    rename_node,
)

PADS = "pad"
"""What pins call this rewrite."""
PADDING = re.compile(r"pad ([^ ]+) ([0-9]{1,18}) ([0-9]{1,18})")
# Operators that a padded last dim passes through as it is.
PASSING = frozenset({"_to_copy", "clone", "alias"})
# What tensor cores want rows and columns of products of half precision to be a multiple of.
ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows `size` of parameter `name` padded to `padded`."""

    name: str
    size: int
    padded: int

    def __str__(self) -> str:
        return f"pad {self.name} {self.size} {self.padded}"


def parse_padding(text: str) -> Padding | None:
    """The inverse of `str`; None for another rewrite."""
    found = PADDING.fullmatch(text)
    return None if found is None else Padding(found[1], int(found[2]), int(found[3]))


def paddings(graph: Graph, ranks: int) -> tuple[Padding, ...]:
    """The vocabularies of `graph` that do not divide over `ranks` and that can be padded: in half
    precision so that each of several ranks has rows for tensor cores.
    """
    found = []
    for entry in graph.of_kind("parameter"):
        shape, width = entry.value.spec.shape, DTYPE_BYTES[entry.value.spec.dtype]
        multiple = ranks * (ALIGNED_BYTES // width if width <= 2 and ranks > 1 else 1)
        if len(shape) != 2 or shape[0] % multiple == 0:
            continue
        padding = Padding(entry.target, shape[0], ceil(shape[0] / multiple) * multiple)
        readers = [i for i in graph.main.body if isinstance(i, Node)]
        looked_up = any(
            n.op == "embedding" and n.refs[0] == entry.value.name for n in readers
        ) or any(n.op == "linear" and n.refs[1:2] == (entry.value.name,) for n in readers)
        if looked_up and padded(graph, padding) is not None:
            found.append(padding)
    return tuple(found)


def padded(graph: Graph, padding: Padding) -> Graph | None:
    """`graph` with the parameter padded; None where some reader cannot take padded rows."""
    return _Padder(graph, padding).run()


def cut(graph: Graph, padding: Padding) -> Graph:
    """`graph` with the parameter padded, and read without its padding; raises `InputError` for a
    parameter that `graph` has not.
    """
    entry = next((i for i in graph.of_kind("parameter") if i.target == padding.name), None)
    if entry is None or entry.value.spec.shape[0] != padding.size:
        raise InputError(f"the rewrite {str(padding)!r} does not apply to {graph.name}")
    user, spec = entry.value, entry.value.spec
    stored = Value(
        f"{user.name}__stored", TensorSpec((padding.padded, *spec.shape[1:]), spec.dtype)
    )
    rows = Node("slice", (Ref(stored.name), 0, 0, padding.size), (), (user,), "", 0, "")
    inputs = tuple(replace(i, value=stored) if i is entry else i for i in graph.inputs)
    main = replace(
        graph.main,
        inputs=tuple(i.value for i in inputs),
        body=numbered((rows, *graph.main.body)),
    )
    return replace(graph, main=main, inputs=inputs)


class _Padder:
    """One pass over main that widens the parameter and every value that carries its rows."""

    def __init__(self, graph: Graph, padding: Padding) -> None:
        self.graph, self.padding, self.specs = graph, padding, graph.main.specs()
        self.wide: dict[str, str] = {}  # value with a padded last dim -> its masked name
        self.body: list[Node | Call] = []

    def run(self) -> Graph | None:
        """The rewritten graph, or None where some reader cannot take padded rows."""
        entry = next(
            (i for i in self.graph.of_kind("parameter") if i.target == self.padding.name), None
        )
        if entry is None or entry.value.spec.shape[0] != self.padding.size:
            return None
        weight = entry.value.name
        for item in self.graph.main.body:
            if isinstance(item, Call):
                if weight in item.args or self.wide.keys() & set(item.args):
                    return None
                self.body.append(item)
            elif not self._node(item, weight):
                return None
        outputs = tuple((user, self._narrow(value)) for user, value in self.graph.outputs)
        shape = (self.padding.padded, *entry.value.spec.shape[1:])
        value = Value(weight, TensorSpec(shape, entry.value.spec.dtype))
        inputs = tuple(
            replace(i, value=value) if i.value.name == weight else i for i in self.graph.inputs
        )
        main = replace(
            self.graph.main,
            inputs=tuple(i.value for i in inputs),
            body=numbered(tuple(self.body)),
        )
        return replace(self.graph, main=main, inputs=inputs, outputs=outputs)

    def _node(self, node: Node, weight: str) -> bool:
        """Append the node as it is to be, or say that it cannot be."""
        if weight in node.refs:
            if node.op == "embedding" and node.refs.count(weight) == 1 == len(node.refs) - 1:
                self.body.append(node)
                return node.refs[0] == weight
            return self._product(node, weight)
        if not self.wide.keys() & set(node.refs):
            self.body.append(node)
            return True
        return self._passing(node)

    def _product(self, node: Node, weight: str) -> bool:
        """X W^T: the last dim of the result is padded; mask it at once."""
        if node.op != "linear" or node.refs[1:] != (weight,):
            return False
        made = node.results[0]
        spec = self._padded(made.spec)
        masked = Value(f"{made.name}__classes", spec)
        self.body.append(replace(node, results=(Value(made.name, spec),)))
        self.body.append(
            Node("parloom.mask_tail", (Ref(made.name), self.padding.size), (), (masked,),
                 node.path, 0, node.source)
        )  # fmt: skip
        self.wide[made.name] = masked.name
        return True

    def _passing(self, node: Node) -> bool:
        names = {old: new for old, new in self.wide.items()}
        if node.op == "cross_entropy_loss":
            if not self._is_of_indices(node) or node.arg(5, "label_smoothing", 0.0):
                return False
            self.body.append(rename_node(node, names))
            return True
        made = node.results[0]
        if len(node.refs) != 1 or made.spec.shape[-1:] != (self.padding.size,):
            return False
        spec = self._padded(made.spec)
        if node.op == "view":
            args: tuple[object, ...] = (*rename_args(node.args[:1], names), spec.shape)
            node = replace(node, args=args)  # type: ignore[arg-type]
        elif node.op in PASSING or (
            node.op == "slice" and node.args[1] not in (-1, self._last(node))
        ):
            node = rename_node(node, names)
        else:
            return False
        self.body.append(replace(node, results=(Value(made.name, spec),)))
        self.wide[made.name] = made.name
        return True

    def _is_of_indices(self, loss: Node) -> bool:
        """Whether targets are indices of classes, and classes have no weights of their own."""
        return len(loss.refs) == 2 and not self.specs[loss.refs[1]].is_float

    def _last(self, node: Node) -> int:
        return len(node.results[0].spec.shape) - 1

    def _padded(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec((*spec.shape[:-1], self.padding.padded), spec.dtype)

    def _narrow(self, value: str) -> str:
        """The user's part of an output that carries padded classes."""
        if value not in self.wide:
            return value
        source = next(v for i in self.body for v in i.results if v.name == self.wide[value])
        spec = TensorSpec((*source.spec.shape[:-1], self.padding.size), source.spec.dtype)
        name = f"{value}__user"
        args = (Ref(source.name), len(spec.shape) - 1, 0, self.padding.size)
        self.body.append(Node("slice", args, (), (Value(name, spec),), "", 0, ""))
        return name


def valid_rows(rewrites: tuple[str, ...], entry: Input) -> tuple[int, ...] | None:
    """The shape that the user knows of a padded parameter, None where nothing was padded."""
    for text in rewrites:
        padding = parse_padding(text)
        if padding is not None and padding.name == entry.target:
            return (padding.size, *entry.value.spec.shape[1:])
    return None
