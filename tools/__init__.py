"""What makes documents: figures, tables, the quality page."""
