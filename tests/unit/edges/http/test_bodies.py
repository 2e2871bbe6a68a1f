"""Bodies of requests: what is read, what is refused, and that no step of parsing is long."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from convoymq.edges.http import bodies
from convoymq.edges.http.bodies import ApiError, Bodies, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), inner
    ),
)  # fmt: skip


@given(VALUES, st.booleans(), st.integers(14, 60))
def test_stepwise_parsing_gives_what_the_library_gives(value: Any, ascii: bool, step: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=1 if step % 2 else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "STEP_CHARS", step)
        assert parse(text) == json.loads(text)


@given(st.text(alphabet='[]{}",:\\u09daD8e+-.ntrfalsenul \n', max_size=80), st.integers(14, 40))
@settings(max_examples=500)
def test_stepwise_parsing_refuses_what_the_library_refuses(text: str, step: int) -> None:
    try:
        expected = parse(text)
    except ApiError:
        expected = ApiError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "STEP_CHARS", step)
        try:
            found = parse(text)
        except ApiError:
            found = ApiError
    assert found == expected


@pytest.mark.parametrize("step", range(14, 40))
def test_a_cut_parts_no_escape(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(bodies, "STEP_CHARS", step)
    value = '\\\\\U0001f600\\n"é\n' * 30 + "\U0001f600" * 30 + "\\" * 41
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse(f" [ {text} , {text} ] ") == [value, value]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "not JSON"),
        ("[" * 1000 + "]" * 1000, "not JSON|nested"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
        ('["\\ud800"]', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ("NaN", "a number that is none"),
        ("-Infinity", "a number that is none"),
        ("1e999", "a number that is none"),
        ("1" * 5000, "not JSON"),
        ("[1] 2", "not JSON"),
        ("{'a': 1}", "not JSON"),
    ],
)
def test_what_python_takes_but_nobody_can_use_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        parse(text)
    assert caught.value.status == 400
    padded = text + " " * bodies.STEP_CHARS
    with pytest.raises(ApiError):
        parse(padded)


def test_a_long_text_is_parsed_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(text: str, *more: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return function(text, *more)

        return call

    monkeypatch.setattr(bodies, "_scan", measured(bodies._scan))
    monkeypatch.setattr(bodies, "scanstring", measured(bodies.scanstring))
    value = {"a": "\n" * 200_000, "b": [[{"c": [1.5] * 100}] * 10] * 300, "d": "x" * 300_000}
    assert parse(json.dumps(value)) == value
    assert longest <= bodies.STEP_CHARS + 1


def request(parts: AsyncIterator[bytes], length: str = "") -> Request:
    async def receive() -> dict[str, Any]:
        async for part in parts:
            return {"type": "http.request", "body": part, "more_body": True}
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"content-length", length.encode())] if length else []
    return Request({"type": "http", "method": "PUT", "headers": headers}, receive)


async def sent(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_body_comes_in_parts() -> None:
    reader = Bodies()
    assert await reader.read(request(sent()), 100) is None
    assert await reader.read(request(sent(b'{"a', b'": "\xc3', b'\xa9"}')), 100) == {"a": "é"}
    large = json.dumps(["é" * 50_000, [1, 2]]).encode()
    parts = [large[at : at + 999] for at in range(0, len(large), 999)]
    assert await reader.read(request(sent(*parts)), 1_000_000) == ["é" * 50_000, [1, 2]]


@pytest.mark.parametrize(
    ("parts", "length", "reason"),
    [
        ([b"x" * 101], "", "at most 100 bytes"),
        ([b"x" * 60, b"x" * 60], "", "at most 100 bytes"),
        ([], "1000", "at most 100 bytes"),
        ([], "9" * 5000, "at most 100 bytes"),
        ([b'"\xff"'], "", "not UTF-8"),
        ([b'"\xc3'], "", "not UTF-8"),
        ([b'"\xed\xa0\x80"'], "", "not UTF-8"),
    ],
)
async def test_a_body_is_bounded_text(parts: list[bytes], length: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        await Bodies().read(request(sent(*parts), length), 100)


async def test_containers_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "CONTAINERS_MAX", 10)
    with pytest.raises(ApiError, match="more than 10 objects"):
        await Bodies().read(request(sent(b"[", b"[]," * 10)), 100)


async def test_a_body_that_stops_coming_is_given_up() -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def trickling() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b" "

    for parts, times in (
        (stuck(), {"idle_timeout_s": 0.01}),
        (stuck(), {"timeout_s": 0.01}),
        (trickling(), {"timeout_s": 0.01}),
    ):
        with pytest.raises(ApiError) as caught:
            await Bodies(**times).read(request(parts), math.inf)  # type: ignore[arg-type]
        assert caught.value.status == 408
