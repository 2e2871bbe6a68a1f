"""An event loop for coroutines of production, on simulated time and in one process of a node.

It has what tasks, futures, `asyncio.gather`, `asyncio.sleep` and `asyncio.timeout` need. What is
not an error of a coroutine, such as a power failure, leaves through the scheduler at once.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable, Coroutine
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, Never, TypeVar, TypeVarTuple, cast

from convoymq.model.errors import BrokerError, Unavailable
from convoymq.model.tasks import Tasks
from convoymq.sim.clock import Process, Scheduler

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class _Handle:
    """A call that is due."""

    __slots__ = ("arguments", "callback", "context", "due_us")

    def __init__(
        self,
        due_us: int,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.due_us = due_us
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments
        self.context = context if context is not None else contextvars.copy_context()

    def cancel(self) -> None:
        """Keeps the callback from being called."""
        self.callback = None

    def cancelled(self) -> bool:
        """Returns whether it was cancelled."""
        return self.callback is None

    def when(self) -> float:
        """Due time, seconds of the loop."""
        return self.due_us / 1e6


class SimLoop:
    """See the module text."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self.process = process
        self._tasks: set[asyncio.Task[object]] = set()
        # It has what tasks and futures use of a loop, and no more.
        self._as_loop = cast(asyncio.AbstractEventLoop, self)

    def start(
        self,
        work: Coroutine[object, Never, Result],
        done: Callable[[Result | None, BrokerError | None], None],
    ) -> None:
        """Runs a coroutine; `done` hears its result, or the refusal that ended it. Any other error
        ends the run."""

        def ended(task: asyncio.Task[Result]) -> None:
            error = task.exception()
            if error is None:
                done(task.result(), None)
            elif isinstance(error, BrokerError):
                done(None, error)
            else:
                raise error

        self.create_task(work).add_done_callback(ended)

    def enter(self, call: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Calls something that may start tasks."""
        # A test may run in a loop of its own.
        outer = _get_running_loop()
        _set_running_loop(self._as_loop)
        try:
            call(*arguments)
        finally:
            _set_running_loop(outer)

    @staticmethod
    async def pause(delay_s: float) -> None:
        """Waits in a coroutine of the loop."""
        await asyncio.sleep(delay_s)

    # What asyncio asks of a loop.

    def time(self) -> float:
        """Simulated seconds."""
        return self._scheduler.now_us / 1e6

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Calls back at this simulated time."""
        return self._call(0, callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Calls back in this process, or never."""
        return self._call(int(delay * 1e6), callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Calls back at a time of the loop."""
        return self._call(int(when * 1e6) - self._scheduler.now_us, callback, args, context)

    def _call(
        self,
        delay_us: int,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> _Handle:
        handle = _Handle(self._scheduler.now_us + delay_us, callback, args, context)
        self._scheduler.after(delay_us, self.process, self._run, handle)
        return handle

    def _run(self, handle: _Handle) -> None:
        # As `enter`: half of all events of a simulation come here.
        callback = handle.callback
        if callback is None:
            return
        outer = _get_running_loop()
        _set_running_loop(self._as_loop)
        try:
            handle.context.run(callback, *handle.arguments)
        finally:
            _set_running_loop(outer)

    async def wait(
        self, begin: Callable[[Callable[..., None]], object], timeout_s: float
    ) -> tuple[object, BrokerError | None]:
        """Begins something, and returns the answer (reply, error) that it gives to its argument.
        Raises Unavailable."""
        answer: asyncio.Future[tuple[object, BrokerError | None]] = asyncio.Future(
            loop=self._as_loop
        )

        def done(reply: object, error: BrokerError | None) -> None:
            if not answer.done():
                answer.set_result((reply, error))

        begin(done)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable("no answer in time") from None

    def create_future(self) -> asyncio.Future[object]:
        """Returns a future of this loop."""
        return asyncio.Future(loop=self._as_loop)

    def create_task(
        self,
        coro: Coroutine[object, Never, Result],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Result]:
        """Returns a task of this loop."""
        task = asyncio.Task(coro, loop=self._as_loop, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """The process is over: what it was about to start never begins."""
        for task in self._tasks:
            coro = cast("Coroutine[Any, Any, object]", task.get_coro())
            if getcoroutinestate(coro) == CORO_CREATED:
                coro.close()

    def get_debug(self) -> bool:
        """No."""
        return False

    def is_running(self) -> bool:
        """True: the loop runs as long as the simulation does."""
        return True

    def call_exception_handler(self, context: dict[str, object]) -> None:
        """Tasks of a process that is over are never awaited."""


class LoopTasks(Tasks):
    """Tasks of a loop, which what runs outside of it may begin as well."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """See `Tasks`."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task
