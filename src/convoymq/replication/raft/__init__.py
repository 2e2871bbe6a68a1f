"""The Raft consensus core."""
