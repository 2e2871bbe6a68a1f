"""Shared types: identifiers, errors and configuration."""
