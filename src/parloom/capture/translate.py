"""From a functional ATen graph to graph nodes: one spelling for everything that means the same.

Operators are named by their ATen packet. Assertions, aliases and other no-ops disappear (with the
same bits coming out), shapes are written out, devices are dropped, results get values of their own
instead of `getitem`. Whether an operator is *supported* is not decided here.
"""

from collections.abc import Iterable, Mapping
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from parloom.capture.attention import CAUSAL, FixedMasks, grouped_source, looked_at
from parloom.capture.autograd import CHECKPOINT
from parloom.capture.blame import (
    BRANCH_ADVICE,
    fixed_size,
    module_path,
    source_of,
    without_wrapper,
)
from parloom.capture.expand import Expansion
from parloom.capture.operators import ADVICE, is_custom
from parloom.capture.spelling import RECURRENT
from parloom.errors import CaptureError, one_line
from parloom.ir.graph import Arg, Dtype, Node, Ref, TensorSpec, Value
from parloom.ir.ops import OPS, PLAIN, RETURN_LISTS

NOISE = frozenset({
    "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "_functional_assert_async",
    "sym_constrain_range", "sym_constrain_range_for_size", "_print",
})  # fmt: skip
# Where a result lies, and what need not be checked: here it is checked.
DROPPED_KWARGS = frozenset({"device", "layout", "pin_memory", "non_blocking", "unsafe"})
ALIASES = frozenset({"alias", "lift_fresh_copy", "lift_fresh", "lift", "detach_copy"})
PAIRS = MappingProxyType({"complex64": "float32", "complex128": "float64"})
RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "view_copy"})
# Where a lookup says that its gradient is sparse; a plan's are not.
SPARSE = MappingProxyType({"embedding": 4, "embedding_bag": 5})
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
BATCH_NORM = "_native_batch_norm_legit_functional"
BATCH_NORM_NO_STATS = "_native_batch_norm_legit"
BATCH_NORM_EVAL = "_native_batch_norm_legit_no_training"


