"""Many askers of one engine: streams for asyncio, while one thread owns the model.

Whatever touches the engine runs in that thread; what comes of it is handed to the event loop of
whoever asked. A reader that falls behind makes its own request pause, and nobody else's: where
others wait for its place, they get it, and it goes on later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from foredraft.engine.llm import LLM, Prompt, best_of, each_sample
from foredraft.engine.outputs import RequestOutput, Run, StreamChunk
from foredraft.engine.room import Room
from foredraft.errors import EngineClosedError, InvalidRequestError, said
from foredraft.params import SamplingParams, SpeculationParams

_LOG = logging.getLogger("foredraft")

_LONGEST_WAIT_S = 3600.0
"""So that a far deadline is a number that a queue can wait for."""


class AsyncEngine:
    """Generates for many at once, from asyncio.

    Args:
        llm: A loaded model; ``None`` loads one with ``options``. The engine owns it from here on.
        max_pending: Most requests that are here at once; who comes then waits to be let in.
        max_unread: Chunks that a stream may hold unread before its request pauses.
        **options: As for :class:`LLM`.

    Raises:
        ModelLoadError: The model cannot be loaded.
        ConfigError: An option is unknown or cannot be honoured.

    Example:
        >>> async with AsyncEngine(model="default") as engine:  # doctest: +SKIP
        ...     async for chunk in await engine.stream("The capital of France is"):
        ...         print(chunk.text, end="")
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        max_pending: int = 1024,
        max_unread: int = 64,
        **options: Any,
    ) -> None:
        """Load the model and start the thread that owns it."""
        for name, value in (("max_pending", max_pending), ("max_unread", max_unread)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(
                    f"{name} is {value!r}; allowed is an integer of 1 or more."
                )
        self._llm = LLM(**options) if llm is None else llm
        self.max_unread = max_unread
        self._room = Room(max_pending)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._channels: dict[str, _Channel] = {}
        self._is_closing = False
        self._has_stopped = False
        self._closed_with: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="foredraft-engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncStream:
        """Queue a request; return its stream of chunks, the last of which has the output.

        Args:
            prompt: A string, token ids, or chat messages.
            sampling: How tokens are picked.
            speculation: How it speculates.
            priority: The lower, the sooner it runs.
            deadline_s: Seconds after which it ends with what it has written.

        Raises:
            InvalidRequestError: The request cannot be honoured.
            EngineClosedError: The engine is closing.
        """
        self._check_open()
        await self._room.enter()
        stream = AsyncStream(self, asyncio.get_running_loop())
        try:
            self._check_open()
            await stream._open(
                lambda: self._llm.start(
                    prompt,
                    sampling or SamplingParams(),
                    speculation or SpeculationParams(),
                    priority=priority,
                    deadline_s=deadline_s,
                )
            )
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> RequestOutput:
        """Generate to the end; arguments and errors as for :meth:`stream`.

        With ``n`` or ``best_of`` above 1 each text is a request of its own; all of them, or none.
        """
        wanted = sampling or SamplingParams()

        async def one_text(one: SamplingParams) -> RequestOutput:
            stream = await self.stream(
                prompt, one, speculation, priority=priority, deadline_s=deadline_s
            )
            try:
                return await _finished(stream)
            finally:
                await stream.aclose()

        # Side by side: one that waits to be let in must not hold up those that are here.
        tasks = [asyncio.ensure_future(one_text(one)) for one in each_sample(wanted)]
        try:
            outputs = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return best_of(outputs, wanted)

    async def aclose(self, *, drain: bool = True) -> None:
        """Let no more requests in, end those that are here, and let drafters save what they keep.

        Args:
            drain: Let those that are here write to their end; else they end now, each with what it
                has written (``finish_reason`` is ``abort``).

        Raises:
            StoreError: What drafters keep cannot be saved.
        """
        self._is_closing = True
        # From here on nobody pauses: who reads a stream may be the one who waits for this.
        self._inbox.put(self._resume_all if drain else self._end_all)
        await asyncio.to_thread(self._thread.join)
        if self._closed_with is not None:
            raise self._closed_with

    async def __aenter__(self) -> AsyncEngine:
        """Use as a context, which closes it."""
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        """Close; at once where the body raised."""
        await self.aclose(drain=kind is None)

    def _check_open(self) -> None:
        if self._is_closing:
            raise EngineClosedError("the engine is closing; it takes no more requests.")

    # All below runs in the engine's own thread.

    def _work(self) -> None:
        try:
            while self._channels or not self._is_closing or not self._inbox.empty():
                self._read_inbox()
                if self._channels and not self._step():
                    self._wait()
            self._llm.close()
        except BaseException as error:  # noqa: BLE001 - whoever closes the engine is told
            self._closed_with = error
        finally:
            self._has_stopped = self._is_closing = True
            while not self._inbox.empty():
                self._inbox.get()()
            for channel in list(self._channels.values()):
                channel.post(EngineClosedError("the engine's thread has stopped"))
            self._room.open()  # who waits to be let in is let in, and told

    def _wait(self) -> None:
        """Everybody is paused: only a reader can change that, or a deadline."""
        deadline = self._llm.engine.scheduler.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=None if timeout is None else min(timeout, _LONGEST_WAIT_S))()

    def _read_inbox(self) -> None:
        """Do what was asked for; where nobody runs, wait for somebody to ask."""
        if not self._channels and not self._is_closing:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _step(self) -> bool:
        """Run a step and hand out what came of it; whether anybody ran."""
        try:
            is_running = self._llm.step()
        except Exception as error:  # noqa: BLE001 - those who asked are told
            # Whose fault it was is not known, and what the step left behind may be half done.
            _LOG.exception("a step of the engine failed; the requests in it end")
            blamed = list(self._llm.engine.scheduler.running) or list(self._channels)
            for name in blamed:  # where nobody runs, nobody would ever
                self._end(name, f"the step failed ({said(error)})")
            return True
        for name, channel in list(self._channels.items()):
            channel.hand_out()
            if channel.run is not None and channel.run.output is not None:
                del self._channels[name]
                self._llm.drop(channel.run)
        return is_running

    def _open(self, channel: _Channel, start: Callable[[], Run]) -> None:
        if self._has_stopped:
            channel.post(EngineClosedError("the engine's thread has stopped"))
            return
        try:
            run = start()
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            channel.post(error)
            return
        channel.begin(run)
        self._channels[run.request_id] = channel

    def _cancel(self, channel: _Channel) -> None:
        if channel.run is None:
            return
        if self._channels.pop(channel.run.request_id, None) is not None:
            self._llm.drop(channel.run)

    def _resume_all(self) -> None:
        for channel in self._channels.values():
            channel.resume()

    def _end_all(self) -> None:
        for name in list(self._channels):
            self._end(name, None)

    def _end(self, name: str, error: str | None) -> None:
        """End a request with what it has written."""
        channel = self._channels.pop(name, None)
        if channel is None or channel.run is None:
            return
        self._llm.end(channel.run, error)
        channel.hand_out()


