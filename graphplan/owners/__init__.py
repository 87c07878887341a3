"""Owners: walking them, naming them, finding them, and putting them back as they were."""

from graphplan.owners.discovery import Discovery as Discovery
from graphplan.owners.naming import free_name as free_name
from graphplan.owners.naming import name_owners as name_owners
from graphplan.owners.records import Cell as Cell
from graphplan.owners.records import Contents as Contents
from graphplan.owners.records import Extent as Extent
from graphplan.owners.records import Members as Members
from graphplan.owners.records import Namespace as Namespace
from graphplan.owners.records import Numbers as Numbers
from graphplan.owners.records import Scalar as Scalar
from graphplan.owners.records import Slot as Slot
from graphplan.owners.records import Via as Via
from graphplan.owners.records import Walk as Walk
from graphplan.owners.records import is_freed as is_freed
from graphplan.owners.records import is_optimizer_state as is_optimizer_state
from graphplan.owners.records import storage_id as storage_id
from graphplan.owners.records import tensor_leaves as tensor_leaves
from graphplan.owners.snapshot import Snapshot as Snapshot
from graphplan.owners.snapshot import bits as bits
from graphplan.owners.snapshot import copy_to as copy_to
from graphplan.owners.snapshot import default_generators as default_generators
from graphplan.owners.snapshot import host_generators as host_generators
from graphplan.owners.walk import SCALARS as SCALARS
from graphplan.owners.walk import is_user_object as is_user_object
from graphplan.owners.walk import walk_owners as walk_owners
