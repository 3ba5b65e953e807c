"""Layout: the place of every leaf of a tree in a few flat buffers, as static integers."""

from zfun.layout._cuts import labels_of as labels_of
from zfun.layout._cuts import place, split_by_label
from zfun.layout._layout import layout_of
from zfun.layout._leaves import unique_leaves
from zfun.layout._slots import ALIGNMENT, BucketSlot, LabelFn, Layout, LeafSlot
from zfun.layout._slots import LAYOUT as LAYOUT
from zfun.layout._slots import PLACEMENT as PLACEMENT
from zfun.layout._slots import aligned as aligned
from zfun.layout._slots import logical_leaf as logical_leaf
from zfun.layout._slots import logical_path as logical_path
from zfun.layout._units import DEFAULT_BUCKET_BYTES, FUSED_BYTES

__all__ = [
    "ALIGNMENT",
    "DEFAULT_BUCKET_BYTES",
    "FUSED_BYTES",
    "BucketSlot",
    "LabelFn",
    "Layout",
    "LeafSlot",
    "layout_of",
    "place",
    "split_by_label",
    "unique_leaves",
]
