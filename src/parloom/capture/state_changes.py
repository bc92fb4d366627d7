"""What Python code does to tensors, autograd and torch's state that no graph of operators shows.

While forward and the loss function are traced, each such call is refused, or something that is in
the graph is done in its place. `CHANGES` has all of them; those that are no torch functions are
caught where torch does them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.traceback import annotate
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from parloom.capture import assertions
from parloom.capture.blame import current_frames, place
from parloom.capture.gradient_paths import READS_DATA
from parloom.capture.owners import LIBRARIES, TORCH_FOLDER, is_a, is_user_file
from parloom.capture.replace import replaced
from parloom.errors import CaptureError

SEEDS = (
    "every step of a plan would go on from there, and draws of a plan have a seed of its own; seed"
    " in the script, or draw in the data loader and give the result in the batch"
)
GRADIENTS = (
    "the gradient of a plan is that of the loss alone, taken after forward; write what it is for as"
    " a term of the loss, or do it in the training loop"
)
AMBIENT = "it is set for all that runs after it; set it in the script, before the model is made"
MEMORY = "no step of a plan repeats that; make a new tensor, or write values with copy_()"
HIDDEN_CLASS = (
    "what its methods do instead of torch's is not in a trace; use a plain tensor (as_subclass("
    "torch.Tensor) in the data loader or the constructor) and functions"
)
# What a call is, and why no plan can have it with the way on. Descriptors have their method's name.
CHANGES: Mapping[str, tuple[str, str]] = MappingProxyType({
    "data.__set__": (
        "assigns to .data of a tensor",
        "no step of a plan repeats that; write to a buffer with copy_() under torch.no_grad(), and"
        " use a new tensor in place of another",
    ),
    "requires_grad": (
        "switches requires_grad of a parameter",
        "a plan trains what requires a gradient before forward; use .detach(), or"
        " torch.func.functional_call with detached parameters, for what a gradient shall not pass",
    ),
    "grad.__get__": ("reads .grad", GRADIENTS),
    "grad.__set__": ("assigns to .grad", GRADIENTS),
    "grad.__delete__": ("deletes .grad", GRADIENTS),
    "grad_dtype.__set__": ("sets the dtype of gradients", GRADIENTS),
    "_grad.__get__": ("reads .grad", GRADIENTS),
    "_grad.__set__": ("assigns to .grad", GRADIENTS),
    "_grad_fn.__get__": ("reads the graph of autograd (.grad_fn)", GRADIENTS),
    "_grad_fn.__set__": ("changes the graph of autograd (.grad_fn)", GRADIENTS),
    "_backward_hooks.__set__": ("sets the hooks of a tensor", GRADIENTS),
    "_post_accumulate_grad_hooks.__set__": ("sets the hooks of a tensor", GRADIENTS),
    "grad_fn.__get__": (
        "reads the graph of autograd (.grad_fn)",
        "hooks on its nodes would run in no step of a plan; use requires_grad to see whether there"
        " is a gradient, and write what a hook does into forward"
        " (x * scale + (x - x * scale).detach() scales a gradient)",
    ),
    "grad": ("computes gradients (torch.autograd.grad)", GRADIENTS),
    "backward": ("computes gradients (backward)", GRADIENTS),
    "set_": ("gives a tensor other memory (set_)", MEMORY),
    "resize_": ("changes the memory of a tensor (resize_)", MEMORY),
    "resize_as_": ("changes the memory of a tensor (resize_as_)", MEMORY),
    "share_memory_": ("moves a tensor to shared memory", MEMORY),
    "swap_tensors": ("exchanges two tensors (torch.utils.swap_tensors)", MEMORY),
    "untyped_storage": ("takes the memory of a tensor (untyped_storage)", MEMORY),
    "storage": ("takes the memory of a tensor (storage)", MEMORY),
    "as_subclass": ("makes a tensor of another class (as_subclass)", HIDDEN_CLASS),
    "generator": (
        "draws from a torch.Generator",
        "no step of a plan would go on from its state; leave generator= out: all draws are keyed by"
        " the seed",
    ),
    "manual_seed": ("seeds torch's generator", SEEDS),
    "seed": ("seeds torch's generator", SEEDS),
    "set_state": ("sets the state of torch's generator (fork_rng does at its end)", SEEDS),
    "saved_tensors_hooks": (
        "changes what is saved for the backward pass (saved_tensors_hooks)",
        "no step of a plan would; plans decide what is kept and what is recomputed, so remove it",
    ),
    "training": (
        "switches between training and evaluation (train, eval, .training)",
        "the next call would begin with that; switch before the model is planned, or give"
        " torch.nn.functional's dropout and batch_norm the mode",
    ),
    "hooks": (
        "registers a hook on a module and leaves it there",
        "the next call would run it too; register hooks in the constructor, or remove them",
    ),
    "set_default_dtype": ("sets torch's default dtype", AMBIENT),
    "set_deterministic_algorithms": ("sets torch's deterministic algorithms", AMBIENT),
    "set_float32_matmul_precision": ("sets the precision of products", AMBIENT),
    "set_default_device": ("sets torch's default device", AMBIENT),
})  # fmt: skip
# Torch's own code does these while it traces.
BY_USERS_ONLY = frozenset({
    "untyped_storage", "storage", "set_", "resize_", "grad_dtype.__set__", "grad_fn.__get__",
    "_backward_hooks.__set__", "_post_accumulate_grad_hooks.__set__",
    *(f"{name}.__{access}__" for name in ("grad", "_grad", "_grad_fn")
      for access in ("get", "set", "delete")),
})  # fmt: skip
ONLY_IN_TRAINING = frozenset({"grad_fn.__get__", "requires_grad", "saved_tensors_hooks"})
# Files of torch that only hand on what they are called for.
PASSING_ON = frozenset({contextlib.__file__, assertions.__file__, *(
    str(Path(TORCH_FOLDER, *parts))
    for parts in (("__init__.py",), ("overrides.py",), ("_tensor.py",), ("random.py",),
                  ("autograd", "__init__.py"), ("autograd", "graph.py"),
                  ("utils", "_contextlib.py"), ("_compile.py",), ("_dynamo", "eval_frame.py"))
)})  # fmt: skip
PLAIN = (
    Tensor, nn.Parameter, FakeTensor, FunctionalTensor, UninitializedParameter, UninitializedBuffer,
)  # fmt: skip
# Attributes of a subclass that change nothing of what is computed.
COSMETIC = frozenset({
    "__new__", "__init__", "__repr__", "__str__", "__doc__", "__module__", "__dict__", "__slots__",
    "__weakref__", "__deepcopy__", "__reduce_ex__", "__annotations__", "__init_subclass__",
    "__firstlineno__", "__static_attributes__",
})  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SETTERS = ("set_default_dtype", "set_deterministic_algorithms", "set_float32_matmul_precision")


# What turns a tensor, or a number that a trace took from one, into a number of Python.
READS_VALUES = frozenset({
    "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__contains__",
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero",
})  # fmt: skip
VALUES_OF_TRACES: Mapping[type, tuple[str, ...]] = MappingProxyType({
    torch.SymBool: ("__bool__", "__int__"),
    torch.SymFloat: ("__bool__", "__float__", "__int__"),
    torch.SymInt: ("__bool__", "__int__", "__index__"),
})  # fmt: skip


class Calls(TorchFunctionMode):
    """Sees every torch function that Python code calls."""

    def __init__(self, refuse: "Refusals") -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "data.__get__" and called_by_user():
            with annotate({READS_DATA: True}):
                return args[0].detach()
        if name in ("requires_grad_", "requires_grad.__set__"):
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if isinstance(args[0], nn.Parameter) and args[0].requires_grad != wanted:
                self.refuse("requires_grad")
        elif name in CHANGES and (name not in BY_USERS_ONLY or called_by_user()):
            self.refuse(name)
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            self.refuse("generator")
        if name in READS_VALUES and called_by_user():
            return self.refuse.noting(func)(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(slots=True)
class Refusals:
    """Refuses by name, with the place in the user's code; the first one stands."""

    model: nn.Module
    training: bool
    first: CaptureError | None = field(default=None)
    unread: Exception | None = field(default=None)

    def __call__(self, name: str) -> None:
        if name in ONLY_IN_TRAINING and not self.training:
            return
        what, why = CHANGES[name]
        where = place(self.model, current_frames())
        error = CaptureError(f"cannot capture {where}: it {what}, and {why}")
        self.first = self.first or error
        raise error

    def noting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """`read`, which fails where a trace has no values: code that catches this does not know."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return read(*args, **kwargs)
            except Exception as error:
                self.unread = self.unread or error
                raise

        return noted


class Untouched:
    """A generator whose state may be read, and is not to be set."""

    def __init__(self, generator: torch.Generator, refuse: Callable[[str], None]) -> None:
        self.generator, self.refuse = generator, refuse

    def __getattr__(self, name: str) -> Any:
        if name in CHANGES and called_by_user():
            self.refuse(name)
        return getattr(self.generator, name)


@contextmanager
def state_changes_refused(model: nn.Module, training: bool) -> Iterator[None]:
    """Around a call of forward and loss: raises `CaptureError` for what a graph would not show."""
    refuse = Refusals(model, training)
    hooks, modes = hooks_of(model), {m: m.training for m in model.modules()}
    try:
        with ExitStack() as changed:
            for owner, name, value in replacements(model, refuse):
                changed.enter_context(replaced(owner, name, value))
            with Calls(refuse):
                yield
            if hooks_of(model) != hooks:
                refuse("hooks")
            if any(m.training != flag and reads_mode(type(m)) for m, flag in modes.items()):
                refuse("training")
        if refuse.unread is not None:
            raise refuse.unread
    finally:
        if refuse.first is not None and not isinstance(sys.exception(), CaptureError):
            raise refuse.first


def replacements(model: nn.Module, refuse: Refusals) -> Iterator[tuple[Any, str, Any]]:
    """Attributes of torch that change its state, and what they are while a model is traced."""
    modules = set(model.modules())
    assign = nn.Module.__setattr__
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    default = Untouched(torch.default_generator, refuse)

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        known = name == "training" and self in modules
        if known and self.training != value and reads_mode(type(self)):
            refuse("training")
        assign(self, name, value)

    def enter_hooks(self: Any) -> None:
        if type(self) is not save_on_cpu:
            refuse("saved_tensors_hooks")
            enter(self)

    def leave_hooks(self: Any, *given: object) -> None:
        if type(self) is not save_on_cpu:
            leave(self, *given)

    def as_subclass(self: Tensor, kind: type) -> Tensor:
        if kind not in PLAIN:
            refuse("as_subclass")
        return self

    for kind, names in VALUES_OF_TRACES.items():
        for name in names:
            yield kind, name, refuse.noting(getattr(kind, name))
    yield torch, "default_generator", default
    yield torch.random, "default_generator", default
    yield nn.Module, "__setattr__", set_attribute
    yield saved_tensors_hooks, "__enter__", enter_hooks
    yield saved_tensors_hooks, "__exit__", leave_hooks
    yield Tensor, "as_subclass", as_subclass
    yield Tensor, "set_", refused_to_users("set_", Tensor.set_, refuse)
    yield torch.utils, "swap_tensors", lambda *_: refuse("swap_tensors")
    yield torch.autograd, "_engine_run_backward", lambda *_, **__: refuse("backward")
    yield torch, "set_default_device", lambda *_: refuse("set_default_device")
    for name in SETTERS:
        yield torch._C, f"_{name}", refused_to_users(name, getattr(torch._C, f"_{name}"), refuse)


def refused_to_users(name: str, change: Callable[..., Any], refuse: Refusals) -> Any:
    """A function that only code of torch's may call."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        if called_by_user():
            refuse(name)
        return change(*args, **kwargs)

    return asked


