"""A broker group without its master: roles, the way back online, locks, escape."""
