"""SIGKILL at random moments under processes that share one directory; see `tests.crash.rounds`."""
