"""From node to node, once a token: records out, and sums of rows back.

Each rank speaks on its node for the ranks of other nodes that have the same number there as it has
here: what they send comes here first, and goes on within the node. On one node it speaks for itself
alone, and nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.host.wire import Wire
from deepep_cupy.protocol.nodes import NodeMap
from deepep_cupy.protocol.rail import RailPart
from deepep_cupy.reference.combine import add

__all__ = ["PATIENCE_S", "Batch", "Rail"]

PATIENCE_S = 0.5
"""What comes by way of another rank is waited for this much longer: the rank that waits for its
source itself shall be the first to say who is late."""


class Batch(NamedTuple):
    """Tokens of one rank, and what goes along with them; ``None``: nothing of that kind does.

    Attributes:
        flags: ``[n, 1]`` uint8, a bit for each rank of the node that a token is for.
        x: ``[n, H]``.
        scales: ``[n, S]``.
        topk_idx: ``[n, K]`` global expert numbers.
        topk_weights: ``[n, K]``.
        token: ``[n]`` numbers of the tokens on the rank they come from.
    """

    flags: NDArray[np.uint8] | None
    x: NDArray[Any]
    scales: NDArray[Any] | None
    topk_idx: NDArray[Any] | None
    topk_weights: NDArray[Any] | None
    token: NDArray[np.int32] | None


class Rail:
    """Records between this rank and its peers of other nodes, and sums of rows the other way.

    Args:
        wire: Carries the messages.
        nodes: Where the ranks are.
        rank: This rank.

    Attributes:
        node: Number of this rank's node.
        mates: The ranks of this node.
        sources: ``[N]``, the ranks that this one speaks for: of each node one, itself included.
    """

    def __init__(self, wire: Wire, nodes: NodeMap, rank: int) -> None:
        self._wire = wire
        self._nodes = nodes
        self._rank = rank
        self.node = nodes.node_of(rank)
        self.mates = nodes.mates_of(rank)
        self.sources = nodes.peers_of(rank)

    def spread(self, own: Batch, parts: list[RailPart], numbers: Sequence[int]) -> list[Batch]:
        """Send this rank's tokens to other nodes; receive what comes for this one.

        Args:
            own: This rank's tokens, all of them, without ``flags``.
            parts: Of ``plan_rail``.
            numbers: Records that come from each of ``sources``.

        Returns:
            The batch of each of ``sources``; this rank's is ``own``.
        """
        batches = []
        for node, peer in enumerate(self.sources):
            if peer == self._rank:
                batches.append(own)
                continue
            token = parts[node].token
            flags = np.packbits(parts[node].goes, axis=1)
            columns: Any = (None if part is None else part[token] for part in own[1:])
            leave = Batch(flags, *columns)
            come: Any = [
                None if part is None else np.empty((numbers[node], *part.shape[1:]), part.dtype)
                for part in leave
            ]
            for sent, received in zip(leave, come, strict=True):
                if sent is not None and received is not None:
                    self._wire.receive(peer, received)
                    self._wire.send(peer, sent)
            batches.append(Batch(*come))
        if len(batches) > 1:
            self._wire.wait("dispatch", "rows")
        return batches

    def goes(self, batch: Batch) -> NDArray[np.bool_]:
        """``[n, L]``, which of this node's ranks the tokens of a batch from elsewhere are for."""
        flags = batch.flags
        assert flags is not None
        return np.unpackbits(flags, axis=1, count=len(self.mates)).astype(np.bool_)

    def bring_sums(
        self,
        arrays: list[NDArray[Any]],
        relayed: Sequence[NDArray[np.bool_]],
        bounds: list[int],
        parts: list[RailPart],
    ) -> list[list[NDArray[Any]]]:
        """Add the rows that each node has of a token, and bring the sums to the token's rank.

        Args:
            arrays: Each ``[N, W]``, a row per received token.
            relayed: ``goes`` of each of ``sources``, of the dispatch.
            bounds: Where each rank's received tokens begin, and where the last end.
            parts: Of ``plan_rail``, of the dispatch.

        Returns:
            For each array and node ``[records, W]``, sums of the tokens of its part.
        """
        local = self.mates.index(self._rank)
        rows = [[self._of_mates(array, goes, bounds, i) for i, goes in enumerate(relayed)]
                for array in arrays]  # fmt: skip
        for array, of_source in zip(arrays, rows, strict=True):
            for number, mate in enumerate(self.mates):
                if number == local:
                    continue
                for shares, source in zip(of_source, self._nodes.peers_of(mate), strict=True):
                    self._wire.receive(mate, shares[number])
                    self._wire.send(mate, array[bounds[source] : bounds[source + 1]])
        self._wire.wait("combine", "rows")
        back = []
        for of_source in rows:
            sums = []
            for node, (goes, shares) in enumerate(zip(relayed, of_source, strict=True)):
                terms = [(np.flatnonzero(goes[:, k]), share) for k, share in enumerate(shares)]
                shape = (len(goes), *shares[local].shape[1:])
                total = add(shape, shares[local].dtype, (), terms)
                if node != self.node:
                    come = np.empty((len(parts[node].token), *shape[1:]), total.dtype)
                    self._wire.receive(self.sources[node], come)
                    self._wire.send(self.sources[node], total)
                    total = come
                sums.append(total)
            back.append(sums)
        self._wire.wait("combine", "rows", PATIENCE_S)
        # Of its own node a rank has added all its tokens: those that no rank here got are left out.
        for sums in back:
            sums[self.node] = sums[self.node][parts[self.node].token]
        return back

    def _of_mates(
        self, array: NDArray[Any], goes: NDArray[np.bool_], bounds: list[int], node: int
    ) -> list[NDArray[Any]]:
        """What each rank of this node has of one source: this rank's is there, others' is room."""
        source = self.sources[node]
        return [
            array[bounds[source] : bounds[source + 1]]
            if mate == self._rank
            else np.empty((int(goes[:, number].sum()), *array.shape[1:]), array.dtype)
            for number, mate in enumerate(self.mates)
        ]
