"""Delayed and timed messages, transactions, pop: cores without I/O, and services around them."""
