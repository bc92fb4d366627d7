"""What diffusion models share: the noise schedule and the embedding of the timestep.

Ho et al., "Denoising Diffusion Probabilistic Models" (arXiv:2006.11239), sections 2 and 4.
"""

from math import log

from torch import Tensor, arange, cat, cos, exp, float64, linspace, nn, sin

STEPS = 1000  # section 4


def betas() -> Tensor:
    """Variances [STEPS] from 1e-4 to 0.02, linear (section 4), in float64."""
    return linspace(1e-4, 0.02, STEPS, dtype=float64)


class Noising(nn.Module):
    """q(x_t | x_0) at a timestep per sample (equation 4)."""

    alpha_bar: Tensor

    def __init__(self) -> None:
        super().__init__()
        alpha_bar = (1 - betas()).cumprod(0).float()
        self.register_buffer("alpha_bar", alpha_bar, persistent=False)

    def forward(self, clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        kept = self.alpha_bar[timestep][:, None, None, None]
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        return noisy.to(clean.dtype)


def sinusoids(timestep: Tensor, width: int) -> Tensor:
    """Sines and cosines [batch, width] of geometrically falling frequencies (appendix B)."""
    half = width // 2
    frequencies = exp(-log(10000.0) / half * arange(half, device=timestep.device))
    angles = timestep[:, None].float() * frequencies
    return cat((cos(angles), sin(angles)), dim=1)
