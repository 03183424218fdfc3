"""The front door in Python: every form of prompt, lists with bad ones, streams, seeds."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft import LLM, ForedraftError, SamplingParams, SpeculationParams
from foredraft.engine.outputs import RequestOutput
from foredraft.errors import ConfigError, InvalidRequestError
from foredraft.types import StepPlan
from tests.folders import CONTEXT, edit_json, make_folder, make_parrot, make_tokenizer
from tests.texts import TEXTS

PROMPT = "one two three one two three one two"
CHAT = [{"role": "user", "content": "one two three"}]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
WARM = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
PLAIN = SpeculationParams("none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", kv_cache_gb=0.1)


@pytest.fixture
def llm(shared: LLM) -> Any:
    yield shared
    assert _is_idle(shared)  # no test leaves anything behind


def _is_idle(llm: LLM) -> bool:
    cache = llm.engine.cache
    kept = llm.engine.scheduler.prefixes.num_retained
    is_free = cache.num_free_slots + kept == cache.num_slots
    return not llm.engine.has_work and not llm._runs and is_free


def _same(one: RequestOutput, other: RequestOutput) -> bool:
    return (one.token_ids, one.text, one.finish_reason) == (
        other.token_ids,
        other.text,
        other.finish_reason,
    )


# ----------------------------------------------------------------------------- forms of a prompt


def test_text_ids_arrays_and_tuples_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT)["input_ids"]
    forms: list[Any] = [
        PROMPT,
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.int32),
        np.array(ids, dtype=np.uint16),
        [np.int64(i) for i in ids],
    ]
    outputs = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert {output[0].prompt_ids for output in outputs} == {tuple(ids)}
    assert len({output[0].token_ids for output in outputs}) == 1
    together = llm.generate(forms, GREEDY)
    assert all(_same(one, outputs[0][0]) for one in together)


def test_chat_messages_go_through_the_template(llm: LLM) -> None:
    expected = llm.tokenizer("<|turn|>user\none two three<|end|>\n<|turn|>assistant\n")["input_ids"]
    assert llm.encode(CHAT).tolist() == expected
    assert llm.generate(CHAT, GREEDY)[0].prompt_ids == tuple(expected)
    two = llm.generate([CHAT, [*CHAT, {"role": "assistant", "content": "four"}, *CHAT]], GREEDY)
    assert two[0].prompt_ids == tuple(expected) and len(two[1].prompt_ids) > 2 * len(expected)


def test_many_prompts_come_back_in_order_and_as_alone(llm: LLM) -> None:
    prompts: list[Any] = [PROMPT, [5, 6, 7], CHAT, np.arange(10, 40), "the boats leave"]
    together = llm.generate(prompts, WARM)
    assert len(together) == len(prompts)
    for prompt, output in zip(prompts, together, strict=True):
        assert _same(output, llm.generate(prompt, WARM)[0])
        assert output.prompt_ids == tuple(llm.encode(prompt).tolist())


def test_an_empty_list_of_prompts_gives_an_empty_list(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate(()) == []
    assert llm.generate([], [], []) == []


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_is_the_decoded_output(llm: LLM, text: str) -> None:
    output = llm.generate(text, WARM)[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 24
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_the_stopping_token_is_in_the_ids_and_not_in_the_text(tmp_path: Path) -> None:
    llm = LLM(make_parrot(tmp_path, ["do ", "re ", "mi "]), dtype="float32", kv_cache_gb=0.1)
    stop = int(llm.tokenizer.convert_tokens_to_ids("mi "))
    for sampling, ids in ((SamplingParams(), 4), (SamplingParams(stop_token_ids=(stop,)), 3)):
        output = llm.generate(PROMPT, sampling)[0]
        assert len(output.token_ids) == ids and output.finish_reason == "stop"
        assert output.stop_token_id == output.token_ids[-1] == (stop if ids == 3 else 2)
        assert output.text == ("do re " if ids == 3 else "do re mi ")
        assert "".join(chunk.text for chunk in llm.stream(PROMPT, sampling)) == output.text
    limited = llm.generate(PROMPT, SamplingParams(max_tokens=3))[0]
    assert (limited.text, limited.finish_reason) == ("do re mi ", "length")
    assert limited.stop_token_id is None


BAD: dict[str, tuple[Any, str]] = {
    "empty text": ("", "empty"),
    "empty ids": (np.array([], dtype=np.int64), "empty"),
    "id too large": ([5, 352], "352 at position 1"),
    "id negative": ([-1, 5], "-1 at position 0"),
    "id huge": ([2**70], "integer"),
    "floats": (np.array([1.0, 2.0]), "integer"),
    "booleans": ([True, False], "integer"),
    "two-dimensional": (np.ones((2, 3), dtype=np.int64), r"shape \(2, 3\)"),
    "too long": ([5] * CONTEXT, "Shorten the prompt"),
    "bytes": (b"abc", "bytes"),
    "nothing": (None, "NoneType"),
    "a number": (5, "int"),
    "a mapping": ({"role": "user", "content": "x"}, "dict"),
    "half a character": ("abc\ud800", "Unicode"),
    "chat: no content": ([{"role": "user"}], "role"),
    "chat: parts": ([{"role": "user", "content": [{"type": "text"}]}], "content"),
    "chat: empty": ([{"role": "user", "content": " "}], "empty"),
    "chat: half a character": ([{"role": "user", "content": "\udfff"}], "Unicode"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_bad_prompt_raises(llm: LLM, case: str) -> None:
    prompt, expected = BAD[case]
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequestError, match=expected) as caught:
            call(prompt)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_bad_prompts_in_a_list_come_back_and_the_others_go_on(llm: LLM) -> None:
    prompts: list[Any] = [PROMPT]
    for bad, _ in BAD.values():
        prompts += [bad, "the boats"]
    outputs = llm.generate(prompts, GREEDY)
    expected = llm.generate("the boats", GREEDY)[0]
    assert _same(outputs[0], llm.generate(PROMPT, GREEDY)[0])
    for (case, (_, part)), bad, good in zip(BAD.items(), outputs[1::2], outputs[2::2], strict=True):
        assert bad.finish_reason == "error" and bad.error, case
        assert part.replace("\\", "") in bad.error, case
        assert (bad.text, bad.token_ids, bad.stats.num_tokens) == ("", (), 0)
        assert good.error is None and _same(good, expected), case


def test_half_a_character_in_a_prediction_is_refused(llm: LLM) -> None:
    speculation = SpeculationParams("prediction", prediction="abc\ud800")
    with pytest.raises(InvalidRequestError, match="half a character at position 3"):
        llm.generate(PROMPT, GREEDY, speculation)


def test_a_ragged_list_of_lists_is_three_prompts_and_deeper_is_refused(llm: LLM) -> None:
    assert len(llm.generate([[5], [5, 6], [7, 8, 9]], GREEDY)) == 3
    outputs = llm.generate([[[5], [5, 6]], [5]], GREEDY)
    assert outputs[0].finish_reason == "error" and "unequal lengths" in str(outputs[0].error)
    assert outputs[1].finish_reason == "length"


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "x"}, iter(["x"]), b"x", object()])
def test_what_is_no_prompt_at_all_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed is a text, token ids, chat messages"):
        llm.generate(prompts)


def test_the_whole_context_can_be_used(llm: LLM) -> None:
    output = llm.generate([5] * (CONTEXT - 1), SamplingParams(max_tokens=None))[0]
    assert len(output.token_ids) == 1
    output = llm.generate([5, 6], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(output.token_ids) == CONTEXT - 2 and output.finish_reason == "length"


# ---------------------------------------------------------------------------- params for each


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    samplings = [GREEDY, WARM, SamplingParams(max_tokens=3), SamplingParams(max_tokens=24)]
    speculations = [
        PLAIN,
        SpeculationParams("ngram", 2),
        SpeculationParams("ngram", 16),
        SpeculationParams("ngram", 4, "block"),
    ]
    outputs = llm.generate([PROMPT] * 4, samplings, speculations)
    for output, sampling, speculation in zip(outputs, samplings, speculations, strict=True):
        alone = llm.generate(PROMPT, sampling, speculation)[0]
        assert _same(output, alone)
        assert output.stats.num_draft_tokens == alone.stats.num_draft_tokens
    assert outputs[0].stats.num_draft_tokens == 0
    assert len(outputs[2].token_ids) == 3
    assert outputs[1].seed == 7


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ([GREEDY], "1 entries for 2 prompts"),
        ([GREEDY] * 3, "3 entries for 2 prompts"),
        ([GREEDY, None], "allowed is one SamplingParams"),
        ({"temperature": 1.0}, "allowed is one SamplingParams"),
        (5, "allowed is one SamplingParams"),
        (PLAIN, "allowed is one SamplingParams"),
    ],
)
def test_lists_of_parameters_must_fit(llm: LLM, sampling: Any, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        llm.generate([PROMPT, PROMPT], sampling)


def test_a_method_that_is_not_there_is_an_error_of_its_prompt_alone(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="allowed is one of none, auto, draft-model"):
        llm.generate(PROMPT, GREEDY, SpeculationParams("ngrams"))
    outputs = llm.generate([PROMPT, PROMPT], GREEDY, [SpeculationParams("ngrams"), PLAIN])
    assert [o.finish_reason for o in outputs] == ["error", "length"]


# ------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("sampling", [GREEDY, WARM, SamplingParams(max_tokens=100)])
@pytest.mark.parametrize("prompt", [PROMPT, CHAT, [5, 6, 5, 6, 5, 6]])
def test_a_stream_is_what_generate_gives(llm: LLM, prompt: Any, sampling: SamplingParams) -> None:
    speculation = SpeculationParams("ngram", 8)
    chunks = list(llm.stream(prompt, sampling, speculation))
    output = llm.generate(prompt, sampling, speculation)[0]
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert all("".join(text for text, _ in c.pieces) == c.text for c in chunks)
    assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(chunk.output is None for chunk in chunks[:-1])
    last = chunks[-1].output
    assert last is not None and _same(last, output) and last.prompt_ids == output.prompt_ids
    assert sum(c.num_accepted for c in chunks) == last.stats.num_accepted_tokens
    assert last.stats.num_accepted_tokens == output.stats.num_accepted_tokens


def test_accepted_tokens_are_marked_in_the_pieces(tmp_path: Path) -> None:
    folder = make_parrot(tmp_path, ["do ", "re ", "mi ", "fa "], forever=True)
    llm = LLM(folder, dtype="float32", kv_cache_gb=0.1)
    sampling = SamplingParams(max_tokens=100)
    chunks = list(llm.stream(PROMPT, sampling))
    marked = [text for chunk in chunks for text, is_draft in chunk.pieces if is_draft]
    num_accepted = sum(chunk.num_accepted for chunk in chunks)
    assert num_accepted > 50
    assert len(marked) == num_accepted
    plain = list(llm.stream(PROMPT, sampling, PLAIN))
    assert not any(is_draft for chunk in plain for _, is_draft in chunk.pieces)
    for every in (plain, chunks):
        assert "".join(c.text for c in every) == "do re mi fa " * 25


def test_closing_a_stream_early_frees_the_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    assert not _is_idle(llm)
    stream.close()
    assert _is_idle(llm)
    stream.close()
    assert list(stream) == []


def test_a_stream_that_is_never_read_frees_the_request(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    assert not _is_idle(llm)
    stream.close()
    assert _is_idle(llm)
    stream = llm.stream(PROMPT, GREEDY)
    del stream
    gc.collect()
    assert _is_idle(llm)


def test_leaving_a_loop_over_a_stream_frees_the_request(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, GREEDY):
        break
    gc.collect()
    assert _is_idle(llm)


def test_streams_may_be_read_in_turn_and_beside_generate(llm: LLM) -> None:
    """One step of the engine serves every request; nobody's part of it may be lost."""
    prompts: list[Any] = [PROMPT, [5, 6, 7], CHAT]
    expected = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts, ids = ["", "", ""], [(), (), ()]  # type: ignore[var-annotated]
    waiting = {0, 1, 2}
    while waiting:
        for index in sorted(waiting):
            chunk = next(streams[index], None)
            if chunk is None:
                waiting.discard(index)
                continue
            texts[index] += chunk.text
            ids[index] += chunk.token_ids
        if len(waiting) == 3 and len(ids[0]) > 3:
            assert _same(llm.generate([5, 6, 7], GREEDY)[0], expected[1])
    assert texts == [e.text for e in expected]
    assert ids == [e.token_ids for e in expected]


