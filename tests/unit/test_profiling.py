"""Measuring a model on this machine, keeping what was measured, and using it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foredraft import LLM, SamplingParams, SpeculationParams
from foredraft.cli.main import main
from foredraft.engine import measure, profiling
from foredraft.engine.measure import (
    bends,
    prepared_requests,
    quick_times,
    rows_to_measure,
    spread,
    time_rows,
)
from foredraft.errors import ProfileError
from foredraft.model.machine import identity, machine, model_hash
from foredraft.plan.profile import PassTime, Profile, load_profile, profile_path
from foredraft.plan.profile import _checksum as profile_checksum
from foredraft.plan.trace import read_trace
from tests.folders import make_folder, make_parrot
from tests.tiny import engine, family_target, run, warnings_logged

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("profiling") / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run_it(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    yield call
    logging.getLogger("foredraft").setLevel(logging.NOTSET)


def test_rows_are_timed_in_a_row_after_a_warm_up() -> None:
    asked: list[int] = []

    def seconds(rows: int) -> float:
        asked.append(rows)
        return float(len(asked))

    assert time_rows(seconds, [1, 5], 2) == {1: [2.0, 3.0], 5: [5.0, 6.0]}
    assert asked == [1] * 3 + [5] * 3
    # However late it is, each is timed once.
    assert {rows: len(v) for rows, v in time_rows(seconds, [1, 5], 3, lambda: True).items()} == {
        1: 1,
        5: 1,
    }


def test_a_profile_of_something_else_is_not_used(
    measured: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the name of its file says: the cache may have been copied from elsewhere."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    target = family_target("llama")
    path = profile_path(measured.model_hash, measured.dtype, identity(measured.machine))
    others = (
        {"model_hash": "0" * 64, "model": "other"},
        {"dtype": "bfloat16"},
        {"machine": {**measured.machine, "cpu": "another one"}},
        {"versions": {**measured.versions, "torch": "1.0"}},
    )
    for fields in others:
        dataclasses.replace(measured, **fields).save(path)
        with warnings_logged() as said:
            assert profiling.known_profile(target) is None, fields
        assert len(said) == 1 and "is not used" in said[0]
    measured.save(path)
    assert profiling.known_profile(target) == measured


@pytest.mark.parametrize("wrong", ["x", -5.0, float("inf"), None, True])
@pytest.mark.parametrize("name", ["host_seconds", "stability"])
def test_numbers_of_a_profile_are_checked(measured: Profile, name: str, wrong: object) -> None:
    with pytest.raises(ProfileError, match=f"{name} is .*measure again"):
        dataclasses.replace(measured, **{name: wrong})


def test_a_verify_pass_costs_at_least_a_plain_one(measured: Profile) -> None:
    """And no less than one with fewer rows: where the clock says so, it is noise."""
    passes = tuple(
        PassTime(1, rows, 128, seconds, 0.0)
        for rows, seconds in ((1, 1.0), (2, 0.95), (3, 1.2), (5, 1.1), (9, 1.4))
    )
    noisy = dataclasses.replace(measured, passes=passes, host_seconds=0.0)
    costs = [noisy.verify_cost(n) for n in range(9)]
    assert costs[:5] == pytest.approx([1.0, 1.0, 1.2, 1.2, 1.2]) and costs == sorted(costs)
    assert noisy.is_measured(9, 1, 128) and not noisy.is_measured(10, 1, 128)


def test_a_bend_is_looked_into_where_two_lines_meet() -> None:
    """Flat up to 179 rows and rising beyond: one more number of rows is asked for, close to it."""
    cost = {rows: max(5.0, 0.028 * rows) for rows in (128, 129, 192, 256, 384)}
    (found,) = bends(cost)
    assert abs(found - 179) <= 1
    assert bends({rows: 5 + 0.02 * rows for rows in (1, 2, 3, 5, 9, 17)}) == []
    assert bends({1: 1.0, 2: 2.0}) == [] and bends({1: 1.0}) == []
    # A step up (a tile of the matrix products more) is no bend between its ends.
    assert bends({16: 1.0, 17: 1.1, 24: 1.11, 32: 1.12}) == []
    # Neighbouring numbers leave nothing between them.
    assert bends({1: 1.0, 2: 1.5, 3: 9.0}) == []


def test_rows_to_measure_hold_the_first_draft_node() -> None:
    assert rows_to_measure(1, (1, 2, 5)) == [1, 2, 5]
    assert rows_to_measure(16, (1, 2, 5)) == [16, 17, 24, 32, 80]


def test_spread_is_half_the_quartiles_distance() -> None:
    assert spread([1.0]) == 0 and spread([2.0] * 9) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)


def test_measuring_leaves_the_engine_as_it_was() -> None:
    target = family_target("llama")
    speculation = SpeculationParams("none")
    plain = run(engine(target), [[5, 6, 7]], SamplingParams(max_tokens=9), speculation)
    the_engine = engine(target)
    cells, paddings = quick_times(the_engine.runner, the_engine.cache)
    assert {1, 2, 3, 5, 9, 17, 32} >= {c.num_rows for c in cells if c.num_requests == 1}
    assert any(c.num_rows == 1 for c in cells) and len(cells) >= 2
    assert {p.num_requests for p in paddings} <= {4, 16}
    assert all(p.row_seconds >= 0 for p in paddings)
    assert the_engine.cache.bytes_in_use == 0
    assert the_engine.cache.num_free_slots == the_engine.cache.num_slots
    texts = run(the_engine, [[5, 6, 7]], SamplingParams(max_tokens=9), speculation)
    assert texts == plain


def test_slots_are_given_back_when_measuring_fails() -> None:
    the_engine = engine(family_target("llama"))
    with (
        pytest.raises(RuntimeError, match="stop"),
        prepared_requests(the_engine.runner, the_engine.cache, 3, 20),
    ):
        raise RuntimeError("stop")
    assert the_engine.cache.num_free_slots == the_engine.cache.num_slots


@pytest.fixture(scope="module")
def measured() -> Profile:
    the_engine = engine(family_target("llama"))
    said: list[float] = []
    profile = profiling.measure_profile(the_engine, lambda text, share: said.append(share), 2.0)
    assert said == sorted(said) and said[0] >= 0 and said[-1] < 1
    assert not the_engine.has_work and the_engine.cache.bytes_in_use == 0
    return profile


def test_what_a_profile_holds(measured: Profile) -> None:
    target = family_target("llama")
    assert measured.model_hash == model_hash(target) and measured.dtype == "float32"
    assert measured.model_hash != model_hash(family_target("qwen3"))
    assert 1 in measured.batches()
    for batch in measured.batches():
        assert measured.t_decode(batch) > measured.host_seconds > 0
        assert measured.alpha(batch) >= 0 and measured.verify_cost(0, batch) == pytest.approx(1)
    free = {"ngram", "prediction", "suffix", "recycling", "lookahead", "auto"}
    assert set(measured.drafts) == free
    assert all(0 < drafted.seconds < 0.05 for drafted in measured.drafts.values())
    assert 0 < measured.drafts["ngram"].seconds < 0.01 and measured.drafts["ngram"].cost == "once"
    assert measured.machine == machine() and measured.versions["foredraft"]


def test_time_is_kept_even_where_a_pass_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the smallest shape is measured, and no other is begun."""
    timed: list[int] = []

    def slowly(seconds: object, rows: list[int], rounds: int) -> dict[int, list[float]]:
        timed.append(rows[-1])
        time.sleep(0.3)
        return {number: [0.1, 0.1] for number in rows}

    monkeypatch.setattr(profiling, "time_rows", slowly)
    found = profiling.measure_profile(engine(family_target("llama")), max_seconds=0.2)
    assert len(timed) == 1 and found.batches() == [1] and not found.paddings


