"""The vision tower and its projector: from the patches of one image to soft tokens of the transformer.

A transformer of its own: patches attend to all patches of the image. Positions have two axes, as learned
embeddings and as RoPE, half of each head for each axis. The mean over a square of patches is one soft token,
and a linear map takes it to the size of the token embeddings, in whose place it stands.

Every image runs alone and without padding, so that its numbers do not depend on other images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.attention import inverse_frequencies, rotate
from dgemma.model.layers import GatedMlp, RmsNorm, rms_norm
from dgemma.model.linear import ALL, PlainLinear
from dgemma.model.vision_config import VisionConfig

# Shapes: patches = those of the image, row by row, hidden = size of the tower, dim = head size,
# soft = soft tokens.


class ClippedLinear(PlainLinear):
    """A linear layer that clamps its inputs and outputs to stored limits, where the model has them."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(
        self, out_features: int, in_features: int, *, clips: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(out_features, in_features, dtype=dtype, device=device)
        self.clips = clips
        if clips:
            for name in ("input_min", "input_max", "output_min", "output_max"):
                self.register_buffer(name, torch.empty((), dtype=dtype, device=device))

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        if not self.clips:
            return super().multiply(x, rows)
        product = super().multiply(x.clamp(self.input_min, self.input_max), rows)
        return product.clamp(self.output_min, self.output_max)


class VisionLayer(nn.Module):
    """Attention over all patches, then a gated MLP."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.eps = config.norm_eps

        def linear(out_features: int, in_features: int) -> ClippedLinear:
            return ClippedLinear(out_features, in_features, clips=config.clips, dtype=dtype, device=device)

        def norm(size: int) -> RmsNorm:
            return RmsNorm(size, config.norm_eps, dtype=dtype, device=device)

        self.query = linear(config.num_heads * dim, hidden)
        self.key = linear(config.num_kv_heads * dim, hidden)
        self.value = linear(config.num_kv_heads * dim, hidden)
        self.output = linear(hidden, config.num_heads * dim)
        self.query_norm = norm(dim)
        self.key_norm = norm(dim)
        self.mlp = GatedMlp(hidden, config.mlp_size, dtype=dtype, device=device)
        self.mlp.gate = linear(config.mlp_size, hidden)
        self.mlp.up = linear(config.mlp_size, hidden)
        self.mlp.down = linear(hidden, config.mlp_size)
        self.before_attention = norm(hidden)
        self.after_attention = norm(hidden)
        self.before_mlp = norm(hidden)
        self.after_mlp = norm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [1, patches, hidden]; the tables [2, patches, 1, dim / 2], one per axis."""
        normed = self.before_attention(x)
        per_head = (-1, self.head_dim)
        query = self.query_norm(self.query.multiply(normed).unflatten(-1, per_head))
        key = self.key_norm(self.key.multiply(normed).unflatten(-1, per_head))
        value = rms_norm(self.value.multiply(normed).unflatten(-1, per_head), None, self.eps)
        attended = F.scaled_dot_product_attention(
            _rotate_axes(query, cos, sin).transpose(1, 2),
            _rotate_axes(key, cos, sin).transpose(1, 2),
            value.transpose(1, 2),
            scale=1.0,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        x = x + self.after_attention(self.output.multiply(attended.transpose(1, 2).flatten(2)))
        changed: Tensor = self.after_mlp(self.mlp(self.before_mlp(x)))
        return x + changed


def _rotate_axes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE by the column in the first half of each head, by the row in the second."""
    halves = zip(x.chunk(2, dim=-1), cos.split(1), sin.split(1), strict=True)
    return torch.cat(
        [rotate(half.contiguous(), own_cos, own_sin) for half, own_cos, own_sin in halves], dim=-1
    )


class VisionTower(nn.Module):
    """Patches of an image in, embeddings of its soft tokens out."""

    frequencies: Tensor

    def __init__(
        self, config: VisionConfig, text_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """text_size: of the token embeddings."""
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.patches = PlainLinear(hidden, config.patch_values, dtype=dtype, device=device)
        table = torch.empty(2, config.num_positions, hidden, dtype=dtype, device=device)
        self.positions = nn.Parameter(table, requires_grad=False)  # by column, by row
        self.layers = nn.ModuleList(
            VisionLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)
        )
        if config.standardizes:
            self.register_buffer("bias", torch.empty(hidden, dtype=dtype, device=device))
            self.register_buffer("scale", torch.empty(hidden, dtype=dtype, device=device))
        self.projection = PlainLinear(text_size, hidden, dtype=dtype, device=device)
        self.place_frequencies(device)

    def place_frequencies(self, device: torch.device) -> None:
        """Make the frequencies of RoPE, which are in no file. On the CPU: `Rope` says why."""
        frequencies = inverse_frequencies(self.config.head_dim // 2, self.config.rope_theta, 1.0)
        if device.type != "meta":
            frequencies = frequencies.to(device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, values: Tensor, rows: int, columns: int) -> Tensor:
        """`values` [patches, numbers of a patch], from 0 to 1, of `rows` x `columns` patches.

        -> [soft, size of the token embeddings].
        """
        patches = self.patches.multiply((2 * (values - 0.5)).to(self.patches.dtype))
        # The position of each patch on both axes [2, patches].
        row, column = torch.meshgrid(
            torch.arange(rows, device=values.device),
            torch.arange(columns, device=values.device),
            indexing="ij",
        )
        places = torch.stack((column.flatten(), row.flatten()))
        embedded = self.positions[0, places[0]] + self.positions[1, places[1]]
        x = (patches + embedded)[None]
        angles = places[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # [2, patches, 1, dim / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.project(self.pool(x[0], rows, columns))

    def pool(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """The mean of each square of patches: [patches, hidden] -> [soft, hidden]."""
        side = self.config.pooling
        squares = x.view(rows // side, side, columns // side, side, -1)
        pooled = squares.float().mean((1, 3)).flatten(0, 1).to(x.dtype).float() * self.config.hidden_size**0.5
        if self.config.standardizes:
            pooled = (pooled - self.get_buffer("bias").float()) * self.get_buffer("scale").float()
        soft: Tensor = pooled.to(x.dtype)
        return soft

    def project(self, soft: Tensor) -> Tensor:
        """[soft, hidden] -> [soft, size of the token embeddings]."""
        return self.projection.multiply(rms_norm(soft, None, self.config.norm_eps))
