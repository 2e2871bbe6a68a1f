"""SQL filters of AMQP 1.0 ("AMQP Filter Expressions", committee draft), as RabbitMQ 4.2 reads them.

    or          and {OR and}          and     not {AND not}         not    [NOT] comparison
    comparison  sum [(= | <> | != | < | <= | > | >=) sum | IS [NOT] NULL
                     | [NOT] LIKE text [ESCAPE text] | [NOT] IN (or {, or})]
    sum         product {(+ | -) product}      product  sign {(* | / | %) sign}
    sign        [+ | -] value
    value       TRUE | FALSE | number | 'text' | "text" | 0xHEX | UTC() | property | ( or )
    property    name | [any text] | a.name | p.field | h.priority

Selectors of JMS are the same, but words may have small letters, `[NOT] BETWEEN sum AND sum`
is a comparison, and names that begin with JMS stand for fields (`_JMS`).

Values are unknown where a property is missing. What is unknown or no boolean is neither true nor
false, and a message is wanted only where the whole is true.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from convoymq.messages.amqp10.sections import FIELDS
from convoymq.model.errors import SyntaxFault

LENGTH_MAX = 4_096
TOKENS_MAX = 200
DEPTH_MAX = 32

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
    | (?P<hex>0x(?:[0-9A-Fa-f]{2})+)
    | (?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+)?)
    | (?P<name>(?:(?:application_properties|properties|header|a|p|h)\.)?
        (?:[A-Za-z_$][A-Za-z0-9_$]*|\[(?:[^\[\]]|\[\[|\]\])+\]))
    | (?P<mark><>|!=|<=|>=|[=<>+\-*/%(),])
    | (?P<end>\Z))""",
    re.VERBOSE,
)
_WORDS = frozenset(("AND", "OR", "NOT", "LIKE", "ESCAPE", "IN", "IS", "NULL", "TRUE", "FALSE"))
_JMS = {
    "JMSPriority": "h.priority",
    "JMSMessageID": "p.message_id",
    "JMSCorrelationID": "p.correlation_id",
    "JMSTimestamp": "p.creation_time",
    "JMSType": "p.subject",
    "JMSXGroupID": "p.group_id",
    "JMSXGroupSeq": "p.group_sequence",
}
_ORDERS = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (1, 0)}
"""Mark -> signs of the difference of its sides."""
_SECTIONS = {"a": "", "application_properties": "", "p": "p", "properties": "p", "h": "h",
             "header": "h"}  # fmt: skip


class Fields(Protocol):
    """A message, for an expression."""

    def application_property(self, name: str) -> object:
        """Returns a value; None: there is none."""

    def field(self, name: str) -> object:
        """Returns a field of the properties section; None: it is not set."""

    @property
    def priority(self) -> int:
        """Returns the priority, 4 by default."""


Expression = Callable[[Fields], object]


def compile_sql(
    text: str, utc_ms: Callable[[], int], *, jms: bool = False
) -> Callable[[Fields], bool]:
    """Returns whether messages are wanted. Raises SyntaxFault: it is no expression.

    Args:
        utc_ms: returns the time, ms since 1970.
        jms: it is a selector of JMS.
    """
    if len(text) > LENGTH_MAX:
        raise SyntaxFault(f"an expression of {len(text)} characters")
    parser = _Parser(text, utc_ms, jms)
    found = parser.either()
    parser.expect("end", "")
    return lambda fields: found(fields) is True


