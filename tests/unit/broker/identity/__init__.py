"""Tests of backends of users."""
