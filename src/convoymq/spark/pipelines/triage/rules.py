"""The rule file of a triage: TOML whose conditions are SQL.

    default = "park"                  # what is done with messages that no rule matches; required
    park = "orders.parked"            # the queue for parked messages
    group_by = ["queue", "reason"]    # what makes a group; default: GROUP_BY
    x_death = "keep"                  # or "remove": of republished messages

    [[rule]]
    name = "again"
    when = "reason = 'rejected' AND deaths < 3"
    action = "republish"              # or "drop", "park"

The first rule whose condition is true decides; NULL is not true. What the conditions may name is
`deaths.COLUMNS` and `GROUP_COLUMNS`: `decisions.check_conditions` asks Spark.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convoymq.model.near_names import did_you_mean
from convoymq.spark.errors import SourceError

ACTIONS = ("republish", "drop", "park")
GROUP_BY = ("queue", "reason", "exchange", "routing_key")
DEFAULT_NAME = "default"
HASH_CHARACTERS = 16
_TOP = ("default", "park", "group_by", "x_death", "rule")
_OF_RULE = ("name", "when", "action", "exchange", "routing_key", "queue", "to")
_NAME_BYTES_MAX = 255


class RuleError(SourceError, ValueError):
    """The rule file can't be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition and what is done with the messages for which it is true."""

    name: str
    when: str
    """SQL; empty: the default, which is for all that no rule matches."""
    action: str
    exchange: str | None = None
    """Of a republish; None: the exchange to which the message was published in the beginning."""
    routing_key: str | None = None
    """Likewise."""
    to_queue: bool = False
    """Republishes straight to the queue in which the message died first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A rule file, checked but for the SQL in it."""

    rules: tuple[Rule, ...]
    """In their order; the default is the last one."""
    group_by: tuple[str, ...] = GROUP_BY
    keep_deaths: bool = True
    text: str = ""

    @property
    def hash(self) -> str:
        """Names the file's content; recorded with every decision."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:HASH_CHARACTERS]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rules:
        """Reads a file. Raises RuleError."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(f"{path}: {error}") from None
        try:
            return cls.parse(text)
        except RuleError as error:
            raise RuleError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Reads the text of a file. Raises RuleError."""
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RuleError(f"not TOML: {error}") from None
        _check_names(given, _TOP, "the file")
        park = _text(given, "park", "the file")
        found = given.get("rule", [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise RuleError("rules are written [[rule]]")
        rules = [_parsed(each, f"rule {i}", park) for i, each in enumerate(found, 1)]
        names = [rule.name for rule in rules]
        for name in names:
            if names.count(name) > 1:
                raise RuleError(f"two rules have the name {name!r}")
        if DEFAULT_NAME in names:
            raise RuleError(f"the name {DEFAULT_NAME!r} is that of what no rule matches")
        if "default" not in given:
            raise RuleError(
                "there is no default: say what is done with messages that no rule matches, such as "
                'default = "park"'
            )
        rules.append(_rule(DEFAULT_NAME, "", given["default"], {}, "default", park))
        x_death = given.get("x_death", "keep")
        if x_death not in ("keep", "remove"):
            raise RuleError(f'x_death is "keep" or "remove", not {x_death!r}')
        return cls(
            rules=tuple(rules),
            group_by=_group_by(given.get("group_by", list(GROUP_BY))),
            keep_deaths=x_death == "keep",
            text=text,
        )


def near(name: str, known: tuple[str, ...]) -> str:
    """Returns a hint for a name that is not known."""
    return did_you_mean(name, known, 0.5) or f"there are {', '.join(known)}"


def _check_names(given: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            raise RuleError(f"{where} has no {name}; {near(name, known)}")


def _parsed(given: Mapping[str, object], where: str, park: str | None) -> Rule:
    name = _text(given, "name", where) or where
    where = where if name == where else f"{where} ({name})"
    _check_names(given, _OF_RULE, where)
    when = given.get("when")
    if not isinstance(when, str) or not when.strip():
        raise RuleError(f"{where} needs when: an SQL condition")
    if "action" not in given:
        raise RuleError(f"{where} needs action: {', '.join(ACTIONS)}")
    return _rule(name, when, given["action"], given, where, park)


def _rule(
    name: str,
    when: str,
    action: object,
    given: Mapping[str, object],
    where: str,
    park: str | None,
) -> Rule:
    if not isinstance(action, str) or action not in ACTIONS:
        raise RuleError(f"{where}: action {action!r}; there are {', '.join(ACTIONS)}")
    exchange, key = _text(given, "exchange", where), _text(given, "routing_key", where)
    queue, to = _text(given, "queue", where), given.get("to")
    if to not in (None, "exchange", "queue"):
        raise RuleError(f'{where}: to is "exchange" or "queue", not {to!r}')
    chosen = [n for n in ("exchange", "routing_key", "queue", "to") if n in given]
    if action == "park":
        if chosen not in ([], ["queue"]):
            raise RuleError(f"{where}: a parked message goes to a queue, not by {chosen[0]}")
        queue = queue or park
        if not queue:
            raise RuleError(f'{where} parks messages: name a queue, or for all rules park = "…"')
    elif action == "drop" and chosen:
        raise RuleError(f"{where}: a dropped message goes nowhere, so {chosen[0]} means nothing")
    elif queue and len(chosen) > 1:
        raise RuleError(f"{where}: queue does not go together with {chosen[0]}")
    elif to == "queue" and len(chosen) > 1:
        raise RuleError(f'{where}: to = "queue" does not go together with {chosen[0]}')
    if queue:
        exchange, key = "", queue
    return Rule(
        name=name,
        when=when,
        action=action,
        exchange=exchange,
        routing_key=key,
        to_queue=to == "queue",
    )


def _text(given: Mapping[str, object], name: str, where: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value.encode()) > _NAME_BYTES_MAX:
        raise RuleError(f"{where}: {name} is a text of at most {_NAME_BYTES_MAX} bytes")
    if not value and name != "exchange" and name != "routing_key":
        raise RuleError(f"{where}: {name} is empty")
    return value


def _group_by(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given) or not given:
        raise RuleError("group_by is a list of columns")
    return tuple(dict.fromkeys(given))