# ATen's names of what has an entry under another name, or is keyed where its call has dropout.
KEYED = frozenset({"native_dropout", "scaled_dot_product_attention"})
DRAW = (
    "use torch.nn.functional.dropout for random masks, draw random inputs in the batch, or switch"
    " the randomness off"
)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype; raises where a dim is symbolic."""
    if not all(isinstance(size, int) for size in tensor.shape):
        known = ", ".join(str(n) if isinstance(n, int) else "?" for n in tensor.shape)
        raise CaptureError(f"a shape, [{known}], depends on the values of a tensor")
    return TensorSpec(tuple(int(size) for size in tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


class Translator:
    """Translates nodes in order; `names` maps what has been seen to value names."""

    def __init__(self, names: Mapping[fx.Node, str], specs: Mapping[str, TensorSpec],
                 hidden: Mapping[str, Mapping[str, Mapping[str, Any]]],
                 loss_place: str = "") -> None:  # fmt: skip
        self.names: dict[fx.Node, str | tuple[str, ...]] = dict(names)
        self.specs = dict(specs)
        self.hidden = hidden
        self.loss_place = loss_place
        self.nodes: list[Node] = []
        self.classes: dict[str, str] = {}
        self.masks = FixedMasks()
        self.checkpoints: dict[str, int] = {}  # of values made inside one, its number
        self.expansion = Expansion(self)

    def translate(self, nodes: Iterable[fx.Node]) -> None:
        """Translate every call; placeholders must be in `names` already."""
        for node in nodes:
            if node.op != "call_function" or isinstance(node.meta.get("val"), NUMBERS):
                continue  # numbers of a tensor's values: refused where a tensor is made of them
            if node.target is getitem:
                self.take_item(node)
                continue
            if self.expansion.takes(node):
                continue
            overload = node.target
            if not isinstance(overload, torch._ops.OpOverload):
                raise self.refusal(
                    node, f"{overload} is not a plain tensor operator; {BRANCH_ADVICE}"
                )
            name = packet_name(overload)
            if name not in NOISE:
                self.operator(node, overload, name)

    def constant(self, node: fx.Node) -> None:
        """A complex constant comes as pairs: text has real numbers alone."""
        name = self.value(node)
        spec = self.specs[name]
        if spec.dtype in PAIRS:
            self.specs[name] = TensorSpec((*spec.shape, 2), PAIRS[spec.dtype])
            self.append(node, "view_as_complex", (Ref(name),), (), (node.meta["val"],), None)

    def value(self, node: fx.Node) -> str:
        """The name of a node's single result."""
        name = self.names[node]
        if not isinstance(name, str):
            raise self.refusal(node, f"{node.target} is used as one tensor but has {len(name)}")
        return name

    def take_item(self, node: fx.Node) -> None:
        arguments: tuple[Any, ...] = node.args
        source, index = arguments
        results = self.names[source]
        if isinstance(results, str) or not isinstance(index, int):
            raise self.refusal(node, "an item of a tensor list is chosen at run time")
        self.names[node] = results[index]

    def operator(self, node: fx.Node, overload: torch._ops.OpOverload, name: str) -> None:
        """Translate one ATen call, by special rule where there is one."""
        if not is_keyed(name) and is_random(node, overload):
            raise self.refusal(node, f"operator {name} draws random numbers by call order; {DRAW}")
        if self.simplified(node, name):
            return
        if name in ("as_strided", "as_strided_scatter") and not is_plain(node.args[0]):
            raise self.refusal(
                node, f"{name} reads memory by stride, and its operand is a view of other memory;"
                " call .contiguous() on it, or use unfold, transpose or slices"
            )  # fmt: skip
        if name == "native_dropout":
            self.dropout(node)
        elif name in (BATCH_NORM, BATCH_NORM_EVAL, BATCH_NORM_NO_STATS):
            self.batch_norm(node, name)
        elif name == "view" and overload._overloadname == "dtype":
            self.emit(node, "view_dtype", self.arguments(node, node.args))
        elif name in RESHAPES:
            self.emit(node, "view", (self.argument(node, node.args[0]), self.shape(node)))
        elif name == "expand":
            self.emit(node, "expand", (self.argument(node, node.args[0]), self.shape(node)))
        elif name == "slice":
            self.emit(node, "slice", self.slice_arguments(node))
        elif name == "scaled_dot_product_attention":
            self.attention(node, overload)
        elif name in SPARSE:
            args = self.arguments(node, node.args)
            dense = (False,) * (len(args) > SPARSE[name])
            args = (*args[: SPARSE[name]], *dense, *args[SPARSE[name] + 1 :])
            self.emit(node, name, args, self.kwargs(node, overload))
        else:
            self.emit(node, name, self.arguments(node, node.args), self.kwargs(node, overload))

    def simplified(self, node: fx.Node, name: str) -> bool:
        """Drop a node that returns its first argument unchanged; whether it was one."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not isinstance(self.names.get(source), str):
            return False
        same = self.specs[self.value(source)] == self.spec(node)
        plain = not node.kwargs.get("memory_format")
        kwargs_name_shape = name in RESHAPES or name == "expand"
        if (
            name in ALIASES
            or (same and plain and name in ("clone", "_to_copy"))
            or (same and kwargs_name_shape and not self.is_bitcast(node))
            or (same and name == "slice" and self.slice_arguments(node)[4] == 1)
        ):
            self.names[node] = self.value(source)
            return True
        return False

    def is_bitcast(self, node: fx.Node) -> bool:
        return getattr(node.target, "_overloadname", "") == "dtype"

    def spec(self, node: fx.Node) -> TensorSpec | None:
        """The spec of a node's single result, if it has one."""
        value = node.meta.get("val")
        return self.checked_spec(node, value) if isinstance(value, Tensor) else None

    def checked_spec(self, node: fx.Node, tensor: Tensor) -> TensorSpec:
        try:
            return spec_of(tensor)
        except CaptureError as err:
            raise self.refusal(node, f"{err}; {self.fixed_size(node)}") from err

    def fixed_size(self, node: fx.Node) -> str:
        """The advice for a node whose size depends on data."""
        stack = self.metadata(node).get("nn_module_stack") or {}
        return fixed_size(f"{list(stack.values())} {self.origin(node)}")

    def shape(self, node: fx.Node) -> Arg:
        """The resolved shape of a node's result."""
        spec = self.spec(node)
        return None if spec is None else spec.shape

    def slice_arguments(self, node: fx.Node) -> tuple[Arg, ...]:
        """(x, dim, start, end, step) with dim and bounds resolved against the operand's shape."""
        arguments: tuple[Any, ...] = node.args
        source, dim, start, end, step = (*arguments, None, None, None, None)[:5]
        shape = self.specs[self.value(source)].shape
        axis = int(dim or 0) % len(shape)
        begin, stop, stride = slice(start, end, step or 1).indices(shape[axis])
        return (self.argument(node, source), axis, begin, max(begin, stop), stride)

    def dropout(self, node: fx.Node) -> None:
        """`dropout(x, p)`; where the mask is used too, nothing can key it."""
        arguments: tuple[Any, ...] = node.args
        x, p, train = arguments
        masks = [u for u in node.users if u.target is getitem and u.args[1] == 1 and u.users]
        if (train is False or p == 0) and not masks:
            self.names[node] = (self.value(x), "")
            return
        if masks:
            raise self.refusal(node, f"the mask of a dropout is used by itself; {DRAW}")
        out = node.meta["val"][0]
        self.append(node, "dropout", self.arguments(node, (x, p)), (), (out,), (0,))

    def batch_norm(self, node: fx.Node, name: str) -> None:
        """`batch_norm(x, weight, bias, mean, var, training, momentum, eps)`.

        Results: the output, and in training with running statistics their new values.
        """
        values = node.meta["val"]
        args: tuple[Any, ...]
        kept: tuple[int, ...]
        if name == BATCH_NORM:
            args, kept = node.args, (0, 3, 4)
        elif name == BATCH_NORM_EVAL:
            args, kept = (*node.args[:5], False, *node.args[5:]), (0,)
        elif len(node.args) == 6:
            args, kept = (*node.args[:3], None, None, *node.args[3:]), (0,)
        else:
            args, kept = node.args, (0,)
        results = tuple(values[i] for i in kept)
        if name == BATCH_NORM:
            # Of the buffers' dtype, as torch has it where there is memory; a trace says float32.
            buffers: Any = node.args[3:5]
            results = values[0], *(buffer.meta["val"] for buffer in buffers)
        self.append(node, "batch_norm", self.arguments(node, args), (), results, kept)

    def attention(self, node: fx.Node, overload: torch._ops.OpOverload) -> None:
        """Attention; a fixed mask that is only causal, or masks nothing, becomes a flag or goes.

        That is `scaled_dot_product_attention(query, key, value[, None, dropout_p[, is_causal]])`.
        """
        arguments: tuple[Any, ...] = node.args
        mask = arguments[3] if len(arguments) > 3 else node.kwargs.get("attn_mask")
        meaning = self.masks.meaning(mask) if isinstance(mask, fx.Node) else None
        args = self.arguments(node, arguments)
        kwargs = self.kwargs(node, overload)
        if meaning is not None:
            p = args[4] if len(args) > 4 else node.kwargs.get("dropout_p", 0.0)
            causal = (True,) if meaning == CAUSAL else ()
            kwargs = tuple(k for k in kwargs if k[0] not in ("attn_mask", "dropout_p"))
            sources = [grouped_source(n) for n in arguments[1:3]]
            self.expansion.looked.update(n for a in arguments[1:3] for n in looked_at(a))
            if all(sources):
                args = (args[0], *(self.argument(node, s) for s in sources))
                kwargs = (*kwargs, ("enable_gqa", True))
            args = (*args[:3], None, self.argument(node, p), *causal)
        self.emit(node, "scaled_dot_product_attention", args, kwargs)

    def emit(self, node: fx.Node, op: str, args: tuple[Arg, ...],
             kwargs: tuple[tuple[str, Arg], ...] = ()) -> None:  # fmt: skip
        """Append a node whose results are those of the ATen call."""
        if op not in OPS and op not in PLAIN and not is_custom(op):
            reason = f"operator {op} has no entry (docs/add-an-op.md) and is not in ir/ops/plain.py"
            raise self.refusal(node, f"{reason}; {ADVICE}")
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self.append(node, op, args, kwargs, (value,), None)
        elif isinstance(value, tuple | list) and all(isinstance(v, Tensor) for v in value):
            if len(value) == 1 and op not in RETURN_LISTS and not returns_list(op):
                raise self.refusal(node, f"operator {op} returns a list of one tensor; add an entry"
                                         " (docs/add-an-op.md)")  # fmt: skip
            self.append(node, op, args, kwargs, tuple(value), tuple(range(len(value))))
        else:
            kind = "nothing" if value is None else type(value).__name__
            raise self.refusal(node, f"operator {op} returns {kind} instead of a tensor")

    def append(self, node: fx.Node, op: str, args: tuple[Arg, ...],
               kwargs: tuple[tuple[str, Arg], ...], tensors: tuple[Tensor, ...],
               positions: tuple[int, ...] | None) -> None:  # fmt: skip
        """Append a node; `positions` are its results' indices in the ATen call's result tuple."""
        path, source = self.origin(node)
        if positions is None:
            names: tuple[str, ...] = (node.name,)
            self.names[node] = node.name
        else:
            names = tuple(f"{node.name}.{i}" for i in positions)
            by_position = dict(zip(positions, names, strict=True))
            size = max(len(node.meta["val"]), 1)
            self.names[node] = tuple(by_position.get(i, "") for i in range(size))
        results = tuple(
            Value(name, self.checked_spec(node, tensor))
            for name, tensor in zip(names, tensors, strict=True)
        )
        self.specs.update((value.name, value.spec) for value in results)
        checkpoint = (self.metadata(node).get("custom") or {}).get(CHECKPOINT)
        if checkpoint is not None:
            self.checkpoints |= dict.fromkeys(names, checkpoint)
        made = Node(op, args, kwargs, results, path, 0, source)
        self.nodes.append(made)
        self.expansion.made(node, made)

    def arguments(self, node: fx.Node, args: Iterable[Any]) -> tuple[Arg, ...]:
        return tuple(self.argument(node, a) for a in args)

    def argument(self, node: fx.Node, arg: Any) -> Arg:
        """One argument of an ATen call as a plain value."""
        if isinstance(arg, fx.Node):
            return self.reference(node, arg)
        if isinstance(arg, tuple | list):
            return tuple(self.argument(node, a) for a in arg)
        if isinstance(arg, torch.dtype):
            return Dtype(dtype_name(arg))
        if isinstance(arg, torch.memory_format):
            return str(arg).removeprefix("torch.")
        if isinstance(arg, torch.device | torch.layout):
            return None
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise self.refusal(node, f"an argument is a {type(arg).__name__}: {arg}")

    def reference(self, node: fx.Node, arg: fx.Node) -> Arg:
        name = self.names.get(arg)
        if isinstance(arg.meta.get("val"), NUMBERS):
            reason = "it takes a Python number from the values of a tensor; keep it a tensor"
            ways = f"(torch.where for a branch); for a size, {self.fixed_size(node)}"
            raise self.refusal(node, f"{reason} {ways}")
        if name is None:
            raise self.refusal(node, f"it depends on {arg.target}, which is no tensor")
        return Ref(name) if isinstance(name, str) else tuple(Ref(n) for n in name)

    def kwargs(self, node: fx.Node, overload: torch._ops.OpOverload) -> tuple[tuple[str, Arg], ...]:
        """Keyword arguments that differ from the defaults; a factory's dtype is always said.

        Without it the dtype would depend on torch's default dtype of the day.
        """
        schema = overload._schema.arguments
        defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        kept: list[tuple[str, Arg]] = []
        for name, value in node.kwargs.items():
            same = name in defaults and type(defaults[name]) is type(value)
            if name in DROPPED_KWARGS or (same and defaults[name] == value):
                continue
            kept.append((name, self.argument(node, value)))
        takes_dtype = any(a.name == "dtype" for a in schema)
        if takes_dtype and not node.kwargs.get("dtype") and not node.all_input_nodes:
            spec = self.spec(node)
            if spec is not None:
                kept.append(("dtype", Dtype(spec.dtype)))
        return tuple(kept)

    def origin(self, node: fx.Node) -> tuple[str, str]:
        """(module path, source line)."""
        meta = self.metadata(node)
        stack = meta.get("nn_module_stack") or {}
        # The outermost entry is the wrapper that was traced, not a module of the user's.
        for path, kind in list(stack.values())[1:]:
            self.classes[without_wrapper(path)] = str(kind).rsplit(".", 1)[-1]
        return module_path(stack), one_line(source_of(meta.get("stack_trace")))

    def metadata(self, node: fx.Node) -> Mapping[str, Any]:
        """A node's metadata, looking into autocast regions for what they hid."""
        meta: Mapping[str, Any] = node.meta
        trace = str(meta.get("stack_trace") or "")
        if "<eval_with_key>" in trace:
            inner = trace.strip().splitlines()[-1].split("=")[0].strip()
            for step in meta.get("from_node", ()):
                meta = self.hidden.get(step.name, {}).get(inner, meta)
        return meta

    def refusal(self, node: fx.Node, reason: str) -> CaptureError:
        """The error for a node that cannot be translated: where it is and why."""
        path, source = self.origin(node)
        where = ".".join(part for part in (self.classes.get("", "the loss"), path) if part)
        if self.loss_place and len(self.metadata(node).get("nn_module_stack") or ()) == 1:
            # Only the wrapper is around it; the stacks of traces have modules' lines alone.
            where = self.loss_place.split(" (")[0] if source else self.loss_place
        line = f" ({source})" if source else ""
        return CaptureError(f"cannot capture {where}{line}: {reason}")