def test_it_is_kept_and_found_again(measured: Profile, cache: Path) -> None:
    target = family_target("llama")
    assert profiling.known_profile(target) is None
    path = profile_path(measured.model_hash, measured.dtype, identity(machine()))
    measured.save(path)
    assert path.is_relative_to(cache) and load_profile(path) == measured
    assert profiling.known_profile(target) == measured
    assert profiling.known_profile(family_target("qwen3")) is None
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("machine", {"cpu": "x"}), ("machine", None), ("versions", None), ("model", 3)],
)
def test_a_profile_that_lacks_facts_is_not_used(
    measured: Profile, cache: Path, field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Though its checksum is right."""
    path = profile_path(measured.model_hash, measured.dtype, identity(machine()))
    content = json.loads(measured.to_json())["profile"] | {field: value}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"format": 2, "sha256": profile_checksum(content), "profile": content})
    )
    assert profiling.known_profile(family_target("llama")) is None
    assert "measure again" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"seconds": ', '"seconds": 1'),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"format": 2', '"format": 99'),
        lambda text: json.dumps([1, 2]),
    ],
    ids=["a changed figure", "cut", "empty", "another format", "something else"],
)
def test_a_damaged_profile_is_measured_again(
    measured: Profile, cache: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = profile_path(measured.model_hash, measured.dtype, identity(machine()))
    measured.save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ProfileError, match="foredraft profile"):
        load_profile(path)
    assert profiling.known_profile(family_target("llama")) is None
    assert str(path) in caplog.text


def test_a_profile_of_another_version_is_not_used(
    measured: Profile, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import dataclasses

    older = dataclasses.replace(measured, versions={**measured.versions, "torch": "1.0"})
    older.save(profile_path(measured.model_hash, measured.dtype, identity(machine())))
    assert profiling.known_profile(family_target("llama")) is None
    assert "another version of torch" in caplog.text


def test_the_engine_uses_a_kept_profile(
    measured: Profile, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.save(profile_path(measured.model_hash, measured.dtype, identity(machine())))
    monkeypatch.setattr(
        "foredraft.engine.engine.quick_times", lambda *a: pytest.fail("measured although known")
    )
    the_engine = engine(family_target("llama"))
    the_engine.add([5, 6, 7], SamplingParams(max_tokens=3), SpeculationParams("ngram"))
    table = the_engine.controller.cost_table
    assert table is not None
    rows = np.array([1.0, 5.0])
    expected = [measured.seconds(1, n) for n in rows]
    assert table.seconds(1, rows, 128.0) == pytest.approx(expected)


def test_on_the_command_line(run_it: Run, folder: Path, cache: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "profile.json"
    code, out, err = run_it("profile", folder, "--seconds", 1, "--out", out_path)
    assert code == 0 and err == f"Measuring {folder} for up to 1 s.\n"
    assert "1.2 to 1.5 is usual" in out and "alpha" in out and "draft time of ngram" in out
    assert load_profile(out_path).model == str(folder)
    found = load_profile(out_path)
    kept = profile_path(found.model_hash, found.dtype, identity(machine()))
    dataclasses.replace(found, stability=0.4).save(kept)
    code, again, err = run_it("profile", folder, "--seconds", 1)
    assert code == 0 and "is restless" in err and "measured before" not in again
    dataclasses.replace(found, stability=0.01).save(kept)
    code, again, err = run_it("profile", folder)
    assert (code, err) == (0, "") and "measured before" in again
    assert "busy with other things" not in again
    code, text, _ = run_it("profile", folder, "--json")
    assert json.loads(text)["profile"]["model_hash"] == load_profile(out_path).model_hash
    code, text, _ = run_it("plan", "--profile", out_path, "--acceptance", 0.8, "--json")
    assert code == 0 and json.loads(text)["verdict"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seconds", 0), "seconds is 0"),
        (("--out", "/no/such/folder/p.json"), "there is no folder /no/such/folder"),
        (("--out", "/"), "that is a folder"),
        (("/no/such/model",), "/no/such/model"),
    ],
)
def test_bad_arguments(run_it: Run, arguments: tuple[Any, ...], words: str) -> None:
    code, out, err = run_it("profile", *arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_a_trace_is_what_happened(run_it: Run, tmp_path: Path, cache: Path) -> None:
    singer = make_parrot(tmp_path / "singer", ["do ", "re ", "mi ", "fa "], forever=True)
    trace = tmp_path / "trace.jsonl"
    arguments = ("generate", "--model", singer, "one two", "three", "--max-tokens", 40, "--json")
    code, out, _ = run_it(*arguments, "--num-speculative-tokens", 4, "--trace", trace)
    assert code == 0
    results = [json.loads(line) for line in out.splitlines()]
    found = read_trace(trace)
    assert len(found) == len(results) == 2
    for one, result in zip(found, results, strict=True):
        assert "steps" not in result and "decode_s" not in result
        assert one.decode_s is not None and one.decode_s > 0
        assert one.method == "ngram" and one.num_tokens == result["num_tokens"]
        assert len(one.steps) == result["num_verify_steps"]
        assert sum(drafted for drafted, _, _ in one.steps) == result["num_draft_tokens"]
        assert sum(accepted for _, accepted, _ in one.steps) == result["num_accepted_tokens"] > 20
    code, _, err = run_it(*arguments, "--trace", "/no/such/folder/t.jsonl")
    assert code == 2 and "there is no folder" in err
    code, _, err = run_it(*arguments, "--trace", tmp_path)
    assert code == 2 and "that is a folder" in err and err.count("\n") == 1


def test_a_cache_that_cannot_be_written_loses_nothing(
    run_it: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    code, out, err = run_it("profile", folder, "--seconds", 1)
    assert code == 0 and "1.2 to 1.5 is usual" in out and "kept in" not in out
    assert "cannot be kept" in err and err.count("\n") == 2


def test_figures_of_a_run(folder: Path, cache: Path) -> None:
    llm = LLM(folder, kv_cache_gb=0.1)
    output = llm.generate([5, 6, 5, 6, 5, 6], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    stats, live = output.stats, llm.engine.stats
    assert stats.estimated_speedup is not None and stats.predicted_speedup is not None
    assert 0.05 < stats.estimated_speedup < 20 and 0.5 < stats.predicted_speedup < 20
    assert stats.num_wasted_tokens == stats.num_draft_tokens - stats.num_accepted_tokens
    assert len(stats.steps) == stats.num_verify_steps
    assert live.num_tokens == 30 and live.num_steps == stats.num_verify_steps + 1
    assert live.recent_speedup is not None and live.recent_predicted_speedup is not None
    assert live.num_wasted_tokens == stats.num_wasted_tokens


def test_every_batch_is_timed_however_slow_one_request_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sixteen requests cost is not told by what one costs, times sixteen."""
    now = 0.0

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow:
        def __init__(self, *args: object) -> None:
            pass

        def __enter__(self) -> Callable[..., float]:
            def seconds(num_rows: int, *, is_even: bool = True) -> float:
                nonlocal now
                now += 0.06
                return 0.06

            return seconds

        def __exit__(self, *args: object) -> None:
            pass

    monkeypatch.setattr(measure, "prepared_requests", Slow)
    the_engine = engine(family_target("llama"), max_num_requests=16)
    passes, _ = measure.quick_times(the_engine.runner, the_engine.cache)
    found: dict[tuple[int, int], set[int]] = {}
    for one in passes:
        found.setdefault((one.num_requests, one.context), set()).add(one.num_rows)
    assert {requests for requests, _ in found} == {1, 4, 16}
    assert all(len(rows) >= 2 for rows in found.values())
    assert now < 3.5
