"""Writes that autograd does not see, and the gradients that `torch.no_grad` stops.

The graph of a trace has in-place operators, aliases of memory, and switches of the grad mode.
Decomposition makes one value of all tensors that share memory, and what is written to it carries
its gradient. Autograd keeps a path per tensor: a write under no_grad or to a detached alias changes
the values that others see, and leaves their paths as they were. Here every tensor has the `Path`
that autograd gives it; a program that would train otherwise is refused, and no_grad and detach
become operators whose results are memory of their own where they are written to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from parloom.capture.blame import module_path, source_of
from parloom.capture.nodes import packet_of, written_by
from parloom.errors import CaptureError

AUTOCAST = torch.ops.higher_order.wrap_with_autocast
GRAD_MODE: Any = torch._C._set_grad_enabled
READS_DATA = "parloom_data"  # marks what `tensor.data` gives
# These return their operand itself where there is nothing to do, and not a view of it.
SAME_TENSOR = frozenset({
    "to", "contiguous", "flatten", "positive", "resolve_conj", "resolve_neg", "conj", "real",
    "atleast_1d", "atleast_2d", "atleast_3d", "type_as", "pin_memory",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
})  # fmt: skip
OVERWRITES = frozenset({
    "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_",
    "log_normal_", "cauchy_", "geometric_",
})  # fmt: skip
MOVES_MEMORY = frozenset({"set_", "resize_", "resize_as_", "swap_", "_resize_output_"})
# No operand of theirs is kept for the backward pass.
KEEPS_NOTHING = frozenset({"add", "sub", "rsub", "cat", "stack", "sum", "mean", "clone", "copy_"})
WAY_ON = (
    "write {name} = {name} + (value - {name}).detach(), which keeps the gradient and takes the"
    " value, or write outside of no_grad to change both"
)


@dataclass(slots=True, eq=False)
class Path:
    """What autograd knows of a tensor and its views, which may share memory with others."""

    storage: int
    requires: bool
    made: fx.Node | None  # None for inputs of the program
    cut: bool = False  # an alias that another path's tensor was detached to
    data: bool = False
    copied: bool = False  # gets memory of its own where it is made
    unread: bool = False  # nothing with a gradient was made of what is in it
    shared: bool = False  # a write went from it to the others in its memory, or back
    without_path: CaptureError | None = None  # its values changed and its path did not
    without_value: CaptureError | None = None


@dataclass(slots=True)
class Event:
    """A node whose result has a gradient path: which memory it keeps and is derived from."""

    node: fx.Node
    reads: frozenset[int]
    derived_from: frozenset[int]
    results: frozenset[int]


@dataclass(slots=True)
class Paths:
    """The paths of all tensors of a graph, in the order in which it runs."""

    model: str
    enabled: bool = True
    of: dict[fx.Node, Any] = field(default_factory=dict)  # path, tuple of paths, or None
    recorded: dict[fx.Node, bool] = field(default_factory=dict)  # whether autograd saw a node
    sharing: dict[int, list[Path]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    unseen: list[tuple[int, int, CaptureError]] = field(default_factory=list)

    def walk(self, module: fx.GraphModule, given: tuple[Any, ...] | None = None) -> Any:
        """Follow a graph, and return the paths of its outputs.

        Raises: CaptureError where a gradient of the functional graph would not be autograd's.
        """
        operands = iter(given or ())
        for node in module.graph.nodes:
            self.recorded[node] = self.enabled
            if node.op == "placeholder":
                self.of[node] = self.new(node, given=True) if given is None else next(operands)
            elif node.op == "output":
                if given is None:
                    self.finish(node)
                return fx.node.map_arg(node.args[0], lambda n: self.of[n])
            elif node.target is GRAD_MODE:
                self.enabled = bool(node.args[0])
            elif node.target is getitem:
                self.take_item(node)
            elif node.target is AUTOCAST:
                body, operand_nodes = region_of(module, node)
                self.recorded[node] = True
                self.of[node] = self.walk(body, tuple(self.of.get(n) for n in operand_nodes))
            elif node.op == "get_attr":
                self.of[node] = self.new(node, given=True)
            else:
                self.call(node)
        return ()

    def take_item(self, node: fx.Node) -> None:
        arguments: tuple[Any, ...] = node.args
        source, index = arguments
        found = self.of.get(source)
        path = found[index] if isinstance(found, tuple | list) else None
        if path is not None and path.made is source:
            path.made = node
        self.of[node] = path
        self.recorded[node] = self.recorded[source]

    def new(self, node: fx.Node, *, given: bool = False) -> Path | None:
        """The path of a tensor with new memory, or of an input of the program."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        key = storage_of(value)
        known = self.sharing.setdefault(key, [])
        if not known or not given:
            known.append(Path(key, value.requires_grad and given, None if given else node))
        return known[0] if given else known[-1]

    def call(self, node: fx.Node) -> None:
        """Follow one operator: what it reads, writes and returns."""
        name = packet_of(node)
        operands = [p for n in node.all_input_nodes for p in paths_in(self.of.get(n))]
        if name == "detach_":
            self.detach(node)
            return
        targets = written_by(node)
        if name in MOVES_MEMORY:
            raise self.refusal(
                node, f"it changes the memory of a tensor with {name}, which no step of a plan"
                " repeats; make a new tensor, and write values with copy_()"
            )  # fmt: skip
        for operand in operands:
            if operand.without_value is not None:
                raise operand.without_value
        written = [p for n in targets for p in paths_in(self.of.get(n))]
        derives = self.enabled and any(p.requires for p in operands) and not makes_new(name)
        self.of[node] = self.results(node, name, operands, written, derives)
        fresh = [p for p in paths_in(self.of[node]) if p.made is node and not p.cut]
        tracked = [p for p in fresh if p.requires]
        for target in targets:
            for path in paths_in(self.of.get(target)):
                if self.write(node, path, derives and is_float(target)):
                    tracked.append(path)
        if tracked:
            self.track(node, name, operands, tracked)

    def track(self, node: fx.Node, name: str, operands: list[Path], tracked: list[Path]) -> None:
        """Note a node that autograd derives a gradient through."""
        for operand in operands:
            if operand.requires and operand.without_path is not None:
                raise operand.without_path
            operand.unread = operand.unread and operand in tracked
        every = frozenset(p.storage for p in operands)
        self.events.append(Event(
            node,
            frozenset() if name in KEEPS_NOTHING else every,
            frozenset(p.storage for p in operands if p.requires),
            frozenset(p.storage for p in tracked),
        ))  # fmt: skip

    def results(
        self, node: fx.Node, name: str, operands: list[Path], written: list[Path], derives: bool
    ) -> Any:
        """The paths of a node's results: an operand's, where they share its memory."""

        def path(value: object) -> Path | None:
            if not isinstance(value, Tensor):
                return None
            key = storage_of(value)
            same = next((p for p in written if p.storage == key), None)
            if same is not None:
                return same
            source = next((p for p in operands if p.storage == key), None)
            if source is None:
                fresh = Path(key, derives and differentiable(value), node)
                fresh.unread = fresh.requires
                self.sharing.setdefault(key, []).append(fresh)
                return fresh
            if returns_operand(node, name, value):
                self.recorded[node] = True
                return source
            if name in ("detach", "alias_copy") or not self.enabled:
                marks = node.meta.get("custom") or {}
                alias = Path(key, False, node, cut=True, data=READS_DATA in marks or source.data)
                self.sharing[key].append(alias)
                return alias
            return source

        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            return tuple(path(v) for v in value)
        return path(value)

    def detach(self, node: fx.Node) -> None:
        """Make `detach_` the `detach` whose result all later uses of that tensor are."""
        source = node.all_input_nodes[0]
        path = self.of.get(source)
        if path is None or not path.requires:
            self.of[node] = path
            node.replace_all_uses_with(source)
            node.graph.erase_node(node)
            return
        node.target = torch.ops.aten.detach.default
        self.call(node)

    def write(self, node: fx.Node, path: Path, derives: bool) -> bool:
        """Follow a write to the tensor of a path; whether autograd derives through it."""
        others = [p for p in self.sharing[path.storage] if p is not path]
        lost = self.refusal(
            node, "it writes to a tensor whose memory one with a gradient has too, where autograd"
            f" does not see it ({'.data' if path.data else cause(self.enabled)}): values change,"
            f" and the gradient is that of the old ones; {WAY_ON.format(name='x')}"
        )  # fmt: skip
        shared = self.refusal(
            node, "it writes something with a gradient to a detached alias of a tensor that is"
            " used on; write to a copy of it (.detach().clone())"
        )  # fmt: skip
        if not derives:
            self.write_unseen(path, others, lost, shared)
            return False
        if path.requires and path.unread and overwritten(node):
            raise self.refusal(
                node, "it writes over all of a tensor that has a gradient and was not used, for"
                " which autograd gives zeros, and a plan nothing; make a new tensor"
            )  # fmt: skip
        path.requires = path.unread = True
        if path.cut and (path.shared or any(p.made is None for p in others)):
            raise shared
        path.copied |= path.cut or self.made_unrecorded(path)
        for other in others:
            other.shared = True
            if path.cut or (other.cut and other.copied):
                other.without_value = shared
        return True

    def write_unseen(
        self, path: Path, others: list[Path], lost: CaptureError, shared: CaptureError
    ) -> None:
        """Follow a write that leaves no gradient path."""
        # Parameters that a program writes to are refused as such.
        keeping = [p for p in (path, *others) if p.requires and p.made is not None]
        if keeping and path.data:
            raise lost
        for other in keeping:
            other.without_path = lost
        if path.data:
            self.unseen.append((len(self.events), path.storage, lost))
        path.copied |= not path.cut and self.made_unrecorded(path)
        path.shared |= path.cut
        for other in others:
            other.shared = True
            if other.cut and other.copied:
                other.without_value = shared

    def made_unrecorded(self, path: Path) -> bool:
        """Whether the memory of a tensor is from a region without gradients."""
        return path.made is not None and not self.recorded[path.made]

    def finish(self, output: fx.Node) -> None:
        """Check what the results of the program are, and what `.data` wrote to."""
        results = [p for n in output.all_input_nodes for p in paths_in(self.of.get(n))]
        for path in results:
            lost = path.without_value or (path.without_path if path.requires else None)
            if lost is not None:
                raise lost
        needed = {p.storage for p in results}
        for index in range(len(self.events) - 1, -1, -1):
            event = self.events[index]
            if not needed & event.results:
                continue
            needed |= event.derived_from
            for end, storage, error in self.unseen:
                if index < end and storage in event.reads:
                    raise error

    def refusal(self, node: fx.Node, reason: str) -> CaptureError:
        """The error for a node: where it is and why."""
        path = module_path(node.meta.get("nn_module_stack") or {})
        source = source_of(node.meta.get("stack_trace"))
        where = ".".join(part for part in (self.model, path) if part)
        line = f" ({source})" if source else ""
        return CaptureError(f"cannot capture {where}{line}: {reason}")