def test_a_request_taken_out_from_outside_does_not_hang(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    for request_id in list(llm.engine.scheduler.running):
        llm.engine.abort(request_id)
    with pytest.raises(RuntimeError, match="taken out"):
        list(stream)


def test_an_error_in_a_step_leaves_no_request_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: StepPlan, drafts: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "forward", fail)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT], GREEDY)
    assert _is_idle(llm)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(PROMPT, GREEDY))
    assert _is_idle(llm)


# --------------------------------------------------------------------------------------- seeds


def test_a_random_seed_is_reported_and_gives_the_text_again(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 4, sampling)
    assert len({o.seed for o in outputs}) == 4 and len({o.token_ids for o in outputs}) == 4
    for output in outputs:
        again = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=output.seed)
        assert _same(llm.generate(PROMPT, again)[0], output)
        assert _same(llm.generate(PROMPT, again, PLAIN)[0], output)


def test_a_given_seed_is_reported(llm: LLM) -> None:
    assert llm.generate(PROMPT, WARM)[0].seed == 7
    stream = list(llm.stream(PROMPT, WARM))
    assert stream[-1].output is not None and stream[-1].output.seed == 7


# -------------------------------------------------------------------------------- progress bar


def test_the_bar_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([PROMPT, PROMPT], GREEDY, progress=False)
    assert capsys.readouterr() == ("", "")
    llm.generate([PROMPT, PROMPT], GREEDY)  # no terminal here: no bar
    assert capsys.readouterr() == ("", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("TERM", "xterm")
        llm.generate([PROMPT, PROMPT], GREEDY, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "generating" in err and "2/2" in err and "48 tokens" in err


# ------------------------------------------------------------------------- loading, tokenizers


def test_unknown_and_bad_options_are_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="no option 'tempreature'; allowed are model, dtype"):
        LLM("/no/such/folder", tempreature=1.0)
    with pytest.raises(ConfigError, match="max_num_requests is 0"):
        LLM("/no/such/folder", max_num_requests=0)
    with pytest.raises(ConfigError, match="model is 5"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(ForedraftError, match="no file or folder"):
        LLM("/no/such/folder")
    with pytest.raises(ForedraftError, match="no file or folder"):
        LLM(Path("/no/such/folder"))


def test_options_reach_the_engine(folder: Path) -> None:
    llm = LLM(
        folder,
        dtype="float64",
        max_num_requests=3,
        max_model_len=50,
        max_num_batched_tokens=16,
        kv_cache_gb=0.01,
        drafter_options={"ngram": {"max_ngram_len": 2}},
    )
    assert str(llm.engine.target.dtype) == "torch.float64"
    assert llm.engine.max_num_requests == 3
    assert llm.engine.target.max_model_len == 50
    prompt = [5, 6] * 20
    assert len(llm.generate(prompt, SamplingParams(max_tokens=None))[0].token_ids) <= 10
    with pytest.raises(ConfigError, match="no option 'max_ngram'"):
        LLM(folder, drafter_options={"ngram": {"max_ngram": 2}})


def test_a_folder_without_tokenizer_takes_ids_and_no_text(folder: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "m"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).unlink()
    llm = LLM(bare, dtype="float32", kv_cache_gb=0.1)
    output = llm.generate([5, 6, 7], GREEDY)[0]
    assert len(output.token_ids) == 24 and output.text == ""
    chunks = list(llm.stream([5, 6, 7], GREEDY))
    assert sum((c.token_ids for c in chunks), ()) == output.token_ids
    for prompt in ("text", CHAT):
        with pytest.raises(InvalidRequestError, match="no tokenizer; pass token ids"):
            llm.generate(prompt)


def test_a_tokenizer_without_chat_template_takes_text_and_no_messages(
    folder: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "m"))
    (bare / "chat_template.jinja").unlink()
    llm = LLM(bare, dtype="float32", kv_cache_gb=0.1)
    assert llm.generate(PROMPT, GREEDY)[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.generate(CHAT)


def test_a_template_that_refuses_says_why(folder: Path, tmp_path: Path) -> None:
    strict = Path(shutil.copytree(folder, tmp_path / "m"))
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(template + "<|turn|>{{ messages[0].content }}")
    llm = LLM(strict, dtype="float32", kv_cache_gb=0.1)
    assert llm.generate(CHAT, GREEDY)[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="user first"):
        llm.generate([{"role": "assistant", "content": "x"}])


def test_a_tokenizer_of_more_ids_than_the_model_is_refused_by_the_prompt(
    folder: Path, tmp_path: Path
) -> None:
    larger = Path(shutil.copytree(folder, tmp_path / "m"))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["zorglub"])
    tokenizer.save_pretrained(larger)
    llm = LLM(larger, dtype="float32", kv_cache_gb=0.1)
    assert llm.generate("one", GREEDY)[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match=r"352 at position 0.*tokenizer is this"):
        llm.generate("zorglub")


def test_long_text_is_refused_without_a_word_from_transformers(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = Path(shutil.copytree(folder, tmp_path / "m"))
    edit_json(short / "tokenizer_config.json", model_max_length=10)
    llm = LLM(short, dtype="float32", kv_cache_gb=0.1)
    capfd.readouterr()
    assert llm.generate(PROMPT * 3, GREEDY)[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="Shorten the prompt"):
        llm.generate(PROMPT * 100, GREEDY)
    assert capfd.readouterr() == ("", "")
