"""`LoadedModel`: a model with the files of its checkpoint and its adapters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

import torch

from dgemma.checkpoint.adapter import load_adapter, save_adapter
from dgemma.checkpoint.adapter_source import open_adapter
from dgemma.checkpoint.fingerprint import file_fingerprint, fingerprint
from dgemma.checkpoint.image_settings import read_image_settings
from dgemma.checkpoint.save import save
from dgemma.checkpoint.source import CheckpointSource, read_generation_config
from dgemma.errors import CheckpointError, InputError
from dgemma.forms.extraction import read_record_types
from dgemma.forms.record_types import RecordTypes
from dgemma.images.prompt import ImageMarks, ModelImages
from dgemma.model.block_diffusion import BlockDiffusionModel
from dgemma.model.lora import LoraSettings, attach, detach, has_adapter, merged
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.detokenizer import Detokenizer
from dgemma.text.tokenizer import Tokenizer, has_tokenizer


class LoadedModel(BlockDiffusionModel):
    """A model, what its checkpoint says beside the weights, and adapters over them. It does not generate."""

    def __init__(self, transformer: Transformer, source: CheckpointSource | None = None) -> None:
        super().__init__(transformer)
        self._source = source
        self._saved_dtype: torch.dtype | None = None  # None: as in memory

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory, an adapter's included."""
        return sum(
            tensor.nbytes for tensor in chain(self.transformer.parameters(), self.transformer.buffers())
        )

    def exact(self, exact: bool = True) -> Self:
        """The same weights, run so that a row's bits never depend on what shares its batch."""
        return self.with_transformer(
            self.transformer.with_execution(replace(self.transformer.execution, exact=exact))
        )

    def with_transformer(self, transformer: Transformer) -> Self:
        """The same files and tokenizer with another transformer."""
        other = copy.copy(self)
        other.transformer = transformer
        return other

    # Adapters

    def with_adapter(self, adapter: str | Path | LoraSettings, *, seed: int = 0) -> Self:
        """This model with a LoRA adapter: one from a directory, or a fresh one to be trained.

        The base's weights are shared, and this handle stays without: one base carries many adapters at
        once. A fresh adapter's factors come from `seed` and require gradients; loaded ones do not.
        """
        if has_adapter(self.transformer):
            raise InputError("this model has an adapter already; call without_adapter() first.")
        if isinstance(adapter, LoraSettings):
            self._require_whole("train an adapter")
            return self.with_transformer(attach(self.transformer, adapter, seed=seed))
        source = open_adapter(adapter, self.config)
        made_from = None if self._source is None else self._source.quantized_from
        return self.with_transformer(
            load_adapter(
                self.transformer,
                source,
                base_fingerprint=self.fingerprint(),
                quantized_from=made_from,
            )
        )

    def without_adapter(self) -> Self:
        """The base alone, over the same weights."""
        return self.with_transformer(detach(self.transformer))

    def merged(self) -> Self:
        """The adapter added into new weights, as fast as the base; this handle stays as it is."""
        return self.with_transformer(merged(self.transformer))

    def fingerprint(self) -> str:
        """A short name for the base's weights, the same in fp32 and bf16; an adapter does not change it."""
        if self.transformer.ranks.size > 1 or self.device.type == "meta":  # they are not all here
            assert self._source is not None
            return file_fingerprint(self._source)
        return fingerprint(self.transformer)

    def save_adapter(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the adapter alone, in the layout that PEFT reads, for this base."""
        self._require_whole("save an adapter")
        base_name = None if self._source is None else str(self._source.path)
        save_adapter(
            self.transformer,
            path,
            base_fingerprint=self.fingerprint(),
            base_name=base_name,
            overwrite=overwrite,
        )

    def save(self, path: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write the released layout; tensors kept aside (vision) and tokenizer files come along.

        A model that was loaded with dtype "auto" is written in the dtype it was stored in.
        """
        self._require_whole("save the weights")
        if has_adapter(self.transformer):
            raise InputError(
                "this model has an adapter beside its weights; save merged(), or the adapter alone with "
                "save_adapter()."
            )
        save(self.transformer, path, self._source, dtype=self._saved_dtype, max_shard_bytes=max_shard_bytes)

    def _require_whole(self, what: str) -> None:
        size = self.transformer.ranks.size
        if size > 1:
            raise InputError.about(
                "mesh", f"has {size} ranks, each with a part of the weights; one process must {what}."
            )

    # Files beside the weights

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return Tokenizer.from_directory(self._directory)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template."""
        return ChatTemplate.from_directory(self._directory, self.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        try:
            return self.chat_template is not None
        except CheckpointError:
            return False

    @cached_property
    def generation_defaults(self) -> GenerationParams:
        """The checkpoint's generation_config.json, or the reference's defaults where it has none."""
        raw = None if self._source is None else read_generation_config(self._source.path)
        if self._source is None or raw is None:
            return GenerationParams()
        try:
            return GenerationParams.from_generation_config(raw)
        except InputError as error:
            raise CheckpointError(f"{self._source.path}: generation_config.json: {error}") from None

    @cached_property
    def images(self) -> ModelImages | None:
        """How images become prompts of this model; None: it reads text only."""
        vision, source = self.config.vision, self._source
        if vision is None:
            return None
        settings = read_image_settings(None if source is None else source.path, vision)
        return ModelImages(settings, ImageMarks(vision.image_token, vision.begin_token, vision.end_token))

    @property
    def has_tokenizer(self) -> bool:
        return self._source is not None and has_tokenizer(self._source.path)

    @cached_property
    def record_types(self) -> RecordTypes | None:
        """The types of records the checkpoint was trained on, with their JSON schemas; None if on none."""
        return None if self._source is None else read_record_types(self._source.path)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """The text each token adds; a token that ends within a character adds none."""
        detokenizer = Detokenizer(self.tokenizer)
        token_texts = [detokenizer.add([token]) for token in tokens]
        if token_texts:
            token_texts[-1] += detokenizer.finish()
        return token_texts

    @property
    def _directory(self) -> Path:
        if self._source is None:
            raise CheckpointError(
                "this model was not loaded from files, so it has no tokenizer; load it from a directory."
            )
        return self._source.path
