"""`OpDef`: everything about one operator in one entry, and `Emission`: how its code is written."""

import keyword
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parloom.errors import VerifyError
from parloom.ir.graph import DTYPE_BYTES, Arg, Dtype, Function, Node, Ref, TensorSpec
from parloom.ir.layout import Layout, Shape, digits, local_shape
from parloom.ir.mesh import Mesh
from parloom.ir.ops.exact import Exact, elementwise, of_all
from parloom.ir.ops.rule import Assignment, Rule, Site, broadcast, elementwise_flops

MAX_DECIMAL_BITS = 4096  # Python refuses to print or read much longer decimal numbers


def literal(arg: Arg) -> str:
    """Code of an argument that names no tensor: the one writer of values into source.

    Raises `VerifyError` for anything but None, bool, int, float, str, a known dtype, or a tuple of
    these: what arguments hold may come from a file.
    """
    if isinstance(arg, tuple):
        inner = ", ".join(literal(a) for a in arg)
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, Dtype):
        if arg.name not in DTYPE_BYTES:
            raise VerifyError(f"unknown dtype {arg.name!r}")
        return f"torch.{arg.name}"
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    if isinstance(arg, int) and arg.bit_length() > MAX_DECIMAL_BITS:
        return hex(arg)
    if arg is not None and type(arg) not in (bool, int, float, str):
        raise VerifyError(f"{arg!r} cannot be written as a literal")
    return repr(arg)


def keywords(kwargs: tuple[tuple[str, str], ...]) -> list[str]:
    """`name=code` of each; raises `VerifyError` for a name that is no identifier."""
    for name, _ in kwargs:
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise VerifyError(f"{name!r} is no argument's name")
    return [f"{name}={code}" for name, code in kwargs]


@dataclass(frozen=True, slots=True)
class Emission:
    """What an entry needs to write one rank's code for one call.

    `names` maps operand values to Python expressions; `key` is an expression for the operator's
    name at run time (it differs between calls of a block function); layouts are those the rule
    requires and produces, so every local size is derived, never matched. `adjacent` are the
    arguments whose tensors lie one after the other in memory.
    """

    site: Site
    rule: Rule
    assignment: Assignment
    mesh: Mesh
    names: Mapping[str, str]
    key: str
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    halo: tuple[tuple[int, int], ...] = ()
    adjacent: tuple[int, ...] = ()

    def arg(self, position: int, name: str = "", default: Arg = None) -> str:
        """Code of one argument."""
        return self.code(self.site.arg(position, name, default))

    def code(self, arg: Arg) -> str:
        """Code of any argument."""
        if isinstance(arg, Ref):
            return self.names[arg.name]
        if isinstance(arg, tuple):
            inner = ", ".join(self.code(a) for a in arg)
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        return literal(arg)

    def keywords(self) -> list[str]:
        """Code of the node's keyword arguments."""
        return keywords(tuple((k, self.code(v)) for k, v in self.site.node.kwargs))

    def call(self, function: str) -> str:
        """`function(...)` with the node's own arguments."""
        node = self.site.node
        parts = [*(self.code(a) for a in node.args), *self.keywords()]
        return f"{function}({', '.join(parts)})"

    def result_shape(self, index: int = 0) -> Shape:
        """Local shape of a result."""
        return local_shape(self.result_layouts[index], self.site.results[index].shape, self.mesh)

    def operand_shape(self, index: int = 0) -> Shape:
        """Local shape of an operand."""
        return local_shape(self.operand_layouts[index], self.site.operands[index].shape, self.mesh)

    def result_digits(self, dim: int, index: int = 0) -> str:
        """Code of the digits of a result's dim."""
        spec, layout = self.site.results[index], self.result_layouts[index]
        return self.code(digits(layout, dim, spec.shape[dim], self.mesh))

    def operand_digits(self, dim: int, index: int = 0) -> str:
        """Code of the digits of an operand's dim."""
        spec, layout = self.site.operands[index], self.operand_layouts[index]
        return self.code(digits(layout, dim, spec.shape[dim], self.mesh))

    def all_digits(self, spec: TensorSpec, layout: Layout) -> str:
        """Code of the digits of all dims."""
        dims = tuple(digits(layout, d, n, self.mesh) for d, n in enumerate(spec.shape))
        return self.code(dims)

    def axes_of(self, factor: str) -> tuple[str, ...]:
        """Axes on a factor of the entry's rule, whether or not it was cut into parts."""
        return tuple(
            a
            for f, axes in self.assignment.items()
            if f == factor or (f.startswith(factor) and f[len(factor) :].isdigit())
            for a in axes
        )

    def once(self, arg: Arg) -> str:
        """Code of an operand that is added (`Rule.added`): zero on all ranks but one where results
        are partial sums.
        """
        index = self.site.operand(arg)
        if index is None or not (axes := self.rule.counts_once(index, self.assignment)):
            return self.code(arg)
        return f"rt.mask({self.code(arg)}, ctx, {axes!r})"


