"""Queries about a directory's users, in the language of RabbitMQ's LDAP plugin (pure).

    QUERY = {constant, true} | {in_group, "DN"} | {in_group, "DN", "ATTRIBUTE"}
          | {in_group_nested, "DN"} | {in_group_nested, "DN", "ATTRIBUTE"}
          | {'and', [QUERY, …]} | {'or', [QUERY, …]} | {'not', QUERY}
          | {for, [{permission, configure, QUERY}, {resource, queue, QUERY}, …]}
          | {equals, TEXT, TEXT} | {match, TEXT, "EXPRESSION"}
    TEXT  = "…" | {string, "…"}

`${username}`, `${user_dn}`, `${vhost}`, `${name}`, `${resource}`, `${permission}` and
`${routing_key}` stand for what is asked about. Queries that would ask the directory for each
decision (`exists`, `attribute`) are not served: what a query needs is read at the log-in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from convoymq.model.errors import PreconditionFailed
from convoymq.model.patterns import compile_pattern

MEMBER = "member"
DEPTH_MAX = 32
_TOKEN = re.compile(
    r"\s*(?:([{}\[\],])|\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|([a-z][A-Za-z0-9_@]*))"
)
_VARIABLE = re.compile(r"\$\{(\w+)\}")

Facts = Mapping[str, str]
Query = Callable[["Asked"], bool]


class Text(str):
    """A string of a term, which is no atom."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: facts by variable, and the groups of the user."""

    facts: Facts
    is_member: Callable[[str, str, bool], bool]
    """(DN of a group as the facts fill it, attribute, through groups of groups) -> whether."""
    quote: Callable[[str], str]
    """Escapes a value for a DN."""


@dataclass(slots=True)
class Needs:
    """Facts about a user that queries need."""

    attributes: set[str] = field(default_factory=set)
    """Attributes of groups that name members."""
    nested: bool = False


def filled(pattern: str, facts: Facts, quote: Callable[[str], str] = str) -> str:
    """Returns a pattern with its variables replaced; unknown ones stay."""
    return _VARIABLE.sub(
        lambda found: quote(facts[found[1]]) if found[1] in facts else found[0], pattern
    )


def query(text: str, needs: Needs) -> Query:
    """Returns a query. Raises ValueError."""
    return _query(_term(text), needs)


def tag_queries(text: str, needs: Needs) -> list[tuple[str, Query]]:
    """Returns (tag, query) of a list of them. Raises ValueError."""
    term = _term(text)
    if not isinstance(term, list):
        raise ValueError("not a list of {TAG, QUERY}")
    found = []
    for each in term:
        match each:
            case (str(tag), body):
                found.append((str(tag), _query(body, needs)))
            case _:
                raise ValueError(f"not {{TAG, QUERY}}: {each}")
    return found


def _query(term: object, needs: Needs) -> Query:
    match term:
        case ("constant", ("true" | "false") as value):
            return lambda _asked: value == "true"
        case ("in_group" | "in_group_nested" as name, Text() as group, *rest) if len(rest) <= 1:
            return _in_group(group, rest, needs, nested=name == "in_group_nested")
        case ("and", list(parts)):
            all_of = [_query(part, needs) for part in parts]
            return lambda asked: all(part(asked) for part in all_of)
        case ("or", list(parts)):
            any_of = [_query(part, needs) for part in parts]
            return lambda asked: any(part(asked) for part in any_of)
        case ("not", part):
            inner = _query(part, needs)
            return lambda asked: not inner(asked)
        case ("for", list(cases)):
            return _for(cases, needs)
        case ("equals", left, right):
            one, other = _text(left), _text(right)
            return lambda asked: filled(one, asked.facts) == filled(other, asked.facts)
        case ("match", value, expression):
            return _match(_text(value), _text(expression))
    raise ValueError(f"not a query that is served: {_shown(term)}")


def _in_group(group: str, rest: list[object], needs: Needs, *, nested: bool) -> Query:
    attribute = MEMBER
    if rest:
        attribute = _text(rest[0])
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", attribute):
            raise ValueError(f"not the name of an attribute: {attribute}")
    needs.attributes.add(attribute)
    needs.nested |= nested
    return lambda asked: asked.is_member(filled(group, asked.facts, asked.quote), attribute, nested)


def _for(cases: list[object], needs: Needs) -> Query:
    made: list[tuple[str, str, Query]] = []
    for each in cases:
        match each:
            case (str(name), str(value), part):
                made.append((name, value, _query(part, needs)))
            case _:
                raise ValueError(f"not {{NAME, VALUE, QUERY}}: {_shown(each)}")

    def decide(asked: Asked) -> bool:
        for name, value, part in made:
            if asked.facts.get(name) == value:
                return part(asked)
        return False

    return decide


def _match(text: str, expression: str) -> Query:
    try:
        compiled = compile_pattern(expression)
    except PreconditionFailed as error:
        raise ValueError(error.text) from None
    return lambda asked: compiled.search(filled(text, asked.facts))


def _text(term: object) -> str:
    match term:
        case Text() as text:
            return text
        case ("string", Text() as text):
            return text
    raise ValueError(f"not a text: {_shown(term)}")


def _shown(term: object) -> str:
    match term:
        case Text():
            return f'"{term}"'
        case tuple():
            return "{" + ", ".join(map(_shown, term)) + "}"
        case list():
            return "[" + ", ".join(map(_shown, term)) + "]"
    return str(term)


# --- terms ---------------------------------------------------------------------------------------


def _term(text: str) -> object:
    """Returns an Erlang term as tuples, lists, `Text` and atoms. Raises ValueError."""
    tokens = _tokens(text.strip().removesuffix("."))
    term = _next_term(tokens, next(tokens, None), 0)
    if next(tokens, None) is not None:
        raise ValueError(f"more than one term: {text}")
    return term


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"not a term at {text[at : at + 20]!r}")
        at = found.end()
        sign, string, quoted, atom = found.groups()
        if sign is not None:
            yield sign, sign
        elif string is not None:
            yield "text", re.sub(r"\\(.)", r"\1", string)
        else:
            yield "atom", atom if atom is not None else re.sub(r"\\(.)", r"\1", quoted)


def _next_term(
    tokens: Iterator[tuple[str, str]], token: tuple[str, str] | None, depth: int
) -> object:
    if token is None or depth > DEPTH_MAX:
        raise ValueError("a term is not complete, or too deep")
    kind, value = token
    if kind == "text":
        return Text(value)
    if kind == "atom":
        return value
    if kind not in "{[":
        raise ValueError(f"not a term at {value!r}")
    end = "}" if kind == "{" else "]"
    found: list[object] = []
    token = next(tokens, None)
    while token is not None and token[0] != end:
        if found:
            if token[0] != ",":
                raise ValueError(f"a comma is missing in front of {token[1]!r}")
            token = next(tokens, None)
        found.append(_next_term(tokens, token, depth + 1))
        token = next(tokens, None)
    if token is None:
        raise ValueError(f"{end} is missing")
    return tuple(found) if kind == "{" else found
