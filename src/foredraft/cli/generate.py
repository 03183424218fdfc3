"""``foredraft generate``: stream text, show which tokens were drafted, say where the time went."""

from __future__ import annotations

import json
import logging
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.errors import ForedraftError, InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import check_method, method_names

if TYPE_CHECKING:
    from rich.console import Console

    from foredraft.engine.llm import LLM, RequestOutput
    from foredraft.engine.near_tie import NearTieReport

_DRAFT_STYLE = "green"
_EXAMPLES = """
Examples:

  foredraft generate "The capital of France is"

  foredraft generate --chat "Name three fruits." --temperature 0.7 --seed 7

  foredraft generate --chat --prompt-file letter.txt --compare

  foredraft generate --prompt-file prompts.jsonl --json > results.jsonl
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
        int, typer.Option(help="Most draft tokens a step; 0 is plain decoding.")
    ] = 8,
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
            help="Run plain and speculative decoding in turn on the same prompt; print the ratio and "
            "whether the text is the same.",
        ),
    ] = False,
    rounds: Annotated[
        int, typer.Option(help="Runs of each kind for --compare; medians are shown.")
    ] = 3,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:index].")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a prompt, and nothing else.")
    ] = False,
) -> None:
    """Generate text, faster where drafts are accepted, and exactly the model's own."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    check_method(method)
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
    speculation = SpeculationParams(method, num_speculative_tokens, verification)
    if rounds < 1:
        raise InvalidRequestError(f"rounds is {rounds}; allowed is an integer of 1 or more.")
    every = _read_prompts(prompts or [], prompt_file or [], chat)
    logging.getLogger("foredraft").setLevel(logging.WARNING)
    llm = _load(model, dtype, device, max_model_len, errors)
    run = _compare if compare else _generate_one
    is_shown_plainly = as_json
    if not as_json:
        _say_settings(console, llm, speculation)
    num_failed = 0
    for index, prompt in enumerate(every):
        if not as_json and len(every) > 1:
            console.rule(f"prompt {index + 1} of {len(every)}", style="dim")
        try:
            result = run(
                llm, prompt, sampling, speculation, rounds, None if is_shown_plainly else console
            )
        except ForedraftError as error:
            num_failed += 1
            result = {"error": str(error)}
            if not as_json:
                errors.print(f"error: {error}", style="red", markup=False)
        if as_json:
            typer.echo(json.dumps(result, ensure_ascii=False))
    if num_failed:
        raise typer.Exit(1)


generate.__doc__ = f"{generate.__doc__}\n{_EXAMPLES}"


def _read_prompts(prompts: list[str], files: list[Path], chat: bool) -> list[Any]:
    """Every prompt, in order: arguments first, then files."""
    every: list[Any] = [_as_chat(text) if chat else text for text in prompts]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InvalidRequestError(
                f"prompt file {file} cannot be read ({reason}); check the path."
            ) from error
        if file.suffix != ".jsonl":
            every.append(_as_chat(text) if chat else text)
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                every.append(_from_json(file, number, line, chat))
    if not every:
        raise InvalidRequestError(
            "no prompt was given; pass one as an argument or with --prompt-file. For example: foredraft "
            'generate "The capital of France is"'
        )
    return every


def _as_chat(text: str) -> list[dict[str, str]]:
    if not text.strip():
        raise InvalidRequestError("the prompt is empty; allowed is any text. Give it some.")
    return [{"role": "user", "content": text}]


def _from_json(file: Path, number: int, line: str, chat: bool) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(
            f"{file}, line {number}, is no JSON ({error}); mend the line."
        ) from error
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value["messages"]
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{file}, line {number}: allowed is a string, or an object with a string 'prompt' or a list "
            "'messages'."
        )
    return _as_chat(text) if chat else text


def _load(model: str, dtype: str, device: str, max_model_len: int | None, errors: Console) -> LLM:
    with errors.status("Importing PyTorch and Transformers") as status:
        from foredraft.engine.llm import LLM

        status.update(f"Loading {model}")

        def notify(sentence: str) -> None:
            errors.print(sentence, style="dim", markup=False)

        return LLM(model, notify=notify, dtype=dtype, device=device, max_model_len=max_model_len)


