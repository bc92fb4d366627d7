"""Draws in forward: what they are drawn from, and what gradient it gets."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.traps.corpus import equal, refused

Built = tuple[nn.Module, dict[str, Tensor]]
BY_CALL_ORDER = r"Net \(random_draws\.py:\d+\): operator \w+ draws random numbers by call order"


class Net(nn.Module):
    """Two linear layers: a function of one weighs the other."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.b(x) * self.draw(self.a(x))).square().mean()
        return loss


def net(draw: Callable[[Tensor], Tensor]) -> Built:
    return Net(draw), {"x": torch.randn(6, 4)}


@equal
def normal_of_what_is_learned() -> Built:
    return net(lambda h: torch.normal(h, h.exp()))


@refused(r"Net \(random_draws\.py:\d+\): it writes over all of a tensor that has a gradient")
def a_draw_over_an_activation() -> Built:
    return net(lambda h: h.clone().uniform_(0.5, 0.7))


@equal
def gumbel_softmax() -> Built:
    return net(lambda h: F.gumbel_softmax(h, tau=0.5, hard=True))


@equal
def gumbel_softmax_in_half_precision() -> Built:
    return net(lambda h: F.gumbel_softmax(h.bfloat16(), tau=0.5).float())


@equal
def one_category() -> Built:
    return net(lambda h: torch.multinomial(h.softmax(-1), 1).float())


@refused(r"Net.*torch cannot trace random_\(from, to\); use torch\.randint")
def integers_in_place() -> Built:
    return net(lambda h: torch.empty_like(h).random_(3, 7))


@refused(r"RuntimeError: randint draws from 1 to 2\*\*63 - 1 integers")
def all_integers() -> Built:
    return net(lambda h: torch.randint(-(2**63), 2**63 - 1, h.shape).float())


@refused("randint: 0 to 299 is out of bounds for torch.int8")
def integers_that_do_not_fit() -> Built:
    return net(lambda h: torch.randint(0, 300, h.shape, dtype=torch.int8).float())


@refused("uniform_ expects from <= to")
def an_interval_upside_down() -> Built:
    return net(lambda h: torch.empty_like(h).uniform_(1.0, 0.0))


@refused(r"leave generator= out: all draws are keyed by the seed")
def a_generator_of_its_own() -> Built:
    generator = torch.Generator().manual_seed(3)
    return net(lambda h: torch.rand(h.shape, generator=generator))


@refused(BY_CALL_ORDER)
def poisson() -> Built:
    return net(lambda h: torch.poisson(h.exp()))


@refused(BY_CALL_ORDER)
def cauchy() -> Built:
    return net(lambda h: torch.empty_like(h).cauchy_())


@refused(BY_CALL_ORDER)
def gamma() -> Built:
    return net(lambda h: torch._standard_gamma(h.exp()))


@refused(BY_CALL_ORDER)
def several_categories_with_replacement() -> Built:
    return net(lambda h: torch.multinomial(h.softmax(-1), 3, replacement=True)[:, :1].float())


@refused(BY_CALL_ORDER)
def leaky_slopes() -> Built:
    return net(lambda h: F.rrelu(h, training=True))
