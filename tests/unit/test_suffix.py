"""The suffix drafter: scopes, the shared store, its file, and what a rule may draft from."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.suffix import SuffixConfig, SuffixDrafter
from foredraft.drafters.suffix_store import SuffixStore
from foredraft.errors import ConfigError, StoreError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Budgets, Request, Segment, StepPlan
from tests.tiny import warnings_logged

VOCAB = 1000


class Words:
    """A tokenizer of numbers: every word is its own id."""

    def __init__(self, name: str = "words") -> None:
        self.name = name

    def get_vocab(self) -> dict[str, int]:
        return {self.name: 1}

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def drafter(tokenizer: object = None, **options: object) -> SuffixDrafter:
    context = DrafterContext(VOCAB, 4096, tokenizer)
    return SuffixDrafter(SuffixConfig(**options), context)  # type: ignore[arg-type]


def segment(
    text: list[int], name: str = "r", scope: str = "", rule: str = "walk", prompt_len: int = 1
) -> Segment:
    ids = np.array(text, dtype=np.int64)
    ids.flags.writeable = False
    speculation = SpeculationParams("suffix", 8, rule, suffix_scope=scope)
    request = Request(name, ids[:prompt_len], SamplingParams(), speculation, 0, 512, frozenset())
    return Segment(request, ids, 0, len(ids) - 1, 1, is_decode=True)


def propose(one: SuffixDrafter, *segments: Segment, budget: int = 8) -> list[list[int]]:
    batch = one.propose(StepPlan(segments), Budgets(np.full(len(segments), budget)))
    return [
        batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]].tolist()
        for i in range(len(segments))
    ]


def finish(one: SuffixDrafter, text: list[int], scope: str = "") -> None:
    ended = segment(text, "ended", scope)
    one.finish(ended.request, ended.token_ids)


def test_a_past_response_is_drafted_from() -> None:
    one = drafter()
    assert propose(one, segment([5, 10, 11])) == [[]]
    finish(one, [1, 10, 11, 12, 13, 14])
    (found,) = propose(one, segment([5, 10, 11]))
    assert found[:3] == [12, 13, 14]
    # Its prompt is nobody's response.
    finish(one, [77, 20, 21])
    assert propose(one, segment([5, 77], "other")) == [[]]


def test_scopes_are_kept_apart() -> None:
    """What one tenant was answered is never proposed to another, however well it would fit."""
    one = drafter()
    finish(one, [1, 10, 11, 12, 13], scope="alice")
    found = propose(
        one,
        segment([9, 10, 11], "a", "alice"),
        segment([9, 10, 11], "b", "bob"),
        segment([9, 10, 11], "c"),
    )
    assert found[0][:2] == [12, 13] and found[1] == found[2] == []


def test_under_a_classical_rule_only_its_own_text_is_drafted_from() -> None:
    """A past response of the same seed knows how the coins will fall."""
    one = drafter()
    finish(one, [1, 10, 11, 12, 13])
    for rule in ("rejection", "block", "traversal"):
        assert propose(one, segment([9, 10, 11], f"a-{rule}", rule=rule)) == [[]]
        own = propose(one, segment([9, 10, 11, 40, 10, 11], f"b-{rule}", rule=rule))
        assert own[0][0] == 40 and 12 not in own[0]


def test_the_longer_match_leads_and_the_other_fills_up() -> None:
    one = drafter()
    finish(one, [1, 10, 11, 12, 13])
    text = [9, 11, 50, 51, 10, 11]  # its own text saw 11 -> 50, the past 10 11 -> 12
    (found,) = propose(one, segment(text))
    assert found[:2] == [12, 13] and 50 in found


def test_a_text_that_grows_is_the_text_that_was_given_at_once() -> None:
    rng = np.random.default_rng(3)
    text = np.repeat(rng.integers(0, 9, 60), 2).tolist()
    growing, fresh = drafter(), drafter()
    for end in range(3, len(text), 5):
        (found,) = propose(growing, segment(text[:end]))
        fresh.forget("r")
        assert found == propose(fresh, segment(text[:end]))[0]
    growing.forget("r")
    assert growing.num_state_bytes == 0


def test_ids_outside_the_vocabulary_end_a_match() -> None:
    one = drafter()
    (found,) = propose(one, segment([1, 2, VOCAB + 5, 3, 1, 2]))
    assert all(token < VOCAB for token in found)


# ----------------------------------------------------------------------------------- the store


def test_the_store_is_bounded_and_the_oldest_goes_first() -> None:
    store = SuffixStore(32, 1000)
    rng = np.random.default_rng(0)
    for number in range(200):
        response = np.concatenate([[number], rng.integers(500, 900, 30)])
        store.add("a" if number % 3 else "b", response)
        assert store.num_tokens <= 1000
    last, first = np.array([199]), np.array([0])
    assert any(tree.match(last) for tree in store.trees("a"))
    assert not any(tree.match(first) for tree in store.trees("b"))
    assert store.num_bytes < 1000 * 300 + 200_000
    assert store.trees("nobody") == []


def test_a_response_longer_than_the_store_is_cut() -> None:
    store = SuffixStore(32, 300)
    store.add("", np.arange(1000))
    assert store.num_tokens <= 300
    assert store.trees("")[0].match(np.array([998])) == 1
    nothing = SuffixStore(32, 0)
    nothing.add("", np.arange(10))
    assert nothing.trees("") == [] and nothing.num_tokens == 0


def test_many_scopes_share_the_bound() -> None:
    store = SuffixStore(16, 400)
    for number in range(100):
        store.add(f"s{number}", np.arange(20))
    assert store.num_tokens <= 400
    assert store.trees("s99") and not store.trees("s0")


def test_a_saved_store_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store.safetensors"
    one = drafter(Words(), store=str(path))
    finish(one, [1, 10, 11, 12, 13])
    finish(one, [1, 30, 31, 32], scope="alice")
    one.close()
    again = drafter(Words(), store=str(path))
    assert propose(again, segment([9, 10, 11]))[0][:2] == [12, 13]
    assert propose(again, segment([9, 30, 31], "a", "alice"))[0] == [32]
    assert propose(again, segment([9, 30, 31], "b")) == [[]]
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"
    one.close()
    again.close()


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    drafter(Words("one"), store=str(path)).close()
    with pytest.raises(ConfigError, match="another tokenizer"):
        drafter(Words("two"), store=str(path))
    assert path.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_store_is_set_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store"
    one = drafter(Words(), store=str(path))
    finish(one, [1, 10, 11, 12, 13])
    one.close()
    whole = path.read_bytes()
    broken = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
        "empty": b"",
    }[damage]
    path.write_bytes(broken)
    with warnings_logged() as said:
        again = drafter(Words(), store=str(path))
    assert len(said) == 1 and "damaged" in said[0] and "set aside" in said[0]
    assert (tmp_path / "store.damaged").read_bytes() == broken
    assert propose(again, segment([9, 10, 11])) == [[]]
    finish(again, [1, 10, 11, 12])
    again.close()
    assert propose(drafter(Words(), store=str(path)), segment([9, 10, 11]))[0] == [12]


def test_no_damage_is_taken_for_a_store_or_for_another_kind(tmp_path: Path) -> None:
    """Every byte flipped in turn, zeros, and every cut: set aside, or refused for its tokenizer."""
    path = tmp_path / "store"
    one = drafter(Words(), store=str(path))
    finish(one, [1, 10, 11, 12, 13], scope="team-7")
    one.close()
    whole = path.read_bytes()
    broken = [bytes(len(whole)), *(whole[:size] for size in range(len(whole)))]
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        broken.append(bytes(flipped))
    broken.append(whole.replace(b"team-7", b"team-9"))
    for number, content in enumerate(broken):
        path.write_bytes(content)
        again = drafter(Words(), store=str(path))
        assert not path.exists(), number
        assert propose(again, segment([9, 10, 11], "a", "team-7")) == [[]]
        for file in tmp_path.iterdir():
            file.unlink()


def test_a_corpus_that_does_not_fit_is_said(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(str(number % 90) for number in range(300)), encoding="utf-8")
    with warnings_logged() as said:
        drafter(Words(), corpus=(str(corpus),), max_shared_tokens=400)
    assert len(said) == 1 and "of which the last" in said[0]
    with warnings_logged() as said:
        drafter(Words(), corpus=(str(corpus),), max_shared_tokens=2000)
    assert not said


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(ConfigError, match="another kind"):
        drafter(Words(), store=str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        drafter(Words(), store=str(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(save({"w": np.zeros(3)}, metadata={"format": "pt"}))
    with pytest.raises(ConfigError, match="another kind"):
        drafter(Words(), store=str(weights))
    weights.unlink()
    assert path.read_text() == "my notes" and list(tmp_path.iterdir()) == [path]


def test_nothing_that_was_set_aside_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for number in range(3):
        path.write_bytes(bytes(8) + b'{"__metadata__":{"format":' + bytes([number]))
        with warnings_logged():
            drafter(Words(), store=str(path))
    kept = sorted(file.name for file in tmp_path.iterdir())
    assert kept == ["store.damaged", "store.damaged2", "store.damaged3"]


def test_a_store_outlives_a_run_that_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    one = drafter(Words(), store=str(path))
    finish(one, [1, 10, 11, 12, 13])
    one.close()
    drafter(Words(), store=str(path), max_shared_tokens=0).close()
    assert propose(drafter(Words(), store=str(path)), segment([9, 10, 11]))[0][:1] == [12]


def test_a_corpus_is_learnt_once(tmp_path: Path) -> None:
    path, corpus = tmp_path / "store", tmp_path / "corpus.txt"
    corpus.write_text("10 11 12 13 1200")
    for _ in range(3):
        one = drafter(Words(), store=str(path), corpus=(str(corpus),))
        one.close()
    assert one.shared.num_tokens == 64 + 4 + 1  # what the model does not have is left out


def test_many_different_continuations_at_every_length() -> None:
    """Each of the lengths that are looked up offers as many tokens as are considered."""
    base = np.random.default_rng(0).integers(0, 300, 64).tolist()
    text: list[int] = []
    for number, length in enumerate((64, 32, 16, 8, 4, 2, 1)):
        for token in range(8):
            text += [*base[64 - length :], 400 + 8 * number + token, 990 + token]
    text += base
    for limit in (1, 2, 3, 5):
        for branches in (1, 4):
            one = drafter(num_branches=branches)
            (found,) = propose(one, segment(text), budget=limit)
            assert 0 < len(found) <= limit
            finish(one, [1, *text])
            assert len(propose(one, segment([5, *base], "other"), budget=limit)[0]) <= limit


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    one = drafter(Words(), store=str(tmp_path / "file" / "store"))
    with pytest.raises(StoreError, match="cannot be written"):
        one.close()


def test_a_corpus_is_learnt(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("10 11 12 13")
    one = drafter(Words(), corpus=(str(path),))
    assert propose(one, segment([9, 10, 11]))[0] == [12, 13]


def test_a_corpus_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01" * 50)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        drafter(Words(), corpus=(str(tmp_path / "binary"),))
    with pytest.raises(ConfigError, match="cannot be read as text"):
        drafter(Words(), corpus=(str(tmp_path / "nowhere"),))
    with pytest.raises(ConfigError, match="tokenizer"):
        drafter(None, corpus=(str(tmp_path / "binary"),))


@pytest.mark.parametrize(
    "options",
    [
        {"max_depth": 1},
        {"max_depth": 2.0},
        {"num_branches": 0},
        {"draft_len_factor": 0},
        {"draft_len_factor": "2"},
        {"max_shared_tokens": -1},
        {"corpus": 7},
        {"store": ""},
    ],
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        SuffixConfig(**options)  # type: ignore[arg-type]


def test_logging_is_quiet_when_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foredraft"):
        drafter(Words())
    assert not caplog.records
