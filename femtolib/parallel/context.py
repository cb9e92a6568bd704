"""Context parallelism: ranks that share the tokens of a row, so that a row may be longer than a device can hold.

A row is cut into 2·cp chunks, of which rank r has the r-th and the r-th from the end: later tokens see more keys, and
so every rank has the same work (as in Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Queries stay
where they are; keys and values are gathered for each layer's forward pass, and their gradients are summed and scattered
back in the backward pass. All else in a decoder is done token by token. Labels, positions and document ids are made
before the cut, so nothing is lost at it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

if TYPE_CHECKING:
    from femtolib.data.loader import Batch


@dataclass(frozen=True)
class SequenceCut:
    """Which tokens of rows of `length` a rank has that is the `rank`-th of `size`, over `mesh`."""

    length: int
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def over(cls, mesh: DeviceMesh, length: int) -> "SequenceCut":
        return cls(length, mesh.get_local_rank(), mesh.size(), mesh)

    @property
    def chunks(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """This rank's two chunks of a row: from, to (excluded)."""
        edges = [number * self.length // (2 * self.size) for number in range(2 * self.size + 1)]
        mirrored = 2 * self.size - 1 - self.rank
        return (edges[self.rank], edges[self.rank + 1]), (edges[mirrored], edges[mirrored + 1])

    def places(self, device: torch.device | str) -> torch.Tensor:
        """Where in the row this rank's tokens are: [sequence / cp]."""
        return torch.cat([torch.arange(*chunk, device=device) for chunk in self.chunks])

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of [batch, sequence]."""
        return rows if self.size == 1 else torch.cat([rows[:, start:stop] for start, stop in self.chunks], 1)

    def take_batch(self, batch: "Batch") -> "Batch":
        """The same rows with this rank's tokens alone; `trained_tokens`, `rows` and `digest` stay those of all."""
        if self.size == 1:
            return batch
        positions = batch.position_ids
        if positions is None:
            positions = torch.arange(self.length, device=batch.input_ids.device).expand_as(batch.input_ids)
        return replace(
            batch,
            input_ids=self.take(batch.input_ids),
            labels=self.take(batch.labels),
            position_ids=self.take(positions),
            document_ids=None,
        )

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole rows, in their order, from the parts of all ranks: [batch, heads, sequence, dim].

        The ranks' gradients of them are summed, and each rank gets those of its own part.
        """
        if self.size == 1:
            return k, v
        part = DTensor.from_local(torch.stack((k, v)), self.mesh, [Shard(3)], run_check=False)
        whole = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        chunks = whole.chunk(2 * self.size, 3)  # 0, 2·cp − 1, 1, 2·cp − 2, …
        k, v = torch.cat([*chunks[0::2], *reversed(chunks[1::2])], 3).unbind()
        return k, v
