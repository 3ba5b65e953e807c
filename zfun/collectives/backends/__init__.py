"""Kinds of groups, and the ground that groups of processes share (``_base``)."""
