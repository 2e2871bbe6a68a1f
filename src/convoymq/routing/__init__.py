"""Virtual hosts, exchanges, bindings: pure tables and matching."""
