"""Runs members of rings: frames between neighbours, and proposals of views."""
