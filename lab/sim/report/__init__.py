"""One self-contained HTML page about a sweep: inline SVG, no network, no library."""
