"""A calculator: the expression is read as a syntax tree, of which only arithmetic is computed, within limits."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from agentrl.tool_schema import tool

MOST_CHARS, MOST_BITS, MOST_FACTORIAL = 500, 4096, 500
CONSTANTS = {"pi": math.pi, "e": math.e}
_HELP = f"Use numbers, + - * / // % **, parentheses, {', '.join(CONSTANTS)} and the functions"


class ExpressionError(ValueError):
    """The expression cannot be computed. The message is written for the model that wrote it."""


Number = Fraction | float


@tool(run_inline=True)
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: For example "12 * (7 + 5) / 4" or "sqrt(2) * sin(pi / 6)". Angles are in radians.

    Returns:
        The result, or what is wrong with the expression.

    >>> calculator("0.1 + 0.2"), calculator("2 ** 100"), calculator("10 / 4")
    ('0.3', '1267650600228229401496703205376', '2.5')
    >>> calculator("9 ** 9 ** 9")
    'error: The result of ** is too large: a number may have at most 1233 digits.'
    """
    try:
        return shown(evaluate(expression))
    except ExpressionError as error:
        return f"error: {error}"


def evaluate(expression: str) -> Number:
    """The value: exact as long as no function or constant makes it a float.

    Raises:
        ExpressionError: It is no arithmetic, has no value, or is too long, too deep or too large.

    >>> evaluate("1 / 3 * 3"), evaluate("round(2.5)"), evaluate("sqrt(16)")
    (Fraction(1, 1), Fraction(2, 1), 4.0)
    """
    if len(expression) > MOST_CHARS:
        raise ExpressionError(f"The expression has {len(expression)} characters; at most {MOST_CHARS} are read.")
    text = expression.strip().translate({0xD7: "*", 0xF7: "/", 0x2212: "-", ord("^"): "**"})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "2(3)" is refused below, in our own words
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        said = getattr(error, "msg", None) or "it cannot be read"
        raise ExpressionError(f"That is no arithmetic: {said}. {_HELP} {', '.join(FUNCTIONS)}.") from None
    try:
        return _value(tree.body)
    except RecursionError:
        raise ExpressionError("The expression is nested too deeply.") from None


def shown(value: Number) -> str:
    """A whole number in full, another with up to 12 significant digits.

    >>> shown(Fraction(1, 3)), shown(6.0), shown(1e300)
    ('0.333333333333', '6', '1e+300')
    """
    if not isinstance(value, Fraction):
        return f"{value:.12g}"
    if value.denominator == 1:
        return str(value.numerator)
    quotient = Context(prec=30, Emax=9999, Emin=-9999).divide(Decimal(value.numerator), Decimal(value.denominator))
    return format(quotient, ".12g")


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() as number):
            return _small(Fraction(number), "a number")
        case ast.Constant(value=float() as broken):
            return _literal(broken)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=inner):
            value = _value(inner)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _apply(type(op), _value(left), _value(right))
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _call(name, [_value(argument) for argument in arguments])
    what = ast.unparse(node)[:40]
    raise ExpressionError(f"'{what}' is no arithmetic. {_HELP} {', '.join(FUNCTIONS)}.")


def _literal(number: float) -> Fraction:
    # as it was written, 0.1 and not the nearest float: the float's shortest text is what was written or as good
    if not math.isfinite(number):
        raise _too_large("a number")
    return Fraction(repr(number))


def _apply(kind: type[ast.operator], a: Number, b: Number) -> Number:
    name, operate = OPERATORS[kind]
    if name in ("/", "//", "%") and b == 0:
        raise ExpressionError(f"Division by zero, at '{name}'.")
    try:
        return _small(operate(a, b), f"the result of {name}")
    except OverflowError:
        raise _too_large(f"The result of {name}") from None
    except ZeroDivisionError:
        raise ExpressionError("Division by zero: 0 has no negative power.") from None


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
        if max(a.numerator.bit_length() - 1, a.denominator.bit_length() - 1) * abs(b.numerator) > MOST_BITS:
            raise OverflowError  # before it is computed
        return a**b.numerator
    value = float(a) ** float(b)
    if isinstance(value, complex):
        raise ExpressionError("A negative number has no real root or broken power.")
    return value


def _call(name: str, arguments: list[Number]) -> Number:
    function, least, most = FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        count = str(least) if least == most else f"at least {least}" if most > 9 else f"{least} or {most}"
        raise ExpressionError(f"{name} takes {count} numbers, not {len(arguments)}.")
    try:
        result = function(*arguments)
    except OverflowError:
        raise _too_large(f"The result of {name}") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{name} has no value for {', '.join(map(shown, arguments))}.") from None
    return _small(result if isinstance(result, float) else Fraction(result), f"the result of {name}")


def _small(value: Number, what: str) -> Number:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
            raise _too_large(what)
    elif not math.isfinite(value):
        raise _too_large(what)
    return value


def _too_large(what: str) -> ExpressionError:
    digits = int(MOST_BITS * math.log10(2))
    return ExpressionError(f"{what[0].upper()}{what[1:]} is too large: a number may have at most {digits} digits.")


def _factorial(n: Number) -> int:
    if n != int(n) or not 0 <= n <= MOST_FACTORIAL:
        raise ExpressionError(f"factorial takes a whole number from 0 to {MOST_FACTORIAL}.")
    return math.factorial(int(n))


def _rounded(value: Number, digits: Number = Fraction(0)) -> Number:
    if digits != int(digits) or abs(digits) > 100:
        raise ExpressionError("round takes a number of digits from -100 to 100.")
    return round(Fraction(value), int(digits))


OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Number]]] = {
    ast.Add: ("+", lambda a, b: a + b),
    ast.Sub: ("-", lambda a, b: a - b),
    ast.Mult: ("*", lambda a, b: a * b),
    ast.Div: ("/", lambda a, b: a / b),
    ast.FloorDiv: ("//", lambda a, b: Fraction(a // b)),
    ast.Mod: ("%", lambda a, b: a % b),
    ast.Pow: ("**", _power),
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "sqrt": (math.sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_rounded, 1, 2),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "min": (min, 1, 99),
    "max": (max, 1, 99),
    "exp": (math.exp, 1, 1),
    "log": (math.log, 1, 2),
    "log10": (math.log10, 1, 1),
    "log2": (math.log2, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
    "tan": (math.tan, 1, 1),
    "asin": (math.asin, 1, 1),
    "acos": (math.acos, 1, 1),
    "atan": (math.atan, 1, 1),
    "factorial": (_factorial, 1, 1),
}
