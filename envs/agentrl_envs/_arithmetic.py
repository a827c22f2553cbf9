"""Exact arithmetic from text: a small parser with limits, and no way to run anything else."""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS, MAX_DEPTH, MAX_BITS, MAX_EXPONENT = 300, 40, 2048, 256
ALLOWED = "Use numbers, + - * / // % ** and parentheses."
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\*\*|//|[-+*/%^()]))")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class ExpressionError(ValueError):
    """The expression cannot be computed. The message is written for the model that wrote it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The value of an expression, and the results of its operations in the order in which they were done."""

    value: Fraction
    results: tuple[Fraction, ...]


def evaluate(expression: str) -> Evaluation:
    """The exact value of an expression; `**` (or `^`) binds most tightly and to the right, as in Python.

    Raises:
        ExpressionError: It is no arithmetic, divides by zero, or is too long, too deep or too large.

    Example:
        >>> evaluate("2 * (3 + 4) / 4")
        Evaluation(value=Fraction(7, 2), results=(Fraction(7, 1), Fraction(14, 1), Fraction(7, 2)))
        >>> evaluate("2 +")
        Traceback (most recent call last):
        agentrl_envs._arithmetic.ExpressionError: The expression ends too early, after '2 +'.
    """
    if len(expression) > MAX_CHARS:
        raise ExpressionError(f"The expression has {len(expression)} characters; at most {MAX_CHARS} are read.")
    parser = _Parser(expression.translate(_SIGNS))
    value = parser.sum()
    if parser.token:
        raise parser.unexpected("an operator")
    return Evaluation(value, tuple(parser.results))


def show_number(value: Fraction) -> str:
    """A whole number in full, another with up to 12 significant digits.

    >>> show_number(Fraction(7)), show_number(Fraction(1, 8)), show_number(Fraction(2, 3))
    ('7', '0.125', '0.666666666667')
    """
    if value.denominator == 1:
        return str(value.numerator)
    with decimal.localcontext() as context:
        context.prec = 30
        return format(decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator), ".12g")


class _Parser:
    """One pass from left to right; `token` is what comes next, empty at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.results: list[Fraction] = []
        self.token = self.number = ""
        self.start = self.end = self.depth = 0
        self.advance()

    def advance(self) -> None:
        rest = self.text[self.end :]
        if not rest.strip():
            self.start, self.token, self.number = len(self.text), "", ""
            return
        match = _TOKEN.match(rest)
        self.start = self.end + len(rest) - len(rest.lstrip())
        if match is None:
            what = self.text[self.start]
            hint = "Write 1234, not 1,234." if what == "," else ALLOWED
            raise ExpressionError(f"The character {what!r} at position {self.start + 1} is not arithmetic. {hint}")
        self.number = match[1] or ""
        self.token = match[1] or match[2]
        self.end += match.end()

    def unexpected(self, wanted: str) -> ExpressionError:
        if not self.token:
            read = self.text.strip()[-20:]
            return ExpressionError(
                f"The expression ends too early, after '{read}'." if read else f"The expression is empty. {ALLOWED}"
            )
        return ExpressionError(f"At position {self.start + 1} stands '{self.token}', where {wanted} should be.")

    def sum(self) -> Fraction:
        return self.chain(self.product, ("+", "-"))

    def product(self) -> Fraction:
        return self.chain(self.signed, ("*", "/", "//", "%"))

    def chain(self, operand: Callable[[], Fraction], operators: tuple[str, ...]) -> Fraction:
        value = operand()
        while self.token in operators:
            operator = self.token
            self.advance()
            value = self.apply(operator, value, operand())
        return value

    def signed(self) -> Fraction:
        if self.token not in ("+", "-"):
            return self.power()
        negative = self.token == "-"
        self.advance()
        value = self.deeper(self.signed)
        return -value if negative else value

    def power(self) -> Fraction:
        base = self.atom()
        if self.token not in ("**", "^"):
            return base
        self.advance()
        return self.apply("**", base, self.deeper(self.signed))

    def atom(self) -> Fraction:
        if self.number:
            value = Fraction(self.number)
            self.advance()
            return value
        if self.token != "(":
            raise self.unexpected("a number")
        self.advance()
        value = self.deeper(self.sum)
        if self.token != ")":
            raise self.unexpected("')'")
        self.advance()
        return value

    def deeper(self, part: Callable[[], Fraction]) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(f"The expression is nested more than {MAX_DEPTH} deep.")
        value = part()
        self.depth -= 1
        return value

    def apply(self, operator: str, a: Fraction, b: Fraction) -> Fraction:
        if operator in ("/", "//", "%") and b == 0:
            raise ExpressionError(f"Division by zero, at '{operator}'.")
        if operator == "**":
            value = _raised(a, b)
        elif operator in ("//", "%"):
            value = Fraction(a // b) if operator == "//" else a % b
        else:
            value = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}[
                operator
            ](a, b)
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise ExpressionError("A result has more than 600 digits; that is too large.")
        self.results.append(value)
        return value


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ExpressionError(f"An exponent must be a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}.")
    if base == 0 and exponent < 0:
        raise ExpressionError("Division by zero: 0 has no negative power.")
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > 2 * MAX_BITS:
        raise ExpressionError("A power has more than 600 digits; that is too large.")
    return base ** int(exponent)
