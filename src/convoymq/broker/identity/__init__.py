"""Who clients are and what they may: backends of users, and their chain (ADR 0203)."""
