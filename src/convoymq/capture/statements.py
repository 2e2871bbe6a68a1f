"""Effect of a logged statement on captured tables.

A row-based log has DDL as text, and DDL changes rows without row events: TRUNCATE removes them,
MODIFY converts them, a new column with a default gives each of them a value. `effects` says for
each captured table that a statement names what happens to its rows.

    effect      statement
    FOLLOWED    ALTER TABLE that changes no value of an existing row: a new column that is NULL, a
                dropped column, indexes, comments
    TRUNCATED   TRUNCATE TABLE
    UNKNOWN     every other ALTER, RENAME, DROP, CREATE OR REPLACE; changes logged as statements
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto


class Effect(Enum):
    """Change of a table's rows or columns by a statement."""

    FOLLOWED = auto()
    TRUNCATED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Named:
    """A token that may be a name: a word, or text in backquotes or double quotes."""

    text: str
    is_quoted: bool

    @property
    def word(self) -> str:
        """Returns the keyword; empty: quoted."""
        return "" if self.is_quoted else self.text.upper()


TOKEN = re.compile(
    r"""(?P<comment>/\*(?!!|M!).*?\*/|--[\s].*?(?:\n|$)|--$|\#.*?(?:\n|$))
    |(?P<hint>/\*M?!\d*|\*/)
    |(?P<string>'(?:[^'\\]|\\.|'')*')
    |`(?P<quoted>(?:[^`]|``)*)`
    |"(?P<double>(?:[^"\\]|\\.|"")*)"
    |(?P<word>[\w$@]+)
    |(?P<mark>\S)""",
    re.VERBOSE | re.DOTALL,
)
DATA = frozenset(("INSERT", "REPLACE", "UPDATE", "DELETE", "LOAD", "WITH"))
INDEXES = frozenset(("INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "CONSTRAINT", "FOREIGN",
                     "CHECK"))  # fmt: skip
HARMLESS = frozenset(("ALGORITHM", "LOCK", "COMMENT", "AUTO_INCREMENT", "ENGINE", "ROW_FORMAT",
                      "FORCE", "ENABLE", "DISABLE", "KEY_BLOCK_SIZE", "STATS_PERSISTENT",
                      "STATS_AUTO_RECALC", "STATS_SAMPLE_PAGES", "AVG_ROW_LENGTH", "CHECKSUM",
                      "MAX_ROWS", "MIN_ROWS", "NOWAIT", "WAIT"))  # fmt: skip
"""First words of actions of ALTER TABLE that touch no value."""
VALUED = frozenset(("DEFAULT", "AS", "GENERATED", "AUTO_INCREMENT", "SERIAL", "PRIMARY", "UPDATE",
                    "SYSTEM", "ROW"))  # fmt: skip
"""Words of a new column by which existing rows may get a value."""
SILENT = frozenset(("CASCADE", "SET"))
"""Words of a foreign key by which rows change without events."""

Token = Named | str


def effects(text: str, database: str, tables: Collection[tuple[str, str]]) -> dict[str, Effect]:
    """Returns the effect of a statement on each captured table that it touches.

    Args:
        database: the default of names without one.
        tables: (database, table) of what is captured. Names are compared without regard to case:
            rather one statement too many counts.
    """
    tokens = list(_tokens(text))
    known = {(base.lower(), name.lower()): name for base, name in tables}

    def captured(names: Iterator[tuple[str, str]]) -> Iterator[str]:
        for base, name in names:
            if (found := known.get(((base or database).lower(), name.lower()))) is not None:
                yield found

    first, rest = _word(tokens, 0), tokens[1:]
    if first == "ALTER":
        return _altered(rest, captured)
    if first == "TRUNCATE":
        rest = rest[1:] if _word(rest, 0) == "TABLE" else rest
        return dict.fromkeys(captured(_names(rest)), Effect.TRUNCATED)
    is_table = "TABLE" in (words := [_word(rest, place) for place in range(4)]) or (
        "TABLES" in words
    )
    if first == "DROP" and words[0] in ("DATABASE", "SCHEMA"):
        bases = {name.lower() for _, name in _names(rest[1:])}
        gone = (name for (base, _), name in known.items() if base in bases)
        return dict.fromkeys(gone, Effect.UNKNOWN)
    if first in ("DROP", "RENAME") and is_table and "TEMPORARY" not in words:
        return dict.fromkeys(captured(_names(rest)), Effect.UNKNOWN)
    if first == "CREATE" and words[:2] == ["OR", "REPLACE"] and words[2] == "TABLE":
        return dict.fromkeys(captured(_first(rest[3:])), Effect.UNKNOWN)
    if first in DATA:
        return dict.fromkeys(captured(_names(rest)), Effect.UNKNOWN)
    return {}