async def _finished(stream: AsyncStream) -> RequestOutput:
    """The output of a stream that is read to its end."""
    async for chunk in stream:
        if chunk.output is not None:
            return chunk.output
    raise EngineClosedError("the engine closed before the request had ended")


class AsyncStream(AsyncIterator[StreamChunk]):
    """One request's chunks; made by :meth:`AsyncEngine.stream`.

    Closing it, or dropping it, ends the request.
    """

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the engine."""
        self._engine = engine
        self._channel = _Channel(engine, loop)
        self._is_closed = False
        self._has_left = False

    @property
    def request_id(self) -> str:
        """Its name in the engine."""
        assert self._channel.run is not None
        return self._channel.run.request_id

    async def __anext__(self) -> StreamChunk:
        """Wait for the next chunk."""
        channel = self._channel
        while self._is_closed or not channel.unread:  # what comes after closing is nobody's
            if self._is_closed or channel.has_ended:
                await self.aclose()
                raise StopAsyncIteration
            channel.has_news.clear()
            await channel.has_news.wait()
        item = channel.unread.popleft()
        if channel.is_paused and 2 * len(channel.unread) <= self._engine.max_unread:
            channel.is_paused = False
            self._engine._inbox.put(channel.resume)
        if isinstance(item, Exception):
            channel.has_ended = True
            await self.aclose()
            raise item
        if item.output is not None:
            channel.has_ended = True
            self._leave()
        return item

    async def aclose(self) -> None:
        """End the request if it still runs; safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._channel.has_news.set()
        self._leave()
        if not self._channel.has_ended:
            self._channel.unread.clear()
            self._channel.cancel()

    def __del__(self) -> None:
        """End a request that nobody can read any more."""
        if not self._is_closed:
            self._is_closed = True
            # This may run anywhere, in the midst of anything: what takes a lock is left to others.
            if not self._has_left:
                self._engine._inbox.put(self._engine._room.leave)
            self._channel.cancel()

    def _leave(self) -> None:
        """Make room for another request, once."""
        if not self._has_left:
            self._has_left = True
            self._engine._room.leave()

    async def _open(self, start: Callable[[], Run]) -> None:
        """Hand the request over, and wait until it is queued or refused."""
        channel, engine = self._channel, self._engine  # not the stream, which may be dropped
        engine._inbox.put(lambda: engine._open(channel, start))
        if not engine._thread.is_alive():
            raise EngineClosedError("the engine's thread has stopped")
        await channel.has_news.wait()
        channel.has_news.clear()
        if channel.unread and isinstance(channel.unread[0], Exception):
            channel.has_ended = True
            raise channel.unread.popleft()  # type: ignore[misc]


class _Channel:
    """What lies between the engine's thread and a stream; the engine does not hold the stream."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.run: Run | None = None
        self.is_paused = False
        self.has_ended = False
        self.unread: deque[StreamChunk | Exception] = deque()
        self.has_news = asyncio.Event()
        self._engine = engine

    def cancel(self) -> None:
        """Call the request off; from any thread."""
        self._engine._inbox.put(lambda: self._engine._cancel(self))

    def _take(self, items: list[StreamChunk | Exception]) -> None:
        """Runs in the event loop."""
        self.unread.extend(items)
        self.has_news.set()

    # All below runs in the engine's own thread.

    def begin(self, run: Run) -> None:
        run.chunks = deque()
        self.run = run
        self.post()

    def hand_out(self) -> None:
        assert self.run is not None and self.run.chunks is not None
        items: list[StreamChunk | Exception] = list(self.run.chunks)
        self.run.chunks.clear()
        if items:
            self.post(*items)
        is_full = len(self.unread) >= self._engine.max_unread
        if is_full and self.run.output is None and not self._engine._is_closing:
            self.is_paused = True
            self._engine._llm.engine.pause(self.run.request_id)

    def resume(self) -> None:
        if self.run is not None and self.run.request_id in self._engine._channels:
            self._engine._llm.engine.resume(self.run.request_id)

    def post(self, *items: StreamChunk | Exception) -> None:
        try:
            self.loop.call_soon_threadsafe(self._take, list(items))
        except RuntimeError:  # its event loop is gone, and with it whoever could read
            self.cancel()
