from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

cdef class RouteCacheVersion:
    cdef public uint64_t value

cdef class RouteCount:
    cdef public uint64_t messages

cdef struct Route:
    uint64_t hash
    unsigned char* key
    Py_ssize_t key_length
    PyObject* targets
    # RouteCount, or None.
    PyObject* count
    # What it counts; NULL: nothing.
    uint64_t* messages

# Open addressing; at least half of the places are free.
cdef struct RouteCache:
    Route* routes
    Py_ssize_t mask
    Py_ssize_t used
    # The version that the routes belong to.
    uint64_t version

cdef int add_route(RouteCache* cache, uint64_t hash, unsigned char* key, Py_ssize_t n,
                   tuple targets, RouteCount count) except? -1
cdef void drop_routes(RouteCache* cache) noexcept

cdef inline uint64_t hash_key(const unsigned char* p, Py_ssize_t n) noexcept:
    cdef uint64_t h = <uint64_t>0x9E3779B97F4A7C15ULL ^ <uint64_t>n
    cdef uint64_t v
    while n >= 8:
        memcpy(&v, p, 8)
        h = (h ^ v) * <uint64_t>0xFF51AFD7ED558CCDULL
        h ^= h >> 32
        p += 8
        n -= 8
    if n:
        v = 0
        memcpy(&v, p, n)
        h = (h ^ v) * <uint64_t>0xFF51AFD7ED558CCDULL
    return h ^ (h >> 29)

# The place of the key, or the free one where it belongs; NULL without a table. Inlined: it runs for
# every message.
cdef inline Route* find_route(RouteCache* cache, uint64_t hash, const unsigned char* key,
                              Py_ssize_t n) noexcept:
    if cache.routes == NULL:
        return NULL
    cdef Py_ssize_t at = hash & <uint64_t>cache.mask
    cdef Route* route
    while True:
        route = cache.routes + at
        if route.key == NULL:
            return route
        if route.hash == hash and route.key_length == n and memcmp(route.key, key, n) == 0:
            return route
        at = (at + 1) & cache.mask
