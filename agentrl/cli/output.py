"""How commands print: rich on a terminal, plain text elsewhere, JSON where asked."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import typer

from agentrl.json_safe import json_safe


def on_terminal() -> bool:
    """True where stdout is a terminal that wants colours (NO_COLOR and TERM=dumb say no)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int:
    """Columns of the terminal, at most 120; 100 where stdout is a file or a pipe."""
    return min(120, shutil.get_terminal_size((100, 24)).columns) if sys.stdout.isatty() else 100


def print_json(value: Any) -> None:
    """The value is on stdout as one line of JSON."""
    print_text(json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False))


def print_text(text: str) -> None:
    """The text is on stdout; characters that its encoding lacks are escaped instead of raising."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, errors="backslashreplace").decode(encoding))
    except BrokenPipeError:  # typer would exit with 1
        discard_output()
        raise typer.Exit from None


def discard_output() -> None:
    """The reader of stdout has gone (`agentrl show ... | head`), which is no error: the rest is written nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_note(text: str) -> None:
    """The remark is on stderr, out of the way of what is piped on."""
    print(text, file=sys.stderr)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """The rows are on stdout: a table of rich's on a terminal, aligned columns elsewhere."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if on_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, header in enumerate(headers):
            table.add_column(header, no_wrap=number == 0)
        for row in cells:
            table.add_row(*map(Text, row))
        Console(width=terminal_width(), highlight=False).print(table)
        return
    widths = [max(len(row[i]) for row in (list(headers), *cells)) for i in range(len(headers))]
    for row in (list(headers), *cells):
        print_text("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