def _kind(value: object) -> object:
    """Returns what a value can be compared with."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, int | float):
        return float
    return str if isinstance(value, str) else type(value)


def _equal(left: object, right: object) -> bool | None:
    if left is None or right is None:
        return None
    return _kind(left) is _kind(right) and left == right


def _not(value: object) -> bool | None:
    return not value if isinstance(value, bool) else None


def _and(left: Expression, right: Expression) -> Expression:
    def both(fields: Fields) -> object:
        one = left(fields)
        if one is False:
            return False
        other = right(fields)
        return False if other is False else (True if one is True and other is True else None)

    return both


def _or(left: Expression, right: Expression) -> Expression:
    def either(fields: Fields) -> object:
        one = left(fields)
        if one is True:
            return True
        other = right(fields)
        return True if other is True else (False if one is False and other is False else None)

    return either


def _compared(left: Expression, mark: str, right: Expression) -> Expression:
    if mark in ("=", "<>", "!="):
        if mark == "=":
            return lambda fields: _equal(left(fields), right(fields))
        return lambda fields: _not(_equal(left(fields), right(fields)))
    signs = _ORDERS[mark]

    def ordered(fields: Fields) -> object:
        one, other = left(fields), right(fields)
        return None if one is None or other is None else _sign(one, other) in signs

    return ordered


def _sign(left: object, right: object) -> int | None:
    """Returns the sign of a difference; None: the values have no order."""
    if isinstance(left, str) and isinstance(right, str):
        return (left > right) - (left < right)
    if isinstance(left, bool) or isinstance(right, bool):
        return None
    if isinstance(left, int | float) and isinstance(right, int | float):
        return (left > right) - (left < right) or (0 if left == right else None)
    return None


def _computed(left: Expression, mark: str, right: Expression) -> Expression:
    def computed(fields: Fields) -> object:
        one, other = left(fields), right(fields)
        if _kind(one) is not float or _kind(other) is not float:
            return None
        assert isinstance(one, int | float)
        assert isinstance(other, int | float)
        try:
            match mark:
                case "+":
                    return one + other
                case "-":
                    return one - other
                case "*":
                    return one * other
                case "/":
                    return one / other
            return one % other if isinstance(one, int) and isinstance(other, int) else None
        except (ZeroDivisionError, OverflowError):
            return None

    return computed


class Like:
    """A pattern of LIKE: `%` stands for any text, `_` for one character. Cost: O(text × parts)."""

    def __init__(self, pattern: str, escape: str) -> None:
        """Raises SyntaxFault: nothing is escaped, or the pattern has control characters."""
        if any(ord(each) < 32 for each in pattern):
            raise SyntaxFault("a pattern with control characters")
        parts, escaped = [""], False
        for each in pattern:
            if escaped:
                parts[-1] += re.escape(each)
                escaped = False
            elif escape and each == escape:
                escaped = True
            elif each == "%":
                parts.append("")
            else:
                parts[-1] += "." if each == "_" else re.escape(each)
        if escaped:
            raise SyntaxFault("a pattern that ends with its escape character")
        self._parts = [re.compile(part, re.DOTALL) for part in parts]
        self._last = re.compile(f"(?:{parts[-1]})\\Z", re.DOTALL)
        sizes = re.compile(r"\\.|.", re.DOTALL)
        self._tail = len(sizes.findall(parts[-1]))

    def matches(self, text: str) -> bool:
        """Returns whether a text is like the pattern."""
        first, *middle = self._parts[:-1] or self._parts
        found = first.match(text)
        if found is None or len(self._parts) == 1:
            return found is not None and found.end() == len(text)
        at = found.end()
        for part in middle:
            found = part.search(text, at)
            if found is None:
                return False
            at = found.end()
        start = len(text) - self._tail
        return start >= at and self._last.match(text, start) is not None


class _Parser:
    """Reads an expression, one token ahead."""

    def __init__(self, text: str, utc_ms: Callable[[], int], jms: bool) -> None:
        self._text = text
        self._jms = jms
        self._utc_ms = utc_ms
        self._at = self._tokens = self._depth = 0
        self._kind = self._token = ""
        self._next()

    def _next(self) -> str:
        """Returns the token that was next, and reads the one after it."""
        token = self._token
        match = _TOKEN.match(self._text, self._at)
        self._tokens += 1
        if match is None or self._tokens > TOKENS_MAX:
            raise self._fault()
        self._at = match.end()
        self._kind = str(match.lastgroup)
        self._token = match[self._kind]
        word = self._token.upper() if self._jms else self._token
        if self._kind == "name" and (word in _WORDS or (self._jms and word == "BETWEEN")):
            self._kind, self._token = "mark", word
        return token

    def _fault(self) -> SyntaxFault:
        return SyntaxFault(f"no expression at character {self._at + 1}")

    def _take(self, *marks: str) -> str:
        """Returns the next token if it is one of the marks, and passes it."""
        return self._next() if self._kind == "mark" and self._token in marks else ""

    def expect(self, kind: str, token: str) -> None:
        """Passes a token. Raises SyntaxFault."""
        if self._kind != kind or self._token != token:
            raise self._fault()
        if kind != "end":
            self._next()

    def _deeper(self, read: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise SyntaxFault(f"more than {DEPTH_MAX} expressions inside each other")
        found = read()
        self._depth -= 1
        return found

    def either(self) -> Expression:
        """Reads the weakest expression."""
        left = self._both()
        while self._take("OR"):
            left = _or(left, self._both())
        return left

    def _both(self) -> Expression:
        left = self._negated()
        while self._take("AND"):
            left = _and(left, self._negated())
        return left

    def _negated(self) -> Expression:
        if not self._take("NOT"):
            return self._comparison()
        found = self._deeper(self._negated)
        return lambda fields: _not(found(fields))

    def _comparison(self) -> Expression:
        left = self._sum()
        mark = self._take("=", "<>", "!=", *_ORDERS, "IS", "LIKE", "IN", "NOT", "BETWEEN")
        if not mark:
            return left
        if mark == "IS":
            return self._is_null(left)
        if mark not in ("LIKE", "IN", "NOT", "BETWEEN"):
            return _compared(left, mark, self._sum())
        negated = mark == "NOT"
        if negated and not (mark := self._take("LIKE", "IN", "BETWEEN")):
            raise self._fault()
        read = {"LIKE": self._like, "IN": self._one_of, "BETWEEN": self._between}[mark]
        found = read(left)
        return (lambda fields: _not(found(fields))) if negated else found

    def _is_null(self, left: Expression) -> Expression:
        negated = bool(self._take("NOT"))
        self.expect("mark", "NULL")
        return lambda fields: (left(fields) is None) is not negated

    def _like(self, left: Expression) -> Expression:
        pattern = self._literal()
        escape = self._literal() if self._take("ESCAPE") else ""
        if len(escape) > 1:
            raise SyntaxFault("an escape character of several")
        like = Like(pattern, escape)

        def matches(fields: Fields) -> object:
            value = left(fields)
            if value is None:
                return None
            return isinstance(value, str) and like.matches(value)

        return matches

    def _between(self, left: Expression) -> Expression:
        low = _compared(left, ">=", self._sum())
        self.expect("mark", "AND")
        return _and(low, _compared(left, "<=", self._sum()))

    def _one_of(self, left: Expression) -> Expression:
        self.expect("mark", "(")
        wanted = [self._deeper(self.either)]
        while self._take(","):
            wanted.append(self._deeper(self.either))
        self.expect("mark", ")")

        def one_of(fields: Fields) -> object:
            value = left(fields)
            found = [_equal(value, each(fields)) for each in wanted]
            return True if True in found else (None if None in found else False)

        return one_of

    def _sum(self) -> Expression:
        left = self._product()
        while mark := self._take("+", "-"):
            left = _computed(left, mark, self._product())
        return left

    def _product(self) -> Expression:
        left = self._sign()
        while mark := self._take("*", "/", "%"):
            left = _computed(left, mark, self._sign())
        return left

    def _sign(self) -> Expression:
        mark = self._take("+", "-")
        if not mark:
            return self._value()
        found = self._deeper(self._sign)
        return _computed(lambda _: 0, mark, found)

    def _literal(self) -> str:
        if self._kind != "text":
            raise self._fault()
        token = self._next()
        return token[1:-1].replace(token[0] * 2, token[0])

    def _value(self) -> Expression:
        constant: object
        if self._kind == "text":
            constant = self._literal()
        elif self._kind == "number":
            token = self._next()
            constant = int(token) if token.isdigit() else float(token)
        elif self._kind == "hex":
            constant = bytes.fromhex(self._next()[2:])
        elif self._kind == "name":
            return self._name(self._next())
        elif mark := self._take("TRUE", "FALSE"):
            constant = mark == "TRUE"
        else:
            self.expect("mark", "(")
            found = self._deeper(self.either)
            self.expect("mark", ")")
            return found
        return lambda _: constant

    def _name(self, token: str) -> Expression:
        """Returns a property, or the time."""
        if self._jms:
            token = _JMS.get(token, token)
        head, dot, name = token.partition(".") if token[0] != "[" else ("", "", token)
        section = _SECTIONS[head] if dot else ""
        name = name if dot or not head else head
        if name[0] == "[":
            name = name[1:-1].replace("[[", "[").replace("]]", "]")
        if section == "h":
            if name != "priority":
                raise SyntaxFault(f"the header has no field {name!r} for filters")
            return lambda fields: fields.priority
        if section == "p":
            field = name.replace("_", "-")
            if field not in FIELDS:
                raise SyntaxFault(f"properties have no field {name!r}")
            return lambda fields: fields.field(field)
        if not dot and name == "UTC" and self._take("("):
            self.expect("mark", ")")
            return lambda _: self._utc_ms()
        return lambda fields: fields.application_property(name)
