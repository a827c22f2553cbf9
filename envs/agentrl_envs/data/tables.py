"""A shop's tables, drawn from a seed, as CSV files or as an SQLite database."""

from __future__ import annotations

import csv
import io
import random
import sqlite3
from dataclasses import dataclass

CITIES = ("Bergen", "Cadiz", "Gent", "Kosice", "Linz", "Nantes", "Porto", "Turku")
CATEGORIES = ("books", "garden", "kitchen", "music", "toys")
_NAMES = (
    "ada",
    "bo",
    "cem",
    "dina",
    "eli",
    "fay",
    "gil",
    "ines",
    "jon",
    "kai",
    "lea",
    "mo",
    "nia",
    "oto",
    "pia",
    "rui",
)
_THINGS = ("lamp", "drum", "novel", "spade", "kettle", "kite", "atlas", "flute", "ladle", "seed", "puzzle", "bowl")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below named columns; `types` are SQLite's."""

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: tuple[tuple[int | float | str, ...], ...]


def make_tables(rng: random.Random, rows: int) -> tuple[Table, ...]:
    """Customers, products and `rows` orders."""
    customers = [
        (n, f"{rng.choice(_NAMES)}{n}", rng.choice(CITIES), rng.randint(2010, 2025)) for n in range(1, 6 + rows // 12)
    ]
    products = [
        (n, f"{rng.choice(_THINGS)}{n}", rng.choice(CATEGORIES), rng.randint(100, 9900) / 100)
        for n in range(1, 6 + rows // 25)
    ]
    orders = []
    for number in range(1, rows + 1):
        day = f"{rng.randint(2021, 2025)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        orders.append((number, rng.choice(customers)[0], rng.choice(products)[0], rng.randint(1, 12), day))
    return (
        Table("customers", ("id", "name", "city", "since"), ("INTEGER", "TEXT", "TEXT", "INTEGER"), tuple(customers)),
        Table("products", ("id", "name", "category", "price"), ("INTEGER", "TEXT", "TEXT", "REAL"), tuple(products)),
        Table(
            "orders",
            ("id", "customer_id", "product_id", "quantity", "day"),
            ("INTEGER", "INTEGER", "INTEGER", "INTEGER", "TEXT"),
            tuple(orders),
        ),
    )


def database(tables: tuple[Table, ...]) -> sqlite3.Connection:
    """The tables in memory."""
    connection = sqlite3.connect(":memory:")
    for table in tables:
        columns = ", ".join(f"{name} {kind}" for name, kind in zip(table.columns, table.types, strict=True))
        connection.execute(f"CREATE TABLE {table.name} ({columns})")
        connection.executemany(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(table.columns))})", table.rows)
    connection.commit()
    return connection


def as_files(tables: tuple[Table, ...], form: str) -> dict[str, bytes]:
    """The files of an episode: one CSV for each table, or shop.db."""
    if form == "sqlite":
        connection = database(tables)
        try:
            return {"shop.db": connection.serialize()}
        finally:
            connection.close()
    return {f"{table.name}.csv": _csv(table).encode() for table in tables}


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()
