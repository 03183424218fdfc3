"""``foredraft generate``: stream text, show which tokens were drafted, say where the time went."""

from __future__ import annotations

import json
import logging
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.drafter_options import drafter_options_of, read_prediction
from foredraft.cli.files import check_output
from foredraft.cli.prompts import read_prompts
from foredraft.cli.screen import Screen
from foredraft.cli.stats import say_stats
from foredraft.config import EngineConfig
from foredraft.errors import ForedraftError, InvalidRequestError
from foredraft.model.source import find_source
from foredraft.params import AUTO, SamplingParams, SpeculationParams
from foredraft.plan.trace import append_trace, trace_line
from foredraft.registry import (
    METHODS,
    PLAIN,
    check_method,
    drafter_class,
    method_names,
)

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM, RequestOutput
    from foredraft.engine.near_tie import NearTieReport

_SHOWN_POSITIONS = 8
_DEFAULT_ROUNDS = 3
_EXAMPLES = """
Examples:

  foredraft generate "The capital of France is"

  foredraft generate --chat "Name three fruits." --temperature 0.7 --seed 7

  foredraft generate --chat --prompt-file letter.txt --compare

  foredraft generate --prompt-file prompts.jsonl --json > results.jsonl

--json prints one object a prompt, with the keys text, token_ids,
num_prompt_tokens, num_tokens, finish_reason, seed, tokens_per_s,
decode_tokens_per_s, acceptance_length, acceptance_rate,
acceptance_by_position, num_verify_steps, num_drafts, num_draft_tokens,
num_accepted_tokens, num_wasted_tokens, members (of --method auto: what
each proposed, and what was accepted of it), estimated_speedup,
predicted_speedup and time_s (draft, target, verify, host); with
--compare also plain_tokens_per_s, speedup, same_text,
is_lossless_up_to_near_ties and worst_near_tie_ulps (null where there was
nothing to check). A prompt that failed gives an object with the key error
alone, and the exit status is 1.
"""


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="One prompt or several.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="'default' (the embedded model), a Hugging Face folder or hub name, or a .gguf."
        ),
    ] = "default",
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file is one prompt; a .jsonl is one a line: a string, or an object with "
            "'prompt' or 'messages'. May be repeated."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put each prompt into the model's chat template, as the user."),
    ] = False,
    method: Annotated[
        str, typer.Option(help=f"How to draft: {', '.join(method_names())}, or 'module:Class'.")
    ] = "ngram",
    num_speculative_tokens: Annotated[
        str,
        typer.Option(help="Most draft tokens a step; 0 is plain decoding; auto: as many as pay."),
    ] = AUTO,
    verification: Annotated[
        str,
        typer.Option(
            help="walk (identical to plain), rejection, block or traversal (exact in law)."
        ),
    ] = "walk",
    temperature: Annotated[float, typer.Option(help="0 is argmax.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens at least this fraction as likely as the likeliest.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Fixes the text; without it one is drawn and reported.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="A token id that ends the text. May be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end-of-sequence token.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run plain and speculative decoding in turn on the same prompt; print the ratio "
            "and whether the text is the same.",
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Runs of each kind for --compare, whose medians are shown; by default "
            f"{_DEFAULT_ROUNDS}."
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="The model that --method draft-model drafts with: a Hugging Face folder or hub "
            "name, or a .gguf."
        ),
    ] = None,
    suffix_corpus: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file that --method suffix learns before it starts. May be repeated."
        ),
    ] = None,
    suffix_store: Annotated[
        Path | None,
        typer.Option(
            help="Past responses for --method suffix: read if the file is there, written at the "
            "end."
        ),
    ] = None,
    prediction_file: Annotated[
        Path | None,
        typer.Option(help="The text that is expected, for --method prediction."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:index].")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Append what became of every draft to this file, for 'foredraft plan --trace'."
        ),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Also show how long drafts were, what was accepted of them, and, for --method "
            "auto, who proposed it.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a prompt, and nothing else.")
    ] = False,
) -> None:
    """Generate text, faster where drafts are accepted, and exactly the model's own."""
    # What can be found wrong without PyTorch is found wrong before it is imported.
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    speculation = SpeculationParams(
        method,
        _number(num_speculative_tokens),
        verification,
        prediction=read_prediction(prediction_file, method),
    )
    check_method(method)
    if method != PLAIN and method not in METHODS:
        drafter_class(method)
    num_rounds = _check_rounds(rounds, compare)
    check_output("--trace", trace)
    config = EngineConfig(
        model,
        dtype,
        device,
        max_model_len=max_model_len,
        drafter_options=drafter_options_of(method, draft_model, suffix_corpus or [], suffix_store),
    )
    find_source(config.model)
    every = read_prompts(prompts or [], prompt_file or [], chat)
    logging.getLogger("foredraft").setLevel(logging.WARNING)
    screen = Screen()
    llm = _load(config, screen)
    if not as_json:
        _say_settings(screen, llm, sampling, speculation)
    num_failed = 0
    try:
        for index, prompt in enumerate(every):
            number = f"prompt {index + 1} of {len(every)}"
            if not as_json and len(every) > 1:
                screen.line(f"--- {number} ---", is_dim=True)
            try:
                shown = None if as_json else screen
                if compare:
                    result = _compare(llm, prompt, sampling, speculation, num_rounds, shown, screen)
                else:
                    result = _generate_one(llm, prompt, sampling, speculation, shown)
            except ForedraftError as error:
                num_failed += 1
                result = {"error": str(error)}
                if not as_json:
                    screen.error(f"{number}: {error}" if len(every) > 1 else str(error))
            if trace is not None and "steps" in result:
                num_tokens, steps = result["num_tokens"], result["steps"]
                seconds, members = result["decode_s"] or None, result["members"]
                line = trace_line(
                    method,
                    1,
                    temperature,
                    num_tokens,
                    steps,
                    seconds,
                    members=members,
                    is_auto=speculation.is_auto,
                    model=llm.engine.target.name,
                )
                append_trace(trace, [line])
            if stats and not as_json and "steps" in result:
                say_stats(screen, result)
            result.pop("steps", None)
            result.pop("decode_s", None)
            if as_json:
                _print_json(result)
    finally:  # what drafters keep is kept, however the run ends
        llm.close()
    if num_failed:
        raise typer.Exit(1)


