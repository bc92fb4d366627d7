"""From an nn.Module to a functional ATen graph: what is traced, and what stops it.

The model is wrapped so that exactly one flat tuple of tensors comes out (the loss first), traced
with `torch.export`, and made functional with `run_decompositions`, at the level that keeps
`linear`, `scaled_dot_product_attention` and their like whole.

Decomposition forgets what `torch.no_grad` does to gradients, and torch's own pass forgets it where
there is autocast around it; so the switches of the grad mode stay in the traced graph, and
`gradient_paths` makes `detach` of them.
"""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from inspect import signature
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._export.passes import replace_set_grad_with_hop_pass
from torch.export import ExportedProgram

from parloom.capture.ambient import refuse_around_capture
from parloom.capture.asked import nothing_asked
from parloom.capture.assertions import NothingRaised
from parloom.capture.assigned import assignments_written
from parloom.capture.autograd import (
    CustomCall,
    RealCall,
    check_derivatives,
    derived_autograd,
    gradients_seen,
    real_calls,
    refuse_hooks,
)
from parloom.capture.blame import explain, forward_place, loss_place
from parloom.capture.check import check_loss
from parloom.capture.gradient_paths import AUTOCAST, with_gradients_stopped
from parloom.capture.repeats import Repeats, Unlike, check_untouched
from parloom.capture.replace import replaced
from parloom.capture.spelling import decomposed, with_plain_dropout
from parloom.capture.state_changes import refuse_classes, state_changes_refused
from parloom.capture.steady import Watch
from parloom.capture.wide_losses import widen_losses
from parloom.errors import CaptureError, InputError

Loss = Callable[[Any, dict[str, Tensor]], Tensor]

# What user code, torch's tracer and its guards raise; anything else is a bug of ours.
TRACE_FAILURES = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError,
    ArithmeticError, ImportError, SyntaxError,
)  # fmt: skip

LARGEST_CALLED = 100_000_000  # parameters of a model that is run once to check custom functions

# An attribute of weights that have an address and no values.
VALUELESS = "_parloom_valueless"
LOSS_RULE = "the loss function is called as loss(output, batch), batch being a dict"


@dataclass(slots=True)
class Traced:
    """A functional exported program, the names of its user outputs, and lost node metadata.

    The loss, when there is one, is the first output and named `""`; outputs that only keep a
    repeated call in the trace are named None. `hidden` holds, per autocast
    region, the metadata of the nodes inside it, which decomposition drops. `loss_place` says which
    function computes the loss, ``""`` where the model does.
    """

    program: ExportedProgram
    names: tuple[str | None, ...]
    hidden: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    loss_place: str = ""


class OutputNames:
    """Where a trace leaves the names of its outputs (torch.export undoes attribute writes)."""

    def __init__(self) -> None:
        self.found: tuple[str | None, ...] = ()


