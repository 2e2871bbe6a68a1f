"""Identity and rights of clients: backends of users, and their chain (ADR 0203)."""
