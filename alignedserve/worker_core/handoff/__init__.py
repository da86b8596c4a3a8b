"""How a request's cache changes hands between workers, and between a worker and a pool: one protocol for all of them.

A lender has blocks in its memory that another may use. A sender asks a receiver for blocks, copies a cache into them,
and offers the request; the receiver takes it or not. Each side forgets the other when their link is lost.
"""
