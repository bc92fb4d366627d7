"""Complex tensors that are plain attributes, as rotary embeddings keep them."""

import torch
from torch import Tensor, nn

from tests.capture.traps.corpus import equal, refused

Built = tuple[nn.Module, dict[str, Tensor]]


def turns(length: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angles = torch.outer(torch.arange(length), 10.0 ** -torch.arange(float(width))).to(dtype)
    return torch.polar(torch.ones_like(angles), angles)


class Rotary(nn.Module):
    """A projection that is turned by its positions."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.freqs_cis = table

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.project(x).reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.freqs_cis[: x.shape[1]].view(1, x.shape[1], -1)
        return torch.view_as_real(turned).flatten(2)


class Model(nn.Module):
    def __init__(self, *tables: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotary(table) for table in tables)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(4).mean()


def built(model: nn.Module) -> Built:
    return model, {"x": torch.randn(4, 6, 8)}


@equal
def table_of_each_layer() -> Built:
    return built(Model(turns(6, 4), turns(12, 4)))


@equal
def one_table_for_all_layers() -> Built:
    table = turns(9, 4)
    return built(Model(table, table))


@equal
def table_that_is_moved_in_forward() -> Built:
    class Moved(Model):
        def __init__(self) -> None:
            super().__init__(turns(6, 4))
            self.freqs_cis = turns(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.freqs_cis = self.freqs_cis.to(x.device)
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return super().forward(torch.view_as_real(pairs * self.freqs_cis[2:]).flatten(2))

    return built(Moved())


@equal
def table_of_double_precision() -> Built:
    class Double(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double())

    return built(Double(turns(6, 4, torch.float64)).double())


@equal
def conjugate_of_a_table() -> Built:
    return built(Model(turns(6, 4).conj()))


@equal
def table_in_a_closure() -> Built:
    table = turns(6, 4)

    class Closure(Model):
        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * table
            return super().forward(torch.view_as_real(pairs).flatten(2))

    return built(Closure(turns(6, 4)))


@equal
def complex_number() -> Built:
    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.number = nn.Linear(8, 8), torch.tensor(1 + 2j)

        def forward(self, x: Tensor) -> Tensor:
            return ((self.project(x) + 0.1) * self.number).abs().square().mean()  # type: ignore[no-any-return]

    return built(Number())


@equal
def table_in_a_buffer() -> Built:
    class Buffer(Rotary):
        def __init__(self) -> None:
            table = turns(6, 4)
            super().__init__(table)
            del self.freqs_cis
            self.register_buffer("freqs_cis", table, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).pow(4).mean()

    return built(Buffer())


@refused(r"capture Model\.layers\.1 \(complex_numbers.py:\d+\).*freqs_cis.*register_buffer")
def large_table() -> Built:
    return built(Model(turns(6, 4), turns(2000, 4)))
