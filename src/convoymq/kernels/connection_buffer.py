"""The compiled part of one AMQP connection: its socket, its input, its output and its channels."""

import cython
from cython.cimports.convoymq.kernels import cnet
from cython.cimports.convoymq.kernels.acknowledgements import flush_codec
from cython.cimports.convoymq.kernels.amqp import (
    AMQP_CHANNEL,
    AMQP_END,
    AMQP_FRAME_HEAD,
    AMQP_FRAME_OVERHEAD,
    AMQP_SIZE,
)
from cython.cimports.convoymq.kernels.byte_buffer import (
    IDLE_CAPACITY,
    Buffer,
    append,
    free_buffer,
    reserve,
)
from cython.cimports.convoymq.kernels.bytes import bytes_pointer, copy_bytes, store16, store32
from cython.cimports.convoymq.kernels.channel_codec import ChannelCodec
from cython.cimports.convoymq.kernels.confirms import encode_confirms
from cython.cimports.convoymq.kernels.frames import scan
from cython.cimports.convoymq.kernels.message_sizes import MessageSizes
from cython.cimports.convoymq.kernels.route_cache import RouteCacheVersion
from cython.cimports.libc import stdlib, string
from cython.cimports.libc.stdint import uint32_t

from convoymq.model.rounds import run_each

# One receive buffer serves all connections: what is left over moves to its connection.
_scratch = cython.declare(cython.p_uchar, cython.NULL)
_scratch_capacity = cython.declare(cython.Py_ssize_t, 0)
_scratch_busy = cython.declare(cython.bint, False)


@cython.cclass
class Outbox:
    def __init__(self, on_first=None):
        self.buffers = []
        self.on_first = on_first
        self.bytes_sent = 0
        self.bytes_received = 0
        self.sizes = MessageSizes()

    def flush(self):
        buffers: list = self.buffers
        while buffers:
            self.buffers = []
            run_each(buffers, _flush, _failed)
            buffers = self.buffers


def _flush(buffer: ConnectionBuffer):
    buffer.dirty = False
    buffer.flush()


def _failed(buffer: ConnectionBuffer, error):
    buffer.owner.on_flush_failed(error)


