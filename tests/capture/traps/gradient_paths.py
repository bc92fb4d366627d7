"""Writes that autograd does not see, and where gradients stop."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net, forward

LOST = r"\.py:\d+\): it writes to a tensor whose memory one with a gradient has too"
BY_MODE = LOST + r".*\(torch\.no_grad\).*x = x \+ \(value - x\)\.detach\(\)"
BY_ALIAS = LOST + r".*\(a detached alias\)"
SHARED = r"it writes something with a gradient to a detached alias of a tensor"
ALL = r"it writes over all of a tensor that has a gradient and was not used"


@refused(BY_MODE)
@forward
def clamped(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        h.clamp_(-1, 1)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def columns_set(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        h[:, :3] = 0
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def a_view_scaled(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    rows = h.view(-1).view(4, 3).t()
    with torch.no_grad():
        rows[0].mul_(2)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def written_by_out(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        torch.add(h, 1, out=h)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def copied_over(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.inference_mode():
        h.copy_(net.c(x))
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def put_by_index(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.set_grad_enabled(False):
        h[torch.tensor([0, 2])] = torch.zeros(4)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def filled_by_mask(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    torch.set_grad_enabled(False)
    h.masked_fill_(x > 0, 0.0)
    torch.set_grad_enabled(True)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def put_by_mask(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        h[h > 1] = 1
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def relu_in_place(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        F.relu(h, inplace=True)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def in_a_submodule(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        net.inner[1](h)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def in_autocast(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net.a(x)
        with torch.no_grad():
            h.mul_(2)
        return net.b(h).float().sum()


@refused(BY_MODE)
@forward
def in_a_list(net: Net, x: Tensor) -> Any:
    states = [net.a(x), net.b(x)]
    with torch.no_grad():
        for state in states:
            state.sub_(1)
    return net.c(states[0] + states[1]).sum()


@refused(BY_MODE)
@forward
def in_a_note(net: Net, x: Tensor) -> Any:
    notes = {"h": net.a(x)}
    bounded(notes)
    return net.b(notes["h"]).sum()


@torch.no_grad()
def bounded(notes: dict[str, Tensor]) -> None:
    torch.clamp_(notes["h"], max=1)


@refused(BY_MODE)
@forward
def all_at_once(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        torch._foreach_mul_([h], 2)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def in_pieces(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        for row in h.unbind(0):
            row.div_(2)
    return net.b(h).sum()


@refused(BY_MODE)
@forward
def a_buffer_that_has_a_gradient(net: Net, x: Tensor) -> Any:
    out = torch.zeros(3, 4)
    out[:2] = net.a(x)[:2]
    with torch.no_grad():
        out.mul_(2)
    return net.b(out).sum()


@refused(BY_ALIAS)
@forward
def by_a_detached_alias(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.detach().clamp_(-1, 1)
    return net.b(h).sum()


@refused(BY_ALIAS)
@forward
def by_an_alias_made_before(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    alias = h.detach().view(-1)[2:].view(2, 5)
    h = h.view(4, 3).t()
    alias[:, 1:].t().fill_(0)
    return h.square().sum()


@refused(BY_ALIAS)
@forward
def by_an_alias_of_a_view(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h[:, 1:].detach()[0] = 1
    return net.b(h).sum()


@refused(BY_ALIAS)
@forward
def by_two_aliases(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.detach().detach().index_fill_(0, torch.tensor([1]), 0.0)
    return net.b(h).sum()


@refused(SHARED)
@forward
def a_gradient_to_an_alias(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.detach().add_(net.c.bias)
    return net.b(h).sum()


@refused(SHARED)
@forward
def a_gradient_to_an_alias_of_zeros(net: Net, x: Tensor) -> Any:
    zeros = torch.zeros(3, 4)
    alias = zeros.detach()
    alias += net.a(x)
    return net.b(alias).sum() + zeros.sum()


@refused(SHARED)
@forward
def an_alias_that_wrote_before(net: Net, x: Tensor) -> Any:
    zeros = torch.zeros(3, 4)
    alias = zeros.detach()
    alias += 1
    before = zeros.sum()
    alias += net.a(x)
    return net.b(alias).sum() + before


@refused(ALL)
@forward
def written_over(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.copy_(x)
    return net.b(h).sum()


@refused(ALL)
@forward
def set_to_zero(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h[:] = 0
    return net.b(h).sum()


@refused(r"it gives a tensor other memory \(set_\)")
@forward
def other_memory(net: Net, x: Tensor) -> Any:
    h = net.a(x).detach()
    h.set_(torch.zeros(3, 4))
    return net.b(h).sum()


@refused(r"it changes the memory of a tensor \(resize_\)")
@forward
def resized(net: Net, x: Tensor) -> Any:
    h = net.a(x).detach().clone()
    h.resize_(2, 4)
    return net.b(h).sum()


@equal
@forward
def running_mean(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    before = net.seen[:2]
    with torch.no_grad():
        net.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        net.seen[2:] = h[0, 2:]
    return (net.b(h) * net.seen).sum() + before.sum()


@equal
@forward
def a_mask_without_gradient(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        mask = (h > 0).float()
        mask[0] = 1
        mask.view(-1)[:2].mul_(3)
        top, _ = h.topk(2)
        top.clamp_(0, 1)
    return (net.b(h) * mask).sum() + (top * h[:, :2]).sum()


@equal
@forward
def features_that_something_is_added_to(net: Net, x: Tensor) -> Any:
    with torch.no_grad():
        features = net.a(x)
        features.mul_(2)
    features += net.c.weight[0]
    features[1:].mul_(net.c.bias)
    return net.b(features).sum()


@equal
@forward
def detached_and_added_to(net: Net, x: Tensor) -> Any:
    h = net.a(x).detach()
    h += net.c.weight[0]
    return net.b(h).sum()


@equal
@forward
def detached_in_place(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    first = 2 * h
    h.detach_()
    return (net.b(h) + first).sum()


@equal
@forward
def detached_in_place_and_added_to(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    h.detach_().add_(net.c.weight[1])
    return net.b(h).sum()


@equal
@forward
def without_a_gradient_detached_in_place(net: Net, x: Tensor) -> Any:
    zeros = torch.zeros(3, 4)
    first = zeros[0]
    zeros.detach_()
    zeros += net.a(x)
    return (net.b(zeros) * first).sum()


@equal
@forward
def a_table_written_in_both_modes(net: Net, x: Tensor) -> Any:
    table = torch.zeros(3, 4)
    h = net.a(x)
    with torch.no_grad():
        table.add_(h.mean(0))
        table[0] = h[0]
    table[1:] += net.b(x)[1:]
    return table.square().sum()


@equal
@forward
def written_when_nobody_needs_it(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    loss = h.sum() + net.b(x).sum()
    with torch.no_grad():
        h.clamp_(-1, 1)
        net.seen.copy_(h.mean(0))
    return loss


@equal
@forward
def a_copy_of_a_detached_tensor(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    bounded = h.detach().clone().clamp_(-1, 1)
    return net.b(h + (bounded - h).detach()).sum()


@equal
@forward
def the_same_tensor_in_a_region(net: Net, x: Tensor) -> Any:
    """What returns its operand without a copy keeps its gradient."""
    h = net.a(x)
    with torch.no_grad():
        target = net.c(h.float().contiguous())
        same = +h
    return (net.b(h) * target).sum() + same.square().sum()


@equal
@forward
def a_region_in_autocast(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net.a(x)
        with torch.no_grad():
            target = net.c(h)
            with torch.autocast("cpu", enabled=False):
                target = net.c(target.float())
        return (net.b(h) * target).float().sum()


@equal
@forward
def autocast_in_a_region(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        target = net.c(h)
        target += 1
    return (net.b(h) * target).sum()


@equal
@forward
def gradients_within_a_region(net: Net, x: Tensor) -> Any:
    with torch.no_grad():
        h = net.a(x)
        with torch.enable_grad():
            y = net.b(h)
            with torch.no_grad():
                y = y + net.c(y)
            z = net.c(h)
    return (y * z).sum()


@equal
@forward
def in_place_with_a_gradient(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    out = torch.empty(3, 4)
    out.copy_(h)
    out[:, 1:].mul_(2).clamp_(-1, 1)
    out[0] += net.c.bias
    with nullcontext():
        out.t()[0] = 1
    return net.b(out).sum()


@equal
@forward
def dropout_of_nothing_without_gradients(net: Net, x: Tensor) -> Any:
    """It returns its operand, whose gradient goes on."""
    h = net.a(x)
    with torch.no_grad():
        same = F.dropout(h, 0.0)
    return net.b(same).pow(2).sum()


@equal
@forward
def other_dropouts_of_nothing_without_gradients(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        same = F.dropout1d(F.alpha_dropout(F.feature_alpha_dropout(h, 0.0), 0.0)[:, None], 0.0)
    return net.b(h + same[:, 0]).pow(2).sum()


@equal
@forward
def dropout_of_nothing_written_to(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    F.dropout(h, 0.0).mul_(2)
    return net.b(h).pow(2).sum()


@refused(BY_MODE)
@forward
def dropout_of_nothing_written_to_without_gradients(net: Net, x: Tensor) -> Any:
    h = net.a(x)
    with torch.no_grad():
        F.dropout(h, 0.0).mul_(2)
    return net.b(h).pow(2).sum()
