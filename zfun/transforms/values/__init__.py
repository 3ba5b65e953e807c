"""Values of any placement.

==================  ==============================================================
``_agreement``      compares a tree across ranks before the first collective
``_shard``          lays a tree out: ``shard`` and ``replicate``
``_redistribute``   changes a placement, and alone chooses the collective
``_communicate``    runs the collective bucket by bucket
``_unshard``        returns whole trees: ``unshard``, ``gather``
``_describe``       lists leaves and bytes
``building``        makes leaves one at a time
==================  ==============================================================
"""
