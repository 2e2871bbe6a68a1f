"""Compiled hot loops; every module here or listed in tools/build_kernels.py is built by Cython."""
