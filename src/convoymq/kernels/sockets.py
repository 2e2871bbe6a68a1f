"""Link sockets: whole frames in, queued frames out; and the tuning of the process's memory.

A link frame begins with its u32 length, little-endian, header included (48 at least); see
docs/formats/entries-and-frames.md. Small frames are cut from one 128 KiB buffer; of a large frame,
what did not come with its header is received straight into the frame's own bytes object.
"""

from collections import deque

import cython
from cython.cimports.convoymq.kernels import cext
from cython.cimports.cpython.object import PyObject
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t

READ_BUFFER_SIZE = 131072
LARGE_FRAME_SIZE = 16384
_BUFFER = cython.declare(cython.Py_ssize_t, 131072)
_LARGE = cython.declare(cython.Py_ssize_t, 16384)
_HEADER = cython.declare(cython.Py_ssize_t, 48)
_READ_TURN = cython.declare(cython.Py_ssize_t, 1 << 20)
_WRITE_TURN = cython.declare(cython.Py_ssize_t, 8 << 20)
_UNSENT_MAX = cython.declare(cython.Py_ssize_t, 262144)
_IOVECS = cython.declare(cython.int, 64)


@cython.cclass
class LinkReader:
    def __cinit__(self, fd: cython.int, frame_max: cython.Py_ssize_t):
        self.fd = fd
        self.frame_max = frame_max
        self.bytes_in = 0
        self.frames_in = 0
        self.start = 0
        self.end = 0
        self.large = cython.NULL
        self.large_have = 0
        self.large_size = 0
        self.buffer = cython.cast(cython.p_uchar, stdlib.malloc(_BUFFER))
        if self.buffer == cython.NULL:
            raise MemoryError

    def __dealloc__(self):
        stdlib.free(self.buffer)
        if self.large != cython.NULL:
            cext.Py_DECREF_raw(self.large)

    @cython.cfunc
    @cython.exceptval(-1)
    def finish_large(self, frames: list) -> cython.int:
        done: cython.pointer(PyObject) = self.large
        self.large = cython.NULL
        frame: object = cython.cast(object, done)  # takes its own reference
        cext.Py_DECREF_raw(done)
        frames.append(frame)
        self.frames_in += 1
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def scan(self, frames: list) -> cython.int:
        length: uint32_t
        have: cython.Py_ssize_t
        p: cython.p_uchar
        while True:
            have = self.end - self.start
            if have < 4:
                break
            p = self.buffer + self.start
            string.memcpy(cython.address(length), p, 4)
            if length < _HEADER or length > self.frame_max:
                raise ValueError(
                    f"a link frame of {length} bytes: not between {_HEADER} and {self.frame_max}"
                )
            if have >= length:
                frames.append(
                    cython.cast(cython.p_char, p)[: cython.cast(cython.Py_ssize_t, length)]
                )
                self.frames_in += 1
                self.start += length
                continue
            if length > _LARGE:
                self.large = cext.PyBytes_FromStringAndSize(cython.NULL, length)
                string.memcpy(cext.PyBytes_AS_STRING(self.large), p, have)
                self.large_have = have
                self.large_size = length
                self.start = self.end
            break
        if self.start == self.end:
            self.start = 0
            self.end = 0
        elif _BUFFER - self.end < _LARGE:
            # What remains is shorter than _LARGE, so there is always room for the rest of it.
            string.memmove(self.buffer, self.buffer + self.start, self.end - self.start)
            self.end -= self.start
            self.start = 0
        return 0

    @cython.ccall
    @cython.exceptval(-1, check=True)
    def read(self, frames: list) -> cython.bint:
        got: cython.Py_ssize_t
        wanted: cython.Py_ssize_t
        total: cython.Py_ssize_t = 0
        target: cython.p_char
        code: cython.int
        while total < _READ_TURN:
            if self.large != cython.NULL:
                target = cext.PyBytes_AS_STRING(self.large) + self.large_have
                wanted = self.large_size - self.large_have
                if wanted > _READ_TURN:
                    wanted = _READ_TURN
            else:
                target = cython.cast(cython.p_char, self.buffer + self.end)
                wanted = _BUFFER - self.end
            got = recv(self.fd, target, wanted, MSG_DONTWAIT)
            if got == 0:
                return False
            if got < 0:
                code = errno
                if code == EINTR:
                    continue
                if code == EAGAIN or code == EWOULDBLOCK:
                    return True
                raise OSError(code, "recv on a link failed")
            total += got
            self.bytes_in += got
            if self.large != cython.NULL:
                self.large_have += got
                if self.large_have == self.large_size:
                    self.finish_large(frames)
            else:
                self.end += got
                self.scan(frames)
            if got < wanted:
                return True
        return True

    def feed(self, data: bytes, frames: list):
        p: cython.p_char = cext.PyBytes_AS_STRING(cython.cast(cython.pointer(cext.PyObject), data))
        left: cython.Py_ssize_t = len(data)
        n: cython.Py_ssize_t
        self.bytes_in += left
        while left > 0:
            if self.large != cython.NULL:
                n = min(left, self.large_size - self.large_have)
                string.memcpy(cext.PyBytes_AS_STRING(self.large) + self.large_have, p, n)
                self.large_have += n
                if self.large_have == self.large_size:
                    self.finish_large(frames)
            else:
                n = min(left, _BUFFER - self.end)
                string.memcpy(self.buffer + self.end, p, n)
                self.end += n
                self.scan(frames)
            p += n
            left -= n


