"""Bodies that clients may send: fields, messages, tools, constraints; what is refused, what is ignored."""
