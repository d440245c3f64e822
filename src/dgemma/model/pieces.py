"""A long prompt is read in pieces: how long one may be, and which tokens it has."""

from __future__ import annotations

from torch import Tensor

from dgemma.model.config import ModelConfig

# Pieces have at most so many tokens, and fewer where attention's mask
# [rows, heads that share keys x tokens, context] would pass so many numbers.
MAX_PIECE_TOKENS = 1024
MAX_MASK_NUMBERS = 64 << 20


def piece_len(config: ModelConfig, rows: int, context: int, block: int) -> int:
    """Tokens of the next piece behind at most `context` tokens, in whole blocks."""
    sharing = config.num_heads // min(shape.num_kv_heads for shape in config.layers)
    mask_per_token = rows * sharing * (context + MAX_PIECE_TOKENS)
    affordable = MAX_MASK_NUMBERS // mask_per_token
    return max(64, block, min(MAX_PIECE_TOKENS, affordable) // block * block)


def cut_piece(tokens: Tensor, done: list[int], lead: list[int], counts: list[int], width: int) -> Tensor:
    """The next piece of every row, behind its leading padding (token 0)."""
    if width == tokens.shape[1] and not any(lead) and all(count == width for count in counts):
        return tokens
    piece = tokens.new_zeros(tokens.shape[0], width)
    for row, (start, skipped, count) in enumerate(zip(done, lead, counts, strict=True)):
        piece[row, skipped : skipped + count] = tokens[row, start : start + count]
    return piece
