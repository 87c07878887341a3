"""Padding calls to capture sizes: ladders of sizes, memory to pad in, and which dimensions of a result are padded."""

from graphplan.padding import buckets as buckets
from graphplan.padding.buckets import Buckets as Buckets
from graphplan.padding.buckets import Ladders as Ladders
from graphplan.padding.buckets import check_shapes as check_shapes
from graphplan.padding.kinds import Kind as Kind
from graphplan.padding.kinds import Kinds as Kinds
from graphplan.padding.kinds import Size as Size
from graphplan.padding.layout import Layout as Layout
from graphplan.padding.layout import Padding as Padding
from graphplan.padding.layout import PadValue as PadValue
from graphplan.padding.reach import handed_on as handed_on
from graphplan.padding.reach import out_of_reach as out_of_reach
from graphplan.padding.shape_stats import ShapeStats as ShapeStats
from graphplan.padding.shapes import Dims as Dims
from graphplan.padding.shapes import Dynamic as Dynamic
from graphplan.padding.shapes import Place as Place
from graphplan.padding.shapes import outer_first as outer_first
from graphplan.padding.slicing import Slicer as Slicer
from graphplan.padding.slicing import distance as distance
from graphplan.padding.slicing import result_leaves as result_leaves
from graphplan.padding.slicing import tolerance as tolerance
