"""Prompts of our own words for the benchmarks: what a small instruct model can really do."""

from __future__ import annotations

_REPORT = (
    "The harbour library opened its new reading room on Monday. The room has forty seats, two "
    "long oak tables and a glass roof that faces the old lighthouse. Mrs Adler, who has run the "
    "library since 2009, said that the room cost less than planned, because the tables were "
    "made by students of the trade school. The town council paid for the roof, and the "
    "fishing club gave the lamps. On the first day more than two hundred people came, most "
    "of them families with children. The library will keep the room open until nine in the "
    "evening from Tuesday to Saturday. On Sundays a group of volunteers will read stories to "
    "children in the reading room. Mrs Adler hopes that the reading room will bring back "
    "readers who had stopped coming when the old building was closed for repairs. The next "
    "step is a small garden between the library and the lighthouse, which the trade school will "
    "plan together with the fishing club."
)

SUMMARIZE = (
    "Summarize the following report. Keep the names, and quote the report's own sentences where "
    f"you can.\n\n{_REPORT}"
)
"""A summary that quotes: the output repeats parts of the prompt."""

_MISSPELLED = (
    _REPORT.replace("forty", "fourty").replace("families", "familys").replace("evening", "evning")
)

EDIT = f"Rewrite this text. Correct the spelling mistakes and change nothing else.\n\n{_MISSPELLED}"
"""An edit: the output repeats the prompt but for a few words."""

CHAT = "Tell me about a long walk through a forest in autumn."
"""Free writing: little in the output is known from the prompt."""


def as_chat(text: str) -> list[dict[str, str]]:
    """Return a prompt as the user's chat message."""
    return [{"role": "user", "content": text}]
