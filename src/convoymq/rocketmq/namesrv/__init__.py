"""The name server: which brokers are alive, and where topics are."""
