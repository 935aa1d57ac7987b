"""Ranks as threads, which agree on the least of their numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List


def together(rank: Callable[[int, Callable[[int], int]], Any], ranks: int) -> List[Any]:
    """Run `rank(number, least)` in one thread per rank and return the results; all call `least` equally often."""
    barrier, given = threading.Barrier(ranks, timeout=20), [0] * ranks

    def run(number: int) -> Any:
        def least(own: int) -> int:
            given[number] = own
            barrier.wait()
            least = min(given)
            barrier.wait()
            return least

        return rank(number, least)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))
