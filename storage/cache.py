"""A bounded cache that several reading threads share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """The most recently used values up to a total cost.

    A value is loaded once however many threads ask for it at the same time: the first loads, the others wait. A load
    that raises raises in all of them and leaves nothing behind. The newest value is kept even if it alone costs more
    than `max_cost`.
    """

    def __init__(self, load: Callable[[K], V], max_cost: int, cost: Callable[[V], int] = lambda _: 1) -> None:
        self._load = load
        self._cost = cost
        self._max_cost = max_cost
        self._total = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[K, Future[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V:
        """The value of `key`, loaded if it is not held."""
        with self._lock:
            future = self._values.get(key)
            if future is not None:
                self._values.move_to_end(key)
                is_mine = False
            else:
                future = self._values[key] = Future()
                is_mine = True
        if not is_mine:
            return future.result()
        try:
            value = self._load(key)
        except BaseException as error:
            with self._lock:
                self._values.pop(key, None)
            future.set_exception(error)
            raise
        with self._lock:
            self._total += self._cost(value)
            future.set_result(value)
            self._evict(key)
        return value

    def _evict(self, newest: K) -> None:
        for key in list(self._values):
            if self._total <= self._max_cost:
                return
            future = self._values[key]
            if key != newest and future.done():
                self._total -= self._cost(future.result())
                del self._values[key]
