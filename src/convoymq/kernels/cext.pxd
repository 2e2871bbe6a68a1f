# C declarations shared by the kernels.
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "Python.h":
    PyObject* PyBytes_FromStringAndSize(const char* v, Py_ssize_t len) except NULL
    object PyByteArray_FromStringAndSize(const char* v, Py_ssize_t len)
    char* PyBytes_AS_STRING(PyObject* o) nogil
    int _PyBytes_Resize(PyObject** o, Py_ssize_t newsize) except -1
    object PyMemoryView_FromMemory(char* mem, Py_ssize_t size, int flags)
    int PyBUF_READ
    int PyBUF_WRITE
    void Py_DECREF_raw "Py_DECREF"(PyObject* o)
    void Py_INCREF_raw "Py_INCREF"(PyObject* o)

cdef extern from "endian.h" nogil:
    uint16_t htobe16(uint16_t v)
    uint32_t htobe32(uint32_t v)
    uint64_t htobe64(uint64_t v)
    uint16_t be16toh(uint16_t v)
    uint32_t be32toh(uint32_t v)
    uint64_t be64toh(uint64_t v)
    uint16_t htole16(uint16_t v)
    uint32_t htole32(uint32_t v)
    uint64_t htole64(uint64_t v)

cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int fd, void* buf, size_t n, int flags)
    ssize_t send(int fd, const void* buf, size_t n, int flags)
    int MSG_NOSIGNAL
    int MSG_DONTWAIT

cdef extern from "time.h" nogil:
    ctypedef long time_t
    cdef struct timespec:
        time_t tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec* at)
    int CLOCK_MONOTONIC
