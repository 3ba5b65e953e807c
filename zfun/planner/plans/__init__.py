"""Plans of a step: memory, traffic and operations, found by running the step without numbers.

``_plan`` makes a plan, whose data is ``_record``, from ``_flops`` (operations) and ``_kept`` (the
state between steps). ``_hardware`` describes machines, ``_compare`` makes plans side by side,
``_advise`` finds the fastest that fits, by ``_bounds`` and ``_peaks``, ``_huggingface`` makes the
model of a config. ``_meshes`` has the compositions over axes, and ``_picture`` draws.
"""
