"""Work done ahead of its consumer by a few threads, in order and within a bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(
    work: Callable[[Item], Result], items: Iterable[Item], *, depth: int, threads: int = 2
) -> Iterator[Result]:
    """`work(item)` for each item, in order; at most `depth` results are worked on or waiting at a time.

    With `depth` 0, or a single item, the work is done in the caller's thread when it asks. An error is raised at its
    item's turn. Leaving the loop early cancels what has not begun and waits for what has.
    """
    first = list(islice(iterator := iter(items), 2))
    if depth < 1 or len(first) < 2:
        yield from map(work, chain(first, iterator))
        return
    pool = ThreadPoolExecutor(min(threads, depth), thread_name_prefix="headrace-prefetch")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in chain(first, iterator):
            waiting.append(pool.submit(work, item))
            if len(waiting) >= depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
