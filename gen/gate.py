"""How coroutines of one replica share its engine and its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Gate:
    """Shared and exclusive passage for the requests of one engine.

    A sample whose states were bad is done once more with nothing else in the batch. Who asks for exclusive passage
    goes before later shared requests, so that it is not starved.
    """

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._num_shared = 0
        self._exclusive = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._condition:
            await self._condition.wait_for(lambda: not self._exclusive)
            self._num_shared += 1
        try:
            yield
        finally:
            async with self._condition:
                self._num_shared -= 1
                self._condition.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._condition:
            await self._condition.wait_for(lambda: not self._exclusive)
            self._exclusive = True
            try:
                await self._condition.wait_for(lambda: self._num_shared == 0)
            except BaseException:
                self._exclusive = False
                self._condition.notify_all()
                raise
        try:
            yield
        finally:
            async with self._condition:
                self._exclusive = False
                self._condition.notify_all()


class Turns:
    """Lets the event loop go on after each piece of work that blocks it: a unit may have thousands of prompts to
    tokenise, and the engine's answers and other units wait for the loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """The result of `work`, when it is its turn."""
        async with self._lock:
            result = work()
            await asyncio.sleep(0)
            return result
