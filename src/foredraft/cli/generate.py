"""``foredraft generate``: stream text, show which tokens were drafted, say where the time went."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.compare import compare_with_plain
from foredraft.cli.drafter_options import drafter_options_of, read_prediction, read_scope
from foredraft.cli.files import check_output
from foredraft.cli.one_prompt import generate_one
from foredraft.cli.prompts import read_prompts
from foredraft.cli.sampling_options import describe, read_biases, read_grammar
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
    from foredraft.engine.llm import LLM

_DEFAULT_ROUNDS = 3
_EXAMPLES = """
Examples:

  foredraft generate "The capital of France is"

  foredraft generate --chat "Name three fruits." --temperature 0.7 --seed 7

  foredraft generate --chat --prompt-file letter.txt --compare

  foredraft generate --prompt-file prompts.jsonl --json > results.jsonl

  foredraft generate "One, two, three," --method lookahead --drafter-option window=8

--json prints one object a prompt, with the keys text, token_ids,
num_prompt_tokens, num_tokens, finish_reason, stop_string, logprobs (null
without --logprobs; else for each token token_id, logprob, rank and top),
seed, tokens_per_s,
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
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A string that ends the text, which ends before it. May be repeated."),
    ] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Keep the string that ended the text in it.")
    ] = False,
    min_tokens: Annotated[int, typer.Option(help="Tokens before which nothing ends the text.")] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, what is in prompt or text comes again less often.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logits of what is in the text.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, for every time that it is in it.")
    ] = 0.0,
    typical_p: Annotated[
        float, typer.Option(help="Keep the tokens of most typical surprise up to this mass.")
    ] = 1.0,
    top_n_sigma: Annotated[
        float,
        typer.Option(help="Keep logits within so many deviations of the largest; 0 keeps all."),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="ID=NUMBER, added to a token's logit. May be repeated."),
    ] = None,
    bad_token_id: Annotated[
        list[int] | None, typer.Option(help="A token id never picked. May be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with the JSON schema that the text must keep to.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A regular expression that the text must match as a whole.")
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(help="A file with a grammar in Lark's syntax, beginning at start."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities, with so many of the likeliest tokens."),
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
    suffix_scope: Annotated[
        str | None,
        typer.Option(
            help="Whose past responses --method suffix may draft from; by default those of no one "
            "in particular."
        ),
    ] = None,
    drafter_option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, any option of the method's own (docs/methods); for --method auto "
            "METHOD.NAME=VALUE. May be repeated."
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
        stop=tuple(stop or ()),
        include_stop=include_stop,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        typical_p=typical_p,
        top_n_sigma=top_n_sigma,
        logit_bias=read_biases(logit_bias or []),
        bad_token_ids=tuple(bad_token_id or ()),
        grammar=read_grammar(json_schema, regex, grammar),
        logprobs=logprobs,
        reuse_prefix=not compare,
        ignore_eos=ignore_eos,
    )
    speculation = SpeculationParams(
        method,
        _number(num_speculative_tokens),
        verification,
        prediction=read_prediction(prediction_file, method),
        suffix_scope=read_scope(suffix_scope, method),
    )
    check_method(method)
    if method != PLAIN and method not in METHODS:
        drafter_class(method)
    num_rounds = _check_rounds(rounds, compare)
    if logprobs is not None and not as_json:
        raise InvalidRequestError("--logprobs is printed with --json alone; add it.")
    check_output("--trace", trace)
    config = EngineConfig(
        model,
        dtype,
        device,
        max_model_len=max_model_len,
        drafter_options=drafter_options_of(
            method, draft_model, suffix_corpus or [], suffix_store, drafter_option
        ),
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
                    result = compare_with_plain(
                        llm, prompt, sampling, speculation, num_rounds, shown, screen
                    )
                else:
                    result = generate_one(llm, prompt, sampling, speculation, shown)
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
        describe(sampling),
    ]
    screen.line(" · ".join(parts), is_dim=True)
    if not is_plain:
        screen.legend()