class LossProgram(nn.Module):
    """The traced wrapper: batch in, (loss, other outputs...) out, as one flat tuple."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        training: bool,
        taken: Collection[str],
        repeats: Repeats | None = None,
    ) -> None:
        super().__init__()
        self.repeats = repeats
        self.model = model
        self.taken = frozenset(taken)
        # Not as a part of the model: what it holds is constant.
        self.loss = loss.__call__ if isinstance(loss, nn.Module) else loss
        self.keep_outputs = not training
        self.names = OutputNames()
        self.watch = Watch(model, loss)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Each module under its first name: torch takes a buffer of two names for two buffers."""
        yield from super().named_modules(set() if memo is None else memo, prefix)

    def forward(self, **batch: Tensor) -> tuple[Tensor, ...]:
        with state_changes_refused(self.model, training=not self.keep_outputs):
            return self.results(batch)

    def results(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The loss and the other tensors that are kept."""
        repeats = nullcontext() if self.repeats is None else self.repeats.watching()
        with repeats, NothingRaised(), assignments_written(self.model), self.watch.call():
            output = self.model(**{k: v for k, v in batch.items() if k in self.taken})
            flat = list(named_tensors(output))
            try:
                loss = select_loss(output, flat, batch, self.loss, required=not self.keep_outputs)
            except CaptureError as err:
                raise CaptureError(f"cannot capture {forward_place(self.model)}: {err}") from err
        results = [] if loss is None else [("", loss)]
        if self.keep_outputs:
            results += [(name, tensor) for name, tensor in flat if tensor is not loss]
        if not results:
            raise CaptureError(f"the model returns no tensor ({type(output).__name__})")
        seen: list[Tensor] = []
        if self.repeats is not None:
            self.repeats.check_results([tensor for _, tensor in results])
            seen = self.repeats.seen
        self.names.found = (*(name for name, _ in results), *(None for _ in seen))
        return (*(tensor for _, tensor in results), *seen)


def named_tensors(output: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(user's name, tensor) of everything in a model's output, depth first."""
    if isinstance(output, Tensor):
        yield name or "output_0", output
    elif isinstance(output, Mapping):
        for key, item in output.items():
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        for key in output._fields:
            yield from named_tensors(getattr(output, key), f"{name}.{key}" if name else key)
    elif isinstance(output, tuple | list):
        for index, item in enumerate(output):
            yield from named_tensors(item, f"{name}.{index}" if name else f"output_{index}")
    elif is_dataclass(output):
        for key in output.__dataclass_fields__:
            yield from named_tensors(getattr(output, key), f"{name}.{key}" if name else key)


def select_loss(
    output: object,
    flat: list[tuple[str, Tensor]],
    batch: dict[str, Tensor],
    loss: Loss | None,
    *,
    required: bool,
) -> Tensor | None:
    """The scalar to minimise: the user's function, `.loss`, or the first output tensor."""
    if loss is not None:
        try:
            chosen: object = loss(output, batch)
        except Exception as err:
            err.add_note(LOSS_RULE)
            raise
    else:
        chosen = getattr(output, "loss", None)
        if chosen is None and isinstance(output, Mapping):
            chosen = output.get("loss")
        if chosen is None:
            chosen = flat[0][1] if flat else None
            if not required and (not isinstance(chosen, Tensor) or chosen.shape):
                return None
    if not isinstance(chosen, Tensor):
        raise CaptureError(f"the loss is a {type(chosen).__name__}, not a tensor")
    if chosen.shape:
        raise CaptureError(
            f"the loss has shape {tuple(chosen.shape)}, but training needs a scalar; return"
            " `.loss`, make the first output the loss, or give a loss function: a factory's third"
            " item, called as loss(output, batch)"
        )
    return chosen


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in the mode asked for, every submodule's own flag restored afterwards.

    A model already in that mode is left alone, so frozen batch norms stay frozen.
    """
    flags = {module: module.training for module in model.modules()}
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def trace(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Loss | None,
    training: bool,
    repeats: Repeats | None = None,
) -> Traced:
    """Export the model and make it functional; with `repeats`, calls that repeat others are stubs.

    Raises: CaptureError naming module path, source line and reason; InputError for a bad batch;
    with `repeats` also `Unlike`, where they do not prove that calls are alike.
    """
    refuse_around_capture(type(model).__name__)
    check_loss(loss)
    if training:
        refuse_hooks(model)
    refuse_classes(model, batch)
    example = example_batch(model, batch)
    wrapper = LossProgram(model, loss, training, arguments_of(model, example, loss), repeats)
    named = replaced(fx.graph, "_format_target", attribute)
    with mode(model, training), torch.enable_grad(), warnings.catch_warnings(), quiet(), named:
        # torch's own use of a class that torch deprecates, once per copied tree.
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        # Whether what forward assigns matters is checked here.
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
        try:
            try:
                exported, custom = export(wrapper, example)
                if repeats is not None and repeats.why:
                    raise Unlike(repeats.why)
            except BaseException:
                wrapper.watch.undo()
                raise
            short = repeats is not None and repeats.did
            if not short:
                wrapper.repeats = None
            wrapper.watch.check(exported, lambda: export(wrapper, example)[0])
            if repeats is not None and short:
                check_repeats(wrapper, repeats)
            if training and custom:
                check_derivatives(custom, called_for_real(wrapper, example))
            with_plain_dropout(exported.graph_module)
            widen_losses(exported.graph_module)
            before = set(exported.graph.nodes)
            with_gradients_stopped(exported.graph_module, type(model).__name__, training)
            if repeats is not None:
                check_untouched(exported.graph, before)
            keep_output_names(exported)
            hidden = autocast_metadata(exported.graph_module)
            functional = decomposed(exported)
        except TRACE_FAILURES as err:
            raise CaptureError(explain(model, example, err)) from err
    told = "" if loss is None else loss_place(loss)
    return Traced(functional, wrapper.names.found, hidden, told)


def check_repeats(wrapper: LossProgram, repeats: Repeats) -> None:
    """Raise `Unlike` where the last call that was traced changes state, or a call is no other's.

    What a call that did not run would have changed is not known. The first calls of a model may
    change state that settles (hooks that are installed once, a default that is filled in).
    """
    left = wrapper.watch.left
    if left is not None and not left.is_clean:
        raise Unlike("every call of forward changes state")
    if repeats.why:
        raise Unlike(repeats.why)


def export(
    wrapper: LossProgram, example: dict[str, Tensor]
) -> tuple[ExportedProgram, list[CustomCall]]:
    """The program as torch exports it, and the custom autograd functions in it."""
    seen = gradients_seen(wrapper.model, training=not wrapper.keep_outputs)
    kept = replaced(
        replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", lambda *given: given
    )
    asked = nothing_asked(wrapper.model)
    taken = nullcontext() if wrapper.repeats is None else wrapper.repeats.taken()
    with derived_autograd(wrapper.model) as custom, seen, kept, asked, taken:
        return torch.export.export(wrapper, (), example, strict=False), custom


def called_for_real(wrapper: LossProgram, example: dict[str, Tensor]) -> list[RealCall]:
    """The arguments of custom functions in a call of a copy of the model on its batch.

    None where it has no values, is large, or does not run by itself.
    """
    weights = list(wrapper.model.parameters())
    large = sum(p.numel() for p in weights) > LARGEST_CALLED
    if large or any(p.is_meta or hasattr(p, VALUELESS) for p in weights):
        return []
    with torch.random.fork_rng(devices=[]), real_calls() as calls:
        try:
            model = deepcopy(wrapper.model)
            copied = LossProgram(model, wrapper.loss, True, wrapper.taken)
            copied(**deepcopy(example))
            copied.watch.undo()  # closures and the loss function are those of the user's model
        except (*TRACE_FAILURES, CaptureError) as err:
            logging.getLogger(__name__).debug("custom functions were not called for real: %s", err)
    return calls


def attribute(owner: str, target: str) -> str:
    """Python for an attribute whose names may be anything, as keys of a `ModuleDict` are.

    torch.fx writes `owner.class` for the key `class`, which is no Python.
    """
    for name in target.split("."):
        plain = name.isidentifier() and not iskeyword(name)
        owner = f"{owner}.{name}" if plain else f"getattr({owner}, {name!r})"
    return owner


def keep_output_names(exported: ExportedProgram) -> None:
    """Let the signature name the outputs of a graph that was rewritten."""
    output = next(n for n in exported.graph.nodes if n.op == "output")
    for node, spec in zip(output.args[0], exported.graph_signature.output_specs, strict=True):
        spec.arg.name = node.name


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch prints and logs where tracing fails; our error says it in one line."""
    said = io.StringIO()
    logger = logging.getLogger("torch")
    level = logger.level
    with redirect_stderr(said):
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)
    sys.stderr.write(said.getvalue())


