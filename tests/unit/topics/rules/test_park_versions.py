"""Answers about parked keys in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from convoymq.topics.rules.park_versions import ParkVersions

KEYS = (b"a", b"b", b"c")


@dataclass
class Partition:
    """Counts the changes of its keys: key -> version of its last change."""

    version: int = 0
    keys: dict[bytes, int] = field(default_factory=lambda: dict.fromkeys(KEYS, 0))

    def change(self, key: bytes) -> None:
        self.version += 1
        self.keys[key] = self.version


@dataclass
class Said:
    """What the partition said; a view has no key."""

    version: int
    keys: dict[bytes, int]
    key: bytes | None = None
    changed: bool = False


STEPS = st.lists(
    st.tuples(st.sampled_from(("view", "answer", "repeat", "operator")), st.sampled_from(KEYS)),
    max_size=25,
)


def said_in(steps: list[tuple[str, bytes]]) -> list[Said]:
    partition = Partition()
    found = []
    for step, key in steps:
        if step in ("answer", "operator"):
            partition.change(key)
        keys = dict(partition.keys)
        if step == "view":
            found.append(Said(partition.version, keys))
        elif step != "operator":
            found.append(Said(partition.version, keys, key, changed=step == "answer"))
    return found


@given(STEPS, st.randoms(use_true_random=False))
def test_what_is_known_of_a_key_never_becomes_older(steps: list[tuple[str, bytes]], rng) -> None:  # type: ignore[no-untyped-def]
    """Against a model that looks up, for each key, the newest of all that has arrived."""
    arriving = said_in(steps)
    rng.shuffle(arriving)
    versions, known = ParkVersions(), dict.fromkeys(KEYS, -1)
    newest = dict.fromkeys(KEYS, -1)
    for said in arriving:
        if said.key is not None:
            if versions.take_answer(said.key, said.version, changed=said.changed):
                known[said.key] = said.keys[said.key]
            newest[said.key] = max(newest[said.key], said.keys[said.key])
        else:
            newer = versions.take_view(said.version)
            for key in KEYS if newer is not None else ():
                if key not in newer:
                    known[key] = said.keys[key]
            newest = {key: max(newest[key], said.keys[key]) for key in KEYS}
        assert known == newest, said


def test_a_view_that_tells_nothing_new_is_not_taken() -> None:
    versions = ParkVersions()
    assert versions.take_view(3) is not None
    assert versions.take_view(2) is None
    assert versions.take_answer(b"a", 4, changed=True)
    assert (versions.known, versions.ahead) == (4, {})
    assert versions.take_view(3) is None


def test_a_view_between_two_answers_leaves_their_keys_alone() -> None:
    versions = ParkVersions()
    versions.take_view(1)
    assert versions.take_answer(b"a", 5, changed=True)
    assert not versions.take_answer(b"a", 4, changed=False)
    newer = versions.take_view(4)
    assert newer is not None
    assert list(newer) == [b"a"]
    assert versions.take_view(5) is not None
    assert not versions.ahead
