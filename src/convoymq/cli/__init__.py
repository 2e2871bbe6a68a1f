"""The convoy command."""
