"""Guaranteed multicast on a ring of members."""
