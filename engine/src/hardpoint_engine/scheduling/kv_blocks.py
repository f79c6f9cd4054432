"""The KV blocks of each request: found in the prefix cache, added as it grows, named when full,
given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from hardpoint_engine.request import Request
from hardpoint_engine.scheduling.block_pool import BlockAccountError, BlockPool
from hardpoint_engine.scheduling.prefix_cache import PrefixCache, chain_root, extend_chain


class KVBlocks:
    """What the scheduler asks about blocks.

    ``block_size`` is in tokens. ``identity`` names the model whose cache this is. ``weight_epoch``
    is part of every name: raising it makes all earlier contents unfindable.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_caching: bool = True,
        identity: Sequence[str] = (),
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix = PrefixCache(pool) if prefix_caching else None
        self.identity = tuple(identity)
        self.weight_epoch = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def find(self, request: Request) -> list[int]:
        """Return cached blocks for the beginning of a request that holds none; at least its last
        token is left to compute, so that there is something to sample from.
        """
        if self.prefix is None or not request.reads_prefix_cache:
            return []
        limit = (len(request.tokens) - 1) // self.block_size
        self._begin_chain(request)
        self._name(request, limit)
        return self.prefix.match(islice(request.names, limit))

    def fits(self, num_tokens: int, found: Sequence[int], headroom: int) -> bool:
        """Whether a request of ``num_tokens`` known tokens fits beside the running ones, given the
        blocks ``found`` for it, with ``headroom`` blocks to spare.
        """
        pool = self.pool
        revived = sum(1 for block in found if not pool.is_held(block))
        wanted = self.blocks_for(num_tokens) - len(found) + revived
        return wanted + headroom <= pool.num_free

    def adopt(self, request: Request, found: Sequence[int]) -> None:
        """Give a request that holds no blocks those ``found`` for it."""
        self._begin_chain(request)
        self.pool.share(found)
        request.blocks = list(found)
        request.capacity = request.num_computed = len(found) * self.block_size
        request.num_named = len(found)
        if self.prefix is not None and request.reads_prefix_cache and not request.num_preemptions:
            self.prefix.stats.queried_tokens += len(request.tokens)
            self.prefix.stats.hit_tokens += request.num_computed

    def cover(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Add blocks until ``request`` can hold ``num_tokens`` positions; return the new ids, or
        None if there are too few free (nothing is added then).
        """
        wanted = self.blocks_for(num_tokens) - len(request.blocks)
        if wanted <= 0:
            return ()
        if wanted > self.pool.num_free:
            return None
        added = self.pool.allocate(wanted)
        request.blocks += added
        request.capacity = len(request.blocks) * self.block_size
        return tuple(added)

    def name_full(self, request: Request) -> None:
        """Make the computed full blocks of ``request`` findable. Called when a step has committed
        and ``num_computed`` has reached another block's end.
        """
        full = request.num_computed // self.block_size
        if self.prefix is not None and request.weight_epoch == self.weight_epoch:
            self._name(request, full)
            for index in range(request.num_named, full):
                self.prefix.store(request.names[index], request.blocks[index])
        request.num_named = full

    def release(self, request: Request) -> None:
        """Take all blocks from ``request``; of its cached ones the last is recycled first."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.capacity = request.num_computed = request.num_named = 0

    def clear_cache(self) -> None:
        """Make all contents unfindable (they are stale or gone)."""
        if self.prefix is not None:
            self.prefix.clear()

    def _begin_chain(self, request: Request) -> None:
        if request.root is None or request.weight_epoch != self.weight_epoch:
            request.weight_epoch = self.weight_epoch
            request.names = []
            request.root = chain_root((*self.identity, self.weight_epoch, *request.key_parts))

    def _name(self, request: Request, num_blocks: int) -> None:
        if request.root is None:
            raise BlockAccountError(f"request {request.req_id} was never admitted")
        extend_chain(request.names, request.root, request.tokens, self.block_size, num_blocks)
