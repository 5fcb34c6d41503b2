"""What a stage needs from the host it runs on: child processes that can be found again, and locks."""