def with_gradients_stopped(module: fx.GraphModule, model: str, training: bool) -> None:
    """Make a traced graph say with `detach` what its switches of the grad mode did.

    Raises: CaptureError where its gradients could not be those that autograd gives.
    """
    if training:
        paths = Paths(model)
        paths.walk(module)
        rewrite(module, paths)
    for graph in graphs_of(module):
        for node in list(graph.graph.nodes):
            if node.target is GRAD_MODE:
                graph.graph.erase_node(node)
        graph.recompile()


def rewrite(module: fx.GraphModule, paths: Paths) -> None:
    """Detach what leaves regions without gradients, or is written in them."""
    for graph in graphs_of(module):
        for node in list(graph.graph.nodes):
            if node.op in ("placeholder", "output") or node not in paths.recorded:
                continue
            own = [p for p in paths_in(paths.of.get(node)) if p.copied]
            if any(p.made is node for p in own):
                clone = after(node, torch.ops.aten.detach.default)
                clone = after(clone, torch.ops.aten.clone.default)
                reconnect(node, clone, lambda user: True)
            elif not paths.recorded[node] and written_by(node):
                targets = written_by(node)
                for source in node.all_input_nodes:
                    if source not in targets and is_float(source):
                        detached = after(source, torch.ops.aten.detach.default)
                        node.replace_input_with(source, detached)
            elif not paths.recorded[node] and is_float(node) and not own:
                users = [u for u in node.users if paths.recorded.get(u, True) or u.op == "output"]
                if users:
                    detached = after(node, torch.ops.aten.detach.default)
                    reconnect(node, detached, users.__contains__)


