"""`convoy perf`: load, latency and correctness of any AMQP 0-9-1 broker."""
