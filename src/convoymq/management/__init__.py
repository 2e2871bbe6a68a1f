"""HTTP API and metrics."""
