"""What the first call makes and later ones read: equal where it is the same in every call."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.traps.attributes import NEXT, Made, net
from tests.capture.traps.corpus import equal, refused


@functools.cache
def mask_of(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@functools.lru_cache(maxsize=4)
def number_of(size: int) -> float:
    return float(size) / 2


class Tables:
    def __init__(self) -> None:
        self.made: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def get(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (size, str(device))
        if key not in self.made:
            angles = torch.arange(size, device=device) / size
            self.made[key] = angles.cos(), angles.sin()
        return self.made[key]


@equal
def a_mask() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape[0] < x.shape[1]:
            self.mask = torch.ones(x.shape[1], x.shape[1]).tril() == 0
        return (self.a(x) @ self.b.weight.masked_fill(self.mask, 0.0)).square().mean()  # type: ignore[no-any-return]

    return net(body, mask=None)


@equal
def a_mask_written_in_place() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.mask is None:
            mask = torch.full((4, 4), -1.0)
            mask.triu_(diagonal=1)
            mask[0, :] = 0.5
            self.mask = mask
        return (self.a(x) @ self.mask).square().mean()  # type: ignore[no-any-return]

    return net(body, mask=None)


@equal
def a_mask_beside_a_written_slice() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if self.mask is None:
            self.mask = torch.ones(3, 4).tril() == 0
        moved = torch.zeros_like(h)
        moved[..., 1:] = h.masked_fill(self.mask, 0.0)[..., :-1]
        return (h + moved).square().mean()  # type: ignore[no-any-return]

    return net(body, mask=None)


@refused(NEXT)
def a_table_whose_view_is_written() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(4, 4)
            row = self.table.view(-1)[4:].view(3, 4)[0]
        else:
            row = torch.zeros(4)
        h = self.b(self.a(x)) @ self.table
        row.copy_(x.detach().mean(0))
        return h.square().mean()  # type: ignore[no-any-return]

    return net(body, table=None)


@refused(NEXT)
def a_table_of_what_was_written() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.table is None:
            rows = torch.ones(2, 4)
            rows[0] = x.detach().mean(0)
            self.table = torch.cat([rows, torch.ones(2, 4)])
        return (self.b(self.a(x)) @ self.table).square().mean()  # type: ignore[no-any-return]

    return net(body, table=None)


@equal
def a_rotary_table_in_an_object() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        cos, sin = self.tables.get(x.shape[1], x.device)
        return (self.a(x) * cos + self.b(x) * sin).square().mean()  # type: ignore[no-any-return]

    return net(body, tables=Tables())


@equal
def a_table_of_a_buffer() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "cos"):
            self.cos = (self.seen * torch.arange(4)).cos()
        return (self.a(x) * self.cos).square().mean()  # type: ignore[no-any-return]

    return net(body)


@equal
def a_buffer_made_in_the_first_call() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(4.0), persistent=False)
        return (self.a(x) * self.table).square().mean()  # type: ignore[no-any-return]

    return net(body)


@equal
def a_table_that_is_like_the_batch() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.ones is None:
            self.ones = torch.ones_like(x) * 3
        return (self.a(x) * self.ones).square().mean()  # type: ignore[no-any-return]

    return net(body, ones=None)


@equal
def a_table_made_without_gradients() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.table is None:
            with torch.no_grad():
                self.table = torch.linspace(0, 1, 4).exp()
        return (self.a(x) * self.table).square().mean()  # type: ignore[no-any-return]

    return net(body, table=None)


@equal
def a_cached_function() -> Made:
    return net(lambda self, x: (self.a(x) @ mask_of(x.shape[1])).square().mean())


@equal
def a_cached_number() -> Made:
    return net(lambda self, x: (self.a(x) * number_of(x.shape[1])).square().mean())


@equal
def numbers_by_shape() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        size = self.sizes.setdefault(tuple(x.shape), x.numel())
        return (self.a(x) / size).square().mean()  # type: ignore[no-any-return]

    return net(body, sizes={})


@equal
def a_cached_property() -> Made:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        @functools.cached_property
        def scale(self) -> float:
            return 0.5 * self.a.in_features

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) * self.scale).square().mean()  # type: ignore[no-any-return]

    return Sized(), net(lambda self, x: x)[1]


@refused(r"forward changes self\.mask" + NEXT)
def a_cache_of_something_else() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        mask = self.mask
        if mask is None:
            mask = torch.ones(4)
            self.mask = torch.arange(4.0)
        return (self.a(x) * mask).square().mean()  # type: ignore[no-any-return]

    return net(body, mask=None)


@refused(r"forward changes self\.mask" + NEXT)
def a_first_call_with_one_more_layer() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.mask is None:
            self.mask = torch.arange(4.0)
            h = h.relu()
        return (h * self.mask).square().mean()  # type: ignore[no-any-return]

    return net(body, mask=None)


@refused(r"forward changes self\.mask" + NEXT)
def a_table_that_moves_on() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        h = self.a(x) * self.mask
        self.mask = self.mask.roll(1)
        return h.square().mean()  # type: ignore[no-any-return]

    return net(body, mask=torch.arange(4.0))


@refused(r"self\.noise" + NEXT)
def a_draw_that_is_kept() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.noise is None:
            self.noise = torch.rand(4)
        return (self.a(x) * self.noise).square().mean()  # type: ignore[no-any-return]

    return net(body, noise=None)


@refused(r"self\.kept" + NEXT)
def a_table_of_a_buffer_that_is_written() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = self.seen * 2
        self.seen.mul_(0.5)
        return (self.a(x) * self.kept).square().mean()  # type: ignore[no-any-return]

    return net(body)
