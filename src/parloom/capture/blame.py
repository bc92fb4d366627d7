"""Where in the user's code something happened: module path, file and line, from what torch keeps.

Absolute paths never leave this file: a source is `modeling_gpt2.py:123`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from linecache import getline
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parloom.capture.owners import is_user_file

FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+)', re.MULTILINE)
CALL_ORDINAL = re.compile(r"@\d+$")
DATA_DEPENDENT = re.compile(
    r"data.dependent|GuardOnDataDependent|unbacked|\bu\d+\b|_local_scalar_dense|DynamicOutputShape",
    re.IGNORECASE,
)
# What an error says where tracing itself is the cause, rather than the model or its batch.
TRACER = re.compile(r"fake ?tensor|\bexport|proxy|tracing|symbolic|SymInt", re.IGNORECASE)

BRANCH_ADVICE = (
    "use torch.where instead of the branch, move it out of forward, or make it depend on a Python"
    " value fixed at construction"
)
FIXED_SIZE = (
    "give it a fixed size: multiply by the mask, or use torch.where, instead of selecting with it"
    " (a mean over a selection is a masked sum divided by the sum of the mask)"
)
FIXED_EXPERTS = (
    "; for experts, multiply each token and slot by a copy of its expert's matrix (torch.bmm with"
    " weights[expert]), which is recognised, and run group by group"
)
EXPERTS = re.compile(r"expert|moe|mixtral|mixture|rout(?:e|ing)", re.IGNORECASE)
SELECTS = re.compile(r"^for |nonzero|tolist|unique|masked_select|expert")
LAYER_DROP = "skipping layers at random is no fixed program: set the layer drop to 0"
# What torch.export says where two inputs of a graph lie in one memory, and one is written to.
SHARED = "expected compiled_fn to be GraphModule"
HIDDEN = "fake tensor in the exported program constant"  # what torch.export says of such tensors


def source_of(stack_trace: str | None) -> str:
    """`file.py:line` of the innermost frame of a recorded stack that is not torch's, or ``""``."""
    frames = FRAME.findall(stack_trace or "")
    return next((f"{Path(f).name}:{line}" for f, line in reversed(frames) if is_user_file(f)), "")


def module_path(stack: Mapping[str, tuple[str, Any]]) -> str:
    """The user's path of the innermost module, from a recorded module stack.

    The wrapper's own name is cut off; a module that is called again has the ordinal of the call,
    `layer@1`, at the outermost repeated level (deeper ordinals count calls of all its parents).
    """
    names = [(key, str(entry[0])) for key, entry in stack.items()]
    if not names:
        return ""
    path = names[-1][1]
    for key, name in names:
        ordinal = CALL_ORDINAL.search(key)
        if ordinal:
            path = name + ordinal.group() + path[len(name) :]
            break
    return without_wrapper(path)


def without_wrapper(name: str) -> str:
    """A name below the traced wrapper as the user knows it."""
    return "" if name == "model" else name.removeprefix("model.")


def explain(model: nn.Module, batch: Mapping[str, Tensor], err: BaseException) -> str:
    """One message for a failed trace: where, what line, why, and the ways on."""
    where = place(model, frames(err))
    text = str(err).strip()
    reason = text.splitlines()[0].strip() if text else type(err).__name__
    if DATA_DEPENDENT.search(f"{type(err).__name__} {text}"):
        if averages(frames(err)):
            return (
                f"cannot capture {where}: a batch norm with momentum=None averages its statistics"
                " over all calls, by a number that it takes from a tensor; set momentum to a"
                " number (torch's own is 0.1)"
            )
        line, function = user_line(frames(err)), user_function(frames(err))
        return (
            f"cannot capture {where}: what it does next depends on the values of a tensor"
            f" ({line or reason}); {ways_on(line, f'{where} {function} {line}')}"
        )
    if HIDDEN in text:
        return (
            f"cannot capture {where}: a tensor reaches the loss around the trace; use .detach()"
            " instead of .data (a penalty on gradients cannot be captured)"
        )
    if SHARED in text:
        names = " and ".join(shared_buffers(model)) or "two of the tensors that it uses"
        return (
            f"cannot capture {where}: {names} lie in the same memory, and forward writes to it"
            " under one of the two names; keep one, a buffer, and read it under that name, or give"
            " one of them a .clone()"
        )
    if ".numpy()" in text:
        return (
            f"cannot capture {where}: it leaves torch for numpy, which no trace follows and no"
            " gradient passes; compute it with torch, or in the data loader and give the result in"
            " the batch"
        )
    if isinstance(err, SyntaxError) and "random_" in (err.text or ""):
        # A trace is source, and the name of that argument a keyword.
        return f"cannot capture {where}: torch cannot trace random_(from, to); use torch.randint"
    shapes = ", ".join(
        f"{name}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in batch.items()
    )
    notes = "".join(f"; {note}" for note in getattr(err, "__notes__", ()))
    tracer = any(type(e).__module__.startswith("torch") for e in chain(err))
    also = ", and that forward uses only operations torch.export can trace"
    return (
        f"cannot capture {where}: {type(err).__name__}: {reason}{notes}; check that the model runs"
        f" on this batch ({shapes}){also if tracer or TRACER.search(text) else ''}"
    )


