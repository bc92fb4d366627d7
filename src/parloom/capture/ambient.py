"""Settings of the process around a model that change what its operators compute.

They are global, and no program holds them: a plan records those that are not torch's defaults, and
a step is refused under others. Where a setting would be part of the program itself (autocast,
function and dispatch modes, hooks on saved tensors), it must be set inside of forward.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from parloom.errors import CaptureError, FingerprintError, InputError

Settings = tuple[tuple[str, str], ...]  # the call or attribute that sets it, its value

_BACKENDS: Any = torch.backends
# How each is read, and torch's default.
READ: Mapping[str, tuple[Callable[[], object], str]] = MappingProxyType({
    "torch.set_default_dtype": (torch.get_default_dtype, "torch.float32"),
    "torch.set_default_device": (lambda: torch.get_default_device().type, "cpu"),
    "torch.use_deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, "False"),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, "highest"),
    "torch.backends.fp32_precision": (lambda: _BACKENDS.fp32_precision, "none"),
    "torch.backends.cuda.matmul.fp32_precision": (
        lambda: _BACKENDS.cuda.matmul.fp32_precision, "none"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: _BACKENDS.cuda.matmul.allow_fp16_reduced_precision_reduction, "True"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: _BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction, "True"),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": (
        lambda: _BACKENDS.cuda.matmul.allow_fp16_accumulation, "False"),
    "torch.backends.cudnn.enabled": (lambda: _BACKENDS.cudnn.enabled, "True"),
    "torch.backends.cudnn.deterministic": (lambda: _BACKENDS.cudnn.deterministic, "False"),
    "torch.backends.cudnn.conv.fp32_precision": (
        lambda: _BACKENDS.cudnn.conv.fp32_precision, "tf32"),
    "torch.backends.cudnn.rnn.fp32_precision": (
        lambda: _BACKENDS.cudnn.rnn.fp32_precision, "tf32"),
    "torch.backends.mkldnn.enabled": (lambda: _BACKENDS.mkldnn.enabled, "True"),
    "torch.backends.mkldnn.matmul.fp32_precision": (
        lambda: _BACKENDS.mkldnn.matmul.fp32_precision, "none"),
    "torch.backends.mkldnn.conv.fp32_precision": (
        lambda: _BACKENDS.mkldnn.conv.fp32_precision, "none"),
    "torch.backends.cuda.enable_flash_sdp": (_BACKENDS.cuda.flash_sdp_enabled, "True"),
    "torch.backends.cuda.enable_mem_efficient_sdp": (
        _BACKENDS.cuda.mem_efficient_sdp_enabled, "True"),
    "torch.backends.cuda.enable_math_sdp": (_BACKENDS.cuda.math_sdp_enabled, "True"),
    "torch.backends.cuda.enable_cudnn_sdp": (_BACKENDS.cuda.cudnn_sdp_enabled, "True"),
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": (
        _BACKENDS.cuda.fp16_bf16_reduction_math_sdp_allowed, "False"),
})  # fmt: skip


def settings() -> Settings:
    """The settings that are not torch's defaults, by name."""
    found = []
    for name, (read, usual) in READ.items():
        value = str(read())
        # `none` asks the setting above, whose own `none` is `ieee`.
        if value != usual and (value, usual) != ("ieee", "none"):
            found.append((name, value))
    return tuple(sorted(found))


def check_settings(planned: Settings) -> None:
    """Raise `FingerprintError` that names a setting with another value than the plan records."""
    there, here = dict(planned), dict(settings())
    if there == here:
        return
    name = next(n for n in (*READ, *there) if there.get(n) != here.get(n))
    usual = READ[name][1] if name in READ else "unknown to this torch"
    raise FingerprintError(
        f"{name} is {here.get(name, usual)} here and was {there.get(name, usual)} when the plan was"
        " made, so that the step would compute something else than was planned: set it alike, or"
        " set it at the top of the factory's file and plan again"
    )


def refuse_around_capture(model: str) -> None:
    """Raise `CaptureError` inside of autocast or a mode: one cannot see it in the model."""
    for what in around():
        raise CaptureError(
            f"cannot capture {model}: it is captured under {what}, which is no part of the model;"
            " enter it inside of forward, where it is captured"
        )


def refuse_around_step(call: str) -> None:
    """Raise `InputError` where a call of the trainer is made inside of autocast or a mode."""
    for what in around():
        raise InputError(
            f"trainer.{call} was called under {what}, and a plan's program computes as the model"
            " alone does; enter it inside of the model's forward, and plan again"
        )


def around() -> Iterator[str]:
    """Contexts that change what operators compute, as a user knows them."""
    for device in ("cpu", "cuda", "mps", "xpu"):
        if torch.is_autocast_enabled(device):
            kind = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            yield f"torch.autocast({device!r}, dtype=torch.{kind})"
    functions: Any = _get_current_function_mode_stack
    modes = (*functions(), *_get_current_dispatch_mode_stack())
    for mode in modes:
        # torch's own count operators, or stand for the default device, which is a setting.
        if not type(mode).__module__.startswith("torch."):
            yield f"the mode {type(mode).__qualname__}"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield "torch.autograd.graph.saved_tensors_hooks"
