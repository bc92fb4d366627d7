"""The user's function that makes an optimizer, where ranks hold parts of the parameters.

Its groups and options may depend on shapes, so it is called with stand-ins that have the whole
shapes and no memory, too. Stand-ins of parameters that other stages own are among a rank's parts
until the groups are made: a group may be empty, and is there on every rank. Hooks, frozen
parameters and written values are refused: on parts they would compute something else than on the
whole.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parloom.errors import InputError
from parloom.runtime.optimizer import check_elementwise, check_given
from parloom.runtime.part import Part
from parloom.runtime.program import ParameterSpec
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.runtime.taken import refuse_taken

Maker = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
OF_GROUP = ("params", "param_names")
# Ranks may be threads of one process, with one generator: one of them at a time keeps and restores
# its state. Reading the state holds the generator's mutex while a Python object is made, which may
# collect garbage and let another thread run: if that one asks for the state, too, it waits for the
# mutex and never gives the interpreter's lock back.
_GENERATOR = Lock()


def make_optimizer(
    maker: Maker,
    owned: Mapping[str, tuple[ShardedParameter, Part]],
    specs: Iterable[ParameterSpec],
) -> tuple[Optimizer, "Untouched"]:
    """The optimizer of this rank's parts, with the options that the whole parameters would get.

    `specs` are all parameters of the model. Raises `InputError` where the parts get other groups
    than the whole parameters would, where `maker` reads values that this rank does not have, and
    where it does to a part what it may not (see `Untouched`).
    """
    helds = {name: held for name, (held, _) in owned.items()}
    sharded, specs = _sharded(owned), list(specs)
    wholes = _stand_ins(specs if sharded else [s for s in specs if s.name not in helds], helds)
    parts = {s.name: helds[s.name].owned if s.name in helds else wholes[s.name] for s in specs}
    mine = {name: parts[name] for name in helds}
    given = {name: (part, _hooks(part), part.requires_grad) for name, part in mine.items()}
    versions = {name: part._version for name, part in mine.items()}
    optimizer = _of_parts(maker, parts, wholes) if sharded else _of_wholes(maker, parts, mine)
    groups = _named(optimizer, {id(part): name for name, part in parts.items()})
    _forget(optimizer, {id(part) for name, part in parts.items() if name not in mine})
    check_elementwise(optimizer)
    check_given(optimizer, list(mine.values()))
    for name in (name for name, part in mine.items() if part._version != versions[name]):
        if sharded:
            raise InputError(
                f"optimizer= writes to {name}, of which ranks may hold parts; change weights before"
                " parallelize, or with trainer.load_state_dict"
            )
        with torch.no_grad():
            helds[name].publish()
    untouched = Untouched(given, groups, sharded)
    untouched.check(optimizer)
    return optimizer, untouched


def _of_wholes(
    maker: Maker, parts: Mapping[str, nn.Parameter], mine: Mapping[str, nn.Parameter]
) -> Optimizer:
    """The optimizer where this rank has all of what it holds."""
    if len(parts) == len(mine):
        return maker(list(parts.items()))
    touched = _Touched({id(part): n for n, part in parts.items() if n not in mine})
    try:
        with touched:
            return maker(list(parts.items()))
    except Exception as error:
        try:
            maker(list(mine.items()))
        except Exception:
            raise error from None
        raise _reads(touched.last or "a parameter") from error


def _named(optimizer: object, names: Mapping[int, str]) -> tuple[tuple[str, ...], ...]:
    """The names of the parameters of each group."""
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else ()
    return tuple(tuple(names[id(p)] for p in g["params"] if id(p) in names) for g in groups)


def _forget(optimizer: object, absent: Collection[int]) -> None:
    """Take the stand-ins of what other stages own out of the groups, and out of the state, which
    some optimizers (Adagrad) begin when they are made.
    """
    if not isinstance(optimizer, Optimizer):
        return
    for parameter in [p for p in optimizer.state if id(p) in absent]:
        del optimizer.state[parameter]
    for group in optimizer.param_groups:
        kept = [id(parameter) not in absent for parameter in group["params"]]
        for key in OF_GROUP:
            if key in group:
                group[key] = list(compress(group[key], kept))


@dataclass(frozen=True, slots=True)
class Untouched:
    """The parameters with the hooks and `requires_grad` that the runtime gave them, and the names
    of each group, those of other stages among them.

    `sharded` names one of which ranks hold parts, empty where there is none.
    """

    parameters: Mapping[str, tuple[nn.Parameter, list[int], bool]]
    groups: tuple[tuple[str, ...], ...]
    sharded: str

    def check(self, optimizer: Optimizer) -> None:
        """Raise `InputError` for hooks and switched `requires_grad`, which a step cannot honor."""
        for name, (parameter, hooks, trained) in self.parameters.items():
            if parameter.requires_grad != trained:
                raise InputError(
                    f"requires_grad of {name} was set to {not trained}, and the plan was made for"
                    f" {trained}; "
                    + (
                        "leave the parameter out of the optimizer's groups by its name, or"
                        if trained
                        else "train it: call requires_grad_(True) in the factory, or freeze it:"
                    )
                    + " call requires_grad_(False) in the factory and plan again"
                )
            if _hooks(parameter) != hooks:
                raise InputError(
                    f"{name} was given a hook: it would see the gradient of a part of the"
                    " parameter or of the batch, or be left out; to clip, pass"
                    " parallelize(..., clip_norm=...), to scale a gradient, scale the learning rate"
                    " of its group"
                )
        if self.sharded and _step_hooks(optimizer):
            raise InputError(
                f"{type(optimizer).__name__} has a hook of its step, which would see parts of"
                f" parameters and gradients (of {self.sharded}, for example); to clip, pass"
                " parallelize(..., clip_norm=...); run other code after trainer.step"
            )


class _Touched(TorchFunctionMode):
    """Notes which stand-in was read last."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.last = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = (self.names[id(a)] for a in tree_leaves((args, kwargs)) if id(a) in self.names)
        self.last = next(found, self.last)
        return func(*args, **(kwargs or {}))


