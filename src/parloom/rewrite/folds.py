"""Affine maps of channels behind products and convolutions, moved into their weights and biases.

`batch_norm(conv2d(x, w), ..)` with statistics that are given, as in evaluation or where a norm is
frozen, is one convolution with a scaled kernel and a bias; so is a product or a sum with one number
for each channel. The scaled weight is made of the user's own in every pass. Each rule is of the
kernel, stride, padding and settings of a call there is, and for all other sizes.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from parloom.ir.graph import Function, Node, Ref, TensorSpec
from parloom.rewrite.rules import Rule, rule
from parloom.rewrite.take import term_of
from parloom.rewrite.terms import arg_text

NORM, SCALE, SHIFT = "fold_batch_norm", "fold_scale", "fold_shift"
NAMES = (NORM, SCALE, SHIFT)
COMBINED: Mapping[str, str] = MappingProxyType({"mul": SCALE, "add": SHIFT})
SPATIAL: Mapping[str, int] = MappingProxyType({"linear": 0, "conv1d": 1, "conv2d": 2, "conv3d": 3})
"""Products with weights, and the dims of their windows."""
GROUPS = 6


def folds(function: Function) -> Iterator[Rule]:
    """The rules for calls of a function that are behind products, or behind such calls; each
    once.
    """
    specs, found = function.specs(), dict[str, Rule]()
    behind: dict[str, Node] = {}
    for node in (item for item in function.body if isinstance(item, Node) and not item.kwargs):
        if node.op in SPATIAL:
            behind[node.results[0].name] = node
        for at, arg in enumerate(node.args[:2]):
            product = behind.get(arg.name) if isinstance(arg, Ref) else None
            if product is None or product is node:
                continue
            for biased in dict.fromkeys((_is_biased(product), True)):
                for own in _rules(_Layer(product, specs, biased), node, at):
                    found.setdefault(str(own), own)
                    behind[node.results[0].name] = product
    yield from found.values()


def _is_biased(product: Node) -> bool:
    return len(product.args) > 2 and product.args[2] is not None


def _rules(layer: "_Layer", node: Node, at: int) -> Iterator[Rule]:
    """The rules for one call whose operand at a position is the product."""
    if node.op == "batch_norm" and at == 0 and node.args[5] is False:
        if all(isinstance(arg, Ref) for arg in node.args[3:5]):
            yield layer.normalized(node)
    elif node.op in COMBINED and len(node.args) == 2 and isinstance(node.args[1 - at], Ref):
        (other,) = node.refs[1 - at :][:1]
        if sizes := layer.sizes_of(layer.specs[other].shape):
            yield layer.combined(node.op, at, sizes)


class _Layer:
    """A product with a weight as text of rules, with a bias or without: channels in `h` groups
    where there are several.
    """

    def __init__(self, node: Node, specs: Mapping[str, TensorSpec], biased: bool) -> None:
        self.op, self.specs, self.biased = node.op, specs, biased
        self.spatial, self._says_bias = SPATIAL[node.op], len(node.args) > 2
        self._rest = [arg_text(term_of(arg)) for arg in node.args[3:]]
        grouped = len(node.args) > GROUPS and node.args[GROUPS] != 1
        if grouped:
            self._rest[GROUPS - 3] = "h"
        (weight,) = node.refs[1:2]
        kernel = specs[weight].shape[2:]
        self._num_outputs = specs[weight].shape[0]
        self._lead = "h * " if grouped else ""
        self.out = f"{self._lead}o"
        windows = "".join(f", {extent}" for extent in kernel)
        self._inputs = [f"w[{self.out}, k{windows}]"]
        self._inputs += [f"c[{self.out}]"] if biased else []

    def normalized(self, norm: Node) -> Rule:
        """The rule of a batch norm behind it, with given statistics."""
        has_weight, has_bias = (isinstance(arg, Ref) for arg in norm.args[1:3])
        names = ["g" if has_weight else "None", "d" if has_bias else "None", "m", "v"]
        inputs = [f"{name}[{self.out}]" for name in names if name != "None"]
        scale = f"rsqrt(add(v, {arg_text(term_of(norm.args[7]))}))"
        scale = f"mul({scale}, g)" if has_weight else scale
        shift = f"mul({'sub(c, m)' if self.biased else 'neg(m)'}, {scale})"
        shift = f"add({shift}, d)" if has_bias else shift
        rest = [arg_text(term_of(arg)) for arg in norm.args[5:]]
        left = f"batch_norm({', '.join((self._left, *names, *rest))})"
        return self._rule(NORM, "b", inputs, left, self._call(self._scaled(scale), shift))

    def combined(self, op: str, at: int, sizes: str) -> Rule:
        """The rule of a product or a sum with one number for each channel, of such a shape."""
        operands = [self._left, "s"]
        left = f"{op}({', '.join(operands if at == 0 else operands[::-1])})"
        flat = f"view(s, ({self.out},))"
        bias = f"{op}(c, {flat})" if self.biased else "None" if op == "mul" else flat
        right = self._call(self._scaled("s") if op == "mul" else "w", bias)
        return self._rule(COMBINED[op], "b" if self.spatial else "*", [f"s[{sizes}]"], left, right)

    def sizes_of(self, shape: tuple[int, ...]) -> str:
        """The sizes of one number for each channel, of an operand of a call behind the product;
        empty where it has others.
        """
        ones = (1,) * self.spatial
        for lead in ((), (1,)):
            if shape == (*lead, self._num_outputs, *ones) and (self.spatial or not lead):
                return ", ".join((*map(str, lead), self.out, *map(str, ones)))
        return ""

    @property
    def _left(self) -> str:
        return self._call("w", "c" if self.biased else "None")

    def _call(self, weight: str, bias: str) -> str:
        """The call with another weight and bias; that it has none is said where it was."""
        is_said = self._says_bias or bias != "None"
        return f"{self.op}({', '.join(('x', weight, *([bias] if is_said else []), *self._rest))})"

    def _scaled(self, scale: str) -> str:
        """The weight, each output times a number."""
        return f"mul(w, view({scale}, ({self.out}{', 1' * (1 + self.spatial)})))"

    def _rule(self, name: str, first: str, inputs: list[str], left: str, right: str) -> Rule:
        places = "".join(f", p{i}" for i in range(self.spatial))
        x = f"x[{first}, {self._lead}k{places}]"
        return rule(name, ", ".join((x, *self._inputs, *inputs)), [left], [right])
