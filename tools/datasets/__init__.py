"""Public data sets, prepared from files that a user fetches: `python -m tools.datasets NAME --from FOLDER`.

Licences mostly forbid passing the files on, so none is part of this repository.
"""
