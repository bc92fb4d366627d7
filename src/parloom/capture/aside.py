"""Parameters of layers that repeat others stay out of a trace, which so does not grow with them.

torch.export makes every parameter of a module an input of its program, and copies, names and checks
each several times: most of the time that the trace of a deep model takes. Layers of one list that
look alike at first sight are taken to repeat the first two (`repeats.py` proves it). Outside
of forward the others have no parameters; inside, they have tensors of the same shapes. No operator
raises on these, as it would in the middle of the user's code, which could catch it or leave things
half done; that one read them shows in the trace.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._guards import active_fake_mode

from parloom.capture.state.aspects import is_plain

LEAST = 4  # modules of one class that are taken to repeat each other
TRACED = 2  # of those that look alike: the first one often reads what needs no gradient


class Aside:
    """The layers of a model that no trace shall run; `run` are those that one does, by identity."""

    def __init__(
        self,
        model: nn.Module,
        indices: Mapping[int, frozenset[str]],
        run: frozenset[int] = frozenset(),
    ) -> None:
        self.layers: dict[int, nn.Module] = {}  # by each module in them
        self.names: dict[int, str] = {}  # of parameters, by the tensors in their place
        for parent in model.modules():
            if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) >= LEAST:
                seen: Counter[object] = Counter()
                for layer in parent:
                    look = first_sight(layer, indices)
                    if seen[look] >= TRACED and id(layer) not in run:
                        self.layers.update((id(vars(m)), layer) for m in layer.modules())
                    seen[look] += 1
        kept = {id(p) for m in model.modules() if id(vars(m)) not in self.layers
                for p in m._parameters.values()}  # fmt: skip
        self.own = {
            id(vars(m)): (m._parameters, dict(m._parameters))
            for m in model.modules()
            if id(vars(m)) in self.layers and m._parameters
        }
        self.parameters: dict[int, tuple[str, nn.Parameter]] = {
            id(p): (name, p)
            for name, p in model.named_parameters()
            if id(p) not in kept and type(p) is nn.Parameter
        }
        self.tensors: dict[int, Tensor] = {}  # in the place of parameters, by their identity

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the layers have no parameters but those of modules that are traced."""
        try:
            self._take()
            yield
        finally:
            for now, before in self.own.values():
                now.clear()
                now.update(before)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside a trace, the layers have tensors of the shapes of their parameters."""
        mode = active_fake_mode()
        assert mode is not None, "a trace is of fake tensors"
        self.tensors.clear()
        self.names.clear()
        for key, (name, parameter) in self.parameters.items():
            self.tensors[key] = tensor = mode.from_tensor(parameter, static_shapes=True)
            self.names[id(tensor)] = name
        try:
            for now, before in self.own.values():
                traced = dict(now)
                now.clear()
                now.update((n, traced.get(n, self._shown(p))) for n, p in before.items())
            yield
        finally:
            self._take()

    def is_read(self, traced: nn.Module) -> bool:
        """Whether an operator read the tensors that are shown: constants of the trace's root."""
        return any(id(value) in self.names for value in vars(traced).values())

    def _take(self) -> None:
        for now, before in self.own.values():
            for name, parameter in before.items():
                if id(parameter) in self.parameters:
                    now.pop(name, None)

    def _shown(self, parameter: Any) -> Any:
        return self.tensors.get(id(parameter), parameter)


def first_sight(layer: nn.Module, indices: Mapping[int, frozenset[str]]) -> object:
    """Classes, plain attributes and shapes of parameters of a layer; indices do not count."""
    return tuple(
        (
            path,
            type(module),
            tuple(
                (name, repr(value))
                for name, value in vars(module).items()
                if is_plain(value) and name not in indices.get(id(vars(module)), ())
            ),
            tuple(
                (name, None if p is None else (p.shape, p.dtype, p.requires_grad))
                for name, p in module._parameters.items()
            ),
        )
        for path, module in layer.named_modules()
    )