def refuse_classes(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Raise `CaptureError` for tensors of a class that does something else than torch's."""
    named: list[tuple[str, str, Tensor]] = [
        *(("parameter", name, tensor) for name, tensor in model.named_parameters()),
        *(("buffer", name, tensor) for name, tensor in model.named_buffers()),
        *(("batch entry", name, tensor) for name, tensor in batch.items()
          if isinstance(tensor, Tensor)),
        *(("tensor", f"{path}.{name}" if path else name, value)
          for path, module in model.named_modules()
          for name, value in vars(module).items() if is_a(value, Tensor)),
    ]  # fmt: skip
    for kind, name, tensor in named:
        found = type(tensor)
        own = overridden(found)
        if own:
            raise CaptureError(
                f"cannot capture {type(model).__name__}: {kind} {name!r} is a"
                f" {found.__module__}.{found.__qualname__} with {own} of its own: {HIDDEN_CLASS}"
            )


def overridden(kind: type) -> str:
    """A method of torch's tensors that a subclass has one of its own for, or ``""``."""
    for base in kind.__mro__:
        if base in PLAIN:
            return ""
        theirs = vars(Tensor).keys() | vars(torch._C.TensorBase).keys() | {"__torch_dispatch__"}
        own = sorted((vars(base).keys() & theirs) - COSMETIC)
        if own:
            return min(own, key=lambda name: (not name.startswith("__torch"), name))
    return ""


def hooks_of(model: nn.Module) -> list[tuple[int, ...]]:
    """The hooks of every module that are not torch's or transformers', to be compared.

    transformers registers those that collect outputs in the first call.
    """
    return [
        tuple(
            id(hook)
            for name in HOOKS
            for hook in getattr(module, name).values()
            if str(getattr(hook, "__module__", "")).partition(".")[0] not in LIBRARIES
        )
        for module in model.modules()
    ]


def reads_mode(kind: type[nn.Module]) -> bool:
    """Whether what a module does may depend on its mode: users' do, and some of torch's."""
    return not kind.__module__.startswith("torch.nn.modules.") or any(
        "training" in function.__code__.co_names
        for base in kind.__mro__
        if base is not nn.Module
        for function in vars(base).values()
        if isinstance(function, FunctionType)
    )


def name_of(func: Any) -> str:
    """`add_`, or `data.__set__` for what sets the attribute `data`."""
    name = str(getattr(func, "__name__", ""))
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        return f"{owner.__name__}.{name}"
    return name


def called_by_user() -> bool:
    """Whether code that is not torch's called a torch function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in PASSING_ON:
        frame = frame.f_back
    return is_user_file(frame.f_code.co_filename)
