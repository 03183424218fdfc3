"""What the user sees: text to standard output, in colour where that is a terminal that has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

if TYPE_CHECKING:
    from rich.status import Status

_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"

# A model may write anything. A terminal is shown pictures of control characters instead of obeying
# them; a pipe or a file gets the text as it is.
_PICTURES: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"},
    **dict.fromkeys([0x0D, *range(0x80, 0xA0)], ""),
    0x7F: "\u2421",
}


class Screen:
    """Standard output and standard error of a command. Text is never wrapped nor read as markup."""

    def __init__(self) -> None:
        """Find out what the two can show; ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM`` are heeded."""
        self._out = Console()
        self._err = Console(stderr=True)
        self.has_colour = _has_colour(self._out)

    def text(self, text: str, is_draft: bool = False) -> None:
        """Write generated text, in green where it was drafted."""
        if self._out.is_terminal:
            text = text.translate(_PICTURES)
        is_green = is_draft and self.has_colour
        sys.stdout.write(f"{_GREEN}{text}{_RESET}" if is_green else text)
        sys.stdout.flush()

    def line(self, text: str = "", is_dim: bool = False) -> None:
        """Write a line of our own."""
        is_dim = is_dim and self.has_colour
        sys.stdout.write(f"{_DIM}{text}{_RESET}\n" if is_dim else f"{text}\n")
        sys.stdout.flush()

    def legend(self) -> None:
        """Say what the colours mean, where there are any."""
        if self.has_colour:
            self.line(
                f"{_RESET}{_GREEN}green{_RESET}{_DIM}: accepted draft tokens; plain: the target's "
                "own",
                is_dim=True,
            )

    def notice(self, text: str) -> None:
        """Write a line to standard error."""
        self._error_line(text, "dim")

    def error(self, text: str) -> None:
        """Write an error, on one line, to standard error."""
        self._error_line(f"error: {' '.join(text.split())}", "red")

    def status(self, text: str) -> Status:
        """Show, on standard error and only where that is a terminal, what is going on."""
        # Not where colours are forced into a file: it would be full of spinning wheels.
        console = self._err if sys.stderr.isatty() else Console(quiet=True)
        return console.status(escape(text))

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str, float], None]]:
        """Show a bar on standard error, where that is a terminal; yield what moves it."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = self._err if sys.stderr.isatty() else Console(quiet=True)
        columns = (TextColumn(text), BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda what, share: bar.update(task, description=escape(what), completed=share)

    def _error_line(self, text: str, style: str) -> None:
        # By rich, which knows of the status that may stand on the same line; and as a Text, which
        # is not read as markup.
        style = style if _has_colour(self._err) else ""
        self._err.print(Text(text, style=style), soft_wrap=True, highlight=False)


def _has_colour(console: Console) -> bool:
    return (
        console.is_terminal
        and console.color_system is not None
        and not console.no_color
        and not console.legacy_windows
    )
