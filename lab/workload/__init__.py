"""Requests to a server and their times: recorded traces, made-up traffic, and mixtures of both."""
