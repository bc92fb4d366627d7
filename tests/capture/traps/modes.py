"""State of torch and of modules that forward changes."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.random import fork_rng, manual_seed

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net, forward

SEEDED = r"Net \(modes\.py:\d+\): it seeds torch's generator"
STATE = r"Net \(modes\.py:\d+\): it sets the state of torch's generator"
DRAWN = r"Net \(modes\.py:\d+\): it draws from a torch\.Generator"
SWITCHED = r"Net\S* \(modes\.py:\d+\): it switches between training and evaluation"
DATA = r"Net \(modes\.py:\d+\): it assigns to \.data of a tensor"
TOGGLED = r"Net\S* \(modes\.py:\d+\): it switches requires_grad of a parameter"


@refused(SEEDED)
@forward
def seeded(net: Net, x: Tensor) -> Any:
    torch.manual_seed(3)
    return net.drop(net.a(x)).sum()


@refused(SEEDED)
@forward
def seeded_by_another_name(net: Net, x: Tensor) -> Any:
    manual_seed(3)
    return net.drop(net.a(x)).sum()


@refused(SEEDED)
@forward
def seeded_anew(net: Net, x: Tensor) -> Any:
    torch.seed()
    return net.drop(net.a(x)).sum()


@refused(SEEDED)
@forward
def seeded_below(net: Net, x: Tensor) -> Any:
    torch.default_generator.manual_seed(1)
    return net.drop(net.a(x)).sum()


@refused(STATE)
@forward
def forked(net: Net, x: Tensor) -> Any:
    with fork_rng():
        h = net.drop(net.a(x))
    return net.drop(h).sum()


@refused(STATE)
@forward
def set_back(net: Net, x: Tensor) -> Any:
    state = torch.get_rng_state()
    h = net.drop(net.a(x))
    torch.set_rng_state(state)
    return (h * net.drop(net.b(x))).sum()


@refused(DRAWN)
@forward
def another_generator(net: Net, x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(3)
    return (net.a(x) * torch.rand(3, 4, generator=generator)).sum()


@refused(DRAWN)
@forward
def another_generator_in_place(net: Net, x: Tensor) -> Any:
    noise = torch.zeros(3, 4).normal_(generator=torch.Generator())
    return (net.a(x) * noise).sum()


@refused(SWITCHED)
@forward
def evaluated_at_the_end(net: Net, x: Tensor) -> Any:
    h = net.drop(net.a(x))
    net.drop.eval()
    return h.sum()


@refused(SWITCHED)
@forward
def a_flag(net: Net, x: Tensor) -> Any:
    h = net.norm(net.a(x))
    net.norm.training = False
    return h.sum()


@refused(SWITCHED)
@forward
def the_whole(net: Net, x: Tensor) -> Any:
    net.train(False)
    return net.b(net.a(x)).sum()


@refused(SWITCHED)
@forward
def for_a_while(net: Net, x: Tensor) -> Any:
    net.drop.eval()
    h = net.drop(net.a(x))
    net.drop.train()
    return net.drop(h).sum()


@refused(r"Net.*: it switches between training and evaluation")
@forward
def around_the_setter(net: Net, x: Tensor) -> Any:
    h = net.drop(net.a(x))
    vars(net.drop)["training"] = False
    return h.sum()


@equal
@forward
def layers_without_modes(net: Net, x: Tensor) -> Any:
    net.c.eval()
    with torch.no_grad():
        target = net.c(x)
    return (net.a(x) - target).square().sum()


@equal
@forward
def a_module_of_the_call(net: Net, x: Tensor) -> Any:
    return nn.Dropout(0.9).eval()(net.a(x)).sum()


@equal
@forward
def no_mode_at_all(net: Net, x: Tensor) -> Any:
    return F.dropout(net.a(x), 0.5, training=False).sum()


@refused(DATA)
@forward
def data_of_a_buffer(net: Net, x: Tensor) -> Any:
    net.seen.data = net.a(x).detach().mean(0)
    return (net.b(x) * net.seen).sum()


@refused(DATA)
@forward
def data_of_a_parameter(net: Net, x: Tensor) -> Any:
    net.a.weight.data = net.a.weight.data.clamp(-1, 1)
    return net.a(x).sum()


@refused(DATA)
@forward
def data_of_an_activation(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.data = h.data.clamp(-1, 1)
    return net.b(h).sum()


@refused(r"Net\S* \(modes\.py:\d+\): it (assigns to \.data of a|exchanges two) tensor")
@forward
def data_of_a_module(net: Net, x: Tensor) -> Any:
    net.c.double()
    return net.c(x.double()).sum()


@refused(r"it writes to a tensor whose memory one with a gradient has too.*\(\.data\)")
@forward
def in_place_by_data(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.data.clamp_(-1, 1)
    return net.b(h).sum()


@refused(r"it writes to a tensor whose memory one with a gradient has too.*\(\.data\)")
@forward
def what_was_saved(net: Net, x: Tensor) -> Any:
    loss = (net.a(x) * net.seen).sum()
    net.seen.data.mul_(2)
    return loss


@equal
@forward
def a_mean_by_data(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    net.seen.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
    return (net.b(h) * net.seen).sum() + (h * net.a.weight.data[0]).sum()


@refused(TOGGLED)
@forward
def frozen(net: Net, x: Tensor) -> Any:
    net.a.weight.requires_grad_(False)
    return net.b(net.a(x)).sum()


@refused(TOGGLED)
@forward
def frozen_for_a_while(net: Net, x: Tensor) -> Any:
    net.b.requires_grad_(False)
    loss = net.b(net.a(x)).sum()
    net.b.requires_grad_(True)
    return loss


@refused(TOGGLED)
@forward
def frozen_by_attribute(net: Net, x: Tensor) -> Any:
    for parameter in net.c.parameters():
        parameter.requires_grad = False
    return (net.a(x) + net.c(x)).sum()


@equal
@forward
def as_it_is(net: Net, x: Tensor) -> Any:
    net.a.requires_grad_(True)
    x.requires_grad_()
    return net.a(x).sum()


@refused(r"Net \(modes\.py:\d+\): it exchanges two tensors")
@forward
def exchanged(net: Net, x: Tensor) -> Any:
    torch.utils.swap_tensors(net.seen, torch.ones(4))  # type: ignore[no-untyped-call]
    return (net.a(x) * net.seen).sum()


@refused(r"Net \(modes\.py:\d+\): it moves a tensor to shared memory")
@forward
def shared(net: Net, x: Tensor) -> Any:
    net.seen.share_memory_()  # type: ignore[no-untyped-call]
    return (net.a(x) * net.seen).sum()


@refused(r"Net \(modes\.py:\d+\): it takes the memory of a tensor")
@forward
def by_the_storage(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.untyped_storage().fill_(0)
    return net.b(h).sum()


@refused(r"Net \(modes\.py:\d+\): it sets torch's default dtype")
@forward
def another_dtype(net: Net, x: Tensor) -> Any:
    h = net.a(x) + torch.ones(4)
    torch.set_default_dtype(torch.float64)
    return net.b(h).sum()


@refused(r"Net \(modes\.py:\d+\): it sets the precision of products")
@forward
def another_precision(net: Net, x: Tensor) -> Any:
    torch.set_float32_matmul_precision("medium")
    return net.b(net.a(x)).sum()


@equal
@forward
def the_state_of_a_generator_is_read(net: Net, x: Tensor) -> Any:
    torch.get_rng_state()
    return net.a(x).sum() * (1 if random.Random(0).random() < 2 else 0)
