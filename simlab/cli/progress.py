"""Progress bars on a terminal's stderr; silence when stderr is not a terminal. What a policy prints
goes there too: stdout is for results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO


def policy_prints() -> redirect_stdout[TextIO]:
    """While policies run: their print() must not land among the results."""
    return redirect_stdout(sys.stderr)


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Yields a function that advances the bar, or None when there is nobody to watch it."""
    if not sys.stderr.isatty():
        with policy_prints():
            yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with policy_prints(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


@contextmanager
def token_bar() -> Iterator[Callable[[int], Callable[[int, int], None]] | None]:
    """Yields a function that starts a bar of so many tokens, or None when nobody watches.

    It returns a function that is told of (tokens done, tokens that will not come after all).
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn

    class Speed(TextColumn):
        def render(self, task: Task) -> Any:
            self.text_format = f"{task.finished_speed or task.speed or 0:,.0f} tokens/s"
            return super().render(task)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        Speed(""),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def start(total: int) -> Callable[[int, int], None]:
            task = progress.add_task("tokens", total=total)

            def tell(done: int, skipped: int) -> None:
                nonlocal total
                total -= skipped
                progress.update(task, advance=done, total=total)

            return tell

        yield start
