"""What models tell autograd by hand: backward passes of their own, and checkpoints.

A trace holds what forward computes, and its gradient is the derivative of that. So while a model is
traced, custom functions run as plain calls of their forward, and afterwards each is checked on
random numbers: its backward must be that derivative. Checkpoints are traced through, and what is
inside them is marked. Hooks on gradients are no part of a trace, and refused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from parloom.capture.blame import current_frames, place
from parloom.capture.replace import replaced
from parloom.errors import CaptureError

CHECKPOINT = "parloom_checkpoint"
LIMIT = 1 << 22  # elements of the arguments that a function is checked on
# Of the random arguments and of the gradients that arrive: usual, near zero, saturated, exploding.
SCALES = ((1.0, 1.0), (1e-8, 1.0), (30.0, 1.0), (1e2, 1.0), (1e4, 1.0), (1.0, 1e4))
REAL_CALLS = 4  # of a function that its real arguments are kept of
TOLERANCE = 1e-4  # between single precision results of two formulas for the same derivative
ADVICE = (
    "let autograd derive it from plain operations: for a straight-through estimator that is"
    " x + (f(x) - x).detach(), for a scaled gradient x * scale + (x - x * scale).detach()"
)

NO_HOOKS = (
    "which no step of a plan would run: remove it, or write what it does to the gradient into"
    " forward (x * scale + (x - x * scale).detach() scales it)"
)

Kind = type[torch.autograd.Function]


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor argument, without its values."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True)
class CustomCall:
    """A custom function with the arguments of one call, and where in the model it is."""

    kind: Kind
    args: tuple[Any, ...]
    where: str


@dataclass(frozen=True, slots=True)
class RealCall:
    """A custom function with the arguments that it gets on the model's own batch."""

    kind: Kind
    args: tuple[Any, ...]


class Context(FunctionCtx):
    """What a custom forward may ask of its context; what it saves goes nowhere."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)


def refuse_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks on gradients that the model or its parameters have already."""
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        raise CaptureError(
            f"cannot capture {type(model).__name__}: all modules have a backward hook"
            f" (register_module_full_backward_hook), {NO_HOOKS}"
        )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            where = ".".join(part for part in (type(model).__name__, path) if part)
            raise CaptureError(f"cannot capture {where}: it has a backward hook, {NO_HOOKS}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"cannot capture {type(model).__name__}: parameter {name!r} has a hook on its"
                f" gradient, {NO_HOOKS}"
            )


