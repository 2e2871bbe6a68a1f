"""Broker groups in the simulator: a master and its slaves."""
