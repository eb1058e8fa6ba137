"""Commands beside training: comparison, export, scoring, analysis, checks of an installation."""
