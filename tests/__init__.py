"""Tests of ConvoyMQ."""
