"""How many requests are in the engine at once: bounded by host memory for their rows, fewer when memory runs short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Requests that must finish without another shortage before one more is admitted again.
RECOVERY_REQUESTS = 64


class Admission:
    """Admits requests while their states fit a byte budget and their number a limit.

    A request reserves the rows of the longest answer it may give, so that the budget holds whatever the answers turn
    out to be. `tighten` halves the number of requests without a restart; it recovers one by one.
    """

    def __init__(self, budget_bytes: int, max_requests: int) -> None:
        assert budget_bytes > 0
        assert max_requests > 0
        self._budget_bytes = budget_bytes
        self._max_requests = max_requests
        self._limit = max_requests
        self._condition = asyncio.Condition()
        self._num_requests = 0
        self._bytes = 0
        self._finished = 0
        self.num_tightened = 0

    @property
    def limit(self) -> int:
        """Requests that may be in the engine now."""
        return self._limit

    def fits(self, nbytes: int) -> bool:
        """Whether a request of this size could be admitted at all."""
        return nbytes <= self._budget_bytes

    @asynccontextmanager
    async def admit(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for room. The caller has checked `fits`."""
        assert self.fits(nbytes)
        async with self._condition:
            await self._condition.wait_for(lambda: self._has_room(nbytes))
            self._num_requests += 1
            self._bytes += nbytes
        try:
            yield
        finally:
            async with self._condition:
                self._num_requests -= 1
                self._bytes -= nbytes
                self._recover()
                self._condition.notify_all()

    def tighten(self) -> bool:
        """Halve the requests that are admitted. False when there is nothing to give up.

        That is so with one request or none, and until those that are over the limit of the last time have left.
        """
        if self._num_requests <= 1 or self._num_requests > self._limit:
            return False
        self._limit = self._num_requests // 2
        self._finished = 0
        self.num_tightened += 1
        return True

    def _has_room(self, nbytes: int) -> bool:
        return self._num_requests < self._limit and self._bytes + nbytes <= self._budget_bytes

    def _recover(self) -> None:
        self._finished += 1
        if self._limit < self._max_requests and self._finished >= RECOVERY_REQUESTS:
            self._finished = 0
            self._limit += 1
