"""Text forms of header values: for kernels only."""
