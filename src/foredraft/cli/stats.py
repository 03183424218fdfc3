"""What ``foredraft generate --stats`` shows of a request: its drafts by length, and by proposer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.cli.screen import Screen

_BOUNDS = (0, 1, 2, 4, 8, 16, 32)
_BAR = 30


def say_stats(screen: Screen, result: dict[str, Any]) -> None:
    """Show two small tables.

    Args:
        screen: Where to.
        result: The figures of a request, with ``steps`` and ``members``.
    """
    steps = result["steps"]
    if not steps:
        return
    rows = []
    for index, least in enumerate(_BOUNDS):
        above = _BOUNDS[index + 1] if index + 1 < len(_BOUNDS) else None
        own = [step for step in steps if step[0] >= least and (above is None or step[0] < above)]
        if own:
            accepted = sum(step[1] for step in own) / len(own)
            rows.append((_span(least, above), len(own), accepted))
    most = max(count for _, count, _ in rows)
    screen.line("draft tokens   steps  accepted a step", is_dim=True)
    for span, count, accepted in rows:
        bar = "#" * max(1, round(_BAR * count / most))
        screen.line(f"{span:>12}  {count:6}  {accepted:15.2f}  {bar}", is_dim=True)
    if not result["members"]:
        return
    screen.line("proposed by   draft tokens  accepted", is_dim=True)
    for method, (proposed, accepted) in result["members"].items():
        screen.line(
            f"{method:12}  {proposed:12}  {accepted:8}  {accepted / proposed:.1%}", is_dim=True
        )


def _span(least: int, above: int | None) -> str:
    if above is None:
        return f"{least} or more"
    return str(least) if above == least + 1 else f"{least} to {above - 1}"
