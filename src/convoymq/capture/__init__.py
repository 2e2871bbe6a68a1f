"""Change data capture: a MariaDB database's tables and binary log into an ordered topic."""
