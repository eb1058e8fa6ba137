"""Products of MXFP8 for sm_100: compiled ahead of time, never run."""