def reconnect(node: fx.Node, other: fx.Node, which: Callable[[fx.Node], bool]) -> None:
    """Make some users of a node use another that is made of it."""
    made = {other, *other.all_input_nodes}
    for user in list(node.users):
        if user not in made and which(user):
            user.replace_input_with(node, other)


def after(node: fx.Node, target: Any) -> fx.Node:
    """A call of a one-argument operator, right after its operand, with its metadata."""
    place = node
    while place.next.op == "placeholder":
        place = place.next
    with node.graph.inserting_after(place):
        made = node.graph.call_function(target, (node,))
    made.meta = dict(node.meta)
    return made


def graphs_of(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A graph and the regions in it."""
    yield module
    for node in module.graph.nodes:
        if node.target is AUTOCAST:
            yield from graphs_of(region_of(module, node)[0])


def region_of(module: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The graph that an autocast region runs, and the operands that it gets."""
    position = next(
        i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"
    )
    body: Any = node.args[position]
    return getattr(module, body.target), node.args[position + 1 :]


def paths_in(found: Any) -> list[Path]:
    """The paths among a node's results."""
    if isinstance(found, tuple | list):
        return [p for p in found if isinstance(p, Path)]
    return [found] if isinstance(found, Path) else []


def overwritten(node: fx.Node) -> bool:
    """Whether nothing is left of what was in the memory of a tensor that is written."""
    target = written_by(node)[0].meta.get("val")
    if packet_of(node) not in OVERWRITES or not isinstance(target, Tensor):
        return False
    return target.numel() * target.element_size() == target.untyped_storage().nbytes()


def returns_operand(node: fx.Node, name: str, value: Tensor) -> bool:
    """Whether an operator had nothing to do, and returned its operand."""
    source = node.all_input_nodes[0].meta.get("val")
    return (
        name in SAME_TENSOR
        and isinstance(source, Tensor)
        and (source.shape, source.stride(), source.dtype)
        == (value.shape, value.stride(), value.dtype)
        and source.storage_offset() == value.storage_offset()
    )


def storage_of(value: Tensor) -> int:
    """What tensors that share memory have in common."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return int(value.untyped_storage()._cdata)


def differentiable(value: Tensor) -> bool:
    """Whether values of a tensor's dtype have gradients."""
    return value.is_floating_point() or value.is_complex()


def is_float(node: fx.Node) -> bool:
    """Whether a node is one tensor that may have a gradient."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and differentiable(value)


def makes_new(name: str) -> bool:
    """Whether an operator takes no more than shape and dtype from its operand."""
    return name.endswith("_like") or name.startswith("new_")


def cause(enabled: bool) -> str:
    """Why autograd does not see a write."""
    return "a detached alias" if enabled else "torch.no_grad"
