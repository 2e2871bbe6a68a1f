"""Filters of consumers: tags, and SQL92 expressions over properties.

    expression  or (AND, OR, NOT, parentheses; AND binds more than OR)
    comparison  = <> > >= < <=  BETWEEN a AND b  IN ('a', 'b')  IS NULL  CONTAINS 'a'
                STARTSWITH 'a'  ENDSWITH 'a', the last six with NOT too
    value       property · 'text' · number · TRUE · FALSE · NULL, with + or - before it

Values have three truths, as in SQL: a comparison with a property that is missing is neither true
nor false, and the message is not wanted. Properties are texts: one that is compared with a number
is read as a number; what is no number is equal to nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from convoymq.model.errors import SyntaxFault
from convoymq.rocketmq.store.types import Matches, Message, java_hash

ALL = "*"
TAG = "TAG"
SQL92 = "SQL92"

EXPRESSION_LENGTH_MAX = 16_384
DEPTH_MAX = 64

Value: TypeAlias = "str | int | float | bool | None"
Expression: TypeAlias = Callable[[Mapping[str, str]], Value]


def tags_of(expression: str | None) -> list[str]:
    """Returns the tags of an expression `a || b`; none: all messages."""
    if expression is None or expression.strip() in ("", ALL):
        return []
    return [tag for part in expression.split("||") if (tag := part.strip())]


def is_tags(expression_type: str | None) -> bool:
    """Returns whether an expression is about tags."""
    return not expression_type or expression_type == TAG


def by_tags(codes: frozenset[int]) -> Matches | None:
    """Returns a filter by tags' codes; None: all messages."""
    if not codes:
        return None
    return lambda code, _message: code in codes


def codes_of(expression: str | None) -> frozenset[int]:
    """Returns the codes of the tags of an expression."""
    return frozenset(map(java_hash, tags_of(expression)))


def by_expression(expression: str) -> Matches:
    """Returns a filter by an SQL92 expression. Raises SyntaxFault."""
    wanted = compile_expression(expression)

    def matches(_code: int, message: Message | None) -> bool:
        return message is None or wanted(message.properties) is True

    return matches


