"""``foredraft bench``: measured ratios, each against its baseline in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.files import check_output
from foredraft.errors import InvalidRequestError
from foredraft.model.source import find_source
from foredraft.plan.trace import append_trace

_BENCHES = ("decode", "adapt", "drafters", "batch", "heads")


def bench(
    name: Annotated[str, typer.Argument(help="Which: decode, adapt, drafters, batch or heads.")],
    model: Annotated[str, typer.Option(help="The target, as for generate.")] = "default",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are shown.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON line to this file.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Spec-Bench's questions, for drafters and heads.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="METHOD=FOLDER, a head to measure; may be given again. For heads."),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(help="Python of an environment that has vLLM, to serve beside it. For batch."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Append what became of every draft to this file, for 'foredraft plan --trace'."
        ),
    ] = None,
) -> None:
    """Run a benchmark; the last line of its output is one JSON object.

    For example: foredraft bench decode, foredraft bench adapt --rounds 3, or foredraft bench
    drafters --data question.jsonl
    """
    if name not in _BENCHES:
        raise InvalidRequestError(f"bench is {name!r}; allowed is one of {', '.join(_BENCHES)}.")
    if rounds < 1:
        raise InvalidRequestError(f"rounds is {rounds}; allowed is an integer of 1 or more.")
    if data is not None and name not in ("drafters", "heads"):
        raise InvalidRequestError(
            f"--data is for the benches drafters and heads, and this is {name!r}; leave it out."
        )
    if head and name != "heads":
        raise InvalidRequestError(
            f"--head is for the bench heads, and this is {name!r}; leave it out."
        )
    if vllm is not None and name != "batch":
        raise InvalidRequestError(
            f"--vllm is for the bench batch, and this is {name!r}; leave it out."
        )
    folders = dict(map(_head, head or []))
    if trace is not None and name not in ("decode", "adapt"):
        raise InvalidRequestError(
            f"--trace is for the benches decode and adapt, and this is {name!r}; leave it out."
        )
    find_source(model)
    check_output("--out", out)
    check_output("--trace", trace)
    import importlib

    if vllm is not None:
        from foredraft.bench.vllm_side import check_python

        check_python(vllm)

    def record(lines: list[str]) -> None:
        if trace is not None:
            append_trace(trace, lines)

    options: dict[str, dict[str, Any]] = {
        "decode": {"trace": record},
        "adapt": {"trace": record},
        "drafters": {"data": data},
        "heads": {"data": data, "heads": folders},
        "batch": {"vllm": vllm},
    }
    report = importlib.import_module(f"foredraft.bench.{name}").run(
        model, rounds, **options.get(name, {})
    )
    line = json.dumps(report)
    if out is not None:
        out.write_text(line + "\n", encoding="utf-8")
    typer.echo(line)


def _head(given: str) -> tuple[str, str]:
    """METHOD=FOLDER taken apart."""
    from foredraft.bench.heads import KINDS

    method, sign, folder = given.partition("=")
    if not sign or method not in KINDS or not folder:
        raise InvalidRequestError(
            f"--head is {given!r}; allowed is METHOD=FOLDER, METHOD one of {', '.join(KINDS)}."
        )
    return method, folder