def _altered(rest: list[Token], captured: object) -> dict[str, Effect]:
    assert callable(captured)
    place = next((n for n in range(min(4, len(rest))) if _word(rest, n) == "TABLE"), -1)
    if place < 0:
        return {}
    rest = rest[place + 1 :]
    if [_word(rest, n) for n in range(2)] == ["IF", "EXISTS"]:
        rest = rest[2:]
    name_tokens = 3 if len(rest) > 1 and rest[1] == "." else 1
    actions = list(_actions(rest[name_tokens:]))
    effect = Effect.FOLLOWED if all(map(_is_harmless, actions)) else Effect.UNKNOWN
    found = dict.fromkeys(captured(_first(rest)), effect)
    # ALTER TABLE a EXCHANGE PARTITION p WITH TABLE b changes both.
    for action in actions:
        for n in range(len(action) - 1):
            if _word(action, n) == "TABLE" and _word(action, 0) in ("EXCHANGE", "CONVERT"):
                found.update(dict.fromkeys(captured(_first(action[n + 1 :])), Effect.UNKNOWN))
    return found


def _is_harmless(action: list[Token]) -> bool:
    """Returns whether no value of an existing row changes."""
    words = [_word(action, place) for place in range(len(action))]
    head, second = words[0], words[1] if len(words) > 1 else ""
    if "PRIMARY" in words or "VERSIONING" in words or "PERIOD" in words:
        return False
    if head == "ADD":
        if second in INDEXES:
            return not ("FOREIGN" in words and SILENT & set(words))
        return second not in ("PARTITION", "") and _is_null_column(action, words)
    if head == "DROP":
        return second not in ("PARTITION", "SYSTEM", "SUBPARTITION")
    if head == "ALTER":
        # Of a default, or whether an index is used.
        return True
    if head == "RENAME":
        return second in ("INDEX", "KEY")
    return head in HARMLESS


def _is_null_column(action: list[Token], words: list[str]) -> bool:
    """Returns whether a new column is NULL in all rows that exist."""
    if "(" in action[1:3]:
        # Several columns in brackets.
        return False
    if "TIMESTAMP" in words and "NULL" not in words:
        # Unless it says NULL, a TIMESTAMP may have a default of its own.
        return False
    pairs = list(zip(words, [*words[1:], ""], strict=True))
    if ("NOT", "NULL") in pairs:
        return False
    return all(
        word not in VALUED or (word == "DEFAULT" and following == "NULL")
        for word, following in pairs
    )


def _actions(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yields the parts between commas that are outside brackets."""
    depth = 0
    part: list[Token] = []
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if token == "," and not depth:
            yield part
            part = []
        elif token != ";":
            part.append(token)
    if part:
        yield part


def _tokens(text: str) -> Iterator[Token]:
    for match in TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "word":
            yield Named(match["word"], False)
        elif kind == "quoted":
            yield Named(match["quoted"].replace("``", "`"), True)
        elif kind == "double":
            yield Named(match["double"], True)
        elif kind == "string":
            yield "'"
        elif kind == "mark":
            yield match["mark"]


def _word(tokens: list[Token], place: int) -> str:
    token = tokens[place] if place < len(tokens) else ""
    return token.word if isinstance(token, Named) else ""


def _names(tokens: list[Token]) -> Iterator[tuple[str, str]]:
    """Yields (database or empty, name) of everything that may be the name of a table."""
    for place, token in enumerate(tokens):
        if not isinstance(token, Named) or tokens[place + 1 : place + 2] == ["."]:
            continue
        before = tokens[place - 2] if place > 1 and tokens[place - 1] == "." else None
        yield before.text if isinstance(before, Named) else "", token.text


def _first(tokens: list[Token]) -> Iterator[tuple[str, str]]:
    """Yields the first name."""
    yield from list(_names(tokens[:3] if tokens[1:2] == ["."] else tokens[:1]))[:1]