def named(node: fx.Node, overload: torch._ops.OpOverload) -> dict[str, Any]:
    """The given arguments of a call by their names in the schema."""
    names = (a.name for a in overload._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def is_plain(arg: Any) -> bool:
    """Whether a tensor has memory of its own and lies in it element by element."""
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    if not isinstance(value, Tensor):
        return False
    whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return whole and value.is_contiguous()


def is_keyed(name: str) -> bool:
    """Whether draws of an operator depend on its place in the program only."""
    return name in KEYED or (name in OPS and OPS[name].random)


def is_random(node: fx.Node, overload: torch._ops.OpOverload) -> bool:
    """Whether a call draws random numbers; a recurrent layer does between its layers only."""
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    given = named(node, overload)
    name = packet_name(overload)
    if name in RECURRENT:
        return bool(given["train"] and given["dropout"] > 0 and given["num_layers"] > 1)
    return True


def returns_list(op: str) -> bool:
    """Whether the entry of an operator says that it returns a list."""
    return op in OPS and OPS[op].returns_list


def packet_name(overload: torch._ops.OpOverload) -> str:
    """`add` for `aten.add.Tensor`; other namespaces keep theirs: `transformers.grouped_mm`."""
    namespace, name = overload._schema.name.split("::")
    return name if namespace == "aten" else f"{namespace}.{name}"
