"""The families of decoders that are read: a row of `table.FAMILIES` each."""
