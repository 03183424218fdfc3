"""``foredraft plan``: should I speculate, with how many draft tokens, up to which batch size?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.errors import PlanError

if TYPE_CHECKING:
    from foredraft.plan.profile import Profile
    from foredraft.plan.result import BatchPlan, Plan
    from foredraft.plan.roofline import Roofline
    from foredraft.plan.trace import RequestTrace

_DEFAULT_MAX = 32  # as in the planner, which is not imported for the help
_SHOWN = (1, 2, 4, 8, 16, 32)
_EXAMPLES = """
Examples:

  foredraft plan --acceptance 0.8 --alpha 0.1

  foredraft plan --acceptance 0.7 --model-config ./Llama-3-8B --hardware H100-SXM

  foredraft plan --profile profile.json --trace trace.jsonl --html plan.html

  foredraft plan --acceptance 0.7 --alpha 0.05 --method eagle3 --t-draft 0.04
  --draft-model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --emit vllm

Acceptance comes from --acceptance or --trace; costs from --alpha, from
--model-config with --hardware (or --bandwidth-gb-s and --tflops), or from
--profile. The first --batch is the one the verdict and the JSON's top level
are about. --json prints one object with the keys
best_num_speculative_tokens, expected_tokens, speedup, speedup_interval,
ceiling (null: none), break_even_batch (null: none among the batch sizes that
are known), verdict, and table, by batch size and number of draft tokens.
"""


def plan(
    acceptance: Annotated[
        float | None,
        typer.Option(help="Probability that a draft token is accepted, given those before it."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded steps instead: a file from 'foredraft generate --trace'."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Cost of verifying one more draft token, in plain decode steps."),
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option(help="A config.json, or its folder: costs from a roofline. Needs hardware."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Costs as measured: a file from 'foredraft profile'.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A GPU by name, such as H100-SXM; an unknown one lists all.")
    ] = None,
    bandwidth_gb_s: Annotated[
        float | None, typer.Option(help="Memory bandwidth of a machine you describe.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Its peak of dense 16-bit matrix products.")
    ] = None,
    weight_bits: Annotated[
        float | None, typer.Option(help="Bits of a weight, if not as the model config says.")
    ] = None,
    t_draft: Annotated[
        float | None,
        typer.Option(help="Draft time in plain decode steps; 0 for n-gram and suffix drafts."),
    ] = None,
    draft_cost: Annotated[
        str | None,
        typer.Option(help="What --t-draft is the time of: once (a draft), per_token, per_level."),
    ] = None,
    max_num_speculative_tokens: Annotated[
        int, typer.Option(help="Largest number of draft tokens to look at.")
    ] = _DEFAULT_MAX,
    batch: Annotated[
        list[int] | None, typer.Option(help="Requests decoded together. May be repeated.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each request in the cache; 1024 for a roofline.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="ngram, suffix, draft-model, eagle, eagle3, medusa or mtp."),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Draft model or head to name in what --emit writes.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            help="Write the plan for another engine, and nothing else: vllm, sglang, tensorrt-llm, "
            "llama.cpp, tgi or ollama."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a report with plots, one HTML file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether speculation pays, with how many draft tokens, and up to which batch size."""
    from foredraft.plan.acceptance import estimate_survival
    from foredraft.plan.engines import emit as emit_plan
    from foredraft.plan.planner import make_plan

    if html is not None and not html.parent.is_dir():
        raise PlanError(
            f"--html is {html}, but there is no folder {html.parent}; make it, or choose another "
            "file."
        )
    if draft_model is not None and emit is None:
        raise PlanError(
            f"--draft-model is {draft_model!r}, but it is only named in what --emit writes; add "
            "--emit, or leave it out."
        )
    if acceptance is not None and trace is not None:
        raise PlanError("--acceptance and --trace are both given; leave one out.")
    if acceptance is None and trace is None:
        raise PlanError(
            "neither --acceptance nor --trace is given; give the acceptance of a draft token (from "
            "0 to 1), or steps recorded with 'foredraft generate --trace FILE'."
        )
    roofline = _roofline(model_config, hardware, bandwidth_gb_s, tflops, weight_bits)
    measured = _profile(profile)
    requests = _requests(trace, method)
    estimate = estimate_survival(requests) if requests else None
    traced_method = requests[0].method if requests else None
    result = make_plan(
        acceptance=acceptance,
        estimate=estimate,
        alpha=alpha,
        t_draft=t_draft,
        draft_cost=draft_cost,
        roofline=roofline,
        profile=measured,
        context=context,
        batches=batch or (),
        max_num_speculative_tokens=max_num_speculative_tokens,
        method=method or traced_method,
    )
    config = None if emit is None else emit_plan(result, emit, draft_model)
    if html is not None:
        from foredraft.plan.check import check_traces
        from foredraft.plan.report import write_report

        checks = check_traces(requests, measured, context) if measured is not None else []
        write_report(html, result, profile=measured, estimate=estimate, checks=checks)
    if as_json:
        content = result.to_dict()
        if config is not None:
            content["emit"] = {
                "engine": config.engine,
                "text": config.text,
                "files": config.files,
                "notes": list(config.notes),
            }
        typer.echo(json.dumps(content))
    elif config is not None:
        typer.echo(config.render())
    else:
        _show(result)


