"""How many pages there are: from bytes to tokens of context. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.errors import InputError
from dgemma.model.config import LayerKind, ModelConfig

# A pool larger than all slots can use, twice over, serves nobody.
_SPARE = 2


@dataclass(frozen=True, kw_only=True)
class Capacity:
    full_pages: int
    window_pages: int
    most_gathered: int
    """Tokens of context that running canvases may hold as copies, beside the pages."""


def token_bytes(config: ModelConfig, kind: LayerKind, item_bytes: int) -> int:
    """Keys and values of one token in all layers of a kind."""
    sizes = (2 * shape.num_kv_heads * shape.head_dim for shape in config.layers if shape.kind is kind)
    return item_bytes * sum(sizes)


def window_pages_of(window: int, page_len: int) -> int:
    """The most pages a sequence holds of sliding layers."""
    return -(-(window - 1) // page_len) + 2


def plan_capacity(
    config: ModelConfig, *, num_bytes: int, slots: int, page_len: int, item_bytes: int, most_len: int
) -> Capacity:
    """What `num_bytes` of memory hold for `slots` sequences of at most `most_len` tokens.

    Windows come first: of every slot its own, the copy its canvas reads, and a tail of somebody's to go on
    from. Of the rest one half are pages of full layers, the other half copies of them.
    """
    per_slot = min(window_pages_of(config.window, page_len), -(-most_len // page_len))
    window_pages = 2 * slots * per_slot
    sliding_token = token_bytes(config, LayerKind.SLIDING, item_bytes)
    full_token = token_bytes(config, LayerKind.FULL, item_bytes)
    windows = (window_pages + slots * per_slot) * page_len * sliding_token
    windows += slots * config.canvas_len * (sliding_token + full_token)  # each copy has room for its canvas
    longest_use = slots * -(-most_len // page_len)
    full_pages = _SPARE * longest_use
    if full_token:
        full_pages = min(full_pages, (num_bytes - windows) // (2 * full_token * page_len))
    if windows > num_bytes or full_pages * page_len < min(most_len, 2 * config.canvas_len):
        raise InputError(
            f"{num_bytes / 1e9:.1f} GB of memory are too little for {slots} sequences at once, whose windows "
            f"alone take {windows / 1e9:.1f} GB. Lower --max-num-seqs or raise --memory-fraction."
        )
    return Capacity(
        full_pages=full_pages,
        window_pages=window_pages,
        most_gathered=min(full_pages, longest_use) * page_len,
    )
