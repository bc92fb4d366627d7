"""Modules that ask where they run, in the constructor, in forward or in the loss function."""

import argparse
import functools
import getpass
import logging
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from os import getpid
from socket import gethostname
from sys import argv
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d, get_world_size, is_initialized

from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net

Made = tuple[nn.Module, dict[str, Tensor]]
WHERE = r"asks_where\.py:\d+\)"
ASKS = {"who": os.getpid}
LISTED = [platform.node]
BOUND = functools.partial(os.getenv, "RANK")
PROCESS = functools.partial(os.getpid)


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


class Asks:
    """Names of a class for functions that ask."""

    pid: Any = os.getpid
    node = staticmethod(platform.node)


def by_default(ask: Callable[[], int] = os.getpid) -> int:
    return ask()


def parsed() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    return int(parser.parse_known_args()[0].width)


def swallowed(ask: Callable[[], object]) -> str:
    try:
        return str(ask())
    except (AssertionError, RuntimeError, ValueError):
        return ""


@refused(r"constructor asks for torch\.cuda\.get_device_capability\(\)")
def capability() -> Made:
    return asking(lambda: swallowed(torch.cuda.get_device_capability))


@refused(r"constructor asks for torch\.cuda\.get_device_properties\(\)")
def properties() -> Made:
    return asking(lambda: swallowed(lambda: torch.cuda.get_device_properties(0)))


@refused(r"constructor asks for torch\.cuda\.mem_get_info\(\)")
def memory_of_the_device() -> Made:
    return asking(lambda: swallowed(torch.cuda.memory.mem_get_info))


@refused(r"constructor asks for torch\.cuda\.is_bf16_supported\(\)")
def precision_of_the_device() -> Made:
    return asking(lambda: swallowed(torch.cuda.is_bf16_supported))


@refused(r"constructor asks for torch\.accelerator\.\w+\(\)")
def accelerator() -> Made:
    return asking(torch.accelerator.device_count)


@refused(r"constructor asks for os\.cpu_count\(\)")
def cores() -> Made:
    return asking(os.cpu_count)


@refused(r"constructor asks for multiprocessing\.cpu_count\(\)")
def cores_of_multiprocessing() -> Made:
    return asking(multiprocessing.cpu_count)


@refused(r"forward asks for torch\.get_num_threads\(\)")
def threads_in_forward() -> Made:
    return forward(torch.get_num_threads)


@refused(r"constructor asks for os\.getuid\(\)")
def user() -> Made:
    return asking(os.getuid)


@refused(r"constructor asks for getpass\.getuser\(\)")
def user_by_name() -> Made:
    return asking(getpass.getuser)


@refused(r"constructor asks for threading\.get_native_id\(\)")
def thread() -> Made:
    return asking(threading.get_native_id)


@refused(r"constructor asks for uuid\.getnode\(\)")
def network_card() -> Made:
    return asking(uuid.getnode)


@refused(r"constructor asks for platform\.machine\(\)")
def kind_of_machine() -> Made:
    return asking(platform.machine)


@refused(r"constructor asks for subprocess\.check_output\(\)")
def another_process() -> Made:
    return asking(lambda: subprocess.check_output(["uname", "-n"]))


@refused(r"constructor asks for sys\.argv")
def arguments() -> Made:
    return asking(lambda: sys.argv[1:])


@refused(r"constructor asks for sys\.argv")
def arguments_by_name() -> Made:
    return asking(lambda: "--wide" in argv)


@refused(r"constructor asks for sys\.argv")
def parsed_arguments() -> Made:
    return asking(parsed)


@refused(r"constructor asks for os\.environ")
def all_of_the_environment() -> Made:
    return asking(lambda: dict(os.environ))


@refused(r"forward asks for os\.getpid\(\)")
def in_a_dict() -> Made:
    return forward(lambda: [ASKS["who"]()])


@refused(r"constructor asks for platform\.node\(\)")
def in_a_list() -> Made:
    return asking(lambda: [ask() for ask in LISTED])


@refused(r"constructor asks for os\.environ\['RANK'\]")
def bound_to_its_argument() -> Made:
    return asking(BOUND)


@refused(r"constructor asks for os\.getpid\(\)")
def a_partial() -> Made:
    return asking(PROCESS)


@refused(r"constructor asks for os\.getpid\(\)")
def of_a_class() -> Made:
    return asking(lambda: Asks().pid())


@refused(r"constructor asks for platform\.node\(\)")
def static_of_a_class() -> Made:
    return asking(lambda: Asks().node())


@refused(r"forward asks for os\.getpid\(\)")
def a_default() -> Made:
    return forward(by_default)


@refused(r"constructor asks for os\.getpid\(\)")
def by_getattr() -> Made:
    return asking(getattr(os, "get" + "pid"))


@refused(r"constructor asks for os\.getpid\(\)")
def mapped() -> Made:
    return asking(lambda: [*map(lambda ask: ask(), [os.getpid])])


@refused(r"forward asks for torch\.distributed\.get_rank\(\)")
def by_the_inner_module() -> Made:
    return forward(lambda: swallowed(distributed_c10d.get_rank))


@refused(r"forward asks for torch\.distributed\.is_torchelastic_launched\(\)")
def launched() -> Made:
    return forward(dist.is_torchelastic_launched)


@equal
def harmless_questions() -> Made:
    def ask() -> str:
        logging.getLogger("asks_where").debug("built by %s", "a model")
        found = (platform.system(), platform.python_version(), os.getcwd(), os.path.exists("/"))
        return str((torch.cuda.is_available(), dist.is_available(), found))[:3]

    return asking(ask)


@equal
def logging_in_forward() -> Made:
    def ask() -> str:
        logging.getLogger("asks_where").warning("called")
        return "abc"

    return forward(ask)
