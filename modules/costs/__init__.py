"""What a model costs: operations counted from true lengths, and a table by module."""