@cython.cclass
class LinkWriter:
    def __cinit__(self, fd: cython.int):
        self.fd = fd
        self.queued_bytes = 0
        self.bytes_out = 0
        self.frames_out = 0
        self.urgent = deque()
        self.bulk = deque()
        self.unsent = []
        self.head = 0
        self.offset = 0
        self.unsent_bytes = 0

    @cython.ccall
    def send(self, frame: bytes, body=(), urgent: cython.bint = False):
        total: cython.Py_ssize_t = len(frame)
        item: object = frame
        if body:
            item = (frame, *body)
            for part in body:
                total += len(cython.cast(bytes, part))
        if urgent:
            self.urgent.append(item)
        else:
            self.bulk.append(item)
        self.queued_bytes += total
        self.frames_out += 1

    @cython.cfunc
    @cython.exceptval(-1)
    def refill(self) -> cython.int:
        # Once in `unsent` the order is fixed, so no more goes there than one call may write:
        # an urgent frame waits for at most that much, or for one frame that is larger.
        if self.head > 256 and self.head * 2 > len(self.unsent):
            del self.unsent[: self.head]
            self.head = 0
        while self.unsent_bytes < _UNSENT_MAX:
            if self.urgent:
                item = self.urgent.popleft()
            elif self.bulk:
                item = self.bulk.popleft()
            else:
                break
            if type(item) is bytes:
                self.unsent.append(item)
                self.unsent_bytes += len(cython.cast(bytes, item))
            else:
                for part in cython.cast(tuple, item):
                    if part:
                        self.unsent.append(part)
                        self.unsent_bytes += len(cython.cast(bytes, part))
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def advance(self, n: cython.Py_ssize_t) -> cython.int:
        size: cython.Py_ssize_t
        self.queued_bytes -= n
        self.unsent_bytes -= n
        self.bytes_out += n
        while n > 0:
            size = len(cython.cast(bytes, self.unsent[self.head])) - self.offset
            if n < size:
                self.offset += n
                return 0
            n -= size
            self.offset = 0
            self.unsent[self.head] = None
            self.head += 1
        if self.head == len(self.unsent):
            self.unsent.clear()
            self.head = 0
        return 0

    @cython.ccall
    @cython.exceptval(-1, check=True)
    def flush(self) -> cython.bint:
        vectors: iovec[64]
        message: msghdr
        count: cython.int
        i: cython.Py_ssize_t
        skip: cython.Py_ssize_t
        size: cython.Py_ssize_t
        sent: cython.Py_ssize_t
        total: cython.Py_ssize_t = 0
        code: cython.int
        while total < _WRITE_TURN:
            self.refill()
            if self.unsent_bytes == 0:
                return True
            count = 0
            i = self.head
            skip = self.offset
            while count < _IOVECS and i < len(self.unsent):
                part = self.unsent[i]
                size = len(cython.cast(bytes, part))
                vectors[count].iov_base = (
                    cext.PyBytes_AS_STRING(cython.cast(cython.pointer(cext.PyObject), part)) + skip
                )
                vectors[count].iov_len = size - skip
                skip = 0
                count += 1
                i += 1
            string.memset(cython.address(message), 0, cython.sizeof(msghdr))
            message.msg_iov = vectors
            message.msg_iovlen = count
            sent = sendmsg(self.fd, cython.address(message), MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent < 0:
                code = errno
                if code == EINTR:
                    continue
                if code == EAGAIN or code == EWOULDBLOCK:
                    return False
                raise OSError(code, "sendmsg on a link failed")
            total += sent
            self.advance(sent)
        return self.queued_bytes == 0

    def take(self, limit: cython.Py_ssize_t) -> list:
        taken: list = []
        size: cython.Py_ssize_t = 0
        n: cython.Py_ssize_t
        while size < limit:
            self.refill()
            if self.unsent_bytes == 0:
                break
            part = self.unsent[self.head]
            n = len(cython.cast(bytes, part))
            taken.append(part)
            size += n
            self.advance(n)
        return taken


def tune_malloc():
    # Buffers of entries live for a round or two; with the defaults each one is a fresh mapping
    # whose pages fault in again.
    mallopt(M_MMAP_THRESHOLD, 256 << 20)
    mallopt(M_TRIM_THRESHOLD, 256 << 20)
    mallopt(M_TOP_PAD, 16 << 20)
    mallopt(M_ARENA_MAX, 1)


def free_heap_bytes() -> int:
    return mallinfo2().fordblks


def trim_malloc():
    malloc_trim(0)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _release_segments(
    library: cython.pointer(dl_phdr_info), size: cython.size_t, count: cython.p_void
) -> cython.int:
    page: Address = sysconf(_SC_PAGESIZE)
    start: Address
    end: Address
    i: cython.int
    if library.dlpi_name[0] == 0 and cython.cast(cython.pointer(cython.int), count)[0] > 0:
        return 0
    cython.cast(cython.pointer(cython.int), count)[0] += 1
    # Backwards: the headers that are read here lie in the first segment, and come back with it.
    for i in range(library.dlpi_phnum - 1, -1, -1):
        # What may be written holds relocations, which the file does not have.
        if library.dlpi_phdr[i].p_type != PT_LOAD or library.dlpi_phdr[i].p_flags & PF_W:
            continue
        start = library.dlpi_addr + library.dlpi_phdr[i].p_vaddr
        end = (start + library.dlpi_phdr[i].p_memsz + page - 1) & ~(page - 1)
        start &= ~(page - 1)
        madvise(cython.cast(cython.p_void, start), end - start, MADV_DONTNEED)
    return 0


def release_code():
    seen: cython.int = 0
    dl_iterate_phdr(_release_segments, cython.address(seen))