plan.__doc__ = f"{plan.__doc__}\n{_EXAMPLES}"


def _roofline(
    model_config: Path | None,
    hardware: str | None,
    bandwidth_gb_s: float | None,
    tflops: float | None,
    weight_bits: float | None,
) -> Roofline | None:
    described = (bandwidth_gb_s, tflops)
    if model_config is None:
        for name, value in (
            ("--hardware", hardware),
            ("--bandwidth-gb-s", bandwidth_gb_s),
            ("--tflops", tflops),
            ("--weight-bits", weight_bits),
        ):
            if value is not None:
                raise PlanError(
                    f"{name} is {value!r}, but without --model-config there is no roofline to use "
                    "it in; give one, or leave it out."
                )
        return None
    if hardware is not None and described != (None, None):
        raise PlanError(
            "--hardware and a described machine (--bandwidth-gb-s, --tflops) are both given; leave "
            "one out."
        )
    from foredraft.plan.roofline import Roofline, described_hardware, find_hardware
    from foredraft.plan.shape import load_shape

    if hardware is not None:
        machine = find_hardware(hardware)
    elif bandwidth_gb_s is None or tflops is None:
        raise PlanError(
            "--model-config is given without a machine; name one with --hardware, or describe one "
            "with both --bandwidth-gb-s and --tflops."
        )
    else:
        machine = described_hardware(bandwidth_gb_s, tflops)
    return Roofline(load_shape(model_config, weight_bits), machine)


def _profile(path: Path | None) -> Profile | None:
    if path is None:
        return None
    from foredraft.plan.profile import load_profile

    return load_profile(path)


def _requests(trace: Path | None, method: str | None) -> list[RequestTrace]:
    if trace is None:
        return []
    from foredraft.plan.trace import read_trace

    return read_trace(trace, method)


def _show(result: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    console.print(result.source, style="dim", markup=False, soft_wrap=True)
    console.print(
        f"method {result.method}, acceptance {result.acceptance:.3g}, draft time counted "
        f"{result.draft_cost.replace('_', ' ')}",
        style="dim",
        markup=False,
    )
    shown = _columns(result)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("batch", justify="right")
    table.add_column("alpha", justify="right")
    for n in shown:
        table.add_column(f"N={n}", justify="right")
    for title in ("best N", "speedup", "interval", "ceiling"):
        table.add_column(title, justify="right")
    for batch in result.batches:
        table.add_row(*_row(batch, shown))
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    console.print(result.verdict, style="bold", markup=False, soft_wrap=True)


def _columns(result: Plan) -> list[int]:
    most = len(result.first.cells) - 1
    return [n for n in _SHOWN if n <= most]


def _row(batch: BatchPlan, shown: list[int]) -> list[str]:
    best = batch.best
    interval = "" if best.low is None else f"{best.low:.2f}-{best.high:.2f}"
    alpha = "0" if batch.alpha == 0 else f"{batch.alpha:.3g}"
    return [
        str(batch.num_requests),
        alpha,
        *(f"{batch.cells[n].speedup:.2f}" for n in shown),
        str(best.num_speculative_tokens) if best.num_speculative_tokens else "off",
        f"{best.speedup:.2f}",
        interval,
        f"{batch.ceiling:.3g}",
    ]
