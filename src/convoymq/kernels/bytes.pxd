# Loads, stores and copies of bytes, inlined into the kernels that use them. `get` and `put` are
# little-endian, as in entries and link frames; `load` and `store` are big-endian, as in AMQP.
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from convoymq.kernels.cext cimport (
    PyBUF_READ,
    Py_DECREF_raw,
    PyBytes_AS_STRING,
    PyBytes_FromStringAndSize,
    PyMemoryView_FromMemory,
    be32toh,
    be64toh,
    htobe32,
    htobe64,
)

cdef inline uint32_t get32(const unsigned char* p) noexcept nogil:
    cdef uint32_t v
    memcpy(&v, p, 4)
    return v

cdef inline uint64_t get64(const unsigned char* p) noexcept nogil:
    cdef uint64_t v
    memcpy(&v, p, 8)
    return v

cdef inline void put32(unsigned char* p, uint32_t v) noexcept nogil:
    memcpy(p, &v, 4)

cdef inline void put64(unsigned char* p, uint64_t v) noexcept nogil:
    memcpy(p, &v, 8)

cdef inline uint32_t load16(const unsigned char* p) noexcept nogil:
    return (<uint32_t>p[0] << 8) | p[1]

cdef inline uint32_t load32(const unsigned char* p) noexcept nogil:
    cdef uint32_t v
    memcpy(&v, p, 4)
    return be32toh(v)

cdef inline uint64_t load64(const unsigned char* p) noexcept nogil:
    cdef uint64_t v
    memcpy(&v, p, 8)
    return be64toh(v)

cdef inline void store16(unsigned char* p, uint32_t v) noexcept nogil:
    p[0] = (v >> 8) & 0xFF
    p[1] = v & 0xFF

cdef inline void store32(unsigned char* p, uint32_t v) noexcept nogil:
    v = htobe32(v)
    memcpy(p, &v, 4)

cdef inline void store64(unsigned char* p, uint64_t v) noexcept nogil:
    v = htobe64(v)
    memcpy(p, &v, 8)

cdef inline unsigned char* bytes_pointer(bytes data) noexcept:
    return <unsigned char*>PyBytes_AS_STRING(<PyObject*>data)

cdef inline bytes copy_bytes(unsigned char* p, Py_ssize_t n):
    return (<char*>p)[:n]

# A view of memory that must outlive it.
cdef inline object memory_view(unsigned char* p, Py_ssize_t n):
    return PyMemoryView_FromMemory(<char*>p, n, PyBUF_READ)

# A bytes object that is filled before anybody else sees it.
cdef inline bytes uninitialized(Py_ssize_t n):
    cdef PyObject* raw = PyBytes_FromStringAndSize(NULL, n)
    cdef bytes data = <bytes>raw
    Py_DECREF_raw(raw)
    return data
