"""What columns of ids, numbers and vectors are: their types, vocabularies, scales and transforms."""
