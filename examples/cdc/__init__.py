"""Parts of `examples/demo_cdc.py`."""
