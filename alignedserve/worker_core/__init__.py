"""Requests, iterations and reports of a worker, whichever phases it serves: the shared part of all worker logics."""