generate.__doc__ = f"{generate.__doc__}\n{_EXAMPLES}"


def _number(text: str) -> int | str:
    """A number of draft tokens as the command line gives it; what is no number is checked later."""
    try:
        return int(text)
    except ValueError:
        return text


def _check_rounds(rounds: int | None, compare: bool) -> int:
    if rounds is None:
        return _DEFAULT_ROUNDS
    if rounds < 1:
        raise InvalidRequestError(f"rounds is {rounds}; allowed is an integer of 1 or more.")
    if not compare:
        raise InvalidRequestError(
            f"rounds is {rounds}, but without --compare there is one run; add --compare or leave "
            "--rounds out."
        )
    return rounds


def _load(config: EngineConfig, screen: Screen) -> LLM:
    with screen.status("Importing PyTorch and Transformers") as status:
        from rich.markup import escape

        from foredraft.engine.llm import LLM

        status.update(escape(f"Loading {config.model}"))
        return LLM(
            config.model,
            notify=screen.notice,
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            drafter_options=config.drafter_options,
        )


def _print_json(result: dict[str, Any]) -> None:
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(result, ensure_ascii=not is_unicode))


def _say_settings(
    screen: Screen, llm: LLM, sampling: SamplingParams, speculation: SpeculationParams
) -> None:
    """Say in one line what is in force, and what the colours mean."""
    target = llm.engine.target
    is_plain = speculation.is_plain
    how = "plain decoding"
    if not is_plain:
        num = speculation.num_speculative_tokens
        many = "as many draft tokens as pay" if speculation.is_auto else f"up to {num} draft tokens"
        how = f"method {speculation.method}, {many}, verification {speculation.verification}"
    dtype = str(target.dtype).removeprefix("torch.")
    parts = [
        target.name,
        f"{dtype} on {target.device}",
        f"context {target.max_model_len}",
        how,
        _describe(sampling),
    ]
    screen.line(" · ".join(parts), is_dim=True)
    if not is_plain:
        screen.legend()


def _describe(sampling: SamplingParams) -> str:
    if sampling.is_greedy:
        return "temperature 0 (argmax)"
    parts = [f"temperature {sampling.temperature:g}"]
    for name, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(sampling, name)
        if value != default:
            parts.append(f"{name} {value:g}")
    return ", ".join(parts)


def _generate_one(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    screen: Screen | None,
) -> dict[str, Any]:
    output = _stream(llm, prompt, sampling, speculation, screen)
    result = _figures(output)
    if screen is not None:
        _say_figures(screen, result, sampling)
    return result


def _stream(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    screen: Screen | None,
) -> RequestOutput:
    output = None
    has_text = False
    try:
        with _between_steps() as check:
            for chunk in llm.stream(prompt, sampling, speculation):
                if screen is not None:
                    for text, is_draft in chunk.pieces:
                        screen.text(text, is_draft)
                        has_text = True
                output = chunk.output
                check()
    finally:  # whatever comes next, an error too, begins on a line of its own
        if screen is not None and has_text:
            screen.line()
    if output is None or output.finish_reason == "error":
        raise ForedraftError(output.error if output is not None and output.error else "no output")
    return output


