"""Ranks as threads, which agree on the least of their numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor


def together(rank, ranks):
    """Run `rank(number, least)` in one thread per rank and return the results; all call `least` equally often."""
    barrier = threading.Barrier(ranks, timeout=20)
    given = [0] * ranks

    def run(number):
        def least(own):
            given[number] = own
            barrier.wait()
            least = min(given)
            barrier.wait()
            return least

        return rank(number, least)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))
