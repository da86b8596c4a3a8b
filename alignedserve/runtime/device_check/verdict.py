"""Fields of the verdict that the self-check, in a process of its own, prints and the choice of devices reads."""

OK, FAILURE = "ok", "failure"