@contextmanager
def _between_steps() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C wait for the end of a step; what is yielded raises it there. A second one is rude.

    Raised anywhere, it could meet compiled code or a finaliser, and be lost or turned into another
    error.
    """
    is_asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True

    def check() -> None:
        if is_asked:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals do not come here
        yield check
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _compare(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    rounds: int,
    shown: Screen | None,
    screen: Screen,
) -> dict[str, Any]:
    """Plain and speculative in turn; a first run is shown, the medians of the rest are compared."""
    import dataclasses

    renew = llm.engine.drafting.renew  # no run may draft from what another one learnt
    renew()
    output = _stream(llm, prompt, sampling, speculation, shown)
    sampling = dataclasses.replace(sampling, seed=output.seed)
    plain = SpeculationParams(PLAIN, 0, speculation.verification)
    plains, outputs = [], []
    with screen.status("Comparing") as status:
        for index in range(rounds):
            status.update(f"Comparing with plain decoding: round {index + 1} of {rounds}")
            plains.append(_stream(llm, prompt, sampling, plain, None))
            renew()
            outputs.append(_stream(llm, prompt, sampling, speculation, None))
    is_same = all(o.token_ids == plains[0].token_ids for o in (output, *outputs, *plains))
    report = None
    if not is_same and sampling.is_greedy:
        from foredraft.engine.near_tie import check_greedy

        other = next(o for o in (output, *outputs, *plains) if o.token_ids != plains[0].token_ids)
        report = check_greedy(llm.engine, other.prompt_ids, other.token_ids)
    result = _figures(outputs[0]) | {
        "tokens_per_s": statistics.median(_rate(o) for o in outputs),
        "plain_tokens_per_s": statistics.median(_rate(o) for o in plains),
        "speedup": statistics.median(
            _rate(o) / _rate(p) for o, p in zip(outputs, plains, strict=True)
        ),
        "same_text": is_same,
        "is_lossless_up_to_near_ties": None if report is None else report.is_lossless,
        "worst_near_tie_ulps": None if report is None else report.worst_ulps,
    }
    if shown is not None:
        _say_figures(shown, result, sampling)
        shown.line(_comparison(result, report, llm, sampling, speculation))
    return result


def _rate(output: RequestOutput) -> float:
    rate = output.stats.tokens_per_s
    if rate is None:
        raise ForedraftError("no token was generated, so there is no rate to compare")
    return rate


def _figures(output: RequestOutput) -> dict[str, Any]:
    stats = output.stats
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_tokens": stats.num_tokens,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "tokens_per_s": stats.tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": stats.acceptance_by_position,
        "num_verify_steps": stats.num_verify_steps,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_wasted_tokens": stats.num_wasted_tokens,
        "estimated_speedup": stats.estimated_speedup,
        "predicted_speedup": stats.predicted_speedup,
        "steps": stats.steps,
        "members": stats.members,
        "decode_s": stats.elapsed_s - stats.first_token_s,
        "time_s": {
            "draft": stats.draft_s,
            "target": stats.target_s,
            "verify": stats.verify_s,
            "host": stats.host_s,
        },
    }


def _say_figures(screen: Screen, result: dict[str, Any], sampling: SamplingParams) -> None:
    noun = "token" if result["num_tokens"] == 1 else "tokens"
    parts = [f"{result['num_tokens']} {noun}", f"{result['tokens_per_s']:.1f} tokens/s"]
    if result["finish_reason"] == "length":
        parts[0] += " (the limit)"
    if result["num_drafts"]:
        parts.append(f"acceptance length {result['acceptance_length']:.2f}")
        rates = result["acceptance_by_position"]
        by_position = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN_POSITIONS])
        if len(rates) > _SHOWN_POSITIONS:
            by_position += f" ... {rates[-1]:.2f} (of {len(rates)})"
        parts.append(f"accepted by position {by_position or 'none'}")
    if result["estimated_speedup"] is not None and result["num_drafts"]:
        parts.append(
            f"{result['estimated_speedup']:.2f}x plain as estimated "
            f"({result['predicted_speedup']:.2f}x foreseen)"
        )
    total = sum(result["time_s"].values()) or 1.0
    shares = [f"{name} {seconds / total:.1%}" for name, seconds in result["time_s"].items()]
    parts.append("time " + ", ".join(shares))
    if not sampling.is_greedy:
        parts.append(f"seed {result['seed']}")
    screen.line(" · ".join(parts), is_dim=True)


def _comparison(
    result: dict[str, Any],
    report: NearTieReport | None,
    llm: LLM,
    sampling: SamplingParams,
    speculation: SpeculationParams,
) -> str:
    line = (
        f"plain {result['plain_tokens_per_s']:.1f} tokens/s, speculative "
        f"{result['tokens_per_s']:.1f} tokens/s: {result['speedup']:.2f}x, "
    )
    if result["same_text"]:
        return line + "same text"
    line += "another text: "
    dtype = str(llm.engine.target.dtype).removeprefix("torch.")
    is_exact = dtype in ("float32", "float64")
    remedy = "" if is_exact else "; --dtype float32 gives the same text"
    if report is not None and report.is_lossless:
        return (
            f"{line}a near tie, {report.worst_ulps:.1f} units of the last {dtype} digit apart, "
            f"went the other way{remedy}"
        )
    if report is not None:
        return (
            f"{line}a token is {report.worst_ulps:.1f} units of the last {dtype} digit from the "
            f"target's own choice, where {report.max_ulps:g} are allowed; this is a fault, please "
            "report it"
        )
    if speculation.verification != "walk" and not sampling.is_greedy:
        return f"{line}{speculation.verification} is exact in law, not token for token"
    if is_exact:
        return f"{line}in {dtype} this is a fault, please report it"
    return f"{line}rounding changed a draw{remedy}"
