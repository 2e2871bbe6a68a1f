"""What a process outside the broker uses."""
