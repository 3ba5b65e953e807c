"""Kinds of groups, and the function that chooses one (``_init``)."""