@contextmanager
def gradients_seen(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside, forward cannot hide from a trace what it does to gradients.

    `inference_mode` is `no_grad`, which is recorded. A tensor's hook raises `CaptureError`, but in
    evaluation, where it would never run.
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.no_grad() if self.mode else nullcontext()
        self._inference_mode_context.__enter__()

    def hook(*_: Any, **__: Any) -> Any:
        if training:
            where = place(model, current_frames())
            raise CaptureError(
                f"cannot capture {where}: it registers a hook on a gradient, {NO_HOOKS}"
            )
        return RemovableHandle(OrderedDict())

    with (
        replaced(torch.inference_mode, "__enter__", enter),
        replaced(Tensor, "register_hook", hook),
        replaced(Tensor, "register_post_accumulate_grad_hook", hook),
    ):
        yield


@contextmanager
def derived_autograd(model: nn.Module) -> Iterator[list[CustomCall]]:
    """Custom functions run as plain calls and are listed.

    Nodes inside checkpoints are marked with the number of the innermost one.
    """
    calls: list[CustomCall] = []
    numbers = count()

    def apply(kind: Kind, *args: Any, **kwargs: Any) -> Any:
        if kind is checkpoint.CheckpointFunction:
            function, _, *operands = args
            with annotate({CHECKPOINT: next(numbers)}), recorded_for(operands):
                return function(*operands)
        if kind.__module__.startswith("torch."):
            return super(base, kind).apply(*args, **kwargs)
        where = place(model, current_frames())
        if any(isinstance(t, Tensor) for a in args if isinstance(a, list | tuple) for t in a):
            raise CaptureError(
                f"cannot capture {where}: custom autograd function {kind.__name__} gets tensors in"
                " a list, where autograd sees none of them; give each as an argument of its own"
            )
        calls.append(CustomCall(kind, tuple(described(a) for a in args), where))
        with recorded_for(args):
            return forward_of(kind, args, kwargs)

    def marked(*_: Any, **__: Any) -> Iterator[None]:
        with annotate({CHECKPOINT: next(numbers)}):
            yield

    base: Any = torch.autograd.function._SingleLevelFunction
    module: Any = checkpoint
    generator = module._checkpoint_without_reentrant_generator
    base.apply = classmethod(apply)
    module._checkpoint_without_reentrant_generator = marked
    try:
        with preserve_node_meta():
            yield calls
    finally:
        del base.apply
        module._checkpoint_without_reentrant_generator = generator


def recorded_for(args: Iterable[Any]) -> AbstractContextManager[object]:
    """Where a function runs that has no gradient unless an argument needs one."""
    needed = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    return nullcontext() if needed else torch.no_grad()


def described(arg: Any) -> Any:
    """An argument to be made again: tensors by shape."""
    if not isinstance(arg, Tensor):
        return arg
    sizes = tuple(int(n) if isinstance(n, int) else 0 for n in arg.shape)
    return Shape(sizes, arg.dtype, arg.requires_grad)


def forward_of(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a custom function computes, as ordinary operations."""
    if kind.setup_context is not torch.autograd.Function.setup_context:
        return kind.forward(*args, **kwargs)
    context = Context(args)
    result = kind.forward(context, *args, **kwargs)
    fixed = {id(t) for t in getattr(context, "non_differentiable", ())}
    if isinstance(result, Tensor):
        return result.detach() if id(result) in fixed else result
    if isinstance(result, tuple | list):
        return tuple(r.detach() if id(r) in fixed else r for r in result)
    return result


@contextmanager
def real_calls() -> Iterator[list[RealCall]]:
    """Inside, the arguments of custom functions that are called on real tensors are kept."""
    calls: list[RealCall] = []
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(kind: Kind, *args: Any, **kwargs: Any) -> Any:
        few = sum(call.kind is kind for call in calls) < REAL_CALLS
        sizes = sum(a.numel() for a in args if isinstance(a, Tensor))
        if few and sizes <= LIMIT and not kind.__module__.startswith("torch."):
            calls.append(RealCall(kind, tuple(taken(a) for a in args)))
        return super(base, kind).apply(*args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield calls
    finally:
        del base.apply


def taken(arg: Any) -> Any:
    """An argument of a call as it is before the call; a tensor as a leaf of enough precision."""
    if not isinstance(arg, Tensor):
        return arg
    half = arg.dtype in (torch.bfloat16, torch.float16)
    copy = arg.detach().to(torch.float32 if half else arg.dtype, copy=True)
    return copy.requires_grad_(arg.requires_grad)


def check_derivatives(calls: list[CustomCall], real: list[RealCall]) -> None:
    """Raise `CaptureError` for a custom function whose backward is not what a trace derives."""
    seen: set[str] = set()
    for call in calls:
        key = f"{id(call.kind)} {call.args!r}"
        if key in seen:
            continue
        seen.add(key)
        name = f"{call.where}: custom autograd function {call.kind.__name__}"
        try:
            error = max(worst_difference(call), *(
                real_difference(r) for r in real if r.kind is call.kind
            ), 0.0)  # fmt: skip
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as err:
            reason = str(err).splitlines()[0] if str(err) else ""
            raise CaptureError(
                f"cannot capture {name} could not be checked on random numbers:"
                f" {type(err).__name__}: {reason}; {ADVICE}"
            ) from err
        if not error <= TOLERANCE:
            raise CaptureError(
                f"cannot capture {name} has a backward that is not the derivative of its forward"
                f" (gradients differ by {error:.0e}), which a plan would train with; {ADVICE}"
            )


def real_difference(call: RealCall) -> float:
    """The largest relative difference on the arguments of a real call."""
    args = list(call.args)
    if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return 0.0  # it was traced without gradients
    return max(args_difference(call.kind, args, arriving) for arriving in (1.0, 1e4))


def worst_difference(call: CustomCall) -> float:
    """The largest relative difference of any gradient between the function and its derivative."""
    shapes = [a for a in call.args if isinstance(a, Shape)]
    if not any(s.differentiable for s in shapes):
        return 0.0
    small = {n: n for s in shapes for n in s.sizes}
    if sum(prod(s.sizes) for s in shapes) > LIMIT:
        # Equal sizes stay equal and different ones different, which most functions can live with.
        small = {n: n if n < 8 else 8 + 8 * i for i, n in enumerate(sorted(small))}
    worst = 0.0
    for scale, arriving in SCALES:
        args = random_arguments(call, small, scale, 2)
        worst = max(worst, args_difference(call.kind, args, arriving))
    if all(s.dtype.is_floating_point or s.dtype == torch.bool for s in shapes):
        return worst
    for high in sorted({max(n, 2) for n in small.values()} - {2}):
        args = random_arguments(call, small, 1.0, high)
        try:
            worst = max(worst, args_difference(call.kind, args, 1.0))
        except (RuntimeError, LookupError):  # no function takes every index
            break
    return worst


def args_difference(kind: Kind, args: list[Any], arriving: float) -> float:
    """The largest relative difference of any gradient between a function and its derivative."""
    derived = partial(plain_forward, kind)
    outside = reached_besides(derived, args)
    expected = gradients(kind.apply, args, arriving, outside)
    found = gradients(derived, args, arriving, outside)
    return max(
        (difference(one, other) for one, other in zip(expected, found, strict=True)), default=0.0
    )


def plain_forward(kind: Kind, *args: Any) -> Any:
    """What a custom function computes, as ordinary operations."""
    return forward_of(kind, args, {})


def reached_besides(function: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    """Leaves that a function's results have a gradient for and that it is not given as arguments.

    Autograd does not see them: they are weights of a module or tensors in a list.
    """
    given = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        results = function(*given)
    found: dict[int, Tensor] = {}
    nodes = [r.grad_fn for r in (results if isinstance(results, tuple | list) else (results,))
             if isinstance(r, Tensor)]  # fmt: skip
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        nodes += [after for after, _ in node.next_functions]
    return list(found.values())


def random_arguments(
    call: CustomCall, small: dict[int, int], scale: float, high: int
) -> list[Any]:  # fmt: skip
    """Arguments of a call: normal numbers, integers below `high`, and what is no tensor."""
    generator = torch.Generator().manual_seed(0)

    def make(arg: Any) -> Any:
        if not isinstance(arg, Shape):
            return arg
        sizes = tuple(small[n] for n in arg.sizes)
        if not arg.dtype.is_floating_point:
            return torch.randint(0, high, sizes, generator=generator).to(arg.dtype)
        # Half precision is too coarse to tell formulas apart.
        dtype = torch.float64 if arg.dtype == torch.float64 else torch.float32
        made = torch.randn(sizes, generator=generator, dtype=dtype) * scale
        return made.requires_grad_(arg.differentiable)

    return [make(a) for a in call.args]


def gradients(
    function: Callable[..., Any], args: list[Any], arriving: float, outside: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of a random combination of all results, by argument and leaf; draws repeat.

    The gradients that arrive at the results are normal numbers times `arriving`.
    """
    given = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
             for a in args]  # fmt: skip
    # Functions may write to their arguments, which leaves cannot be.
    inner = [a.clone() if isinstance(a, Tensor) and a.requires_grad else a for a in given]
    before = [leaf.grad for leaf in outside]
    for leaf in outside:
        leaf.grad = None
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        results = function(*inner)
        generator = torch.Generator().manual_seed(1)
        total = torch.zeros(())
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor) and result.requires_grad:
                weights = torch.randn(result.shape, generator=generator) * arriving
                weights = weights.to(result.dtype)
                total = total + (result * weights).sum()
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    found = [t.grad for t in (*given, *outside) if isinstance(t, Tensor)]
    for leaf, gradient in zip(outside, before, strict=True):
        leaf.grad = gradient
    return found


def difference(expected: Tensor | None, found: Tensor | None) -> float:
    """Largest difference relative to the largest element; a gradient that is missing is zero."""
    if expected is None and found is None:
        return 0.0
    one = torch.zeros_like(found) if expected is None and found is not None else expected
    other = torch.zeros_like(expected) if found is None and expected is not None else found
    assert one is not None
    assert other is not None
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, torch.zeros_like(one), (one - other).abs())
    if not bool(gap.any()):
        return 0.0
    return float(gap.max() / one[one.isfinite()].abs().max().clamp(min=1e-30))