def example_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Separate copies of the batch tensors, on the meta device when the model is.

    Two entries that share one tensor would be traced as one input.
    """
    if not batch:
        raise InputError("the batch is empty; give the model's keyword arguments as tensors")
    devices = {p.device.type for p in model.parameters()}
    copies: dict[str, Tensor] = {}
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"batch entry {name!r} is a {type(tensor).__name__}, not a tensor;"
                " bind other arguments in the model itself"
            )
        if devices == {"meta"} and tensor.device.type != "meta":
            copies[name] = torch.empty_like(tensor, device="meta")
        else:
            copies[name] = tensor.detach().clone()
    shapes = {name: list(t.shape) for name, t in copies.items() if t.shape}
    if shapes and not any(shape[0] for shape in shapes.values()):
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"the batch has no samples ({given}); give one of the size to train with")
    return copies


def arguments_of(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Loss | None
) -> Collection[str]:
    """The entries of the batch that `forward` takes; a loss function gets the others too.

    Raises: CaptureError where forward needs another one, or nobody takes one.
    """
    try:
        parameters = signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # forward is not written in Python
        return batch
    if model._forward_pre_hooks or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return batch
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    taken = [p.name for p in named if p.name in batch]
    missing = [p.name for p in named if p.default is p.empty and p.name not in batch]
    extra = [name for name in batch if name not in taken]
    where = f"cannot capture {forward_place(model)}"
    if missing:
        raise CaptureError(
            f"{where}: forward needs {missing[0]!r}, and the batch has {', '.join(batch)}; add it"
            " to the batch, or give the argument a default"
        )
    if extra and loss is None:
        raise CaptureError(
            f"{where}: forward takes {', '.join(p.name for p in named) or 'nothing'}, and the batch"
            f" has {extra[0]!r} too; leave it out, or give a loss function (a factory's third item)"
            " that uses it: loss(output, batch) gets the whole batch"
        )
    return taken


def autocast_metadata(module: fx.GraphModule) -> dict[str, dict[str, dict[str, Any]]]:
    """Metadata of the nodes inside each autocast region, by region name and node name."""
    hidden: dict[str, dict[str, dict[str, Any]]] = {}
    for node in module.graph.nodes:
        if node.target is AUTOCAST:
            hidden[node.name] = dict(inner_metadata(module, node))
    return hidden


def inner_metadata(owner: fx.GraphModule, region: fx.Node) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, metadata) of all nodes in a region and in the regions nested in it."""
    references = [a for a in region.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    for reference in references:
        body = getattr(owner, str(reference.target))
        for node in body.graph.nodes:
            yield node.name, node.meta
            if node.target is AUTOCAST:
                yield from inner_metadata(body, node)
