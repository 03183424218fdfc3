"""The engine for asyncio: streams, back-pressure, cancelling, failing, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, AsyncEngine, SamplingParams, SpeculationParams
from foredraft.engine.room import Room
from foredraft.errors import EngineClosedError, InvalidRequestError
from foredraft.model.loader import prepare_target
from tests.folders import CONTEXT, make_model, make_tokenizer

PROMPTS = [
    "one two three one two three",
    "A letter to the harbour",
    "def add(a, b):",
    "seven",
    "one two three four five six",
]


@pytest.fixture(scope="module")
def target() -> Any:
    return prepare_target("tiny", make_model(), make_tokenizer(), CONTEXT)


def new_llm(target: Any, **options: Any) -> LLM:
    return LLM(target=target, kv_cache_gb=0.1, **options)


def sampling(index: int, **more: Any) -> SamplingParams:
    options = {"max_tokens": 25, "ignore_eos": True, **more}
    return SamplingParams(temperature=1.0, seed=index, **options)


@pytest.fixture(scope="module")
def texts(target: Any) -> list[str]:
    llm = new_llm(target)
    plain = SpeculationParams("none")
    return [llm.generate(p, sampling(i), plain)[0].text for i, p in enumerate(PROMPTS)]


def go(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_streams_and_outputs_are_plain_decodings(target: Any, texts: list[str]) -> None:
    async def read(engine: AsyncEngine, index: int) -> str:
        stream = await engine.stream(PROMPTS[index], sampling(index))
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].output is not None
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.text
        return chunks[-1].output.text

    async def main() -> None:
        async with AsyncEngine(new_llm(target, max_num_requests=3)) as engine:
            found = await asyncio.gather(*(read(engine, i) for i in range(len(PROMPTS))))
            assert list(found) == texts
            outputs = await asyncio.gather(
                *(
                    engine.generate(p, sampling(i), SpeculationParams("auto"))
                    for i, p in enumerate(PROMPTS)
                )
            )
            assert [output.text for output in outputs] == texts
        assert not engine._thread.is_alive()

    go(main())


def test_closing_a_stream_ends_its_request(target: Any, texts: list[str]) -> None:
    async def main() -> None:
        llm = new_llm(target)
        async with AsyncEngine(llm) as engine:
            stream = await engine.stream(PROMPTS[0], sampling(0, max_tokens=200))
            await anext(stream)
            await stream.aclose()
            dropped = await engine.stream(PROMPTS[1], sampling(1, max_tokens=200))
            await anext(dropped)
            del dropped
            gc.collect()
            output = await engine.generate(PROMPTS[2], sampling(2))
            assert output.text == texts[2]
            for _ in range(500):
                if not llm.engine.has_work and not llm._runs:
                    break
                await asyncio.sleep(0.01)
            assert not llm.engine.has_work and not llm._runs
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    go(main())


def test_a_slow_reader_pauses_itself_alone(target: Any, texts: list[str]) -> None:
    async def main() -> None:
        llm = new_llm(target, max_num_requests=1)
        async with AsyncEngine(llm, max_unread=3) as engine:
            slow = await engine.stream(PROMPTS[0], sampling(0), SpeculationParams("none"))
            outputs = [await engine.generate(PROMPTS[i], sampling(i)) for i in (1, 2)]
            assert [output.text for output in outputs] == texts[1:3]
            await asyncio.sleep(0.05)
            assert len(slow._channel.unread) <= 8  # bounded, whatever the text's length
            text = "".join([chunk.text async for chunk in slow])
            assert text == texts[0]

    go(main())


def test_no_more_than_so_many_are_let_in(target: Any, texts: list[str]) -> None:
    async def main() -> None:
        async with AsyncEngine(new_llm(target), max_pending=2) as engine:
            first = await engine.stream(PROMPTS[0], sampling(0))
            await engine.stream(PROMPTS[1], sampling(1))
            third = asyncio.create_task(engine.generate(PROMPTS[2], sampling(2)))
            await asyncio.sleep(0.05)
            assert not third.done()
            await first.aclose()
            assert (await third).text == texts[2]

    go(main())


def test_bad_requests_are_refused_and_hurt_nobody(target: Any, texts: list[str]) -> None:
    def broken(input_ids: Any, scores: Any) -> Any:
        raise RuntimeError("mine alone")

    async def main() -> None:
        async with AsyncEngine(new_llm(target)) as engine:
            good = asyncio.create_task(engine.generate(PROMPTS[0], sampling(0)))
            with pytest.raises(InvalidRequestError, match="empty"):
                await engine.generate("")
            with pytest.raises(InvalidRequestError, match="stream has one"):
                await engine.stream("one", SamplingParams(n=2))
            output = await engine.generate("one", SamplingParams(logits_processors=(broken,)))
            assert output.finish_reason == "error" and "mine alone" in str(output.error)
            late = await engine.generate(PROMPTS[1], sampling(1), deadline_s=1e-9)
            assert late.finish_reason == "deadline"
            assert (await good).text == texts[0]

    go(main())


def test_a_step_that_fails_ends_those_in_it_and_the_engine_goes_on(
    target: Any, texts: list[str]
) -> None:
    async def main() -> None:
        llm = new_llm(target)
        async with AsyncEngine(llm) as engine:
            real, calls = llm.engine.runner.forward, []

            def fails_once(*args: Any) -> Any:
                calls.append(1)
                if len(calls) == 5:
                    raise RuntimeError("a kernel failed")
                return real(*args)

            llm.engine.runner.forward = fails_once  # type: ignore[method-assign]
            output = await engine.generate(PROMPTS[0], sampling(0), SpeculationParams("none"))
            assert output.finish_reason == "error" and "a kernel failed" in str(output.error)
            assert 0 < len(output.token_ids) < 25 and texts[0].startswith(output.text)
            assert (await engine.generate(PROMPTS[1], sampling(1))).text == texts[1]

    go(main())


def test_closing_lets_requests_end_or_ends_them_with_what_they_have(
    target: Any, texts: list[str]
) -> None:
    async def main() -> None:
        for drain in (True, False):
            engine = AsyncEngine(new_llm(target))
            streams = [await engine.stream(PROMPTS[i], sampling(i)) for i in (0, 1)]
            firsts = [await anext(stream) for stream in streams]
            await engine.aclose(drain=drain)
            for index, stream in enumerate(streams):
                chunks = [firsts[index]] + [chunk async for chunk in stream]
                output = chunks[-1].output
                assert output is not None
                assert output.text == "".join(chunk.text for chunk in chunks)
                assert texts[index].startswith(output.text)
                assert output.finish_reason in (("length",) if drain else ("abort", "length"))
                assert drain is False or output.text == texts[index]
            with pytest.raises(EngineClosedError):
                await engine.stream(PROMPTS[0])
            await engine.aclose()

    go(main())


def test_closing_saves_what_drafters_keep(target: Any, tmp_path: Path) -> None:
    store = tmp_path / "texts.npz"

    async def main() -> None:
        llm = new_llm(target, drafter_options={"suffix": {"store": str(store)}})
        async with AsyncEngine(llm) as engine:
            await engine.generate(PROMPTS[0], sampling(0), SpeculationParams("suffix"))

    go(main())
    assert store.exists()


def test_a_storm_of_cancels_leaves_nothing(target: Any) -> None:
    async def one(engine: AsyncEngine, index: int) -> None:
        stream = await engine.stream(PROMPTS[index % len(PROMPTS)], sampling(index))
        for _ in range(index % 4):
            await anext(stream)
        await stream.aclose()

    async def main() -> None:
        llm = new_llm(target, max_num_requests=4)
        async with AsyncEngine(llm, max_pending=40) as engine:
            tasks = [asyncio.create_task(one(engine, index)) for index in range(200)]
            for index, task in enumerate(tasks):
                if index % 7 == 0:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        scheduler = llm.engine.scheduler
        assert not scheduler.request_ids
        scheduler.drop_prefixes()
        assert llm.engine.cache.bytes_in_use == 0
        assert llm.engine.cache.num_free_slots == llm.engine.cache.num_slots

    go(main())


@pytest.mark.parametrize("options", [{"max_pending": 0}, {"max_unread": True}])
def test_bad_options(target: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        AsyncEngine(new_llm(target), **options)


# ------------------------------------------------------------------ nobody hangs, whoever stops


def test_a_stream_that_is_held_but_not_read_keeps_nobody_from_closing(
    target: Any, texts: list[str]
) -> None:
    """The one who closes may be the only one who could read: nobody pauses any more."""

    async def main() -> None:
        async with AsyncEngine(new_llm(target), max_unread=4) as engine:
            stream = await engine.stream(PROMPTS[0], sampling(0))
            async for _ in stream:
                break
            while not stream._channel.is_paused:
                await asyncio.sleep(0.01)
        rest = [chunk async for chunk in stream]
        assert rest[-1].output is not None and rest[-1].output.text == texts[0]

    go(main())


def test_deadlines_hold_while_everybody_is_paused(target: Any) -> None:
    async def main() -> None:
        async with AsyncEngine(new_llm(target), max_unread=4) as engine:
            stream = await engine.stream(PROMPTS[0], sampling(0, max_tokens=200), deadline_s=0.4)
            await asyncio.sleep(1.0)
            assert not engine._channels, "its time is up, read or not"
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].output is not None
            assert chunks[-1].output.finish_reason == "deadline"

    go(main())


def test_a_loop_that_is_gone_leaves_nothing_behind(target: Any, texts: list[str]) -> None:
    engine = AsyncEngine(new_llm(target), max_unread=4, max_pending=1)

    async def leave() -> Any:
        stream = await engine.stream(PROMPTS[0], sampling(0, max_tokens=200))
        while not stream._channel.is_paused:
            await asyncio.sleep(0.01)
        return stream

    stream = asyncio.run(leave())
    del stream
    gc.collect()

    async def come() -> None:
        assert (await engine.generate(PROMPTS[1], sampling(1))).text == texts[1]
        assert engine._room.num_free == 1
        await engine.aclose()

    go(come())


def test_the_last_chunk_gives_the_place_back(target: Any) -> None:
    async def main() -> None:
        async with AsyncEngine(new_llm(target), max_pending=1) as engine:
            stream = await engine.stream(PROMPTS[0], sampling(0, max_tokens=3))
            async for chunk in stream:
                if chunk.output is not None:
                    break
            other = await asyncio.wait_for(engine.stream(PROMPTS[1], sampling(1)), 20)
            assert [chunk async for chunk in other]
            await stream.aclose()
            assert engine._room.num_free == 1

    go(main())


def test_askers_of_many_loops(target: Any, texts: list[str]) -> None:
    """Each in a thread and a loop of its own, with room for one at a time."""
    engine = AsyncEngine(new_llm(target), max_pending=1)
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        async def main() -> None:
            for _ in range(3):
                output = await engine.generate(PROMPTS[index], sampling(index))
                found[index] = output.text

        asyncio.run(asyncio.wait_for(main(), 60))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict(enumerate(texts[:4]))
    go(engine.aclose())


def test_places_survive_those_who_give_up_waiting() -> None:
    async def main() -> None:
        room = Room(1)
        await room.enter()
        waiting = [asyncio.create_task(room.enter()) for _ in range(6)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        room.leave()
        waiting[1].cancel()  # it may have been called in just now
        await asyncio.sleep(0.01)
        for task in waiting[2:]:
            await task
            room.leave()
        assert room.num_free == 1

    go(main())


def test_a_scheduler_that_fails_with_nobody_running_ends_those_who_wait(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        llm = new_llm(target)
        calls = 0
        schedule = llm.engine.scheduler.schedule

        def fail() -> Any:
            nonlocal calls
            calls += 1
            raise RuntimeError("no plan")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
        async with AsyncEngine(llm) as engine:
            output = await engine.generate(PROMPTS[0], sampling(0))
            assert output.finish_reason == "error" and "no plan" in str(output.error)
            assert calls < 5
            monkeypatch.setattr(llm.engine.scheduler, "schedule", schedule)
            assert (await engine.generate(PROMPTS[0], sampling(0))).finish_reason == "length"

    go(main())


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("str fails")


def _raise(error: BaseException) -> Any:
    raise error


HARMFUL = {
    "needs gradients": lambda ids, scores: scores + torch.nn.Parameter(torch.zeros(1)),
    "cannot be said": lambda ids, scores: _raise(UnsayableError()),
    "leaves": lambda ids, scores: _raise(SystemExit(3)),
    "is cancelled": lambda ids, scores: _raise(asyncio.CancelledError()),
    "is closed": lambda ids, scores: _raise(GeneratorExit()),
    "too large": lambda ids, scores: scores.double() * 1e300,
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_processor_hurts_nobody_else(target: Any, texts: list[str], harm: str) -> None:
    async def main() -> None:
        async with AsyncEngine(new_llm(target)) as engine:
            bad = sampling(0, logits_processors=(HARMFUL[harm],))
            found = await asyncio.gather(
                engine.generate(PROMPTS[0], bad), engine.generate(PROMPTS[1], sampling(1))
            )
            assert found[1].text == texts[1]
            if harm == "needs gradients":  # which is no harm
                assert found[0].text == texts[0]
            else:
                assert found[0].finish_reason == "error"
                assert "a logits processor failed" in str(found[0].error)
            again = await engine.generate(PROMPTS[2], sampling(2))
            assert again.text == texts[2]

    go(main())


def test_several_texts_of_a_prompt(target: Any) -> None:
    several = sampling(7, n=2, best_of=3)
    expected = new_llm(target).generate(PROMPTS[0], several)[0]

    async def main() -> None:
        async with AsyncEngine(new_llm(target)) as engine:
            output = await engine.generate(PROMPTS[0], several)
            assert [one.text for one in output.samples] == [one.text for one in expected.samples]
            assert len(output.samples) == 2 and output.text == expected.text
            with pytest.raises(InvalidRequestError):
                await engine.generate("", several)
            assert not engine._channels

    go(main())


def test_several_texts_never_wait_for_each_others_places(target: Any) -> None:
    """With room for one at a time, and two who ask for three texts each."""

    async def main() -> None:
        async with AsyncEngine(new_llm(target), max_pending=1, max_unread=4) as engine:
            several = [sampling(seed, n=3, max_tokens=12) for seed in (1, 2)]
            found = await asyncio.gather(*(engine.generate(PROMPTS[0], one) for one in several))
            assert [len(output.samples) for output in found] == [3, 3]
            assert engine._room.num_free == 1

    go(main())


def test_a_stream_may_be_dropped_in_the_midst_of_anything(target: Any) -> None:
    """The collector runs wherever it likes, in whoever holds a lock, too."""

    async def main() -> None:
        async with AsyncEngine(new_llm(target), max_pending=2) as engine:
            stream = await engine.stream(PROMPTS[0], sampling(0, max_tokens=200))
            with engine._room._lock:
                del stream
                gc.collect()
            while engine._room.num_free != 2:
                await asyncio.sleep(0.01)

    go(main())


def test_who_waits_to_be_let_in_is_told_when_the_engine_stops(target: Any) -> None:
    async def main() -> None:
        llm = new_llm(target)
        engine = AsyncEngine(llm, max_pending=1, max_unread=4)
        stream = await engine.stream(PROMPTS[0], sampling(0, max_tokens=200))
        waiting = asyncio.create_task(engine.stream(PROMPTS[1], sampling(1)))
        await asyncio.sleep(0.05)
        await engine.aclose(drain=False)  # nobody reads the first, so its place does not come back
        with pytest.raises(EngineClosedError):
            await waiting
        await stream.aclose()

    go(main())
