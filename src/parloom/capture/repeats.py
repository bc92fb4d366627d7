"""Modules that are called again with all as it was: a trace has one operator in their place.

While forward is traced, a call of a module whose class is in the model several times is described
(`state/alike.py`). The first call of a kind runs, and its nodes are marked. A later call that finds
the same does not run: in its place is `again`, an operator with the tensors that the first one read
and results of the same shapes, for which `expand.py` puts the nodes of the first one. What is
around these modules runs as it is, so that what a model does between its layers is in the trace.

An index is an attribute that counts the entries of a list. In its place the first call finds a
number that notes what is read of it, and a later call must read the same.

What stands in the way raises `Unlike`, and the whole model is traced.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from parloom.capture import recorded
from parloom.capture.aside import LEAST, Aside
from parloom.capture.gradient_paths import storage_of
from parloom.capture.left import node_of
from parloom.capture.replace import replaced
from parloom.capture.state.alike import Finder, Found
from parloom.capture.state.aspects import is_plain
from parloom.capture.state.numbers import Number, Reads

MARK = "parloom_calls"  # of a node: the numbers of the calls that it is in
FAILURES = 8  # calls of a class that no other one repeats, in a row
RETRIES = 1  # layers that turn out to repeat no other one

_LIBRARY: Any = torch.library.Library("parloom_capture", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("again(Tensor[] operands, int call, str results, str[] aside) -> Tensor[]")
_LIBRARY.define("seen(Tensor[] operands, Tensor[] results, int call) -> Tensor")


class Unlike(Exception):
    """The whole model must be traced; the text says why."""


def _again(operands: list[Tensor], call: int, results: str, aside: list[str]) -> list[Tensor]:
    """Results of the shapes that a text has, on the device of the operands.

    `aside` has a name for each operand that is no tensor of the trace, and `""` for the others.
    """
    return [_result(text, operands[0].device) for text in results.split("|")]


def _seen(operands: list[Tensor], results: list[Tensor], call: int) -> Tensor:
    """A scalar that keeps what a call read and returned in the trace."""
    return torch.empty((), dtype=torch.int64, device=operands[0].device)


_LIBRARY.impl("again", _again, "CompositeExplicitAutograd")
_LIBRARY.impl("seen", _seen, "CompositeExplicitAutograd")
AGAIN = torch.ops.parloom_capture.again.default
SEEN = torch.ops.parloom_capture.seen.default


def _text(tensor: Tensor) -> str:
    """`float32;4,8;8,1`."""
    sizes, strides = (",".join(map(str, n)) for n in (tensor.shape, tensor.stride()))
    return f"{str(tensor.dtype).removeprefix('torch.')};{sizes};{strides}"


def _result(text: str, device: torch.device) -> Tensor:
    """A tensor of the shape that `_text` told."""
    dtype, sizes, strides = text.split(";")
    shape, stride = ([int(n) for n in part.split(",") if n] for part in (sizes, strides))
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)


@dataclass(frozen=True, slots=True)
class New:
    """A tensor that a call returns: one that it made, or one that it found, by its number."""

    number: int
    made: bool


@dataclass(frozen=True, slots=True)
class First:
    """A call that was run: what it found, read and returned.

    `operands` are those of the tensors that it found that its nodes read. `leaves` are what it
    returned, plain values and tensors, in a `structure`; `gradients` says which of the tensors that
    it made require one. `entered` counts the calls of modules in it, by their paths below its own;
    `nested` says whether a module around it, or its own, was called before.
    """

    number: int
    found: Found
    reads: Reads
    operands: tuple[int, ...]
    leaves: tuple[Any, ...]
    structure: TreeSpec
    texts: str
    gradients: tuple[bool, ...]
    entered: Mapping[str, int]
    nested: bool

    def is_like(self, found: Found, nested: bool) -> bool:
        """Whether a call that finds this would do the same."""
        same = self.nested == nested and found.steps == self.found.steps
        return same and self.reads.hold(found.values)


@dataclass(slots=True)
class Kind:
    """The calls of the modules of one class."""

    firsts: list[First] = field(default_factory=list)
    failures: int = 0


class Repeats:
    """Stands in for calls of modules during one trace."""

    def __init__(self, model: nn.Module, run: frozenset[int] | None = frozenset()) -> None:
        """`run` are layers that do not repeat others, by identity; None says that none may."""
        self.model = model
        self.finder = Finder(indices_of(model))
        self.kinds: dict[type, Kind] = {}
        self.modules: dict[int, nn.Module] = {}
        by_class: dict[type, list[nn.Module]] = {}
        for module in model.modules():
            if module._modules and type(module).forward is not nn.Module.forward:
                by_class.setdefault(type(module), []).append(module)
        for kind, modules in by_class.items():
            if len(modules) >= LEAST:
                self.kinds[kind] = Kind()
                self.modules.update((id(vars(m)), m) for m in modules)
        self.run = run
        self.aside: Aside | None = None
        if self.kinds and run is not None:
            self.aside = Aside(model, self.finder.places, run)
        self.missing: nn.Module | None = None  # a layer that had to be run
        self.repeated = 0
        # Whether a trace may be another one than that of the whole model.
        self.did = self.aside is not None and bool(self.aside.parameters)
        self.why = ""
        self.begin()

    def begin(self) -> None:
        """Before each trace: no call of another one is repeated in it."""
        for kind in self.kinds.values():
            kind.firsts.clear()
            kind.failures = 0
        self.numbers = count()
        self.inside: tuple[int, ...] = ()
        self.seen: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls of modules that find what another one found are not run."""
        original: Any = nn.Module._call_impl
        self.begin()
        shown = nullcontext() if self.aside is None else self.aside.shown()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A module of two names is called as a proxy that has its attributes.
            base = self.modules.get(id(vars(module)))
            tracer = getattr(get_proxy_mode(), "tracer", None)
            if base is None or tracer is None:
                return original(module, *args, **kwargs)
            kind = self.kinds[type(base)]
            if kind.failures >= FAILURES:
                self.check_run(base)
                return original(module, *args, **kwargs)
            found = self.finder.found(base, args, kwargs)
            nested = any("@" in key for key in tracer.module_stack)
            alike = (f for f in reversed(kind.firsts) if f.is_like(found, nested))
            first = next((f for f in alike if self.reads_traced(f, found)), None)
            if first is not None:
                kind.failures = 0
                return self.again(first, found, tracer)
            self.check_run(base)
            kind.failures += 1
            before, last = dict(tracer.num_calls), tracer.graph._root.prev
            given = tuple(node_of(tensor, tracer) for tensor in found.tensors)
            number, reads, lists = next(self.numbers), Reads(active=True), recorded.lists()
            with self.marked(number), self.noting(found, reads):
                result = original(module, *args, **kwargs)
            both = result, recorded.added(lists)
            if self.finder.found(base, args, kwargs).is_unchanged(found):
                nodes = nodes_after(last)
                ran = Ran(number, found, given, reads, both, nodes, tracer, before)
                made = ran.first(nested)
                if made is not None:
                    self.keep(kind, made, both)
            return result

        with shown, replaced(nn.Module, "_call_impl", call):
            yield

    def taken(self) -> AbstractContextManager[object]:
        """Around a trace: what repeats has no parameters outside of forward."""
        return nullcontext() if self.aside is None else self.aside.taken()

    def fewer(self) -> "Repeats | None":
        """Stands in for fewer calls after a trace that failed; None where all are to be run."""
        if self.aside is None or not self.aside.parameters:
            return None
        if self.missing is None or self.run is None or len(self.run) == RETRIES:
            return type(self)(self.model, None)
        return type(self)(self.model, self.run | {id(self.missing)})

    def check_run(self, module: nn.Module) -> None:
        """Note where a call must run whose parameters are not in the trace.

        It runs with tensors of their shapes: an exception would leave the user's code half done.
        """
        layer = None if self.aside is None else self.aside.layers.get(id(vars(module)))
        if layer is not None:
            self.missing = self.missing or layer
            self.why = "a layer repeats no other one"

    def check_results(self, results: list[Tensor]) -> None:
        """Note where what is no call of a layer reads or returns its parameters."""
        tracer = getattr(get_proxy_mode(), "tracer", None)
        if self.aside is None or tracer is None or self.why:
            return
        returned = any(id(tensor) in self.aside.names for tensor in results)
        if returned or self.aside.is_read(tracer.root):
            self.why = "parameters of layers that are not traced are read"

    def reads_traced(self, first: First, found: Found) -> bool:
        """Whether a call in the place of `first` would read a tensor of the trace."""
        names = {} if self.aside is None else self.aside.names
        return any(id(found.tensors[i]) not in names for i in first.operands)

    def again(self, first: First, found: Found, tracer: Any) -> Any:
        """What a call would return that does what `first` did."""
        if first.reads.found:
            read(found)
        for number in found.counted:
            number.read()
        self.repeated += 1
        names = {} if self.aside is None else self.aside.names
        operands = [found.tensors[i] for i in first.operands]
        aside = [names.get(id(t), "") for t in operands]
        traced = [t for t, name in zip(operands, aside, strict=True) if not name]
        made = AGAIN(traced, first.number, first.texts, aside)
        if tuple(t.requires_grad for t in made) != first.gradients:
            self.why = "a call's results require gradients in another way"
        path = path_of(tracer)
        for below, calls in first.entered.items():
            tracer.num_calls[path + below] = tracer.num_calls.get(path + below, 0) + calls

        def leaf(value: Any) -> Any:
            if type(value) is not New:
                return value
            return made[value.number] if value.made else found.tensors[value.number]

        result, added = tree_unflatten([leaf(value) for value in first.leaves], first.structure)
        recorded.add(added)
        return result

    def keep(self, kind: Kind, first: First, result: Any) -> None:
        """Let later calls repeat one; its operands and results stay in the trace."""
        made = {
            leaf.number: value
            for leaf, value in zip(first.leaves, tree_flatten(result)[0], strict=True)
            if type(leaf) is New and leaf.made
        }
        operands = [first.found.tensors[i] for i in first.operands]
        self.did = True
        self.seen.append(SEEN(operands, [made[i] for i in sorted(made)], first.number))
        kind.firsts.append(first)

    @contextmanager
    def marked(self, number: int) -> Iterator[None]:
        """Inside, nodes have the number of a call."""
        outside = self.inside
        self.inside = (*outside, number)
        try:
            with annotate({MARK: self.inside}):
                yield
        finally:
            self.inside = outside

    @contextmanager
    def noting(self, found: Found, reads: Reads) -> Iterator[None]:
        """Inside, indices note what is read of them."""
        before = [vars(owner)[name] for owner, name, _ in found.indices]
        noting = [
            Number.variable(number, value, reads)
            for number, (_, _, value) in enumerate(found.indices)
        ]
        for (owner, name, _), index in zip(found.indices, noting, strict=True):
            vars(owner)[name] = index
        self.did = self.did or bool(noting)
        kept = True
        try:
            yield
        finally:
            for (owner, name, _), index, old in zip(found.indices, noting, before, strict=True):
                kept = kept and vars(owner).get(name) is index
                vars(owner)[name] = old
        if not kept:
            self.why = "a call changes an index"
        if reads.found:
            read(found)


