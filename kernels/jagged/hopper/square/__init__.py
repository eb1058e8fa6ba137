"""Products of jagged rows with themselves, in the square layout."""
