"""The configuration: its schema, how it is composed and checked, and overrides on command lines."""
