"""Processes that compute one model together (tensor parallelism).

Attention is divided by heads, the MLPs by columns and then rows, experts and vocabulary by index. Each rank
holds its part of these weights and of the KV cache, and the whole of what is small: norms and the router. The
residual is whole on every rank: three products per layer are sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from dgemma.errors import InputError, RankError
from dgemma.model.linear import Linear

_NEVER = timedelta(days=3650)


class Ranks:
    """One process that computes alone: its sums and gathers are what it has."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, all of one shape, on every rank."""
        return [x]

    def share(self, message: Any) -> Any:
        """The first rank's message, on every rank. The others wait for it as long as it takes."""
        return message

    def exchange(self, message: Any) -> list[Any]:
        """Every rank's message, on every rank, as long as it takes."""
        return [message]

    def wait(self) -> None:
        """Until all are here, as long as it takes."""

    def bounded(self) -> AbstractContextManager[None]:
        """A block whose collectives fail with a `RankError` if a rank is gone or late."""
        return nullcontext()

    @property
    def messages(self) -> distributed.ProcessGroup | None:
        """The group in which ranks may wait for each other as long as it takes."""
        return None

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which decides what all of them do."""
        return self.rank == 0


ALONE = Ranks()


class GroupRanks(Ranks):
    """The ranks of a torch.distributed process group, whose timeout bounds every sum and gather.

    messages: a group for `share`, on the host and without a timeout: the first rank may have nothing to do
    for hours. That a process is gone is noticed all the same, by its connections.

    in_order: sums are added in the order of the ranks, so that an element's bits do not depend on its place
    in the tensor, as exact execution needs. A ring adds each part of a tensor in another order.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        messages: distributed.ProcessGroup | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._group = group
        self._messages = messages
        self._in_order = in_order and self.size > 2  # of two numbers there is one sum

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, *, in_order: bool = False) -> GroupRanks:
        if mesh.ndim != 1:
            raise InputError.about(
                "mesh",
                f"has {mesh.ndim} dimensions; a model is divided along one. Give one of them by its name.",
            )
        group = mesh.get_group()
        messages = distributed.new_group(
            distributed.get_process_group_ranks(group),
            timeout=_NEVER,
            backend="gloo",
            use_local_synchronization=True,
        )
        return cls(group, messages, in_order=in_order)

    def sum(self, x: Tensor) -> Tensor:
        if self._in_order:
            first, *others = self.gather(x)
            for other in others:
                first = first + other
            return first
        total = x.clone(memory_format=torch.contiguous_format)
        with self.bounded():
            distributed.all_reduce(total, group=self._group)
        return total

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        with self.bounded():
            distributed.all_gather(found, x, group=self._group)
        return found

    def share(self, message: Any) -> Any:
        box = [message]
        with self.bounded():
            distributed.broadcast_object_list(box, group=self._messages, group_src=0)
        return box[0]

    def exchange(self, message: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self.bounded():
            distributed.all_gather_object(found, message, group=self._messages)
        return found

    def wait(self) -> None:
        with self.bounded():
            distributed.barrier(self._messages)

    @property
    def messages(self) -> distributed.ProcessGroup | None:
        return self._messages

    @contextmanager
    def bounded(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of torch.distributed: the connection or the time has ended
            reason, _, _ = str(error).partition("\n")
            raise RankError(
                f"rank {self.rank} of {self.size} lost the others: {reason} "
                "All processes of this model end; start it again."
            ) from error


@dataclass(frozen=True)
class VocabPart:
    """The rows of the embedding that a rank holds, and how it gets what the others hold."""

    vocabs: Sequence[slice]  # of each rank
    ranks: Ranks

    @property
    def own(self) -> slice:
        return self.vocabs[self.ranks.rank]

    @property
    def vocab_size(self) -> int:
        size: int = self.vocabs[-1].stop
        return size

    def gather_rows(self, embedding: Linear, ids: Tensor) -> Tensor:
        """Embeddings by token: each is that of one rank, and zero on the others."""
        own = (ids >= self.own.start) & (ids < self.own.stop)
        rows = embedding.gather_rows(torch.where(own, ids - self.own.start, 0))
        return self.ranks.sum(torch.where(own[..., None], rows, 0.0))

    def gather_products(self, embedding: Linear, hidden: Tensor, tokens: slice) -> Tensor:
        """[..., hidden] -> [..., tokens], from every rank."""
        slices = [self.of_rank(rank, tokens) for rank in range(self.ranks.size)]
        widths = [part.stop - part.start for part in slices]
        here = self._rows(slices[self.ranks.rank])
        own = embedding.multiply(hidden, here) if here.stop > here.start else hidden[..., :0]
        own = F.pad(own, (0, max(widths) - own.shape[-1]))
        found = self.ranks.gather(own)
        return torch.cat([part[..., :width] for part, width in zip(found, widths, strict=True)], dim=-1)

    def sum_of_shares(self, embedding: Linear, shares: Tensor, tokens: slice) -> Tensor:
        """Embeddings weighted by `shares` [..., tokens] -> [..., hidden], summed over the ranks."""
        begin, own = tokens.indices(self.vocab_size)[0], self.of_rank(self.ranks.rank, tokens)
        shares = shares[..., own.start - begin : own.stop - begin]
        return self.ranks.sum(embedding.mix_rows(shares, self._rows(own)))

    def _rows(self, tokens: slice) -> slice:
        """Of the own part of the embedding."""
        return slice(tokens.start - self.own.start, tokens.stop - self.own.start)

    def of_rank(self, rank: int, tokens: slice) -> slice:
        """Which of `tokens` the rank holds."""
        own, (begin, end, _) = self.vocabs[rank], tokens.indices(self.vocab_size)
        begin = max(begin, own.start)
        return slice(begin, max(begin, min(end, own.stop)))
