from convoymq.kernels.area cimport Area

cdef extern from "Python.h":
    char* PyOS_double_to_string(double value, char format, int precision, int flags, int* type) except NULL
    int Py_DTSF_ADD_DOT_0
    void PyMem_Free(void* p)

# Appends text; what is not UTF-8 is replaced.
cdef int add_text(Area* area, unsigned char* p, Py_ssize_t n) except? -1
# Appends the n bytes of a field value, type code first, that `walk_value` has found whole.
cdef int add_json(Area* area, unsigned char* p, Py_ssize_t n, bint nested) except? -1