def shared_buffers(model: nn.Module) -> tuple[str, ...]:
    """Two buffers in one memory, in words; none where each has its own."""
    found: dict[int, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        other = found.setdefault(buffer.untyped_storage()._cdata, name)
        if other != name:
            return f"buffers {other!r}", f"{name!r}"
    return ()


def averages(stack: Iterable[tuple[FrameType, int]]) -> bool:
    """Whether a batch norm that averages over all calls is on a stack."""
    owners = (frame.f_locals.get("self") for frame, _ in stack)
    return any(isinstance(m, _BatchNorm) and m.momentum is None for m in owners)


def ways_on(line: str, around: str) -> str:
    """What to do instead of what a line does with the values of a tensor; see `fixed_size`."""
    if "drop" in line:
        return LAYER_DROP
    return fixed_size(around) if SELECTS.search(line) else BRANCH_ADVICE


def fixed_size(around: str) -> str:
    """What to do instead of selecting; `around` has the names of modules, files and functions."""
    return FIXED_SIZE + (FIXED_EXPERTS if EXPERTS.search(around) else "")


def forward_place(model: nn.Module) -> str:
    """`Model (file.py:line)` of a model's forward; without the line where it has no source."""
    return place(model, ()) + definition(type(model).forward)


def loss_place(loss: object) -> str:
    """`the loss function focal (file.py:line)`; without the line where the user has no source."""
    while isinstance(loss, partial):
        loss = loss.func
    if isinstance(loss, nn.Module):
        return f"the loss function {type(loss).__name__}{definition(type(loss).forward)}"
    if hasattr(loss, "__name__"):
        return f"the loss function {loss.__name__}{definition(loss)}"
    return f"the loss function {type(loss).__name__}{definition(type(loss).__call__)}"


def definition(function: Any) -> str:
    """` (file.py:line)` where a function of the user's begins, or ``""``."""
    code = getattr(unwrap(function), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def place(model: nn.Module, stack: Iterable[tuple[FrameType, int]]) -> str:
    """`Model.path (file.py:line)` of the innermost module and user line of a stack."""
    names = {id(module): name for name, module in model.named_modules()}
    path, source = "", ""
    for frame, line in stack:
        owner = frame.f_locals.get("self")
        if id(owner) in names and names[id(owner)].startswith(path):
            path = names[id(owner)]
        if is_user_file(frame.f_code.co_filename):
            source = f"{Path(frame.f_code.co_filename).name}:{line}"
    where = ".".join(part for part in (type(model).__name__, path) if part)
    return f"{where} ({source})" if source else where


def user_line(stack: Iterable[tuple[FrameType, int]]) -> str:
    """The text of the innermost user line of a stack."""
    found = [(f.f_code.co_filename, n) for f, n in stack if is_user_file(f.f_code.co_filename)]
    return getline(*found[-1]).strip() if found else ""


def user_function(stack: Iterable[tuple[FrameType, int]]) -> str:
    """The name of the innermost user function of a stack, with that of its class."""
    found = [f.f_code.co_qualname for f, _ in stack if is_user_file(f.f_code.co_filename)]
    return found[-1] if found else ""


def current_frames() -> Iterator[tuple[FrameType, int]]:
    """The stack of the caller, outermost first."""
    return reversed(list(walk_stack(None)))


def frames(err: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Frames of an exception and of what it was raised from, outermost first."""
    for item in reversed(chain(err)):
        yield from walk_tb(item.__traceback__)


def chain(err: BaseException) -> list[BaseException]:
    """An exception and what it was raised from, the last first."""
    found: list[BaseException] = []
    current: BaseException | None = err
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found
