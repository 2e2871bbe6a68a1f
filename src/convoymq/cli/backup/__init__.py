"""`convoy backup` and `convoy restore`: messages and definitions in a store (ADR 0208)."""
