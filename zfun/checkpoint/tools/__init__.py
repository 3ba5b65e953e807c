"""Tools that read and write checkpoints without a group, one leaf at a time."""
