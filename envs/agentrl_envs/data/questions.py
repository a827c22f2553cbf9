"""Questions over the tables, with the SQL that answers them; deeper ones filter, join and group."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from agentrl_envs.data.tables import CATEGORIES, CITIES, Table, database

ALL = "FROM orders JOIN customers ON customers.id = customer_id JOIN products ON products.id = product_id"
TWO_DIGITS = " Round to two digits after the point."


@dataclass(frozen=True, slots=True)
class Question:
    """The words, the query, and its only value."""

    text: str
    sql: str
    answer: int | float | str


Draft = tuple[str, str]
"""The words, and the query that answers them: one column, the best row first."""


def make_question(tables: tuple[Table, ...], depth: int, rng: random.Random) -> Question:
    """A question of this depth whose answer is not in doubt: no ties, and nothing is 0."""
    connection = database(tables)
    try:
        while True:
            text, sql = rng.choice(DRAFTS[depth])(rng)
            found = connection.execute(sql).fetchall()
            tied = len(found) > 1 and found[0][1:] == found[1][1:]
            if found and found[0][0] and not tied and (len(found) == 1 or len(found[0]) > 1):
                value = found[0][0]
                return Question(text, sql, round(value, 2) if isinstance(value, float) else value)
    finally:
        connection.close()


# --- depth 1: one table ----------------------------------------------------------------
def _count(rng: random.Random) -> Draft:
    what = rng.choice(("product", "customer"))
    return f"How many different {what}s occur in the orders?", f"SELECT COUNT(DISTINCT {what}_id) FROM orders"


def _mean_price(rng: random.Random) -> Draft:
    return f"What is the mean price of the products?{TWO_DIGITS}", "SELECT AVG(price) FROM products"


def _most_quantity(rng: random.Random) -> Draft:
    return "What is the sum of the quantities of all orders?", "SELECT SUM(quantity) FROM orders"


def _dearest(rng: random.Random) -> Draft:
    way, word = rng.choice((("DESC", "highest"), ("ASC", "lowest")))
    return (
        f"What is the name of the product with the {word} price?",
        f"SELECT name, price FROM products ORDER BY price {way}",
    )


def _cities(rng: random.Random) -> Draft:
    return "In how many different cities do customers live?", "SELECT COUNT(DISTINCT city) FROM customers"


# --- depth 2: one table and a condition ------------------------------------------------
def _count_large(rng: random.Random) -> Draft:
    least = rng.randint(3, 10)
    return (
        f"How many orders have a quantity of at least {least}?",
        f"SELECT COUNT(*) FROM orders WHERE quantity >= {least}",
    )


def _in_city(rng: random.Random) -> Draft:
    city, year = rng.choice(CITIES), rng.randint(2012, 2022)
    return (
        f"How many customers from {city} or who are customers since {year} or later are there?",
        f"SELECT COUNT(*) FROM customers WHERE city = '{city}' OR since >= {year}",
    )


def _in_year(rng: random.Random) -> Draft:
    year = rng.randint(2021, 2025)
    return (
        f"What is the sum of the quantities of the orders of the year {year}?",
        f"SELECT SUM(quantity) FROM orders WHERE day LIKE '{year}-%'",
    )


def _mean_category(rng: random.Random) -> Draft:
    category = rng.choice(CATEGORIES)
    return (
        f"What is the mean price of the products of the category {category}?{TWO_DIGITS}",
        f"SELECT AVG(price) FROM products WHERE category = '{category}'",
    )


# --- depth 3: joined -------------------------------------------------------------------
def _quantity_of_category(rng: random.Random) -> Draft:
    category = rng.choice(CATEGORIES)
    return (
        f"How many pieces (the quantity) of products of the category {category} were ordered in all?",
        f"SELECT SUM(quantity) {ALL} WHERE category = '{category}'",
    )


def _revenue_of_city(rng: random.Random) -> Draft:
    city = rng.choice(CITIES)
    return (
        f"How much are all orders of customers from {city} worth together (price times quantity)?{TWO_DIGITS}",
        f"SELECT SUM(price * quantity) {ALL} WHERE city = '{city}'",
    )


def _buyers(rng: random.Random) -> Draft:
    category, year = rng.choice(CATEGORIES), rng.randint(2021, 2025)
    return (
        f"How many different customers ordered a product of the category {category} in the year {year}?",
        f"SELECT COUNT(DISTINCT customer_id) {ALL} WHERE category = '{category}' AND day LIKE '{year}-%'",
    )


# --- depth 4: joined and grouped -------------------------------------------------------
def _best_city(rng: random.Random) -> Draft:
    year = rng.randint(2021, 2025)
    return (
        f"The customers of which city ordered for the most money (price times quantity) in the year {year}?",
        f"SELECT city, ROUND(SUM(price * quantity), 2) AS worth {ALL} WHERE day LIKE '{year}-%' "
        "GROUP BY city ORDER BY worth DESC",
    )


def _best_customer(rng: random.Random) -> Draft:
    category = rng.choice(CATEGORIES)
    return (
        f"What is the name of the customer who ordered the most pieces (the quantity) of the category {category}?",
        f"SELECT customers.name, SUM(quantity) AS pieces {ALL} WHERE category = '{category}' "
        "GROUP BY customers.id ORDER BY pieces DESC",
    )


def _best_month(rng: random.Random) -> Draft:
    city = rng.choice(CITIES)
    return (
        f"In which month of the year (as two digits, all years together) did customers from {city} order the most "
        "pieces (the quantity)?",
        f"SELECT substr(day, 6, 2) AS month, SUM(quantity) AS pieces {ALL} WHERE city = '{city}' "
        "GROUP BY month ORDER BY pieces DESC",
    )


def _above_mean(rng: random.Random) -> Draft:
    category = rng.choice(CATEGORIES)
    worth = f"SELECT SUM(price * quantity) AS worth {ALL} WHERE category = '{category}' GROUP BY customers.id"
    return (
        f"Take the customers who ordered something of the category {category}. How many of them spent more on it "
        "(price times quantity) than the mean of these customers?",
        f"SELECT COUNT(*) FROM ({worth}) WHERE worth > (SELECT AVG(worth) FROM ({worth}))",
    )


DRAFTS: dict[int, tuple[Callable[[random.Random], Draft], ...]] = {
    1: (_count, _mean_price, _most_quantity, _dearest, _cities),
    2: (_count_large, _in_city, _in_year, _mean_category),
    3: (_quantity_of_category, _revenue_of_city, _buyers),
    4: (_best_city, _best_customer, _best_month, _above_mean),
}