def _of_parts(
    maker: Maker, parts: Mapping[str, nn.Parameter], wholes: Mapping[str, nn.Parameter]
) -> Optimizer:
    touched = _Touched({id(whole): name for name, whole in wholes.items()})
    expected, failure = None, None
    try:
        with _GENERATOR, torch.random.fork_rng(devices=[]), touched:
            expected = maker(list(wholes.items()))
    except Exception as error:
        failure = error
    try:
        optimizer = maker(list(parts.items()))
    except Exception as error:
        if failure is not None:
            raise
        raise InputError(
            f"optimizer= fails with this rank's parts of the parameters, some of which may be empty"
            f" ({type(error).__name__}: {error}); decide by name, or by the shapes of the script's"
            " module"
        ) from error
    if failure is not None:
        raise _reads(touched.last or "a parameter") from failure
    if isinstance(expected, Optimizer) and isinstance(optimizer, Optimizer):
        _take_options(optimizer, parts, expected, wholes)
    return optimizer


def _take_options(
    optimizer: Optimizer,
    parts: Mapping[str, nn.Parameter],
    expected: Optimizer,
    wholes: Mapping[str, nn.Parameter],
) -> None:
    """Give the optimizer of the parts the options of that of the wholes."""
    mine, theirs = _groups(optimizer, parts), _groups(expected, wholes)
    for name in parts:
        if mine.get(name) != theirs.get(name):
            raise InputError(
                f"optimizer= puts {name} in {_told(theirs.get(name))} by its whole shape"
                f" {list(wholes[name].shape)}, and in {_told(mine.get(name))} by this rank's part"
                f" {list(parts[name].shape)}; decide by name, or by the shapes of the script's"
                " module"
            )
    for group, whole in zip(optimizer.param_groups, expected.param_groups, strict=False):
        for key, value in whole.items():
            if key in OF_GROUP:
                continue
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
                raise _reads(next((n for n, i in theirs.items() if whole is _at(expected, i)), key))
            if not _same(group.get(key), value):
                group[key] = value


def _reads(name: str) -> InputError:
    return InputError(
        f"optimizer= reads values of {name}; ranks hold parts of them; compute such settings from"
        " the module before parallelize"
    )


def _at(optimizer: Optimizer, index: int) -> dict[str, Any]:
    group: dict[str, Any] = optimizer.param_groups[index]
    return group


def _told(index: int | None) -> str:
    return "no group" if index is None else f"group {index}"


def _groups(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The group of each parameter, by name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        names[id(parameter)]: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) in names
    }


def _same(left: object, right: object) -> bool:
    """Whether two options are equal; a tensor is as good as another of its values."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and bool(left == right)


def _stand_ins(
    specs: Sequence[ParameterSpec], helds: Mapping[str, ShardedParameter]
) -> dict[str, nn.Parameter]:
    """Stand-ins for whole parameters of this and of other stages, without memory."""
    found = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True) if specs else None
    for spec in specs:
        if spec.name in helds:
            owned = helds[spec.name].owned
            dtype, device, trained = owned.dtype, owned.device, owned.requires_grad
        else:
            dtype = getattr(torch, spec.master_dtype or spec.dtype)
            device, trained = torch.device("cpu"), spec.trainable
        # What `nn.Parameter(torch.empty(...))` makes under the mode, which takes ten times as long.
        fake = FakeTensor(mode, torch.empty(spec.user_shape, dtype=dtype, device="meta"), device)
        fake._is_param = True
        found[spec.name] = cast(nn.Parameter, fake.requires_grad_(trained))
    return found


def _sharded(owned: Mapping[str, tuple[ShardedParameter, Part]]) -> str:
    """A parameter of which some rank holds another shape than the user's."""
    for held, part in owned.values():
        if part.comm.mesh.size(held.axes) > 1 or held.spec.shape != held.spec.user_shape:
            return held.name
    return ""


def _hooks(parameter: nn.Parameter) -> list[int]:
    """The ids of the hooks on a parameter's gradient."""
    found = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [key for hooks in found for key in hooks or ()]


def _step_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or [h for h in torch_optimizer._global_optimizer_pre_hooks.values() if h != refuse_taken]
        or torch_optimizer._global_optimizer_post_hooks
    )