@cython.cfunc
@cython.exceptval(-1)
def put_frame(
    buffer: ConnectionBuffer,
    type: cython.int,
    channel: cython.int,
    p: cython.p_uchar,
    n: cython.Py_ssize_t,
) -> cython.int:
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    reserve(out, n + AMQP_FRAME_OVERHEAD)
    q: cython.p_uchar = out.p + out.end
    q[0] = cython.cast(cython.uchar, type)
    store16(q + AMQP_CHANNEL, channel)
    store32(q + AMQP_SIZE, cython.cast(uint32_t, n))
    if n:
        string.memcpy(q + AMQP_FRAME_HEAD, p, n)
    q[AMQP_FRAME_HEAD + n] = AMQP_END
    out.end += n + AMQP_FRAME_OVERHEAD
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _keep(buffer: ConnectionBuffer, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    """Makes the n bytes at p all that waits in the connection's buffer (p may lie inside it)."""
    b: cython.pointer(Buffer) = cython.address(buffer.inp)
    if n == 0:
        b.start = 0
        b.end = 0
        if b.capacity > IDLE_CAPACITY:
            free_buffer(b)
        return 0
    if b.p != cython.NULL and p >= b.p and p < b.p + b.capacity:
        b.start = p - b.p
        b.end = b.start + n
        return 0
    b.start = 0
    b.end = 0
    append(b, p, n)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _work(buffer: ConnectionBuffer, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
    buffer.scanning = True
    done: cython.Py_ssize_t = n
    try:
        done = scan(buffer, p, n)
    finally:
        buffer.scanning = False
        _keep(buffer, p + done, n - done)
    buffer.flush_settles()
    return 0


@cython.cclass
class ConnectionBuffer:
    def __cinit__(self):
        self.inp.p = cython.NULL
        self.out.p = cython.NULL

    def __init__(self, owner, outbox: Outbox, fd=-1, frame_max=8192, message_size_max=16 << 20):
        self.owner = owner
        self.outbox = outbox
        self.fd = fd
        self.state = CONNECTION_HEADER
        self.frame_max = frame_max
        self.message_size_max = message_size_max
        self.backlog_max = 1 << 20
        self.codecs = []
        self.dirty_codecs = []
        self.confirm_codecs = []

    def __dealloc__(self):
        stdlib.free(self.inp.p)
        stdlib.free(self.out.p)

    @property
    def output_bytes(self):
        return self.out.end - self.out.start

    @property
    def input_bytes(self):
        return self.inp.end - self.inp.start

    def open_codec(self, number: cython.int, owner, version: RouteCacheVersion):
        codecs: list = self.codecs
        while len(codecs) <= number:
            codecs.append(None)
        if codecs[number] is not None:
            raise ValueError(f"channel {number} is open")
        codec = ChannelCodec(self, number, owner, version)
        codecs[number] = codec
        return codec

    def codec(self, number: cython.int):
        return self.codecs[number] if 0 <= number < len(self.codecs) else None

    def receive(self):
        """Reads the socket once and works through what came.

        Returns the bytes read: 0 = the peer has closed, -errno = failed, EAGAIN included."""
        global _scratch, _scratch_capacity, _scratch_busy
        if self.scanning or _scratch_busy:
            raise RuntimeError("receive() was called from within itself")
        kept: cython.Py_ssize_t = self.inp.end - self.inp.start
        if kept + RECEIVE_BYTES > _scratch_capacity:
            capacity: cython.Py_ssize_t = max(kept + RECEIVE_BYTES, 3 * RECEIVE_BYTES)
            grown: cython.p_void = stdlib.realloc(_scratch, capacity)
            if grown == cython.NULL:
                raise MemoryError
            _scratch = cython.cast(cython.p_uchar, grown)
            _scratch_capacity = capacity
        n: cython.Py_ssize_t = cnet.recv(self.fd, _scratch + kept, RECEIVE_BYTES, cnet.MSG_DONTWAIT)
        if n <= 0:
            return n if n == 0 else -cnet.errno
        if kept:
            string.memcpy(_scratch, self.inp.p + self.inp.start, kept)
        self.received += n
        self.outbox.bytes_received += n
        _scratch_busy = True
        try:
            _work(self, _scratch, kept + n)
        finally:
            _scratch_busy = False
        return n

    def feed(self, data: bytes):
        """Works through bytes that somebody else has read (TLS)."""
        if self.scanning:
            raise RuntimeError("feed() was called from within itself")
        n: cython.Py_ssize_t = len(data)
        self.received += n
        self.outbox.bytes_received += n
        if self.inp.end > self.inp.start:
            append(cython.address(self.inp), bytes_pointer(data), n)
            self.pump()
        else:
            _work(self, bytes_pointer(data), n)

    def pump(self):
        """Works through what waits in the connection's own buffer, after a pause."""
        if self.scanning or self.inp.end == self.inp.start:
            return
        _work(self, self.inp.p + self.inp.start, self.inp.end - self.inp.start)

    def flush_settles(self):
        codecs: list = self.dirty_codecs
        if not codecs:
            return
        self.dirty_codecs = []
        for item in codecs:
            codec: ChannelCodec = item
            flush_codec(codec)

    def send_frame(self, type: cython.int, channel: cython.int, payload: bytes):
        put_frame(self, type, channel, bytes_pointer(payload), len(payload))
        mark_dirty(self)

    def send_bytes(self, data: bytes):
        append(cython.address(self.out), bytes_pointer(data), len(data))
        mark_dirty(self)

    def flush_confirms(self):
        codecs: list = self.confirm_codecs
        if codecs:
            self.confirm_codecs = []
            for item in codecs:
                codec: ChannelCodec = item
                encode_confirms(codec)

    def flush(self):
        """End of a round: encodes what is due and hands the output on."""
        # Deliveries without acknowledgement of this round.
        self.flush_settles()
        self.flush_confirms()
        if self.fd < 0:
            self.owner.on_output()
            return
        error: cython.int = self.write()
        if error or self.out.end > self.out.start:
            self.owner.on_write_blocked(error)
        elif self.holding:
            self.owner.on_drained()

    def write(self):
        """Sends what the socket takes. Returns 0, or the errno that ended the connection."""
        out: cython.pointer(Buffer) = cython.address(self.out)
        while out.end > out.start:
            n: cython.Py_ssize_t = cnet.send(
                self.fd,
                out.p + out.start,
                out.end - out.start,
                cnet.MSG_DONTWAIT | cnet.MSG_NOSIGNAL,
            )
            if n < 0:
                if cnet.errno == cnet.EINTR:
                    continue
                if cnet.errno == cnet.EAGAIN or cnet.errno == cnet.EWOULDBLOCK:
                    return 0
                return cnet.errno
            out.start += n
            self.sent += n
            self.outbox.bytes_sent += n
        _release_output(self)
        return 0

    def take_output(self):
        """All output as bytes (TLS, tests)."""
        out: cython.pointer(Buffer) = cython.address(self.out)
        data: bytes = (
            copy_bytes(out.p + out.start, out.end - out.start) if out.end > out.start else b""
        )
        out.start = out.end
        self.sent += len(data)
        self.outbox.bytes_sent += len(data)
        _release_output(self)
        return data

    def close(self):
        """Nothing is scanned or kept any more; output stays until it is taken."""
        self.state = CONNECTION_CLOSED
        if not self.scanning:
            free_buffer(cython.address(self.inp))
        self.dirty_codecs = []
        self.confirm_codecs = []
        for item in self.codecs:
            if item is not None:
                codec: ChannelCodec = item
                codec.close()
        self.codecs = []


@cython.cfunc
@cython.exceptval(check=False)
def _release_output(buffer: ConnectionBuffer) -> cython.void:
    out: cython.pointer(Buffer) = cython.address(buffer.out)
    out.start = 0
    out.end = 0
    if out.capacity > IDLE_CAPACITY:
        free_buffer(out)
