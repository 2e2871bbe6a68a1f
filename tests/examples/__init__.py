"""Worked examples of CONTRIBUTING.md: what is added in a folder of its own and one line."""