_TOKEN = re.compile(
    r"""
    (?: [ \t\r\n\f]+ | --[^\r\n]*(?:[\r\n]|$) | /\*.*?\*/ )*
    (?: (?P<text>'(?:[^']|'')*')
      | (?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+
          |(?:0|[1-9][0-9]*)[lL]?)(?![A-Za-z0-9_$.])
      | (?P<word>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<mark><>|>=|<=|[=<>()+,-])
      | (?P<end>\Z)
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_WORDS = frozenset((
    "NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH",
    "ENDSWITH",
))  # fmt: skip
_ORDERS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_PARTS: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": lambda text, part: part in text,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def compile_expression(expression: str) -> Expression:
    """Returns a predicate of properties. Raises SyntaxFault."""
    if len(expression) > EXPRESSION_LENGTH_MAX:
        raise SyntaxFault(f"an expression of {len(expression)} characters")
    parser = _Parser(expression)
    found = parser.either()
    parser.expect("")
    return _truth(found)


def _number(value: Value) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            return float(value) if "." in value or "e" in value.lower() else int(value)
        except ValueError:
            return None
    return value


def _equal(left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        return _boolean(left) is _boolean(right)
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    one, other = _number(left), _number(right)
    return one is not None and one == other


def _boolean(value: Value) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _truth(expression: Expression) -> Expression:
    return lambda properties: _boolean(expression(properties))


def _not(expression: Expression) -> Expression:
    def negated(properties: Mapping[str, str]) -> Value:
        value = _boolean(expression(properties))
        return None if value is None else not value

    return negated


def _and(left: Expression, right: Expression) -> Expression:
    def both(properties: Mapping[str, str]) -> Value:
        one = _boolean(left(properties))
        if one is False:
            return False
        other = _boolean(right(properties))
        return False if other is False else (True if one and other else None)

    return both


def _or(left: Expression, right: Expression) -> Expression:
    return _not(_and(_not(left), _not(right)))


def _ordered(left: Expression, right: Expression, mark: str) -> Expression:
    compare = _ORDERS[mark]

    def ordered(properties: Mapping[str, str]) -> Value:
        one, other = left(properties), right(properties)
        if one is None or other is None:
            return None
        first, second = _number(one), _number(other)
        return first is not None and second is not None and compare(first, second)

    return ordered


def _negate(expression: Expression) -> Expression:
    def negated(properties: Mapping[str, str]) -> Value:
        number = _number(expression(properties))
        return None if number is None else -number

    return negated


class _Parser:
    """Reads an expression, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.kind = ""
        self.token = ""
        self._next()

    def _next(self) -> str:
        """Returns the token that was next, and reads the one after it."""
        token = self.token
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise SyntaxFault(f"Invalid MessageSelector: character {self._at + 1}")
        self._at = match.end()
        self.kind = str(match.lastgroup)
        self.token = match[self.kind]
        if self.kind == "word" and self.token.upper() in _WORDS:
            self.kind, self.token = "mark", self.token.upper()
        return token

    def _take(self, *marks: str) -> str:
        """Returns the next token if it is one of the marks, and passes it."""
        if self.kind in ("mark", "end") and self.token in marks:
            return self._next() or "end"
        return ""

    def expect(self, mark: str) -> None:
        """Passes a mark. Raises SyntaxFault."""
        if self.kind not in ("mark", "end") or self.token != mark:
            raise SyntaxFault(
                f"Invalid MessageSelector: {mark or 'the end'} was expected before character "
                f"{self._at + 1}"
            )
        if mark:
            self._next()

    def either(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise SyntaxFault(f"more than {DEPTH_MAX} expressions inside each other")
        left = self._both()
        while self._take("OR"):
            left = _or(left, self._both())
        self._depth -= 1
        return left

    def _both(self) -> Expression:
        left = self._equality()
        while self._take("AND"):
            left = _and(left, self._equality())
        return left

    def _equality(self) -> Expression:
        left = self._comparison()
        while mark := self._take("=", "<>", "IS"):
            left = self._is_null(left) if mark == "IS" else self._equals(left, mark)
        return left

    def _equals(self, left: Expression, mark: str) -> Expression:
        right = self._comparison()

        def equal(properties: Mapping[str, str]) -> Value:
            return _equal(left(properties), right(properties))

        return equal if mark == "=" else _not(equal)

    def _is_null(self, left: Expression) -> Expression:
        negated = self._take("NOT")
        self.expect("NULL")
        if negated:
            return lambda properties: left(properties) is not None
        return lambda properties: left(properties) is None

    def _comparison(self) -> Expression:
        left = self._unary()
        while mark := self._take(*_ORDERS, *_PARTS, "NOT", "BETWEEN", "IN"):
            negated = mark == "NOT"
            if negated and not (mark := self._take(*_PARTS, "BETWEEN", "IN")):
                raise SyntaxFault("Invalid MessageSelector: NOT before nothing that it negates")
            left = self._compared(left, mark)
            if negated:
                left = _not(left)
        return left

    def _compared(self, left: Expression, mark: str) -> Expression:
        if mark in _ORDERS:
            return _ordered(left, self._unary(), mark)
        if mark == "BETWEEN":
            low = self._unary()
            self.expect("AND")
            return _and(_ordered(left, low, ">="), _ordered(left, self._unary(), "<="))
        if mark == "IN":
            return self._one_of(left)
        part, test = self._literal(), _PARTS[mark]

        def has(properties: Mapping[str, str]) -> Value:
            value = left(properties)
            return test(value, part) if isinstance(value, str) else None

        return has

    def _one_of(self, left: Expression) -> Expression:
        self.expect("(")
        values = {self._literal()}
        while self._take(","):
            values.add(self._literal())
        self.expect(")")

        def one_of(properties: Mapping[str, str]) -> Value:
            value = left(properties)
            return value in values if isinstance(value, str) else None

        return one_of

    def _literal(self) -> str:
        if self.kind != "text":
            raise SyntaxFault(f"Invalid MessageSelector: no text before character {self._at + 1}")
        return self._next()[1:-1].replace("''", "'")

    def _unary(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise SyntaxFault(f"more than {DEPTH_MAX} expressions inside each other")
        mark = self._take("+", "-", "NOT")
        found = self._unary() if mark else self._primary()
        self._depth -= 1
        return {"-": _negate, "NOT": _not}.get(mark, lambda same: same)(found)

    def _primary(self) -> Expression:
        if self.kind == "text":
            text = self._literal()
            return lambda _: text
        if self.kind == "number":
            number = _number(self._next().rstrip("lL"))
            return lambda _: number
        if self.kind == "word":
            name = self._next()
            return lambda properties: properties.get(name)
        if mark := self._take("TRUE", "FALSE", "NULL"):
            value = {"TRUE": True, "FALSE": False}.get(mark)
            return lambda _: value
        self.expect("(")
        found = self.either()
        self.expect(")")
        return found
