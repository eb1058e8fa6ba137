"""The process of a rank: its group, signals, stalls, memory and files."""
