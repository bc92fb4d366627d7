"""One tensor or module under several names."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.traps.corpus import equal, refused

Built = tuple[nn.Module, dict[str, Tensor]]


class Net(nn.Module):
    """A layer in front of whatever a subclass shares."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)


def built(model: nn.Module) -> Built:
    return model, {"x": torch.randn(8, 4)}


class TwoNames(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = self.first
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.b(self.first(self.a(x)))).pow(4).mean()  # type: ignore[no-any-return]


@equal
def batch_norm_of_two_names() -> Built:
    return built(TwoNames())


@equal
def batch_norm_called_by_its_second_name() -> Built:
    class Second(TwoNames):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.a(x)).pow(4).mean()  # type: ignore[no-any-return]

    return built(Second())


@equal
def batch_norm_of_every_layer_of_a_list() -> Built:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.BatchNorm1d(4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.pow(4).mean()

    return built(Layers())


@equal
def block_with_batch_norm_in_two_containers() -> Built:
    class Block(Net):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.parts = nn.ModuleDict({"x": self.encode, "y": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            h = self.parts["x"](self.encode(self.a(x)))
            return self.parts["y"](h).square().mean()  # type: ignore[no-any-return]

    return built(Block())


@equal
def spectral_norm_of_two_names() -> Built:
    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
            self.c = self.b

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x))).square().mean()  # type: ignore[no-any-return]

    return built(Spectral())


class Buffers(Net):
    p: Tensor
    q: Tensor

    def __init__(self, q: Any = None) -> None:
        super().__init__()
        self.register_buffer("p", torch.ones(4))
        self.register_buffer("q", self.p if q is None else self.p[q])

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.p + self.q).square().mean()  # type: ignore[no-any-return]


@equal
def tied_buffers_that_are_read() -> Built:
    return built(Buffers())


@equal
def overlapping_buffers_that_are_read() -> Built:
    return built(Buffers(slice(3, 4)))


def written(name: str, q: Any = None) -> Built:
    class Written(Buffers):
        def forward(self, x: Tensor) -> Tensor:
            getattr(self, name).mul_(0.5)
            return super().forward(x)

    return built(Written(q))


SHARED = r"buffers 'p' and 'q' lie in the same memory.*clone"


@refused(SHARED)
def tied_buffers_written_by_the_first_name() -> Built:
    return written("p")


@refused(SHARED)
def tied_buffers_written_by_the_second_name() -> Built:
    return written("q")


@refused(SHARED)
def overlapping_buffers_one_written() -> Built:
    return written("p", slice(3, 4))


@refused(SHARED)
def overlapping_buffers_view_written() -> Built:
    return written("q", slice(1, 2))


@equal
def parameter_under_the_name_of_a_buffer() -> Built:
    class Named(Net):
        w: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", self.a.weight)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) @ self.w).square().mean()  # type: ignore[no-any-return]

    return built(Named())


@refused("'a.weight' and 'w' lie in the same memory")
def data_of_a_parameter_as_a_buffer() -> Built:
    class Data(Net):
        w: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", self.a.weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) @ self.w).square().mean()  # type: ignore[no-any-return]

    return built(Data())


@refused("lie in the same memory, and forward writes")
def buffer_under_the_name_of_an_attribute() -> Built:
    class Attribute(Buffers):
        def __init__(self) -> None:
            super().__init__(slice(0, 1))
            del self.q
            self.q = self.p

        def forward(self, x: Tensor) -> Tensor:
            self.p.mul_(0.5)
            return super().forward(x)

    return built(Attribute())


@equal
def buffer_that_is_only_read_under_the_name_of_an_attribute() -> Built:
    class Attribute(Buffers):
        def __init__(self) -> None:
            super().__init__(slice(0, 1))
            del self.q
            self.q = self.p

    return built(Attribute())
