"""One prompt of ``foredraft generate``: its text as it comes, and the figures of its run."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from foredraft.cli.screen import Screen
from foredraft.errors import ForedraftError
from foredraft.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.engine.outputs import RequestOutput

_SHOWN_POSITIONS = 8


def generate_one(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    screen: Screen | None,
) -> dict[str, Any]:
    """Generate for a prompt; show it, unless there is no screen, and return its figures."""
    output = stream(llm, prompt, sampling, speculation, screen)
    result = figures_of(output)
    if screen is not None:
        say_figures(screen, result, sampling)
    return result


def stream(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    screen: Screen | None,
) -> RequestOutput:
    """Generate for a prompt, piece by piece; ``ForedraftError`` where it failed."""
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


def figures_of(output: RequestOutput) -> dict[str, Any]:
    """What ``--json`` prints of an output."""
    stats = output.stats
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_tokens": stats.num_tokens,
        "finish_reason": output.finish_reason,
        "stop_string": output.stop_string,
        "logprobs": None
        if output.logprobs is None
        else [dataclasses.asdict(one) for one in output.logprobs],
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


def say_figures(screen: Screen, result: dict[str, Any], sampling: SamplingParams) -> None:
    """Say in one line what a run came to, and where its time went."""
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
