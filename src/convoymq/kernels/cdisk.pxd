# C declarations for file I/O off the interpreter.
cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    ssize_t pwritev(int fd, const iovec* iov, int count, long offset)
    ssize_t pwritev2(int fd, const iovec* iov, int count, long offset, int flags)
    int RWF_DSYNC

cdef extern from "fcntl.h" nogil:
    int open(const char* path, int flags)
    int O_RDWR
    int O_CLOEXEC
    int O_DIRECT

cdef extern from "sys/eventfd.h" nogil:
    int eventfd(unsigned int value, int flags)
    int EFD_CLOEXEC
    int EFD_NONBLOCK

cdef extern from "unistd.h" nogil:
    ssize_t read(int fd, void* data, size_t count)
    ssize_t write(int fd, const void* data, size_t count)
    ssize_t pread(int fd, void* data, size_t count, long offset)
    int close(int fd)
    int fdatasync(int fd)
    int fsync(int fd)

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t size)
