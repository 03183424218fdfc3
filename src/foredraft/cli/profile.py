"""``foredraft profile``: measure what decoding, verifying and drafting cost here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.files import check_output
from foredraft.errors import InvalidRequestError

if TYPE_CHECKING:
    from foredraft.cli.screen import Screen
    from foredraft.config import EngineConfig
    from foredraft.plan.profile import Profile

_EXAMPLES = """
Examples:

  foredraft profile

  foredraft profile ./my-model --out profile.json

  foredraft profile --again --json

The profile is kept in the cache folder, where the engine finds it; it is
measured once for a model, a dtype and a machine, and again when foredraft,
PyTorch or Transformers change. 'foredraft plan --profile FILE' reads it.
"""
_DEFAULT_SECONDS = 90.0
_RESTLESS = 0.1
"""Repeats that lie further apart than this share of their median say that others were at work."""


def profile(
    model: Annotated[
        str, typer.Argument(help="The target, as for generate: default, a folder, a hub name.")
    ] = "default",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:index].")] = "auto",
    seconds: Annotated[
        float, typer.Option(help="Most seconds to measure; it stops earlier when steady.")
    ] = _DEFAULT_SECONDS,
    again: Annotated[
        bool, typer.Option("--again", help="Measure although there is a profile already.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the profile to this file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the profile as JSON, and nothing else.")
    ] = False,
) -> None:
    """Measure this machine: what a step costs by rows, requests and context, and what drafting."""
    from foredraft.cli.screen import Screen
    from foredraft.config import EngineConfig
    from foredraft.model.source import find_source

    if not 1 <= seconds <= 3600:
        raise InvalidRequestError(f"seconds is {seconds}; allowed is a number from 1 to 3600.")
    check_output("--out", out)
    config = EngineConfig(model, dtype, device)
    find_source(config.model)
    screen = Screen()
    found, path, is_new = _profile(config, seconds, again, screen)
    if out is not None:
        found.save(out)
    if as_json:
        typer.echo(found.to_json())
        return
    for line in _lines(found):
        screen.line(line)
    if path is not None:
        before = "" if is_new else "measured before (--again measures anew); "
        screen.line(f"{before}kept in {path}", is_dim=True)


profile.__doc__ = f"{profile.__doc__}\n{_EXAMPLES}"


def _profile(
    config: EngineConfig, seconds: float, again: bool, screen: Screen
) -> tuple[Profile, Path | None, bool]:
    """Return the profile, where it is kept, if it could be, and whether it was measured now."""
    with screen.status("Importing PyTorch and Transformers") as status:
        from foredraft.engine.engine import Engine
        from foredraft.engine.profiling import known_profile, measure_profile
        from foredraft.model.machine import identity, machine
        from foredraft.plan.profile import profile_path

        status.update("Loading the model")
        engine = Engine(config, notify=screen.notice)
    found = None if again else known_profile(engine.target)
    if found is not None and found.stability > _RESTLESS:
        screen.notice(
            f"The profile that was kept is restless (half of the repeats lie within "
            f"{found.stability:.0%} of their median), so it is measured again."
        )
        found = None
    is_new = found is None
    if found is None:
        screen.notice(f"Measuring {config.model} for up to {seconds:.0f} s.")
        with screen.progress("Measuring") as tell:
            found = measure_profile(engine, tell, seconds)
    path: Path | None = profile_path(found.model_hash, found.dtype, identity(machine()))
    if is_new and path is not None:
        try:
            found.save(path)
        except OSError as error:  # what was measured is shown all the same
            screen.notice(f"The profile cannot be kept in {path} ({error.strerror}).")
            path = None
    return found, path, is_new


def _lines(found: Profile) -> list[str]:
    """What a person wants to know of a profile."""
    where = found.machine.get("gpu") or found.machine.get("cpu")
    lines = [
        f"{found.model}, {found.dtype} on {where}, {len(found.passes)} shapes; half of the repeats "
        f"lie within {found.stability:.1%} of their median",
        "",
        "batch  context  decode step   alpha   verify pass with 1, 2, 4, 8, 16 draft tokens",
    ]
    for batch in found.batches():
        for context in found.contexts(batch):
            costs = "  ".join(
                f"{found.verify_cost(n, batch, context):5.2f}"
                if found.is_measured(batch * (1 + n), batch, context)
                else "    -"
                for n in (1, 2, 4, 8, 16)
            )
            lines.append(
                f"{batch:5}  {context:7}  {1e3 * found.t_decode(batch, context):8.2f} ms  "
                f"{found.alpha(batch, context):6.3f}   {costs}"
            )
    if found.stability > _RESTLESS:
        lines += [
            "",
            "the machine was busy with other things: these figures are uncertain; measure again on "
            "a quiet one",
        ]
    cost = found.verify_cost(4)
    lines += [
        "",
        f"verifying 4 draft tokens costs {cost:.2f} plain steps here; 1.2 to 1.5 is usual",
        f"fitted alpha at batch 1: {found.alpha():.3f}; by that line "
        + (
            f"no draft brings more than {1 / found.alpha():.0f}x"
            if found.alpha() > 0
            else "longer drafts cost nothing"
        ),
        f"host time: {1e3 * found.host_seconds:.2f} ms a step, "
        f"{found.host_seconds / found.t_decode():.1%} of a plain step at batch 1",
    ]
    for method, drafted in found.drafts.items():
        lines.append(
            f"draft time of {method}: {1e6 * drafted.seconds:.0f} us, counted "
            f"{drafted.cost.replace('_', ' ')}; t_draft {found.t_draft(method):.4f} plain steps"
        )
    return lines
