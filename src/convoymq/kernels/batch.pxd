from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from convoymq.kernels.bytes cimport get32

cdef class Chunk:
    cdef public bytes data

cdef class PendingCommand:
    cdef public uint64_t seq
    cdef public int type
    cdef public Chunk chunk
    cdef public Py_ssize_t offset
    cdef public Py_ssize_t length
    cdef public uint32_t messages
    cdef public list tags
    cdef public object note

cdef class PendingBudget:
    cdef public Py_ssize_t bytes
    cdef public Py_ssize_t bytes_max
    cdef public set waiting

cdef class PublishTarget:
    cdef public CommandBuilder builder
    cdef public uint64_t session
    cdef public uint64_t seq
    cdef public object pending
    cdef public Py_ssize_t pending_bytes
    cdef public Py_ssize_t pending_messages
    # Beyond one of these, `owner.check_flow()` is called when an ENQUEUE command is closed.
    cdef public Py_ssize_t pending_bytes_max
    cdef public Py_ssize_t pending_messages_max
    cdef public Py_ssize_t pending_commands_max
    cdef public PendingBudget budget
    cdef public object owner
    # Of RECORD_ASKS, RECORD_WAITS and RECORD_GROUPED: what the queue serves.
    cdef public int serves
    # Records go to the targets that `place` returns, never to this one.
    cdef public bint spreads
    # The next record has a producer and a sequence; the open command begins with this one.
    cdef bint named
    cdef bytes producer
    cdef uint64_t sequence

    # The target that takes the record of these parts: exchange and routing key, and content; `tag`
    # becomes the one that it has there.
    cdef PublishTarget place(self, unsigned char* names, Py_ssize_t names_length,
                             unsigned char* content, Py_ssize_t content_length, uint64_t* tag)
    # Reserves n bytes for a record that starts at `record` and is whole.
    cdef unsigned char* reserve_record(self, unsigned char* record, Py_ssize_t n, uint64_t tag,
                                       uint64_t body_size, int flags)

cdef class CommandBuilder:
    cdef PyObject* store
    cdef unsigned char* p
    cdef Py_ssize_t end
    cdef Py_ssize_t capacity
    cdef Py_ssize_t hint
    cdef Py_ssize_t last_end
    cdef Chunk chunk
    cdef int command_count
    # SETTLE commands that settle something: who sent them waits for no answer.
    cdef int deferrable_count
    # What is collected waits to be coalesced: the next command is announced by `on_first`, too.
    cdef public bint held
    cdef public object on_first
    cdef public object on_full
    # the open ENQUEUE command
    cdef PublishTarget open_target
    cdef bint open_named
    cdef Py_ssize_t open_start
    cdef uint32_t open_count
    cdef uint64_t open_bytes
    cdef uint64_t open_size
    cdef int open_flags
    cdef uint64_t tag_first
    cdef uint64_t tag_last
    cdef list open_tags
    cdef uint32_t* offsets
    cdef Py_ssize_t offsets_capacity

    cdef int need(self, Py_ssize_t n) except? -1
    cdef int announce(self, bint was_empty) except? -1
    # Reserves n bytes for one record of `target` and returns where to write them; the pointer is
    # valid until the next call on this builder. tag 0 = the channel does not confirm.
    cdef unsigned char* reserve(self, PublishTarget target, uint64_t tag, uint64_t body_size,
                                int flags, Py_ssize_t n)
    cdef int close_command(self) except? -1
    cdef int start_command(self, int type, int flags, uint64_t session, uint64_t seq,
                           uint32_t count, uint32_t arg, Py_ssize_t body_length) except? -1
    cdef bytes seal(self)

# Checks that an ENQUEUE command lies wholly inside `size` bytes and returns its record table's
# position, absolute; -1 when it does not. Record i: [table[i], table[i + 1]) relative to `command`.
cdef Py_ssize_t record_table(const unsigned char* p, Py_ssize_t size, Py_ssize_t command,
                             uint32_t* count) noexcept nogil

# The body size that a record of n bytes names; -1 when it is cut off.
cdef Py_ssize_t record_body_size(unsigned char* p, Py_ssize_t n) noexcept

# Records of an ENQUEUE command, to be read one by one.
cdef struct Records:
    unsigned char* command
    unsigned char* table
    Py_ssize_t length

# Opens the command at `command` for records first … first + count - 1. Raises ValueError when it
# does not have them.
cdef int open_records(unsigned char* p, Py_ssize_t size, Py_ssize_t command, Py_ssize_t first,
                      Py_ssize_t count, Records* records) except? -1

# Finds record i of an opened command and fills in its size; one that lies outside the command is
# as one that is empty. Inlined: it runs for every message.
cdef inline unsigned char* record_at(Records* records, Py_ssize_t i, Py_ssize_t* size) noexcept:
    cdef Py_ssize_t low = get32(records.table + 4 * i)
    cdef Py_ssize_t high = get32(records.table + 4 * i + 4)
    if low > high or high > records.length:
        low = high = 0
    size[0] = high - low
    return records.command + low
