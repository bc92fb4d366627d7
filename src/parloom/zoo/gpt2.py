"""GPT-2 as published: the blocks of the small GPT, and dropout on the embeddings."""

from torch import Tensor, arange, nn
from torch.nn import functional as F

from parloom.zoo.batches import tokens
from parloom.zoo.gpt import GPT


class GPT2(GPT):
    """Next-token loss over the whole batch; `labels` equal to -100 do not count."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, positions: int, dropout: float
    ) -> None:
        super().__init__(vocab, width, depth, heads, positions, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        places = arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits


def build(
    *,
    batch: int = 8,
    seq: int = 1024,
    scale: float = 1.0,
    vocab_size: int = 50257,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    n_positions: int = 1024,
    dropout: float = 0.1,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The smallest one, 124 M parameters at scale 1; input_ids and labels [batch, seq].

    Raises:
        ValueError: a sequence longer than there are positions.
    """
    if seq > n_positions:
        raise ValueError(f"a sequence of {seq}, but there are {n_positions} positions")
    width = heads * max(1, round(width * scale / heads))
    model = GPT2(vocab_size, width, depth, heads, n_positions, dropout)
    return model, tokens(batch, seq, vocab_size)
