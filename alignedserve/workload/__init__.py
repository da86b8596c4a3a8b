"""What is asked of a server and when: recorded traces, made-up traffic, and mixtures of both."""
