"""Room for so many requests at once: who comes when there is none waits, in order of coming.

Unlike ``asyncio.Semaphore`` it may be used from many event loops, and left from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

_NO_BOUND = 2**62
"""Room for everybody."""


class Room:
    """Room for ``size`` at once."""

    def __init__(self, size: int) -> None:
        """Nobody is in it."""
        self._lock = threading.Lock()
        self._num_free = size
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @property
    def num_free(self) -> int:
        """Places that nobody has."""
        return self._num_free

    def open(self) -> None:
        """Let in whoever waits, and whoever comes."""
        with self._lock:
            self._num_free += _NO_BOUND
            waiting, self._waiting = self._waiting, deque()
            self._num_free -= len(waiting)
        for loop, place in waiting:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_call_in, place)

    async def enter(self) -> None:
        """Take a place, once there is one."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._num_free > 0 and not self._waiting:
                self._num_free -= 1
                return
            place: asyncio.Future[None] = loop.create_future()
            entry = loop, place
            self._waiting.append(entry)
        try:
            await place
        except BaseException:
            with self._lock:
                is_waiting = entry in self._waiting
                if is_waiting:
                    self._waiting.remove(entry)
            # Called in while it was being called off: the place is somebody else's.
            if not is_waiting:
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back; from any thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_free += 1
                    return
                loop, place = self._waiting.popleft()
            # Where its loop is gone, so is whoever waited.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_call_in, place)
                return


def _call_in(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)
