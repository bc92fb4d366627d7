"""Programs that are equal on a part of their results, in a plan: from the model to the proof."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import api
from parloom.errors import InputError
from parloom.rewrite.rewrites import derived


class Vocoder(nn.Module):
    """The last layers of MelGAN (Kumar et al., 2019): many channels of a signal to one, padded by
    its mirror image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 64, 7, padding=3)
        self.pad, self.last = nn.ReflectionPad1d(3), nn.Conv1d(64, 1, 7)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.pad(F.leaky_relu(self.first(x), 0.2))).tanh().square().mean()
        return loss


def vocoder() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Vocoder(), {"x": torch.randn(2, 8, 4096)}


def test_a_corrected_program_is_planned_and_proved() -> None:
    """The signal is not copied to be padded: two ends of six places are."""
    captured = api.capture(f"{__file__}:vocoder", optimizer="adamw")
    plans = {
        method: api.search(captured, cluster="2xcpu", method=method) for method in ("taso", "pet")
    }
    assert plans["taso"].decisions.rewrites == ()
    (text,) = plans["pet"].decisions.rewrites
    assert text.startswith("take last in main by pad_conv1d_split_with_sizes_cat_")
    assert "leaky_relu, (6, 4090), -1)[0], (3, 3), 'reflect')" in text
    pet, taso = (plans[method].prediction for method in ("pet", "taso"))
    assert pet is not None
    assert taso is not None
    assert pet.step_s < 0.9 * taso.step_s
    assert api.verify(plans["pet"]).passed
    wrong = text.replace("(6, 4090), -1)[0]", "(7, 4089), -1)[0]").replace(
        "(3, 3), -1)[0]", "(3, 4), -1)[0]"
    )
    for other in (wrong, text.replace("'reflect'", "'replicate'")):
        with pytest.raises(InputError, match="does not follow from"):
            derived(captured.graph, (other,))
