"""Meshes: devices arranged along named axes (Part 3, "A unified notation for sharding").

A mesh gives its axes names and sizes. `Mesh` (in `meshes`) runs: this process is one rank of it. `AbstractMesh` (in
`abstract`) has sizes only, and meta tensors stand for arrays. Both have views: `mesh.stacked("L")` reads a line for
stacked arrays, `mesh.optional` lets a line name axes that the mesh lacks, `mesh.without("C")` leaves one out. In
`meeting` the ranks of a group agree on what they are about to do; `page` is the memory that they share for it.
"""

from scaling.mesh.abstract import AbstractMesh, Group
from scaling.mesh.meshes import Mesh
from scaling.mesh.world import TIMEOUT, check_device, join_world

__all__ = ["TIMEOUT", "AbstractMesh", "Group", "Mesh", "check_device", "join_world"]
