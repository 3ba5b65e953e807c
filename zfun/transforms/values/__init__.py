"""Placements: ``_redistribute`` chooses the collective, ``_describe`` lists leaves and bytes."""
