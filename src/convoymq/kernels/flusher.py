"""The thread that makes the write-ahead log durable: `pwritev`, then `fdatasync`, without the GIL.

The loop fills an iovec array and writes to one eventfd; the thread answers by another. The two
never touch the same fields at the same time: between `submit` and the answer they are the thread's.

A small flush of a quick disk that is idle most of the time is done by the caller itself (`inline`):
that saves two hand-offs between threads and a round of the loop (ADR 0006).

Small flushes into a file that lies ready in its whole length go past the page cache, in whole
blocks: the block in which the content ends is written again with what follows, and the rest of the
last block as zeros, which nobody takes for records (they carry a generation and a checksum).
"""

import os
import select
import threading

import cython
from cython.cimports.convoymq.kernels import cdisk, cext
from cython.cimports.libc import errno, stdlib, string
from cython.cimports.libc.stdint import uint64_t

SYNC_FDATASYNC = 0
SYNC_FSYNC = 1
SYNC_DSYNC = 2
SYNC_NONE = 3

_FSYNC = cython.declare(cython.int, 1)
_DSYNC = cython.declare(cython.int, 2)
_NONE = cython.declare(cython.int, 3)
_IOV_MAX = cython.declare(cython.Py_ssize_t, 1024)

#: Bounds of inline flushes: bytes, average duration, one that ends the mode, and for how long.
INLINE_BYTES_MAX = 65536
INLINE_AVERAGE_US_MAX = 1000
INLINE_HICCUP_US = 20_000
INLINE_PAUSE_US = 5_000_000
_INLINE_BYTES = cython.declare(cython.Py_ssize_t, 65536)
_INLINE_AVERAGE = cython.declare(cython.double, 1000)
_INLINE_HICCUP = cython.declare(uint64_t, 20_000)
_INLINE_PAUSE = cython.declare(uint64_t, 5_000_000)

#: Direct writes begin and end at multiples of a block, and begin again so long after one that went
#: through the page cache: changing over costs a read.
DIRECT_BLOCK = 4096
DIRECT_PAUSE_US = 100_000
_BLOCK = cython.declare(cython.long, 4096)
_STAGE = cython.declare(cython.Py_ssize_t, 65536 + 2 * 4096)
_DIRECT_PAUSE = cython.declare(uint64_t, 100_000)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _now_us() -> uint64_t:
    at: cext.timespec
    cext.clock_gettime(cext.CLOCK_MONOTONIC, cython.address(at))
    return cython.cast(uint64_t, at.tv_sec) * 1000000 + cython.cast(uint64_t, at.tv_nsec) // 1000


