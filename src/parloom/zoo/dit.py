"""DiT-XL/2: a diffusion transformer (Peebles and Xie, arXiv:2212.09748).

adaLN-Zero blocks (section 3.2, figure 3), patches of 2 on a latent of 32x32x4, XL of table 1; noise
and its variance are predicted and trained with the hybrid loss of Nichol and Dhariwal
(arXiv:2102.09672, section 3.1), as in facebookresearch/DiT. Noise, timesteps and labels, of which
some are dropped for guidance without a classifier, come with the batch.

Shape suffixes: B batch, S patches, D width.
"""

from functools import wraps
from math import log, pi, sqrt

import torch
from torch import Generator, Tensor, arange, cat, exp, nn, rand, randint, tanh, where
from torch.nn import functional as F

from parloom.zoo.batches import noised
from parloom.zoo.diffusion import STEPS, betas, sinusoids
from parloom.zoo.rounding import scaled

FREQUENCIES = 256  # of the timestep; facebookresearch/DiT, models.py


class Attention(nn.Module):
    """Attention between all patches."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


def modulate(x_BSD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """Shift and scale of all patches of a sample."""
    return x_BSD * (1 + scale_BD[:, None]) + shift_BD[:, None]


class Block(nn.Module):
    """Attention and a perceptron; the condition shifts, scales and gates both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(
            F.silu(condition)
        ).chunk(6, dim=1)
        x = x + gate_1[:, None] * self.attention(modulate(self.norm_1(x), shift_1, scale_1))
        y: Tensor = self.up(modulate(self.norm_2(x), shift_2, scale_2))
        y = x + gate_2[:, None] * self.down(F.gelu(y, approximate="tanh"))
        return y


def places(width: int, rows: int) -> Tensor:
    """Sines and cosines [rows^2, width] of column and row, half of the width each."""
    frequencies = 10000.0 ** (-arange(width // 4) / (width // 4))
    row, column = torch.meshgrid(arange(rows).float(), arange(rows).float(), indexing="ij")
    angles = [axis.flatten()[:, None] * frequencies for axis in (column, row)]
    return cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)


class Denoiser(nn.Module):
    """Noise and variance [batch, 2 * channels, image, image] from a noisy latent."""

    def __init__(
        self,
        channels: int,
        image: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.patch, self.rows = patch, image // patch
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.places = nn.Parameter(places(width, self.rows), requires_grad=False)
        self.time_1 = nn.Linear(FREQUENCIES, width)
        self.time_2 = nn.Linear(width, width)
        self.labels = nn.Embedding(classes + 1, width)  # the last: no label
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch**2 * 2 * channels)
        self.initialise()

    def initialise(self) -> None:
        """Section 3.2: gates and head start at zero, so that every block is the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in (self.labels, self.time_1, self.time_2):
            nn.init.normal_(module.weight, std=0.02)
        modulations = [block.get_submodule("modulation") for block in self.blocks]
        for module in (*modulations, self.modulation, self.head):
            nn.init.zeros_(module.get_parameter("weight"))

    def forward(self, noisy: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.places
        time = self.time_1(sinusoids(timestep, FREQUENCIES).to(x.dtype))
        condition = self.time_2(F.silu(time)) + self.labels(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        x = x.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, (self.rows, self.rows))
        found: Tensor = x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        return found


class DiT(nn.Module):
    """The hybrid loss: squared error of the noise, and the variational bound for the variance.

    The bound does not train the mean. It is in bits per dim, of one timestep per sample.
    """

    schedule: Tensor

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser
        beta = betas()
        kept = (1 - beta).cumprod(0)
        before = cat((kept.new_ones(1), kept[:-1]))
        posterior = beta * (1 - before) / (1 - kept)
        # The posterior of the first step has no variance; its logarithm is that of the second.
        posterior = cat((posterior[1:2], posterior[1:]))
        mean_clean = beta * before.sqrt() / (1 - kept)
        mean_noisy = (1 - before) * (1 - beta).sqrt() / (1 - kept)
        rows = (kept, beta.log(), posterior.log(), mean_clean, mean_noisy)
        self.register_buffer("schedule", torch.stack(rows, dim=1).float(), persistent=False)

    def forward(
        self, clean: Tensor, noise: Tensor, timestep: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept, log_beta, log_posterior, mean_clean, mean_noisy = self.schedule[timestep][
            :, :, None, None, None
        ].unbind(1)
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        predicted, fraction = self.denoiser(noisy.to(clean.dtype), timestep, labels).chunk(2, 1)
        share = (fraction + 1) / 2
        log_variance = share * log_beta + (1 - share) * log_posterior
        guess = (noisy - (1 - kept).sqrt() * predicted.detach()) / kept.sqrt()
        mean = mean_clean * guess + mean_noisy * noisy
        target = mean_clean * clean + mean_noisy * noisy
        divergence = gaussian_divergence(target, log_posterior, mean, log_variance)
        decoded = -discretised_log_likelihood(clean, mean, log_variance / 2)
        first = (timestep == 0)[:, None, None, None]
        bound = where(first, decoded, divergence).mean() / log(2)
        return F.mse_loss(predicted, noise) + bound, predicted


def gaussian_divergence(
    mean_1: Tensor, log_variance_1: Tensor, mean_2: Tensor, log_variance_2: Tensor
) -> Tensor:
    """KL divergence of the first Gaussian from the second, in nats per dim."""
    ratio = exp(log_variance_1 - log_variance_2)
    square = (mean_1 - mean_2) ** 2 * exp(-log_variance_2)
    return (log_variance_2 - log_variance_1 + ratio + square - 1) / 2


def discretised_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log-probability of the bin of width 2/255 around x (Ho et al. 2020, equation 13)."""
    upper = normal_distribution((x - mean + 1 / 255) * exp(-log_scale))
    lower = normal_distribution((x - mean - 1 / 255) * exp(-log_scale))
    inside = where(x > 0.999, 1 - lower, upper - lower)
    return where(x < -0.999, upper, inside).clamp(min=1e-12).log()


def normal_distribution(x: Tensor) -> Tensor:
    """The standard normal distribution function, by the approximation of GELU."""
    return (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2


def build(
    *,
    batch: int = 256,
    seq: int | None = None,
    scale: float = 1.0,
    latent: int = 4,
    image: int = 32,
    patch_size: int = 2,
    width: int = 1152,
    depth: int = 28,
    heads: int = 16,
    classes: int = 1000,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """675 M parameters; clean and noise [batch, latent, image, image], timestep and labels.

    `scale` multiplies the width, a multiple of four times the heads; `seq` is unused.
    """
    width = scaled(width, scale, 4 * heads)
    denoiser = Denoiser(latent, image, patch_size, width, depth, heads, classes)
    g = Generator().manual_seed(1)
    labels = randint(0, classes, (batch,), generator=g, device="cpu")
    dropped = rand(batch, generator=g, device="cpu") < 0.1
    found = noised(batch, latent, image, STEPS) | {"labels": labels.masked_fill(dropped, classes)}
    return DiT(denoiser), found


@wraps(build, assigned=())
def build_denoiser(**sizes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A step of sampling: noisy [batch, latent, image, image], timestep and labels [batch]."""
    model, batch = build(**sizes)
    inputs = {"noisy": batch["noise"], "timestep": batch["timestep"], "labels": batch["labels"]}
    return model.get_submodule("denoiser"), inputs
