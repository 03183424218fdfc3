"""Stop strings and text by token: found wherever they lie, held back no longer than needed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.output_text import OutputText
from tests.folders import make_tokenizer


@functools.cache
def tokenizer() -> Any:
    return make_tokenizer()


def text_of(stops: tuple[str, ...] = (), **options: Any) -> OutputText:
    return OutputText(Detokenizer(tokenizer()), stops, by_token=True, **options)


def run(text: OutputText, ids: list[int], sizes: list[int]) -> tuple[str, int, str | None]:
    """Add tokens in steps of these sizes; the text, the tokens taken, and the stop string."""
    out, taken, place = "", 0, 0
    for size in [*sizes, len(ids)]:
        span = ids[place : place + size]
        place += size
        added = text.add(span, 0)
        taken += added.num_tokens
        out += "".join(piece for piece, _ in text.take())
        if added.stop is not None:
            text.end(is_stopped=True)
            out += "".join(piece for piece, _ in text.take())
            return out, taken, added.stop
    text.end()
    return out + "".join(piece for piece, _ in text.take()), taken, None


def slowly(
    ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int
) -> tuple[str, int, str | None]:
    """Token by token, the whole text decoded anew each time."""

    def decode(n: int) -> str:
        return Detokenizer(tokenizer()).push(ids[:n]) if n else ""

    first = len(decode(max(0, min_tokens - 1)))
    for num in range(max(1, min_tokens), len(ids) + 1):
        text = decode(num)
        found = [(text.find(stop, first), len(stop), stop) for stop in stops]
        found = [entry for entry in found if entry[0] >= 0]
        if found:
            place, length, stop = min(found)
            return text[: place + length if include else place], num, stop
    detokenizer = Detokenizer(tokenizer())
    return detokenizer.push(ids) + detokenizer.flush(), len(ids), None


TEXT = "one two three four, five: é ü 😀 six\n\nseven eight one two nine"


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), max_size=30),
    stops=st.lists(
        st.one_of(
            st.sampled_from(["three", "ree fo", "\n\n", "😀", "é ü", "nine", "zebra", "e", " "]),
            st.integers(0, len(TEXT) - 2).flatmap(
                lambda a: st.integers(a + 1, len(TEXT)).map(lambda b: TEXT[a:b])
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_stops_are_those_of_a_slow_search(
    sizes: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    ids = tokenizer()(TEXT)["input_ids"]
    found = run(text_of(tuple(stops), include_stop=include, min_tokens=min_tokens), ids, sizes)
    assert found == slowly(ids, tuple(stops), include, min_tokens)


def test_what_may_be_a_stop_is_held_back_and_let_go() -> None:
    ids = tokenizer()("one two three one two four")["input_ids"]
    text = text_of(("two four",))
    shown = []
    for token in ids:
        added = text.add([token], 0)
        shown.append("".join(piece for piece, _ in text.take()))
        if added.stop:
            break
    assert "".join(shown) == "one two three one "
    # Nothing that a reader has seen is ever taken back, and nothing is held without need.
    assert any("two three" in "".join(shown[: n + 1]) for n in range(len(shown)))


def test_pieces_say_who_drafted_them() -> None:
    ids = tokenizer()("one two three four")["input_ids"]
    text = text_of()
    text.add(ids, 2)
    marks = [is_drafted for _, is_drafted in text.take()]
    assert marks[:2] == [True, True] and not any(marks[2:])


@pytest.mark.parametrize("seed", range(5))
def test_without_stops_steps_may_be_added_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, len(tokenizer()), 60).tolist()
    whole = OutputText(Detokenizer(tokenizer()))
    sizes = rng.integers(1, 9, 20).tolist()
    assert run(whole, ids, sizes)[0] == run(text_of(), ids, sizes)[0]
