"""Values and their placements: ``_redistribute`` chooses the collective, ``_describe`` says where each leaf lies."""