Emit = Callable[[Emission], str] | str
SavedTensors = tuple[tuple[str, int], ...]
Own = Callable[[Site, bool], float]
Saved = SavedTensors | Callable[[Site], SavedTensors]


def each_element(num_bytes: int) -> Own:
    """So many bytes for every element of the result."""
    return lambda site, fused: num_bytes * site.results[0].num_elements


def first_bytes(site: Site, fused: bool) -> float:
    """As many bytes as the first operand has."""
    return site.operands[0].num_bytes


def all_operands(site: Site) -> SavedTensors:
    """Every tensor argument is kept."""
    return tuple(("operand", i) for i in range(len(site.operands)))


def both_operands(site: Site) -> SavedTensors:
    """The operands of a comparison; a lone one is compared with a number, which takes a mask."""
    return all_operands(site) if len(site.operands) > 1 else ()


def each_other(site: Site) -> SavedTensors:
    """Operands of a product: each is kept for the gradient of the others, so a lone one is not."""
    if len(site.operands) == 1:
        return ()
    return tuple(("other", i) for i in range(len(site.operands)))


@dataclass(frozen=True, slots=True)
class OpDef:
    """One operator.

    `rule` gives its factors; `emit` is a function name that takes the node's arguments, `.method`
    for a method of the first, or a function that writes the expression; `flops` the forward work
    over the global index space (an axis on any factor divides it; the backward pass costs
    `backward_ratio` times as much); `saved` what autograd keeps, as ("operand" | "result", index),
    ("other", index) for an operand that is kept where another one needs a gradient, or a function
    of the call that says so;
    `own_bytes` what autograd keeps that is no value of the graph, `undo_bytes` what the backward
    pass takes beside gradients (sharded as result 0 is), `lies_in` the memory that result 0 lies in
    where that is more than its own (sharded as operand 0 is), all over the global index space and
    told whether kernels are fused (GPUs) or not (CPUs);
    `expand` gives the simpler operators that replace the call where a `local` factor is sharded, or
    always where there is nothing to `emit`;
    `halo` the border rows that operand 0 needs per halo factor; `joins` the arguments (by position)
    whose tensors it reads as one; `view` a result that shares its operand's memory, and `writes`
    the operands (from the last) that it copies into that memory; `linear` where the result is
    linear in the first operand ("first"), in either
    of two ("either") or in all together ("joint"), so that partial sums may pass through; "carried"
    is "first" where they always do, and the gradients of the other operands become partial;
    `detached` the results that carry no gradient where others do;
    `returns_list` where the code gives a list (or tuple) even of a single result;
    `why_whole` why nothing of it can be split, for plans to say;
    `exact` what it computes, in any algebra, for proofs (where nothing is said and its factors are
    the dims of the result, a function of elements).
    """

    name: str
    rule: Callable[[Site], Rule]
    emit: Emit
    flops: Callable[[Site, Rule], float] = elementwise_flops
    backward_ratio: float = 1.0
    saved: Saved = ()
    own_bytes: Own | None = None
    undo_bytes: Own | None = None
    lies_in: Own | None = None
    expand: Callable[[Site, frozenset[str]], Function] | None = None
    halo: Callable[[Site], Mapping[str, tuple[int, int, int]]] | None = None
    joins: tuple[int, ...] = ()
    view: bool = False
    writes: tuple[int, ...] = ()
    random: bool = False
    differentiable: bool = True
    detached: tuple[int, ...] = ()
    linear: str = ""
    returns_list: bool = False
    why_whole: str = ""
    exact: Exact | None = None

    def passes_partial(self, node: Node, partial: tuple[bool, ...]) -> bool:
        """Whether the result is a partial sum when just the marked operands are. A number that is
        added counts on every rank: zero, with which Python's `sum` begins, may.
        """
        if not any(partial):
            return False
        if self.linear == "joint":
            return all(partial) and all(isinstance(a, Ref) or a == 0 for a in node.args[:2])
        if self.linear == "either":
            return sum(partial) == 1
        return self.linear in ("first", "carried") and partial[0] and not any(partial[1:])

    @property
    def computes(self) -> Exact | None:
        """What it computes, which refuses arguments that it does not read; None where that is not
        known.
        """
        if self.exact is None and self.rule is broadcast and not self.random:
            return of_all(elementwise(self.name))
        return None if self.exact is None else of_all(self.exact)

    def saves(self, site: Site) -> SavedTensors:
        """What autograd keeps of a call."""
        return self.saved(site) if callable(self.saved) else self.saved

    def source(self, emission: Emission) -> str:
        """The expression that one rank runs."""
        if callable(self.emit):
            return self.emit(emission)
        if self.emit.startswith("."):
            first, *rest = emission.site.node.args
            parts = [*(emission.code(a) for a in rest), *emission.keywords()]
            return f"{emission.code(first)}{self.emit}({', '.join(parts)})"
        return emission.call(self.emit)
