"""The line of requests that wait to be admitted, ordered by a policy's key."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from infer_lab.request import Request


class WaitingQueue:
    """A priority queue from which any request can be removed: O(log n) for each operation."""

    def __init__(self, key: Callable[[Request], int]) -> None:
        self._key = key
        self._heap: list[tuple[int, int, Request]] = []
        self._members: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be admitted."""
        return (entry[2] for entry in sorted(self._heap) if entry[2] in self._members)

    def push(self, request: Request, arrival: int) -> None:
        """Add a request; arrival decides between equals."""
        heapq.heappush(self._heap, (self._key(request), arrival, request))
        self._members[request] = None

    def peek(self) -> Request:
        """The request that is next."""
        while self._heap[0][2] not in self._members:  # was removed
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        """Remove and return the request that is next."""
        request = self.peek()
        heapq.heappop(self._heap)
        self.discard(request)
        return request

    def discard(self, request: Request) -> None:
        """Remove a request if it is here.

        Its heap entry goes when it comes to the top, or when more than half are such: so what
        has been aborted is not kept alive, and the sweeps cost O(1) for each request removed.
        """
        self._members.pop(request, None)
        if len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)
