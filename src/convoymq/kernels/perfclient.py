"""The hot loops of `convoy perf`: an AMQP 0-9-1 publisher and consumer that are not the bottleneck.

Both work on a connected, non-blocking socket whose channel 1 is open; everything else (connecting,
declaring, reconnecting, reporting) is plain Python in `cli.perf`. Every body starts with 16 bytes:
sent at (u64 µs, monotonic), sequence number (u32, from 1), publisher (u16), run (u16), all
little-endian. The `Ledger` keeps a bit for every sequence number that was confirmed and one for
every that was seen.
"""

import cython
from cython.cimports.convoymq.kernels import cext
from cython.cimports.libc import errno, stdlib, string
from cython.cimports.libc.stdint import uint16_t, uint32_t, uint64_t

STAMP_SIZE = 16
_UNLIMITED = cython.declare(uint64_t, 0xFFFFFFFFFFFFFFFF)
_STAMP = cython.declare(cython.Py_ssize_t, 16)
_INPUT = cython.declare(cython.Py_ssize_t, 262144)
_OUTPUT = cython.declare(cython.Py_ssize_t, 262144)
_BUCKETS = cython.declare(cython.Py_ssize_t, 2048)
# What was read last, of any client: a thousand input buffers would not stay in the cache.
_read = cython.declare(cython.p_uchar, cython.NULL)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def now_us() -> uint64_t:
    at: cext.timespec
    cext.clock_gettime(cext.CLOCK_MONOTONIC, cython.address(at))
    return cython.cast(uint64_t, at.tv_sec) * 1000000 + cython.cast(uint64_t, at.tv_nsec) // 1000


def clock_us():
    """The monotonic clock that stamps messages, in µs."""
    return now_us()


