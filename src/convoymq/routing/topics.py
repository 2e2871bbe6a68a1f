"""Topic patterns: `*` stands for one word, `#` for any number of words, none included.

Words are separated by dots; an empty word is a word, but an empty key has none. Patterns live in
a trie. A key walks it with the set of nodes that are reachable so far, so two `#` in one pattern
cost no backtracking.
"""

from __future__ import annotations

from collections.abc import Iterable

from convoymq.model.refusals import too_many_wildcards
from convoymq.routing.types import Destination

MANY_WILDCARDS_MAX = 2

_ONE = "*"
_MANY = "#"


def split_words(key: str) -> list[str]:
    """Returns the words of a routing key or pattern."""
    return key.split(".") if key else []


def check_pattern(pattern: str) -> None:
    """Refuses a binding key with too many `#`.

    Raises:
        PreconditionFailed: it has more than two.
    """
    count = split_words(pattern).count(_MANY)
    if count > MANY_WILDCARDS_MAX:
        raise too_many_wildcards(pattern, count, MANY_WILDCARDS_MAX)


class _Node:
    __slots__ = ("children", "destinations", "is_many")

    def __init__(self, *, is_many: bool = False) -> None:
        self.children: dict[str, _Node] = {}
        self.destinations: dict[Destination, int] = {}
        self.is_many = is_many


class TopicTrie:
    """Patterns and the destinations they lead to.

    A pair may be added several times (bindings that differ in arguments only); it stays until it
    is removed as often.
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        """Starts without patterns."""
        self._root = _Node()

    def add(self, pattern: str, destination: Destination) -> None:
        """Adds a pair. Cost: O(words)."""
        node = self._root
        for word in split_words(pattern):
            child = node.children.get(word)
            if child is None:
                child = node.children[word] = _Node(is_many=word == _MANY)
            node = child
        node.destinations[destination] = node.destinations.get(destination, 0) + 1

    def remove(self, pattern: str, destination: Destination) -> None:
        """Removes a pair that was added, and the nodes that nobody needs any more."""
        path = [self._root]
        words = split_words(pattern)
        for word in words:
            path.append(path[-1].children[word])
        leaf = path[-1]
        left = leaf.destinations[destination] - 1
        if left:
            leaf.destinations[destination] = left
            return
        del leaf.destinations[destination]
        for parent, word, node in zip(
            reversed(path[:-1]), reversed(words), reversed(path[1:]), strict=True
        ):
            if node.children or node.destinations:
                break
            del parent.children[word]

    def match(self, key: str) -> Iterable[Destination]:
        """Yields the destinations of all patterns that match; one may come more than once.

        Cost: O(words * nodes reached).
        """
        active = _with_empty_matches((self._root,))
        for word in split_words(key):
            active = _with_empty_matches(_step(active, word))
        for node in active:
            yield from node.destinations


def _step(active: Iterable[_Node], word: str) -> Iterable[_Node]:
    for node in active:
        if node.is_many:
            yield node
        # A key may hold the words `*` and `#`; they have no special meaning there.
        for name in (word, _ONE) if word not in (_ONE, _MANY) else (_ONE,):
            child = node.children.get(name)
            if child is not None:
                yield child


def _with_empty_matches(nodes: Iterable[_Node]) -> tuple[_Node, ...]:
    """Adds to `nodes` what is reached by `#` standing for no word; each node once."""
    found: dict[int, _Node] = {}
    for start in nodes:
        node: _Node | None = start
        while node is not None and id(node) not in found:
            found[id(node)] = node
            node = node.children.get(_MANY)
    return tuple(found.values())
