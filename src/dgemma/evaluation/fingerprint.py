"""A model's weights in sixteen letters: the same model gives the same ones, a trained one others."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel

# Numbers looked at per tensor: training moves them all, so a few tell.
_SAMPLES = 64


def fingerprint(lm: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(lm.stack.state_dict().items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.cpu().double().numpy().tobytes())
    for name, module in lm.stack.named_modules():
        if hasattr(module, "alpha"):  # of an adapter: it scales what the tensors say
            digest.update(f"{name} {module.alpha}".encode())
    return digest.hexdigest()[:16]
