from cpython.object cimport PyObject

cdef extern from "sys/types.h" nogil:
    pass

cdef extern from "sys/uio.h" nogil:
    cdef struct iovec:
        void* iov_base
        size_t iov_len

cdef extern from "sys/socket.h" nogil:
    cdef struct msghdr:
        void* msg_name
        unsigned int msg_namelen
        iovec* msg_iov
        size_t msg_iovlen
        void* msg_control
        size_t msg_controllen
        int msg_flags
    ssize_t recv(int fd, void* buffer, size_t length, int flags)
    ssize_t sendmsg(int fd, const msghdr* message, int flags)
    int MSG_DONTWAIT
    int MSG_NOSIGNAL

cdef extern from "errno.h" nogil:
    int errno
    int EAGAIN
    int EWOULDBLOCK
    int EINTR

cdef extern from "malloc.h" nogil:
    cdef struct mallinfo2_t "mallinfo2":
        size_t arena
        size_t hblkhd
        size_t uordblks
        size_t fordblks
    mallinfo2_t mallinfo2()
    int mallopt(int parameter, int value)
    int malloc_trim(size_t pad)
    int M_MMAP_THRESHOLD
    int M_TRIM_THRESHOLD
    int M_TOP_PAD
    int M_ARENA_MAX

cdef extern from "link.h" nogil:
    ctypedef unsigned long Address "ElfW(Addr)"
    ctypedef struct Segment "ElfW(Phdr)":
        unsigned int p_type
        unsigned int p_flags
        Address p_vaddr
        unsigned long p_memsz
    cdef struct dl_phdr_info:
        Address dlpi_addr
        const char* dlpi_name
        const Segment* dlpi_phdr
        unsigned short dlpi_phnum
    int dl_iterate_phdr(int (*look)(dl_phdr_info*, size_t, void*) noexcept nogil, void* data)
    int PT_LOAD
    int PF_W

cdef extern from "sys/mman.h" nogil:
    int madvise(void* start, size_t length, int advice)
    int MADV_DONTNEED

cdef extern from "unistd.h" nogil:
    long sysconf(int name)
    int _SC_PAGESIZE

cdef int _release_segments(dl_phdr_info* library, size_t size, void* count) noexcept nogil

cdef class LinkReader:
    cdef public int fd
    cdef public Py_ssize_t frame_max
    cdef public unsigned long long bytes_in
    cdef public unsigned long long frames_in
    cdef unsigned char* buffer
    cdef Py_ssize_t start
    cdef Py_ssize_t end
    cdef PyObject* large
    cdef Py_ssize_t large_have
    cdef Py_ssize_t large_size

    cpdef bint read(self, list frames) except? -1
    cdef int scan(self, list frames) except? -1
    cdef int finish_large(self, list frames) except? -1

cdef class LinkWriter:
    cdef public int fd
    cdef public Py_ssize_t queued_bytes
    cdef public unsigned long long bytes_out
    cdef public unsigned long long frames_out
    cdef object urgent
    cdef object bulk
    cdef list unsent
    cdef Py_ssize_t head
    cdef Py_ssize_t offset
    cdef Py_ssize_t unsent_bytes

    cpdef send(self, bytes frame, object body=*, bint urgent=*)
    cpdef bint flush(self) except? -1
    cdef int refill(self) except? -1
    cdef int advance(self, Py_ssize_t n) except? -1
