"""Modules that ask where they run, in the constructor, in forward or in the loss function."""

import os
import platform
import socket
from os import getpid
from socket import gethostname

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net

Made = tuple[nn.Module, dict[str, Tensor]]
WHERE = r"asks_where\.py:\d+\)"


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 4)}


def scale_of_the_run() -> float:
    return float(os.getenv("PARLOOM_TEST_SCALE", "1"))


class Built(nn.Module):
    """A layer that asks while it is built."""

    def __init__(self, ask: object) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scale = float(len(str(ask()))) if callable(ask) else 1.0

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.a(x) * self.scale).square().mean()
        return loss


def asking(ask: object) -> Made:
    return Built(ask), batch()


def forward(ask: object) -> Made:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.a(x).square().mean() * len(str(ask())) if callable(ask) else x.mean()

    return Net(body), batch()


@refused(r"cannot capture Built \(" + WHERE + r": its constructor asks for os\.environ\['RANK'\]")
def rank_in_a_constructor() -> Made:
    return asking(lambda: os.environ.get("RANK", "0"))


@refused(r"constructor asks for os\.environ\['LOCAL_RANK'\]")
def getenv_in_a_constructor() -> Made:
    return asking(lambda: os.getenv("LOCAL_RANK"))


@refused(r"constructor asks for os\.environ\['NODE'\]")
def membership_in_a_constructor() -> Made:
    return asking(lambda: "NODE" in os.environ)


@refused(r"constructor asks for socket\.gethostname\(\)")
def host_in_a_constructor() -> Made:
    return asking(socket.gethostname)


@refused(r"constructor asks for socket\.gethostname\(\)")
def host_by_name_in_a_constructor() -> Made:
    return asking(gethostname)


@refused(r"constructor asks for platform\.node\(\)")
def node_in_a_constructor() -> Made:
    return asking(platform.node)


@refused(r"constructor asks for torch\.cuda\.device_count\(\)")
def devices_in_a_constructor() -> Made:
    return asking(torch.cuda.device_count)


@refused(r"constructor asks for torch\.distributed\.is_initialized\(\)")
def dist_in_a_constructor() -> Made:
    return asking(lambda: dist.get_rank() if dist.is_initialized() else 0)


@refused(r"Net \(" + WHERE + r": forward asks for torch\.distributed\.is_initialized\(\)")
def a_guarded_world_size_in_forward() -> Made:
    return forward(lambda: get_world_size() if is_initialized() else 1)


@refused(r"forward asks for torch\.distributed\.get_rank\(\)")
def a_rank_whose_error_is_caught() -> Made:
    def ask() -> int:
        try:
            return dist.get_rank()
        except ValueError:
            return 0

    return forward(ask)


@refused(r"forward asks for os\.getpid\(\)")
def process_in_forward() -> Made:
    return forward(os.getpid)


@refused(r"forward asks for os\.getpid\(\)")
def process_by_name_in_forward() -> Made:
    return forward(getpid)


@refused(r"forward asks for os\.environ\['PARLOOM_TEST_SCALE'\]")
def environment_in_a_function_of_forward() -> Made:
    return forward(scale_of_the_run)


@refused(r"forward asks for os\.environ\['SMOOTH'\]")
def environment_in_the_loss() -> tuple[nn.Module, dict[str, Tensor], object]:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output * float(os.environ.get("SMOOTH", "1"))

    return Net(lambda net, x: net.a(x).square().mean()), batch(), loss


@equal
def a_factory_that_asks() -> Made:
    scale = float(os.environ.get("PARLOOM_TEST_SCALE", "2")) + 0 * os.getpid()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Net(lambda net, x: net.a(x).square().mean() * (scale + rank)), batch()
