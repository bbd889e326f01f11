"""Meshes: devices arranged along named axes (Part 3, "A unified notation for sharding").

`meshes` has the two kinds, one that runs and one of sizes only. In `meeting` the ranks of a group tell each other what
they are about to do; `page` is the memory that they share for it.
"""

from scaling.mesh.meshes import AbstractMesh, Group, Mesh
from scaling.mesh.world import TIMEOUT, check_device, join_world

__all__ = ["TIMEOUT", "AbstractMesh", "Group", "Mesh", "check_device", "join_world"]