@dataclass(frozen=True, slots=True)
class Ran:
    """A call that was run, with the nodes that it made.

    `given` are the nodes of the tensors that it found, and `before` the counts of calls. `both` are
    its result and what was recorded in it.
    """

    number: int
    found: Found
    given: tuple[fx.Node | None, ...]
    reads: Reads
    both: tuple[Any, recorded.Lists | None]
    nodes: list[fx.Node]
    tracer: Any
    before: Mapping[str, int]

    def first(self, nested: bool) -> First | None:
        """The call as one that others repeat; None where it does more than its results show."""
        path = path_of(self.tracer)
        entered = {
            name: calls - self.before.get(name, 0)
            for name, calls in self.tracer.num_calls.items()
            if calls != self.before.get(name, 0)
        }
        leaves, structure = tree_flatten(self.both)
        operands, told = self.operands(), self.leaves(leaves)
        if self.both[1] is None or not operands or told is None:
            return None
        if not all(n.startswith(f"{path}.") for n in entered):
            return None
        made = {
            leaf.number: value
            for leaf, value in zip(told, leaves, strict=True)
            if type(leaf) is New and leaf.made
        }
        device = self.found.tensors[operands[0]].device
        if not made or any(t.device != device for t in made.values()):
            return None
        new = [made[i] for i in sorted(made)]
        below = {name.removeprefix(path): calls for name, calls in entered.items()}
        return First(
            self.number, self.found, self.reads, operands, told, structure,
            "|".join(map(_text, new)), tuple(t.requires_grad for t in new), below, nested,
        )  # fmt: skip

    def operands(self) -> tuple[int, ...]:
        """The tensors that the call found and read; none where it read others, too."""
        own = set(self.nodes)
        read = {n for node in self.nodes for n in node.all_input_nodes if n not in own}
        if not read <= set(self.given) or any(n.op != "call_function" for n in self.nodes):
            return ()
        both = zip(self.given, self.found.tensors, strict=True)
        if not all(node not in read or is_same(node_of(t, self.tracer), node) for node, t in both):
            return ()
        return tuple(i for i, node in enumerate(self.given) if node in read)

    def leaves(self, values: list[Any]) -> tuple[Any, ...] | None:
        """The values that a call returned; None where one is neither plain nor a tensor of its own.

        A view of another tensor is none of its own: what is written to it is written to both.
        """
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            known = {id(t): i for i, t in enumerate(self.found.tensors)}
            memory = {storage_of(t) for t in self.found.tensors if is_traced(t)}
            made: dict[int, int] = {}
            told: list[Any] = []
            for value in values:
                if not isinstance(value, Tensor):
                    if not is_plain(value) or type(value) is Number:
                        return None
                    told.append(value)
                elif id(value) in known:
                    told.append(New(known[id(value)], made=False))
                else:
                    if not is_traced(value) or type(value) is nn.Parameter:
                        return None
                    if id(value) not in made:
                        if storage_of(value) in memory:
                            return None
                        memory.add(storage_of(value))
                        made[id(value)] = len(made)
                    told.append(New(made[id(value)], made=True))
        return tuple(told)


