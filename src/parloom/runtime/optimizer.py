"""torch optimizers over shards: which ones may, and their state as boxes and JSON.

An optimizer that treats every element alike computes on a shard what it computes on the whole; one
that looks at a tensor as a matrix, or at all of them as one vector, does not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parloom.errors import InputError


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """A class of torch.optim.

    `num_states` counts the states of a parameter's size that it keeps by default; `why_whole` says
    why its update of a shard needs more than the shard, empty where it does not.
    """

    maker: type[Optimizer]
    num_states: int = 0
    why_whole: str = ""

    @property
    def name(self) -> str:
        """What plans call it."""
        return self.maker.__name__.lower()


OPTIMIZERS: Mapping[str, OptimizerClass] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            OptimizerClass(torch.optim.Adadelta, 2),
            OptimizerClass(torch.optim.Adagrad, 1),
            OptimizerClass(torch.optim.Adam, 2),
            OptimizerClass(torch.optim.Adamax, 2),
            OptimizerClass(torch.optim.AdamW, 2),
            OptimizerClass(torch.optim.ASGD, 1),
            OptimizerClass(torch.optim.NAdam, 2),
            OptimizerClass(torch.optim.RAdam, 2),
            OptimizerClass(torch.optim.RMSprop, 1),
            OptimizerClass(torch.optim.Rprop, 2),
            OptimizerClass(torch.optim.SGD, 0),
            OptimizerClass(
                torch.optim.Adafactor, why_whole="it factors second moments by rows and columns"
            ),
            OptimizerClass(
                torch.optim.LBFGS, why_whole="it takes inner products over all parameters"
            ),
            OptimizerClass(torch.optim.Muon, why_whole="it orthogonalises whole matrices"),
            OptimizerClass(torch.optim.SparseAdam, why_whole="it takes sparse gradients only"),
        )
    }
)

# Group options that say how to compute on this machine, and not what.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `InputError` for an optimizer whose update of a shard needs the rest of the tensor.

    Classes are told by their names: packages have an Adafactor or a Muon of their own.
    """
    for kind in type(optimizer).__mro__:
        known = OPTIMIZERS.get(kind.__name__.lower())
        if known is not None and known.why_whole:
            raise InputError(
                f"{kind.__name__} cannot update shards: {known.why_whole};"
                " use an elementwise optimizer such as AdamW or SGD"
            )


def check_given(optimizer: Optimizer, owned: Sequence[Tensor]) -> None:
    """Raise `InputError` for an optimizer of other parameters than the `owned` ones."""
    known = {id(parameter) for parameter in owned}
    others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in known]
    if others:
        raise InputError(
            f"{type(optimizer).__name__} was made with {len(others)} tensors that are not the"
            " trainer's: make it from the (name, parameter) pairs that `optimizer` is called with,"
            " this rank's parts of the model's parameters:"
            f" optimizer=lambda named: torch.optim.{type(optimizer).__name__}(named, lr=...)"
        )


def state_tensors(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The parameter's state tensors that have its shape, by key."""
    state = optimizer.state.get(parameter, {})
    return {key: state[key] for key in state if _is_shaped(state[key], parameter)}


def _is_shaped(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Scalars, the keys of state tensors, and group options, by the user's names (`id` -> name)."""
    parameters: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        entry: dict[str, Any] = {"tensors": {}, "scalars": {}}
        for key, value in state.items():
            if _is_shaped(value, parameter):
                entry["tensors"][key] = _dtype_name(value.dtype)
            elif isinstance(value, Tensor):
                entry["scalars"][key] = {"value": value.item(), "dtype": _dtype_name(value.dtype)}
            else:
                entry["scalars"][key] = {"value": value, "dtype": None}
        parameters[names[id(parameter)]] = entry
    groups = [
        {
            "names": [names[id(p)] for p in group["params"] if id(p) in names],
            "options": {
                key: _number(value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "parameters": parameters, "groups": groups}


def joined_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of ranks that have other parameters as one: groups with equal options are one."""
    parameters = {name: entry for state in states for name, entry in state["parameters"].items()}
    groups: dict[str, dict[str, Any]] = {}
    for group in (group for state in states for group in state["groups"]):
        known = groups.setdefault(
            json.dumps(group["options"], sort_keys=True), {**group, "names": []}
        )
        known["names"] += [name for name in group["names"] if name not in known["names"]]
    return {"class": states[0]["class"], "parameters": parameters, "groups": list(groups.values())}


def load_optimizer_state(
    optimizer: Optimizer,
    owned: Mapping[str, nn.Parameter],
    state: Mapping[str, Any],
    groups: Sequence[Iterable[str]] = (),
    others: Iterable[str] = (),
) -> None:
    """Take over scalars and group options, and allocate the state tensors.

    This rank has the parameters `owned`; `others` are on other ranks only, some of them in `groups`
    of the optimizer by their names. Raises `InputError` when
    the optimizer is of another class, a saved parameter is unknown, or a parameter group is new.
    """
    if state["class"] != type(optimizer).__name__:
        raise InputError(
            f"the checkpoint has the state of {state['class']}, this run has"
            f" {type(optimizer).__name__}: train with {state['class']}, or start from exported"
            " weights"
        )
    optimizer.state.clear()
    known = {*owned, *others}
    for name, entry in state["parameters"].items():
        if name not in known:
            raise InputError(
                f"the checkpoint has an optimizer state of {name!r}, which is no parameter of"
                " this model: it is of another one"
            )
        if name not in owned:
            continue
        parameter = owned[name]
        loaded: dict[str, Any] = {}
        for key, dtype in entry["tensors"].items():
            loaded[key] = torch.zeros_like(parameter, dtype=getattr(torch, dtype)).detach()
        group = _group_of(optimizer, parameter)
        for key, saved in entry["scalars"].items():
            loaded[key] = _scalar(key, saved, parameter, group)
        optimizer.state[parameter] = loaded
    name_of = {id(parameter): name for name, parameter in owned.items()}
    for index, group in enumerate(optimizer.param_groups):
        mine = {name_of[id(p)] for p in group["params"] if id(p) in name_of}
        mine |= set(groups[index]) if index < len(groups) else set()
        if not mine:
            continue
        saved_group = next((g for g in state["groups"] if mine & set(g["names"])), None)
        if saved_group is None:
            raise InputError(f"the checkpoint has no parameter group with any of {sorted(mine)}")
        for key, value in saved_group["options"].items():
            if key not in IMPLEMENTATION:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _group_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """The options of a parameter; none where the optimizer was not given it."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return next((g for g in groups if any(p is parameter for p in g["params"])), {})


def _scalar(
    key: str, saved: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]
) -> object:
    """A number of the state, where torch.optim.Optimizer.load_state_dict would put it.

    `step` stays on the CPU, in the dtype that it had, unless a fused or capturable kernel reads it.
    """
    value, dtype = saved["value"], saved["dtype"]
    if dtype is None:
        return value
    tensor = torch.tensor(value, dtype=getattr(torch, dtype))
    if key == "step":
        if group.get("fused") or group.get("capturable"):
            return tensor.to(parameter.device, torch.float32)
        return tensor
    if parameter.dim() == 0 and parameter.is_floating_point():
        return tensor.to(parameter.device, parameter.dtype)
    return tensor.to(parameter.device)


def _number(value: Any) -> Any:
    """A group option as a JSON value (a learning rate may be a tensor)."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
