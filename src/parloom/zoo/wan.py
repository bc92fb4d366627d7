"""Wan 2.1: a video diffusion transformer that denoises a latent under a text (arXiv:2503.20314).

The sizes and the modules are those of Wan-Video/Wan2.1, `wan/modules/model.py`: patches of a frame
and 2x2 places, self attention with rotary places in time, height and width, cross attention to the
text, and a modulation by the timestep that all blocks share but for a bias. It is trained by flow
matching (section 4.2.1 of the paper): the velocity noise - clean is predicted. Noise, timesteps and
the text's encoding, which is that of umT5, come with the batch.

Shape suffixes: B batch, S patches, T tokens of text, D width, H heads, K head width.
"""

from functools import wraps
from math import log

from torch import Generator, Tensor, arange, cat, exp, nn, rand, randn, stack
from torch.nn import functional as F

from parloom.zoo.llama import RMSNorm
from parloom.zoo.rounding import scaled

FREQUENCIES = 256  # of the timestep
STEPS = 1000  # timesteps of the schedule
PATCH = (1, 2, 2)


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotate pairs of neighbors of the head width; angles [S, K / 2]."""
    B, H, S, K = x_BHSK.shape
    even, odd = x_BHSK.view(B, H, S, K // 2, 2).unbind(-1)
    turned = stack((even * cos_SK - odd * sin_SK, even * sin_SK + odd * cos_SK), dim=-1)
    return turned.flatten(-2)


def angles(grid: tuple[int, int, int], width: int) -> Tensor:
    """Angles [S, width / 2] of all patches: a third of the head for each of height and width, each
    rounded down to an even number, and the rest for time.
    """
    third = 2 * (width // 6)
    parts = []
    for dim, own in enumerate((width - 2 * third, third, third)):
        frequencies = 10000.0 ** (-arange(0, own, 2).double() / own)
        along = arange(grid[dim]).double()[:, None] * frequencies
        shape = [1, 1, 1, own // 2]
        shape[dim] = grid[dim]
        parts.append(along.view(shape).expand(*grid, own // 2))
    return cat(parts, dim=-1).flatten(0, 2)


class Attention(nn.Module):
    """Attention of the patches to themselves, or to a text; queries and keys are normalised over
    the whole width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm_q = RMSNorm(width)
        self.norm_k = RMSNorm(width)

    def forward(self, x: Tensor, y: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        q, k = self._heads(self.norm_q(self.q(x))), self._heads(self.norm_k(self.k(y)))
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        z = F.scaled_dot_product_attention(q, k, self._heads(self.v(y)))
        found: Tensor = self.o(z.transpose(1, 2).flatten(2))
        return found

    def _heads(self, x_BSD: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        return x_BSD.view(B, S, self.heads, D // self.heads).transpose(1, 2)


class Block(nn.Module):
    """Self attention, attention to the text and a perceptron; time shifts, scales and gates."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.self_attn = Attention(width, heads)
        self.norm3 = nn.LayerNorm(width, eps=1e-6)
        self.cross_attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.modulation = nn.Parameter(randn(6, width) / width**0.5)

    def forward(
        self, x: Tensor, time_B6D: Tensor, text_BTD: Tensor, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        told = (self.modulation + time_B6D).unsqueeze(2).unbind(1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = told
        y = self.norm1(x) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.self_attn(y, y, turn)
        x = x + self.cross_attn(self.norm3(x), text_BTD)
        y = self.norm2(x) * (1 + scale_2) + shift_2
        z: Tensor = x + gate_2 * self.down(F.gelu(self.up(y), approximate="tanh"))
        return z


class Denoiser(nn.Module):
    """The velocity [batch, channels, frames, height, width] of a noisy latent."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        grid: tuple[int, int, int],
        channels: int,
        width: int,
        inner: int,
        heads: int,
        depth: int,
        text_width: int,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.patches = nn.Conv3d(channels, width, PATCH, PATCH)
        self.text_1, self.text_2 = nn.Linear(text_width, width), nn.Linear(width, width)
        self.time_1, self.time_2 = nn.Linear(FREQUENCIES, width), nn.Linear(width, width)
        self.time_3 = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(width, inner, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.head = nn.Linear(width, PATCH[0] * PATCH[1] * PATCH[2] * channels)
        self.modulation = nn.Parameter(randn(2, width) / width**0.5)
        own = angles(grid, width // heads)
        self.register_buffer("cos", own.cos().float(), persistent=False)
        self.register_buffer("sin", own.sin().float(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.weight)

    def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        x = self.patches(noisy).flatten(2).transpose(1, 2)
        text_BTD = self.text_2(F.gelu(self.text_1(text), approximate="tanh"))
        half = FREQUENCIES // 2
        frequencies = exp(-log(10000.0) / half * arange(half, device=timestep.device))
        waves = timestep[:, None].float() * frequencies
        time = cat((waves.cos(), waves.sin()), dim=1).to(x.dtype)
        time = self.time_2(F.silu(self.time_1(time)))
        time_B6D = self.time_3(F.silu(time)).unflatten(1, (6, -1))
        turn = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, time_B6D, text_BTD, turn)
        shift, scale = (self.modulation + time[:, None]).unsqueeze(2).unbind(1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        x = x.unflatten(2, (*PATCH, -1)).unflatten(1, self.grid)
        # [B, f, h, w, patch of f, h, w, channels] -> [B, channels, frames, height, width]
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)
        found: Tensor = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return found


class Wan(nn.Module):
    """The squared error of the velocity at a time per sample."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(
        self, clean: Tensor, noise: Tensor, time: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor]:
        share = time[:, None, None, None, None]
        noisy = (1 - share) * clean + share * noise
        found = self.denoiser(noisy.to(clean.dtype), STEPS * time, text)
        return F.mse_loss(found, noise - clean), found


def build(  # noqa: PLR0913 - one argument per size
    *,
    batch: int = 1,
    seq: int | None = None,
    scale: float = 1.0,
    width: int = 1536,
    inner: int = 8960,
    heads: int = 12,
    depth: int = 30,
    latent: int = 16,
    frames: int = 21,
    rows: int = 60,
    columns: int = 104,
    text_width: int = 4096,
    tokens: int = 512,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """1.3B: 1,419 M parameters; clean and noise [batch, latent, frames, rows, columns], time
    [batch] from 0 to 1, text [batch, tokens, text_width].

    The latent is that of 81 frames of 480x832. `scale` multiplies the widths; `seq` is unused.
    """
    width, inner = scaled(width, scale, 2 * heads), scaled(inner, scale)
    grid = (frames // PATCH[0], rows // PATCH[1], columns // PATCH[2])
    denoiser = Denoiser(grid, latent, width, inner, heads, depth, text_width)
    g = Generator().manual_seed(0)
    shape = batch, latent, frames, rows, columns
    clean, noise = (randn(*shape, generator=g, device="cpu") for _ in range(2))
    time = rand(batch, generator=g, device="cpu")
    text = randn(batch, tokens, text_width, generator=g, device="cpu")
    return Wan(denoiser), {"clean": clean, "noise": noise, "time": time, "text": text}


def build_14b(  # noqa: PLR0913 - one argument per size
    *,
    batch: int = 1,
    seq: int | None = None,
    scale: float = 1.0,
    width: int = 5120,
    inner: int = 13824,
    heads: int = 40,
    depth: int = 40,
    latent: int = 16,
    frames: int = 21,
    rows: int = 60,
    columns: int = 104,
    text_width: int = 4096,
    tokens: int = 512,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """14B: 14,288 M parameters; else as 1.3B."""
    return build(
        batch=batch,
        seq=seq,
        scale=scale,
        width=width,
        inner=inner,
        heads=heads,
        depth=depth,
        latent=latent,
        frames=frames,
        rows=rows,
        columns=columns,
        text_width=text_width,
        tokens=tokens,
    )


Built = tuple[nn.Module, dict[str, Tensor]]


def _alone(built: Built) -> Built:
    """A step of sampling: noisy [batch, latent, frames, rows, columns], timestep and text."""
    model, batch = built
    inputs = {"noisy": batch["noise"], "timestep": STEPS * batch["time"], "text": batch["text"]}
    return model.get_submodule("denoiser"), inputs


@wraps(build, assigned=())
def build_denoiser(**sizes: int) -> Built:
    """A step of sampling with the network of 1.3B."""
    return _alone(build(**sizes))


@wraps(build_14b, assigned=())
def build_14b_denoiser(**sizes: int) -> Built:
    """A step of sampling with the network of 14B."""
    return _alone(build_14b(**sizes))
