"""Hooks on gradients, gradients in forward, and checkpoints."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net, forward

GRAPH = r"Net\S* \(hooks\.py:\d+\): it reads the graph of autograd \(\.grad_fn\)"
SAVED = r"Net.* \(hooks\.py:\d+\): it changes what is saved for the backward pass"
COMPUTED = r"Net \(hooks\.py:\d+\): it computes gradients"


def doubled(gradients: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
    return tuple(None if g is None else 2 * g for g in gradients)


@refused(GRAPH)
@forward
def on_a_node(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.grad_fn.register_hook(doubled)
    return net.b(h).sum()


@refused(GRAPH)
@forward
def before_a_node(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.grad_fn.register_prehook(doubled)
    return net.b(h).sum()


@refused(GRAPH)
@forward
def on_the_node_before(net: Net, x: Tensor) -> Any:
    h = net.a(x).relu()
    h.grad_fn.next_functions[0][0].register_hook(doubled)
    return net.b(h).sum()


@refused(GRAPH)
@forward
def on_an_edge(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    get_gradient_edge(h).node.register_hook(doubled)
    return net.b(h).sum()


@refused(r"Net \(hooks\.py:\d+\): it (reads the graph|registers a hook on a gradient)")
@forward
def on_many(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    register_multi_grad_hook([h], print)
    return net.b(h).sum()


@refused(GRAPH)
@forward
def though_it_is_caught(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    try:
        h.grad_fn.register_hook(doubled)
    except Exception:
        h = h * 1
    return net.b(h).sum()


@refused(GRAPH)
def in_a_forward_hook() -> tuple[nn.Module, dict[str, Tensor]]:
    net, batch = plain()
    net.get_submodule("a").register_forward_hook(
        lambda module, given, out: out.grad_fn.register_hook(doubled)
    )
    return net, batch


@forward
def plain(net: Net, x: Tensor) -> Any:
    return net.b(net.a(x)).sum()


@refused(SAVED)
@forward
def saved_as_zero(net: Net, x: Tensor) -> Any:
    with saved_tensors_hooks(torch.zeros_like, lambda saved: saved):
        h = net.a(x).tanh()
    return net.b(h).sum()


class Rounded(saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda saved: saved.bfloat16(), lambda saved: saved.float())


@refused(SAVED)
@forward
def saved_in_few_bits(net: Net, x: Tensor) -> Any:
    with Rounded():
        h = net.a(x).tanh()
    return net.b(h).sum()


@equal
@forward
def saved_elsewhere(net: Net, x: Tensor) -> Any:
    with save_on_cpu():
        h = net.a(x).tanh()
    return net.b(h).sum()


@equal
@forward
def many_threads(net: Net, x: Tensor) -> Any:
    with torch.autograd.set_multithreading_enabled(False):
        return net.b(net.a(x)).sum()


@equal
@forward
def a_gradient_is_kept(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    if h.requires_grad:
        h.retain_grad()
    return net.b(h).sum()


@refused(r"Net \(hooks\.py:\d+\): it reads \.grad")
@forward
def the_last_gradient(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    last = net.a.weight.grad
    return net.b(h if last is None else h * last.norm()).sum()


@refused(COMPUTED)
@forward
def a_penalty(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    y = net.b(h).tanh().sum()
    (gradient,) = torch.autograd.grad(y, h, create_graph=True)
    return y + gradient.square().sum()


@refused(COMPUTED)
@forward
def backward_in_forward(net: Net, x: Tensor) -> Any:
    net.b(net.a(x)).sum().backward()
    return net.b(net.a(x)).sum()


@refused(COMPUTED)
@forward
def all_derivatives(net: Net, x: Tensor) -> Any:
    return net.a(torch.func.grad(lambda z: net.b(z).tanh().sum())(x)).sum()


@refused(COMPUTED)
@forward
def a_jacobian(net: Net, x: Tensor) -> Any:
    made: Any = torch.autograd.functional.jacobian
    return made(net.a, x, create_graph=True).sum()


@equal
@forward
def mapped_over_samples(net: Net, x: Tensor) -> Any:
    return torch.func.vmap(lambda row: net.a(row).tanh().sum())(x).sum()


@equal
@forward
def other_weights(net: Net, x: Tensor) -> Any:
    weights = {name: 2 * p for name, p in net.a.named_parameters()}
    return torch.func.functional_call(net.a, weights, (x,)).square().sum()


@equal
@forward
def a_checkpoint_that_no_gradient_enters(net: Net, x: Tensor) -> Any:
    """Its parameters get no gradient, and eager warns."""
    h = checkpoint(net.a, x, use_reentrant=True)
    return net.b(h).sum()


@equal
@forward
def checkpoints_in_a_row(net: Net, x: Tensor) -> Any:
    h = checkpoint(net.a, x, use_reentrant=True)
    h = checkpoint(net.b, net.c(h), use_reentrant=True)
    return checkpoint(net.inner, h, use_reentrant=False).sum()


@equal
@forward
def a_checkpoint_whose_input_is_made_to_need_one(net: Net, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return net.b(checkpoint(net.a, x, use_reentrant=True)).sum()


@equal
@forward
def a_checkpoint_of_a_list(net: Net, x: Tensor) -> Any:
    """Tensors in a list do not count as its inputs."""
    h = net.c(x)
    out = checkpoint(lambda found: net.a(found[0]), [h], use_reentrant=True)
    return (net.b(out) + h).sum()


@refused(r"it registers a hook on a module and leaves it there")
@forward
def a_hook_that_stays(net: Net, x: Tensor) -> Any:
    net.a.register_forward_hook(lambda module, given, out: 2 * out)
    return net.b(net.a(x)).sum()


@equal
@forward
def a_hook_that_goes(net: Net, x: Tensor) -> Any:
    handle = net.a.register_forward_hook(lambda module, given, out: 2 * out)
    h = net.a(x)
    handle.remove()
    return net.b(h).sum()
