"""A classifier of words by their characters: embedding, LSTM, one linear layer (Boenisch et al. 2024)."""

from __future__ import annotations

from torch import Tensor, nn

from evenhand.errors import UsageError
from evenhand.models.layers import Shape, head

VOCABULARY = 256
"""One row per byte; what the data never use is never read, so it costs nothing."""
PADDING = 0
EMBEDDED = 64
HIDDEN = 128


class CharLSTM(nn.Module):
    """Reads the characters of each record one after the other and answers after the last.

    Token 0 is padding, wherever it stands: padded positions change nothing.

    Examples:
      >>> import torch
      >>> model = CharLSTM(3)
      >>> short, long = torch.tensor([[7, 9]]), torch.tensor([[0, 7, 9, 0, 0]])
      >>> _ = torch.nn.init.normal_(model.head.weight)
      >>> bool(torch.allclose(model(short), model(long), atol=1e-6))
      True
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED, padding_idx=PADDING)
        self.lstm = nn.LSTM(EMBEDDED, HIDDEN, batch_first=True)
        self.head = head(HIDDEN, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the classes, for tokens (B, T)."""
        empty = (tokens == PADDING).long()
        tokens = tokens.gather(1, empty.argsort(dim=1, stable=True)).long()
        last = ((1 - empty).sum(1) - 1).clamp(min=0)
        states = self.lstm(self.embedding(tokens))[0]
        scores: Tensor = self.head(states.gather(1, last.view(-1, 1, 1).expand(-1, 1, HIDDEN)).squeeze(1))
        return scores


def char_lstm(shape: Shape, classes: int) -> nn.Module:
    """For records that are one row of tokens, 0 to 255."""
    if len(shape) != 1 or shape[0] < 1:
        raise UsageError(
            f"The char_lstm needs one row of tokens per record, and these inputs have shape {shape}: give whole "
            "numbers from 1 to 255, one column per character, and 0 where there is none."
        )
    return CharLSTM(classes)
