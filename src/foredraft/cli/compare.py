"""``foredraft generate --compare``: plain and speculative decoding in turn, and do they agree?"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

from foredraft.cli.one_prompt import figures_of, say_figures, stream
from foredraft.cli.screen import Screen
from foredraft.errors import ForedraftError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import PLAIN

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.engine.near_tie import NearTieReport
    from foredraft.engine.outputs import RequestOutput


def compare_with_plain(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    rounds: int,
    shown: Screen | None,
    screen: Screen,
) -> dict[str, Any]:
    """Plain and speculative in turn; a first run is shown, the medians of the rest are compared."""
    renew = llm.engine.drafting.renew  # no run may draft from what another one learnt
    renew()
    output = stream(llm, prompt, sampling, speculation, shown)
    sampling = dataclasses.replace(sampling, seed=output.seed)
    plain = SpeculationParams(PLAIN, 0, speculation.verification)
    plains, outputs = [], []
    with screen.status("Comparing") as status:
        for index in range(rounds):
            status.update(f"Comparing with plain decoding: round {index + 1} of {rounds}")
            plains.append(stream(llm, prompt, sampling, plain, None))
            renew()
            outputs.append(stream(llm, prompt, sampling, speculation, None))
    is_same = all(o.token_ids == plains[0].token_ids for o in (output, *outputs, *plains))
    report = None
    if not is_same and sampling.is_greedy:
        from foredraft.engine.near_tie import check_greedy

        other = next(o for o in (output, *outputs, *plains) if o.token_ids != plains[0].token_ids)
        report = check_greedy(llm.engine, other.prompt_ids, other.token_ids)
    result = figures_of(outputs[0]) | {
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
        say_figures(shown, result, sampling)
        shown.line(_comparison(result, report, llm, sampling, speculation))
    return result


def _rate(output: RequestOutput) -> float:
    rate = output.stats.tokens_per_s
    if rate is None:
        raise ForedraftError("no token was generated, so there is no rate to compare")
    return rate


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
    remedy = "" if is_exact else "; --dtype float32 leaves next to none"
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
