"""The benchmark cases, one module a family with `cases(device)`."""
