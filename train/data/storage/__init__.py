"""Files that rows are read from, and the cache that prepared columns are kept in."""