@cython.cclass
class Histogram:
    """Latencies in µs: exact below 64, then 64 buckets for each doubling (1.6 % wide)."""

    def __cinit__(self):
        self.counts = cython.cast(
            cython.pointer(uint64_t), stdlib.calloc(_BUCKETS, cython.sizeof(uint64_t))
        )
        if self.counts == cython.NULL:
            raise MemoryError
        self.total = 0
        self.largest = 0

    def __dealloc__(self):
        stdlib.free(self.counts)

    @cython.cfunc
    @cython.exceptval(check=False)
    def record(self, value: uint64_t) -> cython.void:
        bucket: cython.Py_ssize_t
        if value < 64:
            bucket = cython.cast(cython.Py_ssize_t, value)
        else:
            shift: cython.int = 0
            rest: uint64_t = value
            while rest >= 128:
                rest >>= 1
                shift += 1
            bucket = 64 * (shift + 1) + cython.cast(cython.Py_ssize_t, rest - 64)
            if bucket >= _BUCKETS:
                bucket = _BUCKETS - 1
        self.counts[bucket] += 1
        self.total += 1
        if value > self.largest:
            self.largest = value

    def merge(self, other: Histogram):
        i: cython.Py_ssize_t
        for i in range(_BUCKETS):
            self.counts[i] += other.counts[i]
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def percentile(self, fraction: float):
        if self.total == 0:
            return 0
        wanted: uint64_t = cython.cast(uint64_t, fraction * self.total)
        seen: uint64_t = 0
        i: cython.Py_ssize_t
        for i in range(_BUCKETS):
            seen += self.counts[i]
            if seen > wanted:
                if i < 64:
                    return i
                return min(self.largest, cython.cast(uint64_t, (i % 64) + 64) << (i // 64 - 1))
        return self.largest

    def summary(self):
        return {
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
            "p999": self.percentile(0.999),
            "max": self.largest,
        }


@cython.cclass
class Ledger:
    """Messages of one publisher that were sent, confirmed and received: a bit each per sequence
    number."""

    def __cinit__(self):
        self.confirmed_bits = cython.NULL
        self.seen_bits = cython.NULL
        self.size = 0

    def __dealloc__(self):
        stdlib.free(self.confirmed_bits)
        stdlib.free(self.seen_bits)

    @cython.cfunc
    @cython.exceptval(check=True)
    def need(self, seq: uint32_t) -> cython.int:
        wanted: cython.Py_ssize_t = seq // 8 + 1
        if wanted <= self.size:
            return 0
        size: cython.Py_ssize_t = max(wanted, 2 * self.size, 65536)
        first: cython.p_void = stdlib.realloc(self.confirmed_bits, size)
        if first == cython.NULL:
            raise MemoryError
        self.confirmed_bits = cython.cast(cython.p_uchar, first)
        second: cython.p_void = stdlib.realloc(self.seen_bits, size)
        if second == cython.NULL:
            raise MemoryError
        self.seen_bits = cython.cast(cython.p_uchar, second)
        string.memset(self.confirmed_bits + self.size, 0, size - self.size)
        string.memset(self.seen_bits + self.size, 0, size - self.size)
        self.size = size
        return 0

    @cython.cfunc
    @cython.exceptval(check=True)
    def confirm(self, seq: uint32_t) -> cython.int:
        """1 when the number is confirmed for the first time."""
        self.need(seq)
        bit: cython.int = 1 << (seq & 7)
        if self.confirmed_bits[seq >> 3] & bit:
            return 0
        self.confirmed_bits[seq >> 3] |= bit
        self.confirmed += 1
        return 1

    @cython.cfunc
    @cython.exceptval(check=True)
    def see(self, seq: uint32_t) -> cython.int:
        """1 when the number is seen for the first time."""
        self.need(seq)
        bit: cython.int = 1 << (seq & 7)
        if self.seen_bits[seq >> 3] & bit:
            self.duplicates += 1
            return 0
        self.seen_bits[seq >> 3] |= bit
        self.unique += 1
        return 1

    def missing(self):
        found: uint64_t = 0
        i: cython.Py_ssize_t
        for i in range(self.size):
            rest: cython.int = self.confirmed_bits[i] & ~self.seen_bits[i]
            while rest:
                rest &= rest - 1
                found += 1
        return found


@cython.cclass
class _Socket:
    """Buffers of one connection and a scanner of whole frames."""

    def __cinit__(self):
        global _read
        self.input = cython.cast(cython.p_uchar, stdlib.malloc(_INPUT))
        self.output = cython.cast(cython.p_uchar, stdlib.malloc(_OUTPUT))
        if _read == cython.NULL:
            _read = cython.cast(cython.p_uchar, stdlib.malloc(_INPUT))
        if self.input == cython.NULL or self.output == cython.NULL or _read == cython.NULL:
            raise MemoryError
        self.filled = 0
        self.out_size = _OUTPUT
        self.out_from = 0
        self.out_to = 0
        self.closed = False

    def __dealloc__(self):
        stdlib.free(self.input)
        stdlib.free(self.output)

    @property
    def wants_write(self):
        return self.out_to > self.out_from and not self.closed

    @cython.cfunc
    @cython.exceptval(check=False)
    def flush(self) -> cython.void:
        n: cython.Py_ssize_t
        while self.out_to > self.out_from:
            n = cext.send(
                self.fd,
                self.output + self.out_from,
                self.out_to - self.out_from,
                cext.MSG_NOSIGNAL | cext.MSG_DONTWAIT,
            )
            if n < 0:
                if errno.errno == errno.EAGAIN:
                    return
                if errno.errno == errno.EINTR:
                    continue
                self.closed = True
                return
            self.out_from += n
        self.out_from = 0
        self.out_to = 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def room(self, n: cython.Py_ssize_t) -> cython.bint:
        """Returns whether n more bytes fit into the output buffer (flushing it if that helps)."""
        if self.out_to + n <= self.out_size:
            return True
        self.flush()
        if self.out_from and self.out_to + n > self.out_size:
            string.memmove(self.output, self.output + self.out_from, self.out_to - self.out_from)
            self.out_to -= self.out_from
            self.out_from = 0
        return self.out_to + n <= self.out_size

    def write(self, data: bytes):
        """Queues a control frame."""
        n: cython.Py_ssize_t = len(data)
        if not self.room(n):
            self.closed = True
            return
        string.memcpy(self.output + self.out_to, cython.cast(cython.p_char, data), n)
        self.out_to += n
        self.flush()

    @cython.cfunc
    def receive(self) -> cython.bint:
        """Reads once and handles every whole frame; False when the socket has no more for now."""
        kept: cython.Py_ssize_t = self.filled
        room: cython.Py_ssize_t = _INPUT - kept
        n: cython.Py_ssize_t = cext.recv(self.fd, _read + kept, room, cext.MSG_DONTWAIT)
        if n <= 0:
            if n == 0 or (errno.errno != errno.EAGAIN and errno.errno != errno.EINTR):
                self.closed = True
            return False
        if kept:
            string.memcpy(_read, self.input, kept)
        self.scan(_read, kept + n)
        return n == room

    def feed(self, data: bytes):
        """Takes bytes that were read before the kernel got the socket."""
        n: cython.Py_ssize_t = len(data)
        if n > _INPUT - self.filled:
            raise ValueError("more bytes than the input buffer holds")
        string.memcpy(self.input + self.filled, cython.cast(cython.p_char, data), n)
        self.scan(self.input, self.filled + n)

    @cython.cfunc
    def scan(self, p: cython.p_uchar, n: cython.Py_ssize_t) -> cython.int:
        """Handles the whole frames of n bytes and keeps what is left."""
        at: cython.Py_ssize_t = 0
        size: cython.Py_ssize_t
        while n - at >= 8:
            size = (
                (cython.cast(uint32_t, p[at + 3]) << 24)
                | (p[at + 4] << 16)
                | (p[at + 5] << 8)
                | p[at + 6]
            )
            if size + 8 > _INPUT:
                self.bad += 1
                self.closed = True
                return 0
            if n - at < size + 8:
                break
            if p[at + size + 7] != 206:
                self.bad += 1
                self.closed = True
                return 0
            self.handle(p[at], p + at + 7, size, (p[at + 1] << 8) | p[at + 2])
            at += size + 8
        self.filled = n - at
        if self.filled and p + at != self.input:
            string.memmove(self.input, p + at, self.filled)
        return 0

    @cython.cfunc
    def handle(
        self, type: cython.int, p: cython.p_uchar, n: cython.Py_ssize_t, channel: cython.int
    ) -> cython.int:
        return 0

    @cython.cfunc
    def other(
        self, type: cython.int, p: cython.p_uchar, n: cython.Py_ssize_t, channel: cython.int
    ) -> cython.int:
        self.others.append((type, channel, cython.cast(cython.p_char, p)[:n]))
        return 0


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _be64(p: cython.p_uchar) -> uint64_t:
    v: uint64_t
    string.memcpy(cython.address(v), p, 8)
    return cext.be64toh(v)


@cython.cfunc
@cython.exceptval(check=False)
def _write_number(p: cython.p_uchar, number: uint32_t) -> cython.void:
    """Eight hexadecimal digits."""
    i: cython.int
    digit: cython.int
    for i in range(8):
        digit = (number >> (28 - 4 * i)) & 15
        p[i] = digit + (48 if digit < 10 else 87)


@cython.cclass
class Publisher(_Socket):
    def __cinit__(self):
        self.template = cython.NULL
        self.times = cython.NULL
        self.seqs = cython.NULL

    def __init__(self, ledger: Ledger, publisher, run, window, confirm_latency: Histogram):
        self.ledger = ledger
        self.publisher = publisher
        self.run = run
        self.window = window
        self.latency = confirm_latency
        self.others = []
        self.ring = 1
        while self.ring < 2 * window + 2:
            self.ring *= 2
        self.times = cython.cast(cython.pointer(uint64_t), stdlib.calloc(self.ring, 8))
        self.seqs = cython.cast(cython.pointer(uint32_t), stdlib.calloc(self.ring, 4))
        if self.times == cython.NULL or self.seqs == cython.NULL:
            raise MemoryError
        self.next_seq = 1
        self.next_tag = 1
        self.low_tag = 1
        self.tag_limit = _UNLIMITED
        self.again = []

    def __dealloc__(self):
        stdlib.free(self.template)
        stdlib.free(self.times)
        stdlib.free(self.seqs)

    def connect(self, fd, template: bytes, stamp_at, number_at, distinct):
        """Starts on a fresh channel; what was not confirmed is sent again, in order.

        At `number_at` (-1 = nowhere) each message gets its number in eight hexadecimal digits,
        modulo `distinct` unless that is 0.
        """
        n: cython.Py_ssize_t = len(template)
        stdlib.free(self.template)
        self.template = cython.cast(cython.p_uchar, stdlib.malloc(n))
        if self.template == cython.NULL:
            raise MemoryError
        string.memcpy(self.template, cython.cast(cython.p_char, template), n)
        if 2 * n > self.out_size:
            grown: cython.p_void = stdlib.realloc(self.output, 2 * n)
            if grown == cython.NULL:
                raise MemoryError
            self.output = cython.cast(cython.p_uchar, grown)
            self.out_size = 2 * n
        self.template_size = n
        self.stamp_at = stamp_at
        self.number_at = number_at
        self.distinct = distinct
        again = []
        tag: uint64_t
        for tag in range(self.low_tag, self.next_tag):
            seq: uint32_t = self.seqs[tag & (self.ring - 1)]
            if seq:
                again.append(seq)
        again.extend(self.again)
        self.again = sorted(set(again))
        self.fd = fd
        self.filled = 0
        self.out_from = 0
        self.out_to = 0
        self.closed = False
        self.next_tag = 1
        self.low_tag = 1
        self.tag_limit = _UNLIMITED
        self.outstanding = 0

    def lost(self):
        """The connection broke: nothing is in flight any more."""
        self.closed = True

    def pump(self, limit: cython.longlong, stop: cython.bint):
        """Publishes while the window is open, at most up to `limit` messages in all (-1: no limit).

        With `stop`, only what must be repeated. Returns the number published in this call."""
        made: cython.longlong = 0
        p: cython.p_uchar
        seq: uint32_t
        again: list = self.again
        while not self.closed and self.outstanding < self.window and self.next_tag < self.tag_limit:
            if len(again):
                seq = again[0]
            elif stop or (limit >= 0 and self.published >= limit):
                break
            else:
                seq = self.next_seq
            if not self.room(self.template_size):
                break
            if len(again):
                again.pop(0)
                self.resent += 1
            else:
                self.next_seq += 1
                self.published += 1
            p = self.output + self.out_to
            string.memcpy(p, self.template, self.template_size)
            at: uint64_t = now_us()
            if self.stamp_at >= 0:
                string.memcpy(p + self.stamp_at, cython.address(at), 8)
                string.memcpy(p + self.stamp_at + 8, cython.address(seq), 4)
                string.memcpy(p + self.stamp_at + 12, cython.address(self.publisher), 2)
                string.memcpy(p + self.stamp_at + 14, cython.address(self.run), 2)
            if self.number_at >= 0:
                number: uint32_t = seq % self.distinct if self.distinct else seq
                _write_number(p + self.number_at, number)
            self.mark(p)
            slot: cython.Py_ssize_t = self.next_tag & (self.ring - 1)
            self.times[slot] = at
            self.seqs[slot] = seq
            self.next_tag += 1
            self.outstanding += 1
            self.out_to += self.template_size
            made += 1
        self.flush()
        return made

    def on_readable(self):
        while not self.closed and self.receive():
            pass

    def on_writable(self):
        self.flush()

    @cython.cfunc
    def handle(
        self, type: cython.int, p: cython.p_uchar, n: cython.Py_ssize_t, channel: cython.int
    ) -> cython.int:
        if type == 1 and n >= 13 and p[0] == 0 and p[1] == 60 and p[2] == 0:
            if p[3] == 80 or p[3] == 120:
                self.resolve(_be64(p + 4), p[12] & 1, p[3] == 80)
                return 0
            if p[3] == 50:
                self.returned += 1
                return 0
        if type == 2 or type == 3:
            return 0
        return self.other(type, p, n, channel)

    @cython.cfunc
    @cython.exceptval(check=False)
    def mark(self, p: cython.p_uchar) -> cython.void:
        """Writes what tells this message from others into its frames."""

    @cython.cfunc
    def resolve(self, tag: uint64_t, multiple: cython.bint, ok: cython.bint) -> cython.int:
        first: uint64_t = self.low_tag if multiple else tag
        if multiple and tag == 0:
            tag = self.next_tag - 1
        return self.resolve_range(first, tag, ok, not multiple)

    @cython.cfunc
    def resolve_range(
        self, first: uint64_t, tag: uint64_t, ok: cython.bint, every: cython.bint
    ) -> cython.int:
        """Takes the outcome of messages; `every`: all of them wait for it."""
        at: uint64_t = now_us()
        if tag >= self.next_tag or first < self.low_tag:
            self.bad += 1
            return 0
        t: uint64_t
        for t in range(first, tag + 1):
            slot: cython.Py_ssize_t = t & (self.ring - 1)
            seq: uint32_t = self.seqs[slot]
            if seq == 0:
                if every:
                    self.bad += 1
                continue
            self.seqs[slot] = 0
            self.outstanding -= 1
            if ok:
                self.ledger.confirm(seq)
                if self.measuring:
                    self.latency.record(at - self.times[slot])
            else:
                self.nacked += 1
        while self.low_tag < self.next_tag and self.seqs[self.low_tag & (self.ring - 1)] == 0:
            self.low_tag += 1
        if self.last_confirm_us and at - self.last_confirm_us > self.longest_gap_us:
            self.longest_gap_us = at - self.last_confirm_us
            self.longest_gap_end_us = at
        self.last_confirm_us = at
        return 0


@cython.cclass
class Consumer(_Socket):
    def __init__(self, ledgers, run, ack_every, no_ack, e2e_latency: Histogram, verify):
        self.ledgers = list(ledgers)
        self.run = run
        self.ack_every = ack_every
        self.no_ack = no_ack
        self.latency = e2e_latency
        self.verify = verify
        self.others = []
        self.last_seq = {}

    def connect(self, fd):
        """Starts on a fresh channel."""
        self.fd = fd
        self.filled = 0
        self.out_from = 0
        self.out_to = 0
        self.closed = False
        self.unacked = 0
        self.last_tag = 0
        self.body_left = 0
        self.stamped = 0

    def lost(self):
        """The connection broke; unacknowledged deliveries will come again."""
        self.closed = True
        self.unacked = 0

    def on_readable(self):
        while not self.closed and self.receive():
            pass
        self.flush()

    def on_writable(self):
        self.flush()

    def ack_all(self):
        """Acknowledges what is outstanding (end of a run, or a pause in the flow)."""
        if self.unacked and not self.closed:
            self.ack()
            self.flush()

    @cython.cfunc
    def ack(self) -> cython.int:
        if not self.room(21):
            return 0
        p: cython.p_uchar = self.output + self.out_to
        string.memcpy(p, b"\x01\x00\x01\x00\x00\x00\x0d\x00\x3c\x00\x50", 11)
        tag: uint64_t = cext.htobe64(self.last_tag)
        string.memcpy(p + 11, cython.address(tag), 8)
        p[19] = 1
        p[20] = 206
        self.out_to += 21
        self.unacked = 0
        return 0

    @cython.cfunc
    def handle(
        self, type: cython.int, p: cython.p_uchar, n: cython.Py_ssize_t, channel: cython.int
    ) -> cython.int:
        if type == 3:
            k: cython.Py_ssize_t = min(n, _STAMP - self.stamped)
            if k > 0:
                string.memcpy(cython.address(self.stamp[0]) + self.stamped, p, k)
                self.stamped += k
            if cython.cast(uint64_t, n) > self.body_left:
                self.bad += 1
                return 0
            self.body_left -= n
            if self.body_left == 0:
                self.delivered()
            return 0
        if type == 2 and n >= 14:
            self.body_left = _be64(p + 4)
            self.stamped = 0
            if self.body_left == 0:
                self.delivered()
            return 0
        if type == 1 and n >= 4 and p[0] == 0 and p[1] == 60 and p[2] == 0 and p[3] == 60:
            at: cython.Py_ssize_t = 5 + p[4]
            if at + 9 > n:
                self.bad += 1
                return 0
            self.last_tag = _be64(p + at)
            self.redelivered_now = p[at + 8] & 1
            return 0
        return self.other(type, p, n, channel)

    @cython.cfunc
    def delivered(self) -> cython.int:
        at: uint64_t = now_us()
        sent: uint64_t = 0
        seq: uint32_t = 0
        publisher: uint16_t = 0
        run: uint16_t = 0
        self.consumed += 1
        if self.redelivered_now:
            self.redelivered += 1
        if self.stamped == _STAMP:
            string.memcpy(cython.address(sent), cython.address(self.stamp[0]), 8)
            string.memcpy(cython.address(seq), cython.address(self.stamp[8]), 4)
            string.memcpy(cython.address(publisher), cython.address(self.stamp[12]), 2)
            string.memcpy(cython.address(run), cython.address(self.stamp[14]), 2)
            if publisher >= len(self.ledgers) or (self.run and run != self.run):
                self.foreign += 1
            else:
                if self.measuring and at >= sent:
                    self.latency.record(at - sent)
                if self.verify:
                    ledger: Ledger = self.ledgers[publisher]
                    ledger.see(seq)
                    if not self.redelivered_now:
                        last: uint32_t = self.last_seq.get(publisher, 0)
                        if seq <= last:
                            self.out_of_order += 1
                        else:
                            if seq != last + 1:
                                self.gaps += 1
                            self.last_seq[publisher] = seq
        elif self.verify:
            self.foreign += 1
        if self.last_deliver_us and at - self.last_deliver_us > self.longest_gap_us:
            self.longest_gap_us = at - self.last_deliver_us
            self.longest_gap_end_us = at
        self.last_deliver_us = at
        if not self.no_ack:
            self.unacked += 1
            if self.unacked >= self.ack_every:
                self.ack()
        return 0


def work_through(events: list, workers: dict):
    """Has clients read and write as epoll says. `workers`: descriptor → client.

    Returns the descriptors of those that need a look: they have control frames, are closed, or have
    begun or ceased to wait until they may write."""
    found: list = []
    for fd, what in events:
        worker: _Socket = workers[fd]
        if what & 4:
            worker.on_writable()
        if what & ~4:
            worker.on_readable()
        waits: cython.bint = worker.out_to > worker.out_from
        if worker.closed or waits != worker.awaits_write or len(worker.others):
            found.append(fd)
    return found
