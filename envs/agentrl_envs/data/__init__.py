"""Answer a question about tables with Python: look at the files, compute, answer."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from agentrl.environment import Environment
from agentrl.sandbox import SandboxSpec
from agentrl.sandbox.episode import EpisodeSandbox
from agentrl.sandbox.shown import shown
from agentrl_envs._common import Range, call, settle
from agentrl_envs.data.questions import Question, make_question
from agentrl_envs.data.tables import Table, as_files, make_tables

KNOBS: dict[str, Range] = {
    "depth": (1, 4),
    "rows": (20, 2000),
    "form": ("any", "csv", "sqlite"),
    "max_calls": (2, 100),
}
SPEC = SandboxSpec(memory_mb=512, disk_mb=32, files=512, env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"})
RUN_S = 10.0
MOST_CODE, MOST_SHOWN = 20_000, 3000  # characters
RAN, PRINTED = 0.05, 0.3  # for a program that worked; for one whose last line is the answer
_LOAD = """import csv, sqlite3
db = sqlite3.connect(":memory:")
types = {"id": "INTEGER", "customer_id": "INTEGER", "product_id": "INTEGER", "quantity": "INTEGER", "since": "INTEGER",
         "price": "REAL"}
for name in ("customers", "products", "orders"):
    head, *rows = csv.reader(open(name + ".csv"))
    db.execute(f"CREATE TABLE {name} ({', '.join(c + ' ' + types.get(c, 'TEXT') for c in head)})")
    db.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(head))})", rows)
"""


class Data(Environment):
    """Three tables of a shop as files, and a question with one answer.

    Args:
        depth: 1: of one table, 2: with a condition, 3: of joined tables, 4: joined and grouped.
        rows: Orders in the tables, 20 to 2000.
        form: csv, sqlite, or either by the seed (any).
        max_calls: Tool calls after which the episode is over, 2 to 100.
        backend: Of the sandbox; None: see `agentrl.sandbox.open_sandbox`.
    """

    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(
        self, depth: int = 2, rows: int = 200, form: str = "any", max_calls: int = 10, backend: str | None = None
    ) -> None:
        self._defaults = settle(KNOBS, {}, depth=depth, rows=rows, form=form, max_calls=max_calls)
        self._box = EpisodeSandbox(SPEC, backend=backend)
        self._question = Question("", "", "")
        self._form = "csv"
        self._calls = self._max_calls = 0
        self._ran = self._printed = self._right = False

    def reset(
        self,
        seed: int | None = None,
        depth: int | None = None,
        rows: int | None = None,
        form: str | None = None,
        max_calls: int | None = None,
        **row: Any,
    ) -> str:
        """Tables and a question that depend on the seed and the difficulty only."""
        knobs = settle(KNOBS, self._defaults, depth=depth, rows=rows, form=form, max_calls=max_calls)
        rng = random.Random(seed)
        drawn = rng.choice(("csv", "sqlite"))
        self._form = drawn if knobs["form"] == "any" else knobs["form"]
        tables = make_tables(rng, knobs["rows"])
        self._question = make_question(tables, knobs["depth"], rng)
        self._calls, self._max_calls = 0, knobs["max_calls"]
        self._ran = self._printed = self._right = self.done = False
        self._box.start(as_files(tables, self._form))
        return (
            f"{_described(tables, self._form)}\n{self._question.text}\nCompute it with Python, then answer, once. "
            f"Calls: {self._max_calls}."
        )

    def python(self, code: str) -> str:
        """Run a Python program in the folder with the files. Nothing is left of it but the files that it writes.

        Args:
            code: The whole program; it shows only what it prints.

        Returns:
            What it printed, and how it ended.
        """
        if self.done:
            return "The episode is over."
        if len(code) > MOST_CODE:
            return f"The code has {len(code)} characters; at most {MOST_CODE} are read. Nothing was run."
        self._count()
        result = self._box.exec(["python3", "-"], stdin=code, timeout_s=RUN_S)
        if result.reason == "ok" and result.exit_code == 0 and (printed := result.stdout.strip()):
            self._ran = True
            self._printed |= is_right(printed.splitlines()[-1], self._question.answer)
        return shown(result, MOST_SHOWN)

    def answer(self, text: str) -> str:
        """Answer the question. This ends the episode.

        Args:
            text: The answer alone, a number or a name.

        Returns:
            Whether it is right.
        """
        if self.done:
            return "The episode is over."
        self._count()
        self.done = True
        self._right = is_right(text, self._question.answer)
        return "right" if self._right else "wrong"

    def get_reward(self) -> float:
        """1 for the right answer; else 0.05 for a program that worked, 0.3 for one that printed the answer last."""
        return 1.0 if self._right else RAN * self._ran + PRINTED * self._printed

    def close(self) -> None:
        """The sandbox is gone."""
        self._box.close()

    def _count(self) -> None:
        self._calls += 1
        self.done = self._calls >= self._max_calls

    def _gold(self) -> dict[str, Any] | str:
        """A query computes the answer in the sandbox; it is given as the sandbox would have printed it."""
        if self.done:
            return "Done."
        if self._calls:
            return call("answer", text=str(self._question.answer))
        load = _LOAD if self._form == "csv" else 'import sqlite3\ndb = sqlite3.connect("shop.db")\n'
        return call("python", code=f'{load}print(db.execute("""{self._question.sql}""").fetchone()[0])\n')


def _described(tables: tuple[Table, ...], form: str) -> str:
    where = "the SQLite database shop.db" if form == "sqlite" else "CSV files with these names (customers.csv, ...)"
    lines = [f"{table.name}: {', '.join(table.columns)}" for table in tables]
    return f"The tables of a shop are in {where}, in the working folder:\n" + "\n".join(lines)


def is_right(text: str, answer: int | float | str) -> bool:
    """Whether the text is the answer: numbers to half a unit of the second digit after the point, names without case.

    >>> is_right(" 12.0", 12), is_right("3.14159", 3.14), is_right("Bergen.", "bergen"), is_right("about 12", 12)
    (True, True, True, False)
    """
    given = text.strip()[:200].strip(" .'\"")
    if isinstance(answer, str):
        return given.casefold() == answer.casefold()
    try:
        return abs(float(given) - answer) < 0.0051
    except ValueError:
        return False