@cython.cclass
class Flusher:
    def __cinit__(self, method: cython.int = 0, inline: cython.bint = False):
        self.inline = inline
        self.inlining = False
        self.average_us = 0
        self.ended_us = 0
        self.inline_after_us = 0
        self.direct = inline and (method == 0 or method == _DSYNC)
        self.inline_count = 0
        self.direct_count = 0
        self.flush_count = self.flushed_bytes = self.flush_us = 0
        self.direct_fd = -1
        self.direct_size = 0
        self.direct_after_us = 0
        self.stage = cython.NULL
        self.staged = 0
        self.stage_base = 0
        self.stage_end = -1
        self.wake_fd = -1
        self.done_fd = -1
        self.method = method
        self.busy = False
        self.pending = False
        self.stopping = False
        self.iov = cython.NULL
        self.count = 0
        self.capacity = 0

    def __init__(self, method: cython.int = 0, inline: cython.bint = False):
        if not 0 <= method <= _NONE:
            raise ValueError(f"sync method {method} is not known")
        self.on_completed = None
        self.wake_fd = cdisk.eventfd(0, cdisk.EFD_CLOEXEC)
        self.done_fd = cdisk.eventfd(0, cdisk.EFD_CLOEXEC | cdisk.EFD_NONBLOCK)
        if self.wake_fd < 0 or self.done_fd < 0:
            raise OSError(errno.errno, "eventfd")
        # The thread must not keep its owner alive for ever: `close` ends it, and a node that exits
        # without closing has nothing to lose that was confirmed.
        self.thread = threading.Thread(target=self._run, name="wal", daemon=True)
        self.thread.start()

    def __dealloc__(self):
        stdlib.free(self.iov)
        stdlib.free(self.stage)
        if self.direct_fd >= 0:
            cdisk.close(self.direct_fd)

    def _run(self):
        with cython.nogil:
            self.loop()

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def loop(self) -> cython.void:
        value: uint64_t
        while True:
            if cdisk.read(self.wake_fd, cython.address(value), 8) != 8:
                if errno.errno == errno.EINTR:
                    continue
                return
            if self.pending:
                self.result = self.timed_flush()
                self.pending = False
                value = 1
                while cdisk.write(self.done_fd, cython.address(value), 8) < 0:
                    if errno.errno != errno.EINTR:
                        return
            if self.stopping:
                return

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def timed_flush(self) -> cython.int:
        began: uint64_t = _now_us()
        code: cython.int = 0
        if self.staged == 0 or not self.flush_staged():
            code = self.flush()
            self.stage_end = -1
        else:
            self.stage_end = self.offset + self.total
            self.direct_count += 1
        self.staged = 0
        self.ended_us = _now_us()
        self.flush_count += 1
        self.flushed_bytes += self.total
        self.flush_us += self.ended_us - began
        self.average_us += 0.2 * ((self.ended_us - began) - self.average_us)
        if self.ended_us - began > _INLINE_HICCUP:
            self.inline_after_us = self.ended_us + _INLINE_PAUSE
        return code

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def flush_staged(self) -> cython.bint:
        """Writes and syncs what is staged, in one call; False: it must go the other way."""
        part: cdisk.iovec
        written: cython.Py_ssize_t
        part.iov_base = self.stage
        part.iov_len = self.staged
        while True:
            written = cdisk.pwritev2(
                self.direct_fd, cython.address(part), 1, self.stage_base, cdisk.RWF_DSYNC
            )
            if written == self.staged:
                return True
            if written >= 0 or errno.errno != errno.EINTR:
                # Not here: the other way tells whether the disk can be written at all.
                self.direct = False
                return False

    @cython.cfunc
    @cython.exceptval(-1)
    def _open_direct(self) -> cython.int:
        if self.direct_fd >= 0:
            cdisk.close(self.direct_fd)
        self.stage_end = -1
        self.direct_file = self.file
        path: bytes = b"/proc/self/fd/%d" % self.fd
        self.direct_fd = cdisk.open(path, cdisk.O_RDWR | cdisk.O_DIRECT | cdisk.O_CLOEXEC)
        self.direct_size = os.fstat(self.direct_fd).st_size if self.direct_fd >= 0 else 0
        if self.stage == cython.NULL:
            memory: cython.p_void = cython.NULL
            if cdisk.posix_memalign(cython.address(memory), _BLOCK, _STAGE) != 0:
                raise MemoryError
            self.stage = cython.cast(cython.p_uchar, memory)
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _stage(self) -> cython.bint:
        """Copies what is submitted into whole blocks; False: it cannot be written directly."""
        if self.total > _INLINE_BYTES:
            return False
        if self.file is not self.direct_file:
            self._open_direct()
        base: cython.long = self.offset & ~(_BLOCK - 1)
        head: cython.Py_ssize_t = self.offset - base
        end: cython.long = self.offset + self.total
        whole: cython.long = (end + _BLOCK - 1) & ~(_BLOCK - 1)
        if self.direct_fd < 0 or whole > self.direct_size or whole - base > _STAGE:
            return False
        if head > 0:
            if self.stage_end == self.offset:
                string.memmove(self.stage, self.stage + (base - self.stage_base), head)
            elif cdisk.pread(self.fd, self.stage, head, base) != head:
                return False
        self.stage_end = -1
        at: cython.Py_ssize_t = head
        i: cython.Py_ssize_t
        for i in range(self.count):
            string.memcpy(self.stage + at, self.iov[i].iov_base, self.iov[i].iov_len)
            at += self.iov[i].iov_len
        self.staged = whole - base
        string.memset(self.stage + at, 0, self.staged - at)
        self.stage_base = base
        return True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def flush(self) -> cython.int:
        at: cython.Py_ssize_t = 0
        offset: cython.long = self.offset
        batch: cython.Py_ssize_t
        written: cython.Py_ssize_t
        code: cython.int
        while at < self.count:
            if self.iov[at].iov_len == 0:
                at += 1
                continue
            batch = self.count - at
            if batch > _IOV_MAX:
                batch = _IOV_MAX
            if self.method == _DSYNC:
                written = cdisk.pwritev2(
                    self.fd, self.iov + at, cython.cast(cython.int, batch), offset, cdisk.RWF_DSYNC
                )
            else:
                written = cdisk.pwritev(
                    self.fd, self.iov + at, cython.cast(cython.int, batch), offset
                )
            if written < 0:
                if errno.errno == errno.EINTR:
                    continue
                return errno.errno
            if written == 0:
                return errno.EIO
            offset += written
            while at < self.count and written >= cython.cast(
                cython.Py_ssize_t, self.iov[at].iov_len
            ):
                written -= self.iov[at].iov_len
                at += 1
            if written > 0:
                self.iov[at].iov_base = cython.cast(cython.p_char, self.iov[at].iov_base) + written
                self.iov[at].iov_len -= written
        if self.method >= _DSYNC:
            return 0
        while True:
            if self.method == _FSYNC:
                code = cdisk.fsync(self.fd)
            else:
                code = cdisk.fdatasync(self.fd)
            if code == 0:
                return 0
            if errno.errno != errno.EINTR:
                return errno.errno

    def submit(self, file, offset: cython.long, buffers, token):
        if self.busy:
            raise RuntimeError("a flush is in flight")
        if self.stopping:
            raise RuntimeError("the flusher is closed")
        kept: list = list(buffers)
        count: cython.Py_ssize_t = len(kept)
        if count > self.capacity:
            grown: cython.pointer(cdisk.iovec) = cython.cast(
                cython.pointer(cdisk.iovec),
                stdlib.realloc(self.iov, (count + 64) * cython.sizeof(cdisk.iovec)),
            )
            if grown == cython.NULL:
                raise MemoryError
            self.iov = grown
            self.capacity = count + 64
        i: cython.Py_ssize_t
        total: cython.Py_ssize_t = 0
        for i in range(count):
            item = kept[i]
            if not isinstance(item, bytes):
                raise TypeError("only bytes can be flushed")
            data: bytes = item
            self.iov[i].iov_base = cext.PyBytes_AS_STRING(
                cython.cast(cython.pointer(cext.PyObject), data)
            )
            self.iov[i].iov_len = len(data)
            total += len(data)
        self.fd = file.fileno()
        self.offset = offset
        self.count = count
        self.file = file
        self.kept = kept
        self.token = token
        self.total = total
        self.busy = True
        now: uint64_t = _now_us()
        if self.direct and total > 0 and now >= self.direct_after_us and not self._stage():
            self.direct_after_us = now + _DIRECT_PAUSE
        if self.inline and not self.inlining and total <= _INLINE_BYTES and self._is_idle(now):
            self._flush_inline()
            return
        self.pending = True
        self._wake()

    @cython.cfunc
    def _is_idle(self, now: uint64_t) -> cython.bint:
        """The disk is quick, and rests at least as long as it works."""
        return (
            self.average_us <= _INLINE_AVERAGE
            and now >= self.inline_after_us
            and now - self.ended_us >= self.average_us
        )

    @cython.cfunc
    def _flush_inline(self) -> cython.int:
        code: cython.int
        with cython.nogil:
            code = self.timed_flush()
        self.inline_count += 1
        token = self.token
        self.token = self.kept = self.file = None
        self.busy = False
        # What the answer makes the owner submit goes to the thread: no recursion.
        self.inlining = True
        try:
            self.on_completed(token, code)
        finally:
            self.inlining = False
        return 0

    def _wake(self):
        value: uint64_t = 1
        while cdisk.write(self.wake_fd, cython.address(value), 8) < 0:
            if errno.errno != errno.EINTR:
                raise OSError(errno.errno, "eventfd")

    def fileno(self):
        return self.done_fd

    def completed(self):
        value: uint64_t
        if not self.busy or cdisk.read(self.done_fd, cython.address(value), 8) != 8:
            return []
        token = self.token
        code: cython.int = self.result
        self.token = self.kept = self.file = None
        self.busy = False
        return [(token, code)]

    def on_readable(self):
        for token, code in self.completed():
            self.on_completed(token, code)

    def wait(self):
        if self.busy:
            waiter = select.poll()
            waiter.register(self.done_fd, select.POLLIN)
            waiter.poll()

    def close(self):
        if not self.stopping:
            self.stopping = True
            self._wake()
            self.thread.join()
            if self.direct_fd >= 0:
                os.close(self.direct_fd)
                self.direct_fd = -1
            self.direct_file = None
            os.close(self.wake_fd)
            os.close(self.done_fd)
            self.wake_fd = self.done_fd = -1
            self.busy = False
            self.token = self.kept = self.file = None