def check_untouched(graph: fx.Graph, before: set[fx.Node]) -> None:
    """Raise `Unlike` where nodes were put after results of a call, which no other call has."""
    ends: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is AGAIN:
            ends |= {node, *node.users}
        elif node.target is SEEN:
            ends |= set(node.args[1])
    for node in graph.nodes:
        if node not in before and not ends.isdisjoint(node.all_input_nodes):
            raise Unlike("what writes to a call's results changes its gradients")


def is_same(now: fx.Node | None, before: fx.Node | None) -> bool:
    """Whether a tensor has the value of a node that it had before.

    A tensor that an operator returns as it is has the node of that operator after it.
    """
    while now is not before:
        target = None if now is None else now.target
        if now is None or not isinstance(target, torch._ops.OpOverload):
            return False
        if target._schema.is_mutable or not now.all_input_nodes:
            return False
        now = now.all_input_nodes[0]
    return True


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor is one of a trace, with plain memory."""
    return isinstance(tensor, FakeTensor) and tensor.layout is torch.strided


def read(found: Found) -> None:
    """Note that indices are read, where a call around notes it."""
    for owner, name, _ in found.indices:
        value = vars(owner)[name]
        if type(value) is Number:
            value.read()


def path_of(tracer: Any) -> str:
    """The path of the module that is called, as the tracer has it."""
    path: str = list(tracer.module_stack.values())[-1][0]
    return path


def nodes_after(last: fx.Node) -> list[fx.Node]:
    """The nodes of a graph that come after one."""
    found: list[fx.Node] = []
    node = last.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def indices_of(model: nn.Module) -> dict[int, frozenset[str]]:
    """Attributes that count the entries of a list of modules, by the module they are of.

    The difference between them and the place in the list is the same for all entries.
    """
    found: dict[int, set[str]] = {}
    for parent in model.modules():
        if not isinstance(parent, nn.ModuleList) or len(parent) < LEAST:
            continue
        places: dict[tuple[str, str], list[tuple[int, nn.Module]]] = {}
        for place, entry in enumerate(parent):
            for path, module in entry.named_modules():
                for name, value in vars(module).items():
                    if type(value) is int:
                        places.setdefault((path, name), []).append((place, module))
        for (_, name), owners in places.items():
            offsets = {vars(module)[name] - place for place, module in owners}
            if len(owners) > 1 and len(offsets) == 1:
                for _, module in owners:
                    found.setdefault(id(vars(module)), set()).add(name)
    return {key: frozenset(names) for key, names in found.items()}
