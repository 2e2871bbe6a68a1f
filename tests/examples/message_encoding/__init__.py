"""A protocol whose messages have an encoding of their own."""
