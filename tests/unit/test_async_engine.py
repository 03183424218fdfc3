"""The engine for asyncio: streams, back-pressure, cancelling, failing, closing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, AsyncEngine, SamplingParams, SpeculationParams
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
