"""Write-ahead log, segments, snapshots and recovery over a small file interface."""
