"""Layout of the log on disk, and its readers: entries, WAL files, segments."""