def _say_settings(console: Console, llm: LLM, speculation: SpeculationParams) -> None:
    """Say in one line what is in force, and what the colours mean."""
    target = llm.engine.target
    how = "plain decoding"
    if speculation.method != "none" and speculation.num_speculative_tokens:
        how = (
            f"method {speculation.method}, up to {speculation.num_speculative_tokens} draft tokens, "
            f"verification {speculation.verification}"
        )
    dtype = str(target.dtype).removeprefix("torch.")
    console.print(f"{target.name} · {dtype} on {target.device} · {how}", style="dim", markup=False)
    if console.is_terminal and how != "plain decoding":
        console.print(
            f"[{_DRAFT_STYLE}]green[/]: accepted draft tokens; plain: the target's own", style="dim"
        )


def _generate_one(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    rounds: int,
    console: Console | None,
) -> dict[str, Any]:
    output = _stream(llm, prompt, sampling, speculation, console)
    result = _figures(output)
    if console is not None:
        console.print(_one_line(result), style="dim", markup=False)
    return result


def _stream(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    console: Console | None,
) -> RequestOutput:
    output = None
    for chunk in llm.stream(prompt, sampling, speculation):
        if console is not None:
            for text, is_draft in chunk.pieces:
                console.out(text, style=_DRAFT_STYLE if is_draft else None, end="", highlight=False)
        output = chunk.output
    if console is not None:
        console.out("")
    if output is None or output.finish_reason == "error":
        raise ForedraftError(output.error if output is not None and output.error else "no output")
    return output


def _compare(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    rounds: int,
    console: Console | None,
) -> dict[str, Any]:
    """Plain and speculative in turn; the first of each is shown, the medians of all are compared."""
    import dataclasses

    output = _stream(llm, prompt, sampling, speculation, console)
    sampling = dataclasses.replace(sampling, seed=output.seed)
    plain = SpeculationParams("none", 0, speculation.verification)
    plains, outputs = [], []
    for _ in range(rounds):
        plains.append(_stream(llm, prompt, sampling, plain, None))
        outputs.append(_stream(llm, prompt, sampling, speculation, None))
    plain_rate = statistics.median(_rate(o) for o in plains)
    rate = statistics.median(_rate(o) for o in outputs)
    ratio = statistics.median(_rate(o) / _rate(p) for o, p in zip(outputs, plains, strict=True))
    is_same = all(o.token_ids == plains[0].token_ids for o in (output, *outputs, *plains))
    result = _figures(outputs[0]) | {
        "tokens_per_s": rate,
        "plain_tokens_per_s": plain_rate,
        "speedup": ratio,
        "same_text": is_same,
    }
    report = None
    if not is_same and sampling.is_greedy:
        from foredraft.engine.near_tie import check_greedy

        report = check_greedy(llm.engine, output.prompt_ids, output.token_ids)
        result["is_lossless_up_to_near_ties"] = report.is_lossless
        result["worst_near_tie_ulps"] = report.worst_ulps
    if console is not None:
        console.print(_one_line(result), style="dim", markup=False)
        console.print(_comparison(result, report, llm, speculation), markup=False)
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
        "time_s": {
            "draft": stats.draft_s,
            "target": stats.target_s,
            "verify": stats.verify_s,
            "host": stats.host_s,
        },
    }


def _one_line(result: dict[str, Any]) -> str:
    parts = [f"{result['num_tokens']} tokens", f"{result['tokens_per_s']:.1f} tokens/s"]
    if result["num_drafts"]:
        parts.append(f"acceptance length {result['acceptance_length']:.2f}")
        by_position = " ".join(f"{rate:.2f}" for rate in result["acceptance_by_position"])
        parts.append(f"by position {by_position or 'none'}")
    total = sum(result["time_s"].values()) or 1.0
    parts.append(
        "time " + " ".join(f"{name} {s / total:.1%}" for name, s in result["time_s"].items())
    )
    parts.append(f"seed {result['seed']}")
    return " · ".join(parts)


def _comparison(
    result: dict[str, Any], report: NearTieReport | None, llm: LLM, speculation: SpeculationParams
) -> str:
    line = (
        f"plain {result['plain_tokens_per_s']:.1f} tokens/s, speculative {result['tokens_per_s']:.1f} "
        f"tokens/s: {result['speedup']:.2f}x, "
    )
    if result["same_text"]:
        return line + "same text"
    if report is not None and report.is_lossless:
        return line + (
            f"another text: a near tie, {report.worst_ulps:.1f} of the last {llm.engine.target.dtype} digit "
            "apart, went the other way; --dtype float32 gives the same text"
        )
    if speculation.verification != "walk":
        return (
            line + f"another text ({speculation.verification} is exact in law, not token for token)"
        )
    return line + "another text: rounding changed a draw; --dtype float32 gives the same text"
