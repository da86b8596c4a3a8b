"""Connections of clients: how many there may be, what each may send, and how long it may take."""
