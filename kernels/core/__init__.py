"""The ground that every family of kernels stands on: dispatch, operators, launches, caches, offsets, schedules."""
